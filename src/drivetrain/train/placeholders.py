"""Numbers that are known only when training starts, for use in the arguments of a scheduler.

A placeholder represents a number of the run; arithmetic with it builds a small tree, and the Trainer replaces trees by
numbers just before it makes the scheduler. No text is evaluated anywhere.

    create_scheduler_fn = partial(OneCycleLR, max_lr=0.1, total_steps=P.NUM_EPOCHS *
    P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH)
"""

import operator
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from drivetrain.core.errors import ConfigError

_SYMBOLS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
}


class _Arithmetic:
    """Gives a class `+ - * / //` on either side, each of which makes an expression."""

    def __add__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("+", self, other)

    def __radd__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("+", other, self)

    def __sub__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("-", self, other)

    def __rsub__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("-", other, self)

    def __mul__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("*", self, other)

    def __rmul__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("*", other, self)

    def __truediv__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("/", self, other)

    def __rtruediv__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("/", other, self)

    def __floordiv__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("//", self, other)

    def __rfloordiv__(self, other: object) -> "PlaceholderExpression":
        return PlaceholderExpression("//", other, self)


class PlaceholderExpression(_Arithmetic):
    """One operation on two values, of which at least one is a placeholder or an expression."""

    def __init__(self, symbol: str, left: object, right: object):
        self.symbol, self.left, self.right = symbol, left, right

    def evaluate(self, trainer: object) -> Any:
        """Return the number, with the trainer's values in place."""
        return _SYMBOLS[self.symbol](_replace(trainer, self.left), _replace(trainer, self.right))

    def __repr__(self) -> str:
        return f"({self.left} {self.symbol} {self.right})"


class TrainerPlaceholderValues(_Arithmetic, Enum):
    """Numbers of the run in progress."""

    NUM_EPOCHS = "num_epochs"
    NUM_UPDATE_STEPS_PER_EPOCH = "num_update_steps_per_epoch"
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = "num_local_update_steps_per_epoch"
    TRAIN_DATALOADER_LEN = "_train_dataloader"
    EVAL_DATALOADER_LEN = "_eval_dataloader"

    @classmethod
    def placeholder_set(cls) -> "set[TrainerPlaceholderValues]":
        """Return all placeholders."""
        return set(cls)

    def evaluate(self, trainer: Any) -> int:
        """Return the number this placeholder represents in a run that has its loaders and configuration."""
        if self.value.startswith("_"):
            loader = getattr(trainer, self.value, None)
            try:
                return len(loader)  # type: ignore[arg-type]
            except TypeError as error:
                reason = "there is no such loader" if loader is None else "the loader has no length"
                raise ConfigError(self._unknown(reason)) from error
        number = getattr(trainer.run_config, self.value, None)
        if number is None:
            raise ConfigError(self._unknown(f"run_config.{self.value} is not known in this run"))
        return number

    def _unknown(self, reason: str) -> str:
        return (
            f"{self} has no value: {reason}. Give the scheduler a number instead, "
            "or train with num_epochs and a loader that has a length."
        )


def replace_trainer_placeholder_values(trainer: object, instance: object) -> Any:
    """Return a `functools.partial` with every placeholder in its arguments replaced; anything else as it is.

    Placeholders are found in positional and keyword arguments, in lists, tuples and dicts among them, and in nested
    partials.
    """
    return _replace(trainer, instance) if isinstance(instance, partial) else instance


def _replace(trainer: object, value: object) -> Any:
    if isinstance(value, (TrainerPlaceholderValues, PlaceholderExpression)):
        return value.evaluate(trainer)
    if isinstance(value, partial):
        arguments = [_replace(trainer, item) for item in value.args]
        keywords = {key: _replace(trainer, item) for key, item in value.keywords.items()}
        return partial(_replace(trainer, value.func), *arguments, **keywords)
    if isinstance(value, tuple):
        items = [_replace(trainer, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_replace(trainer, item) for item in value]
    if type(value) is dict:
        return {key: _replace(trainer, item) for key, item in value.items()}
    return value
