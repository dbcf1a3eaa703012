"""Label smoothing (Szegedy et al., 2015, arXiv 1512.00567): spread a little of each target over all classes."""

from torch import Tensor

from drivetrain.algorithms.utils.losses import SoftTargets
from drivetrain.context.batch import BatchKey, ensure_targets_one_hot, infer_target_type
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


class LabelSmoothing(SoftTargets):
    """Smooths the targets for the loss and restores the true ones afterwards."""

    def __init__(self, smoothing: float = 0.1, target_key: BatchKey = 1):
        check_fractions("LabelSmoothing", smoothing=smoothing)
        super().__init__(target_key)
        self.smoothing = smoothing

    def softened(self, logits: Tensor, target: Tensor) -> Tensor:
        return smooth_labels(logits, target, self.smoothing)
