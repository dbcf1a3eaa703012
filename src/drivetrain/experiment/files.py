"""Parameter files: YAML or JSON with one mapping at the top, read strictly, with the line of every key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.core.errors import ParameterError, did_you_mean
from drivetrain.experiment.parameters import ParameterSet


class Given(NamedTuple):
    """A value as it was given, before it is read in its parameter's type."""

    value: Any
    origin: str
    is_text: bool = False


class GivenTwice(ParameterError):
    """One parameter under two spellings, `batch-size` and `batch_size`; `keys` is where the second one stands."""

    def __init__(self, message: str, keys: tuple[str, ...] = ()):
        super().__init__(message)
        self.keys = keys


def flatten(values: Mapping[str, Any], parameters: ParameterSet) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return each value under its full name, with the path of keys it was found at: `opt: {lr: 1}` gives `opt.lr`.

    A dataclass instance stands for its fields. Names that no parameter has come out as they are.
    """
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    _flatten(values, (), "", parameters, found)
    return found


def _flatten(
    values: Mapping[str, Any],
    path: tuple[str, ...],
    prefix: str,
    parameters: ParameterSet,
    found: dict[str, tuple[Any, tuple[str, ...]]],
) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}" if isinstance(key, str) else str(key)
        if isinstance(key, str) and name not in parameters:
            name = prefix + key.replace("-", "_")
        inside = name not in parameters and any(other.startswith(name + ".") for other in parameters)
        if inside and hasattr(value, "__dataclass_fields__"):
            value = {field: getattr(value, field) for field in value.__dataclass_fields__}
        if inside and value is None:
            continue
        if inside and isinstance(value, Mapping):
            _flatten(value, (*path, str(key)), name + ".", parameters, found)
        elif name in found:
            keys = (*path, str(key))
            raise GivenTwice(f"{name} is given twice, as {'.'.join(found[name][1])} and {'.'.join(keys)}.", keys)
        else:
            found[name] = (value, (*path, str(key)))


def read_parameter_file(path: str | Path, parameters: ParameterSet) -> dict[str, Given]:
    """Read the values of one file; unknown keys are refused, keys that may not come from a file are skipped."""
    from drivetrain.core.yaml import read_yaml

    file = read_yaml(Path(path), error=ParameterError)
    given: dict[str, Given] = {}
    try:
        flat = flatten(file.data, parameters)
    except GivenTwice as error:
        raise ParameterError(f"{file.name}:{file.line(*error.keys) or 1}: {error}") from None
    for name, (value, keys) in flat.items():
        place = f"{file.name}:{file.line(*keys) or 1}"
        if name not in parameters:
            raise ParameterError(f"{place}: {unknown_parameter('.'.join(keys), parameters)}")
        if parameters[name].allow_from_file:
            given[name] = Given(value, place)
    return given


def unknown_parameter(name: str, parameters: ParameterSet) -> str:
    """Say that no parameter has this name, with the nearest one and all of them."""
    shown = [other for other, parameter in parameters.items() if not parameter.hidden]
    hint = did_you_mean(str(name).replace("-", "_"), shown)
    return f"unknown parameter {name!r}.{hint} Parameters: {', '.join(shown)}."
