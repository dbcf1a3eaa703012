"""One rule for every value: explicit, then parameter files, environment, the experiment's `defaults`, declared default.

The rule is the same for a command line and for `run(...)`, in any order of the arguments, and every value keeps its
origin.
"""

import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.core.errors import ParameterError, did_you_mean
from drivetrain.core.secret import is_masked, masked, texts_of
from drivetrain.experiment.parameters import Parameter, ParameterSet

PARAMS_FILE = "params_file"
NOT_DECLARED = (None, "default", "defaults", "sweep")
"""Origins of values that nobody gave for this run."""

logger = logging.getLogger("drivetrain")


class Given(NamedTuple):
    """A value as it was given, before it is read in its parameter's type."""

    value: Any
    origin: str
    is_text: bool = False


class GivenTwice(ParameterError):
    """One parameter under two spellings, `batch-size` and `batch_size`; `keys` is the path of the second one."""

    def __init__(self, message: str, keys: tuple[str, ...] = ()):
        super().__init__(message)
        self.keys = keys


@dataclass
class Resolved:
    """The values of one run, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict, repr=False)
    origins: dict[str, str] = field(default_factory=dict)
    """`cli`, `run`, `file.yaml:3`, `env:NAME`, `defaults` or `default`, by parameter."""
    secrets: frozenset[str] = frozenset()
    """Parameters whose values are masked wherever they are written."""
    public: frozenset[str] = frozenset()
    """Parameters that were declared not to be secret, so that nothing within them is masked."""

    def copy(self) -> "Resolved":
        """Return the same with values and origins of its own."""
        return replace(self, values=dict(self.values), origins=dict(self.origins))

    def shown(self) -> dict[str, Any]:
        """Return the values as files and screens show them."""
        return {name: self.shown_value(name, value) for name, value in self.values.items()}

    def shown_value(self, name: str, value: object) -> Any:
        """Return one value as files and screens show it."""
        return value if name in self.public else masked(value, is_secret=name in self.secrets)

    def hidden(self) -> frozenset[str]:
        """Return the secret texts, for texts that must not contain them."""
        found = (
            texts_of(value, is_secret=name in self.secrets)
            for name, value in self.values.items()
            if name not in self.public
        )
        return frozenset().union(*found)

    def is_declared(self, name: str) -> bool:
        """Return whether somebody gave this value for this run, rather than it being a default."""
        return self.origins.get(name) not in NOT_DECLARED


def given_in_python(values: Mapping[str, object], parameters: ParameterSet, origin: str = "run") -> dict[str, Given]:
    """Return what a Python caller gave, by full name; an unknown name is an error."""
    if not isinstance(values, Mapping):
        raise ParameterError(f"parameters: expected a dict of names and values, got {values!r}.")
    given = {}
    for name, (value, keys) in flatten(values, parameters).items():
        if name not in parameters:
            place = "" if origin == "run" else f"{origin}: "
            raise ParameterError(place + unknown_parameter(".".join(keys), parameters))
        given[name] = Given(value, origin)
    return given


def resolve(
    parameters: ParameterSet,
    explicit: Mapping[str, Given],
    defaults: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the value of every parameter; None means "not given" wherever it appears."""
    sources = [
        dict(explicit),
        _from_files(parameters, explicit),
        _from_environment(parameters, os.environ if environment is None else environment),
        given_in_python(defaults or {}, parameters, "defaults"),
    ]
    public = frozenset(name for name, parameter in parameters.items() if parameter.secret is False)
    resolved = Resolved(secrets=parameters.secrets, public=public)
    for name, parameter in parameters.items():
        every = [source[name] for source in sources if name in source and source[name].value is not None]
        given = next((entry for entry in every if not holds_mask(parameter, entry.value)), None)
        if given is None and every:
            raise ParameterError(masked_value(parameter, every[0].origin))
        if given is None:
            resolved.values[name], resolved.origins[name] = parameter.make_default(), "default"
        else:
            resolved.values[name] = _read(parameter, given)
            resolved.origins[name] = given.origin
        if parameter.required and resolved.values[name] is None:
            raise ParameterError(
                f"the parameter {name!r} is required. Give {parameter.flag} on the command line, or {name}=..."
            )
    for name, parameter in parameters.items():
        if parameter.behaviour is not None and resolved.is_declared(name) and hasattr(parameter.behaviour, "on_value"):
            parameter.behaviour.on_value(parameter, resolved.values[name], resolved.values)
    return resolved


