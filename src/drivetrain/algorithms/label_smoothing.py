"""Label smoothing (Szegedy et al., 2015, arXiv 1512.00567): spread a little of each target over all classes."""

from torch import Tensor

from drivetrain.algorithms.utils.losses import check_loss_is_outside, check_soft_targets, logits_for
from drivetrain.algorithms.utils.parts import map_tensors
from drivetrain.context.batch import BatchKey, ensure_targets_one_hot, infer_target_type
from drivetrain.context.state import State
from drivetrain.core import Algorithm, Event, Logger
from drivetrain.core.arguments import check_fractions


def smooth_labels(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """Return soft targets that keep `1 - smoothing` on the given class; rows of no class (such as -100) stay zero.

    >>> import torch
    >>> smooth_labels(torch.zeros(2, 4), torch.tensor([1, -100]), smoothing=0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500],
            [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    check_fractions("smooth_labels", smoothing=smoothing)
    dense = ensure_targets_one_hot(logits, target)
    share = smoothing / logits.shape[1]
    has_class = 1 if infer_target_type(logits, target) == "one_hot" else dense.sum(1, keepdim=True)
    return dense * (1 - smoothing) + has_class * share


class LabelSmoothing(Algorithm):
    """Smooths the targets for the loss and restores the true ones afterwards."""

    allow_multiple = False
    events = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})
    reads, writes = ("outputs", "batch"), ("batch",)
    tags = frozenset({"soft_targets"})

    def __init__(self, smoothing: float = 0.1, target_key: BatchKey = 1):
        check_fractions("LabelSmoothing", smoothing=smoothing)
        self.smoothing, self.target_key = smoothing, target_key
        self._true: object = None
        self._is_checked = False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.AFTER_LOSS:
            state.batch_set_item(self.target_key, self._true)
            self._true = None
            return
        if not self._is_checked:
            check_loss_is_outside(state, str(self))
        self._true = state.batch_get_item(self.target_key)
        logits = logits_for(state.outputs, self._true, str(self))
        smooth = map_tensors(lambda one, target: smooth_labels(one, target, self.smoothing), logits, self._true)
        if not self._is_checked:
            check_soft_targets(state, logits, smooth, str(self))
            self._is_checked = True
        state.batch_set_item(self.target_key, smooth)
