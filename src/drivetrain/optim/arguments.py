"""Checks of what a user passes to a unit, and the defaults that a set or the Trainer may replace.

Six arguments can be shared: a value given to the unit wins, then the one shared by set or Trainer, then the default. So
"not given" must differ from "given, and equal to the default"; `Default` is that difference.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drivetrain.core.arguments import check_count, check_flag, check_number
from drivetrain.core.errors import ConfigError, ConfigTypeError, did_you_mean


class Default:
    """The value of an argument that was not given; shows as that value."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


# Typed Any so that signatures can state the type of the value a caller passes.
DISTRIBUTED: Any = Default(False)
USE_AMP: Any = Default(True)
ACCUM_GRAD: Any = Default(1)
FT_FACTOR: Any = Default(1.0)
GRAD_CLIP: Any = Default(1.0)
GRAD_NORM_TYPE: Any = Default(2.0)

SHARED: dict[str, Any] = {
    "distributed": DISTRIBUTED,
    "use_amp": USE_AMP,
    "accum_grad": ACCUM_GRAD,
    "ft_factor": FT_FACTOR,
    "grad_clip": GRAD_CLIP,
    "grad_norm_type": GRAD_NORM_TYPE,
}

NONFINITE = ("skip", "raise", "ignore")


def check_shared(name: str, value: object) -> Any:
    """Return the value of a shared argument, or raise an error."""
    if name in ("distributed", "use_amp"):
        return check_flag(name, value)
    if name == "accum_grad":
        return check_count(name, value)
    if name == "grad_clip" and value is None:
        return None
    hint = " (None switches clipping off)" if name == "grad_clip" else ""
    return check_number(name, value, above=0, infinite=name == "grad_norm_type", hint=hint)


def check_keywords(
    function: Callable[..., object], given: Mapping[str, object], owner: str, also_valid: Iterable[str] = ()
) -> None:
    """Check keywords against a signature; an unknown or missing one is a TypeError with the nearest name."""
    accepted, required = keywords_of(function)
    if accepted is not None:
        for name in given:
            if name not in accepted:
                choices = [*accepted, *also_valid]
                hint = did_you_mean(name, choices)
                raise ConfigTypeError(f"{owner} has no argument {name!r}.{hint} Valid: {', '.join(choices) or 'none'}.")
    for name in required:
        if name not in given:
            raise ConfigTypeError(f"{owner} needs the argument {name!r}, which was not given.")


def keywords_of(function: Callable[..., object]) -> tuple[list[str] | None, list[str]]:
    """Return the keywords a bound function accepts (None: any) and those it requires."""
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.VAR_KEYWORD)
    ]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    return (None if takes_any else [p.name for p in named]), [p.name for p in named if p.default is p.empty]


def one_of_two_names(conf: dict[str, object], alias: str, name: str, value: object) -> Any:
    """Take an alias out of `conf`; given under both names with different values is an error."""
    if alias not in conf:
        return value
    other = conf.pop(alias)
    if value is not None and value != other:
        raise ConfigError(f"{name}={value!r} and {alias}={other!r} are two names of one argument and differ. Use one.")
    return other
