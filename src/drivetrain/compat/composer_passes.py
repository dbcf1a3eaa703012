"""Ready-made rearrangements of an event's algorithms, for code that asks for them by name.

The engine needs none of them: it sorts by what plugins declare. A pass is a function that takes `(algorithms, event)`
and returns the algorithms as they shall run; it has the last word, on the list the engine has sorted.
"""

import warnings
from collections.abc import Sequence
from typing import TypeVar

from drivetrain.core.errors import DrivetrainWarning
from drivetrain.core.event import Event
from drivetrain.core.ordering import refers_to
from drivetrain.core.plugin import PluginReference, plugin_name

T = TypeVar("T")


def sort_to_front(list_to_sort: Sequence[T], cls: PluginReference) -> list[T]:
    """Return the list with instances of `cls` first, otherwise in the same order."""
    return sorted(list_to_sort, key=lambda item: not refers_to(cls, item))


def sort_to_back(list_to_sort: Sequence[T], cls: PluginReference) -> list[T]:
    """Return the list with instances of `cls` last, otherwise in the same order."""
    return sorted(list_to_sort, key=lambda item: refers_to(cls, item))


def sort_selective_backprop_first(algorithms: Sequence[T], event: Event) -> list[T]:
    """Let selective backprop choose samples before others change them."""
    return sort_to_front(algorithms, "SelectiveBackprop")


def sort_low_precision_layernorm_last(algorithms: Sequence[T], event: Event) -> list[T]:
    """Let low-precision norms replace layers after other surgery."""
    return sort_to_back(algorithms, "LowPrecisionLayerNorm")


def set_filo_order(algorithms: Sequence[T], event: Event) -> list[T]:
    """Reverse the list at every `after_*` and `*_end` event: first in, last out."""
    return list(reversed(algorithms)) if event.is_after_event else list(algorithms)


def warn_if_multiple_loss_interpolation(algorithms: Sequence[T], event: Event) -> list[T]:
    """Warn when more than one algorithm interpolates the loss."""
    several = [plugin_name(plugin) for plugin in algorithms if refers_to("#interpolates_loss", plugin)]
    if len(several) > 1:
        warnings.warn(
            f"{' and '.join(several)} all interpolate the loss at {event.name}; use one of them.",
            DrivetrainWarning,
            stacklevel=2,
        )
    return list(algorithms)
