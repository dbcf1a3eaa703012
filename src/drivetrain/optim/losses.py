"""Which loss a unit follows: one name, several names (their sum), or names with weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain.core.errors import BatchOutputError, ConfigError, did_you_mean

Terms = tuple[tuple[str, float], ...]
LossNames = str | Sequence[str] | Mapping[str, float] | None
Losses = Mapping[str, Tensor] | Tensor


def loss_terms(optim_loss: LossNames) -> Terms:
    """Return what an `optim_loss` argument means: names with weights.

    >>> loss_terms(None), loss_terms(["ctc", "att"]), loss_terms({"ctc": 0.3})
    ((('loss', 1.0),), (('ctc', 1.0), ('att', 1.0)), (('ctc', 0.3),))
    """
    if optim_loss is None:
        return (("loss", 1.0),)
    if isinstance(optim_loss, str):
        terms: list[tuple[Any, Any]] = [(optim_loss, 1.0)]
    elif isinstance(optim_loss, Mapping):
        terms = list(optim_loss.items())
    elif isinstance(optim_loss, Sequence):
        terms = [(name, 1.0) for name in optim_loss]
    else:
        terms = []
    names = [name for name, _ in terms]
    for name, weight in terms:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"optim_loss={optim_loss!r}: {name!r} is not the name of a loss.")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ConfigError(f"optim_loss={optim_loss!r}: the weight of {name!r} must be a number.")
    if not terms or len(set(names)) < len(names):
        raise ConfigError(f"optim_loss={optim_loss!r}: expected a name, a list of different names or {{name: weight}}.")
    return tuple((name, float(weight)) for name, weight in terms)


def pick_loss(losses: Losses, terms: Terms, unit: str) -> Tensor:
    """Return the unit's loss from what the model gave, as a scalar that has a gradient; nothing is changed in place."""
    if isinstance(losses, Tensor):
        losses = {"loss": losses}
    total: Tensor | None = None
    for name, weight in terms:
        value = losses.get(name)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise _bad_loss(losses, name, unit)
        term = value if weight == 1.0 else value * weight
        total = term if total is None else total + term
    assert total is not None
    if not total.requires_grad:
        raise ConfigError(
            f"unit {unit!r}: the loss {_shown(terms)} has no gradient. It was computed under no_grad, detached, or from frozen "
            "parameters only."
        )
    return total if total.ndim == 0 else total.squeeze()


def _bad_loss(losses: Mapping[str, object], name: str, unit: str) -> Exception:
    if name not in losses:
        hint = did_you_mean(name, losses)
        given = ", ".join(map(str, losses)) or "none"
        return BatchOutputError(
            f"unit {unit!r} follows the loss {name!r}, which was not returned.{hint} Losses given: {given}."
        )
    value = losses[name]
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    return ConfigError(f"unit {unit!r}: the loss {name!r} is {what}; expected a tensor with one element.")


def _shown(terms: Terms) -> str:
    return " + ".join(repr(name) if weight == 1.0 else f"{weight:g}*{name!r}" for name, weight in terms)
