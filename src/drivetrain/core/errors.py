"""Every error Drivetrain raises on purpose, in one family, and the sentence that makes them helpful.

A message says what was given, what was expected, the nearest valid name, and what to do. Where a built-in type would
be expected (`ValueError` for a wrong argument, `KeyError` for a missing entry), ours is also an instance of it, so that
code written against the libraries we replace keeps catching what it caught.
"""

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from drivetrain.core.plain import plain_text

BETWEEN = re.compile(r"(drivetrain|torch)\.|(contextlib|functools|threading)$")
"""Modules between the user's code and the place that warns or raises."""


class DrivetrainError(Exception):
    """The root of the family; also exported as `drivetrain.Error`."""


class ConfigError(DrivetrainError, ValueError):
    """Something the user wrote is wrong: an argument, a name, a combination."""


ConfigurationError = ConfigError


class ParameterError(ConfigError):
    """An experiment parameter has a bad name or value."""


class ConfigTypeError(ConfigError, TypeError):
    """Something the user wrote has the wrong type or form: a count that is not whole, a method with other arguments."""


class PluginConflictError(ConfigError):
    """Two plugins cannot run together; the message names both and a way out."""


class PluginOrderError(ConfigError):
    """The declared order of plugins is a cycle; the message prints it."""


class StrategyError(ConfigError):
    """A plan, or a part of one, is wrong."""


class UnknownMethodError(StrategyError):
    """No optimization method has this name."""


class MethodConfigError(StrategyError):
    """A method was given a configuration it does not understand."""


class ConflictError(StrategyError):
    """Two methods of a plan exclude each other."""


class StrategyFormatError(StrategyError):
    """A file or text is not a plan this version can read."""


class BatchSizeError(StrategyError):
    """The global batch does not divide over the data ranks."""


class UnsupportedMethodError(StrategyError):
    """The device cannot run this method."""


class PlanInfeasible(StrategyError):
    """No plan fits; `failure` on the strategy gives the shortfall."""


class StateError(DrivetrainError, ValueError):
    """A saved state does not fit the object that should take it."""


class BatchOutputError(DrivetrainError, KeyError):
    """A loss hook returned something the loop cannot use."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message


class BatchError(ConfigError, RuntimeError, IndexError, TypeError):
    """Model or loss cannot take the data: the message names the batch, the layer, and what they were given."""


class CheckpointError(DrivetrainError, RuntimeError):
    """A checkpoint is damaged, missing or cannot be written."""


class CheckpointsExistError(CheckpointError, ConfigError, FileExistsError):
    """A new run would replace the checkpoints of an earlier one."""

    __str__ = Exception.__str__  # OSError would look for an errno


class FolderInUseError(CheckpointError, ConfigError):
    """Another run writes its checkpoints into the same folder."""


class ResumeError(CheckpointError):
    """A run cannot be continued exactly."""


class DeviceError(DrivetrainError, RuntimeError):
    """The requested device does not exist."""


class UnknownDeviceError(ConfigError, DeviceError):
    """No device has this name."""


class DistributedError(DrivetrainError, RuntimeError):
    """The process group is missing, or does not match its environment."""


class SharedGraphError(DrivetrainError, RuntimeError):
    """A backward pass needs a graph, or weights, that another unit's pass or step has used up."""


class StopTrainingError(DrivetrainError):
    """Raise it in a hook or callback to end a run cleanly; `train()` then returns."""


class TrainingStopped(DrivetrainError, RuntimeError):
    """Raised by `train()` after an orderly end that has a bad cause."""


class NonFiniteError(TrainingStopped):
    """Updates were not finite, and the policy of the run ends it."""


class NonFiniteStateError(NonFiniteError, CheckpointError):
    """Weights or optimizer state hold NaN or infinity, so they are not saved."""


class NonFiniteLossError(NonFiniteError):
    """The loss became NaN or infinite."""

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        epoch: int | None = None,
        where: str | None = None,
        last_checkpoint: str | None = None,
    ):
        super().__init__(message)
        self.step, self.epoch, self.where, self.last_checkpoint = step, epoch, where, last_checkpoint


class ExperimentError(DrivetrainError):
    """An experiment is nested, missing or cannot be found."""


class SweepError(DrivetrainError):
    """Some trials of a sweep failed; `result` holds all of them."""

    def __init__(self, message: str, result: object = None):
        super().__init__(message)
        self.result = result


class MissingExtra(DrivetrainError, ImportError):
    """An optional package is needed and not installed; the message has the install line."""

    def __init__(self, package: str, extra: str | None = None, purpose: str = "this"):
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        )
        self.package, self.extra, self.purpose = package, extra, purpose

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.package, self.extra, self.purpose)  # the message is made from them again


@contextmanager
def needs_package(package: str, extra: str | None, purpose: str) -> Iterator[None]:
    """Import an optional package within the block; without it a `MissingExtra` is raised."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(package, extra, purpose) from error


class TimeUnitError(DrivetrainError, RuntimeError):
    """Two times of different units were compared or added."""


class EngineError(DrivetrainError, RuntimeError):
    """The engine was used after `close()`, or a plugin that may only watch changed the state in strict mode."""


class CallbackMethodNotImplementedError(DrivetrainError, NotImplementedError):
    """A callback does not define a required method."""


class DrivetrainWarning(UserWarning):
    """Something works, but hardly as it was meant; `Trainer(strict=True)` makes it an error."""


class NoEffectWarning(DrivetrainWarning):
    """An algorithm was applied and changed nothing."""


class NotIntendedUseWarning(DrivetrainWarning):
    """An algorithm is used in a way that works, but not as it was meant."""


class DrivetrainDeprecationWarning(DrivetrainWarning, DeprecationWarning):
    """Something is kept for old code only."""


def warn(message: str, category: type[Warning] = DrivetrainWarning) -> None:
    """Issue a warning that shows the line of the user's code which led to it, however deep in the package it is raised."""
    frame = raised = sys._getframe(1)
    while BETWEEN.match(frame.f_globals.get("__name__") or ""):
        if frame.f_back is None:  # a thread of the package
            frame = raised
            break
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def nearest_name(name: object, valid: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the valid name closest to `name`, or None when nothing is close; a higher `cutoff` asks for more."""
    by_folded = {choice.casefold(): choice for choice in map(str, valid)}
    close = difflib.get_close_matches(str(name).casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[close[0]] if close else None


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return the sentence that names the nearest valid name, with a space before it; empty when nothing is close.

    >>> did_you_mean("epp", ["ep", "ba"])
    " Did you mean 'ep'?"
    """
    near = nearest_name(name, valid)
    return f" Did you mean {near!r}?" if near else ""


def unknown_name(kind: str, name: object, valid: Iterable[str], *, where: str = "") -> str:
    """Return a message that `name` is not a valid `kind`: the location, the nearest name and all valid ones.

    >>> unknown_name("time unit", "epp", ["ep", "ba"])
    "unknown time unit 'epp'. Did you mean 'ep'? Valid: ep, ba."
    """
    choices = [str(choice) for choice in valid]
    place = f"{where}: " if where else ""
    return f"{place}unknown {kind} {name!r}.{did_you_mean(name, choices)} Valid: {', '.join(choices) or 'none'}."


def first_line(error: object) -> str:
    """Return the first line of an error's message, or its class where it has none, as an assertion."""
    return plain_text(error).strip().partition("\n")[0][:300].rstrip(".") or type(error).__name__