def holds_mask(parameter: Parameter, value: object) -> bool:
    """Return whether a value that was read back was masked when it was written."""
    may_be = parameter.is_secret or (parameter.secret is None and not isinstance(value, str))
    return may_be and is_masked(value)


def masked_value(parameter: Parameter, where: str) -> str:
    """Return the message for a value that was masked when it was written: how to give it again."""
    variable = f" or in the environment variable {parameter.envvar}" if parameter.envvar else ""
    return (
        f"{where}: the value of {parameter.name} is masked, because it is a secret. Give it again with {parameter.flag}{variable}. "
        "If it is not a secret, declare it with secret=False."
    )


def _read(parameter: Parameter, given: Given) -> Any:
    where = {"cli": parameter.flag, "run": "run"}.get(given.origin, given.origin)
    if parameter.name == PARAMS_FILE and isinstance(given.value, list | tuple):
        files = [parameter.read(item, is_text=given.is_text, where=where) for item in given.value]
        return files[0] if len(files) == 1 else files
    return parameter.read(given.value, is_text=given.is_text, where=where)


def _from_files(parameters: ParameterSet, explicit: Mapping[str, Given]) -> dict[str, Given]:
    given = explicit.get(PARAMS_FILE)
    if given is None or given.value is None:
        return {}
    found: dict[str, Given] = {}
    for path in given.value if isinstance(given.value, list | tuple) else [given.value]:
        if not isinstance(path, str | Path):
            raise ParameterError(f"{PARAMS_FILE}: expected the path of a YAML or JSON file, got {path!r}.")
        found |= {
            name: entry for name, entry in read_parameter_file(path, parameters).items() if entry.value is not None
        }
    return found


def _from_environment(parameters: ParameterSet, environment: Mapping[str, str]) -> dict[str, Given]:
    """Read the variables that parameters declare; an empty one counts as not set."""
    found = {}
    for name, parameter in parameters.items():
        text = environment.get(parameter.envvar, "") if isinstance(parameter.envvar, str) else ""
        if text:
            origin = f"env:{parameter.envvar}"
            found[name] = Given(_items(text, origin) if parameter.multiple else text, origin, is_text=True)
    return found


def _items(text: str, origin: str) -> list[str]:
    """Split a list at spaces and commas; quotes keep an item together."""
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="")
        lexer.whitespace += ","
        lexer.whitespace_split, lexer.commenters = True, ""
        return list(lexer)
    except ValueError as error:
        raise ParameterError(f"{origin}: the value cannot be split into items: {error}.") from None


def flatten(values: Mapping[str, object], parameters: ParameterSet) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return each value under its full name, with the path of keys it was found at: `opt: {lr: 1}` gives `opt.lr`.

    A dataclass instance counts as its fields. Names that no parameter has come out as they are.
    """
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    _flatten(values, (), "", parameters, found)
    return found


def _flatten(
    values: Mapping[str, object],
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
    """Read the values of one file; an unknown key is an error, keys that may not come from a file are skipped."""
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
        parameter = parameters[name]
        if parameter.allow_from_file:
            given[name] = Given(value, place)
        elif value not in (None, parameter.default) and not parameter.hidden:
            logger.warning("%s: %s is never read from a file and is ignored. Give %s.", place, name, parameter.flag)
    return given


def unknown_parameter(name: str, parameters: ParameterSet) -> str:
    """Return the message for an unknown parameter, with the nearest name and all names."""
    shown = [other for other, parameter in parameters.items() if not parameter.hidden]
    hint = did_you_mean(str(name).replace("-", "_"), shown)
    return f"unknown parameter {name!r}.{hint} Parameters: {', '.join(shown)}."
