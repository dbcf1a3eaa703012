"""MixUp (Zhang et al., 2018, arXiv 1710.09412): train on convex combinations of pairs of samples and of their targets."""

import torch
from torch import Tensor

from drivetrain.algorithms.utils import parts
from drivetrain.algorithms.utils.losses import PairMixing
from drivetrain.algorithms.utils.parts import Generator, first_tensor, map_tensors, take_rows
from drivetrain.context.batch import BatchKey, ensure_targets_one_hot
from drivetrain.context.state import State
from drivetrain.core.arguments import check_numbers
from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Batch


def mixup_batch(
    input: object,
    target: object,
    mixing: float | Tensor | None = None,
    alpha: float = 0.2,
    indices: Tensor | None = None,
    *,
    generator: Generator = None,
) -> tuple[Batch, Batch, float | Tensor]:
    """Return `(1 - mixing) x + mixing x[indices]`, the targets `y[indices]`, and the mixing coefficient.

    The coefficient is drawn from Beta(alpha, alpha) and folded below 1/2, so that a sample is always more itself than its partner;
    one that is given is used as it is. Several tensors, in a list, are mixed alike.

    >>> x, y = torch.tensor([[0.0], [4.0]]), torch.tensor([0, 1])
    >>> mixup_batch(x, y, mixing=0.25, indices=torch.tensor([1, 0]))
    (tensor([[1.],
            [3.]]), tensor([1, 0]), 0.25)
    """
    check_numbers("mixup_batch", 0, alpha=alpha)
    if mixing is None:
        mixing = draw_mixing(alpha, generator)
    first = first_tensor(input, "mixup_batch")
    if indices is None:
        indices = parts.draw_permutation(first.shape[0], first.device, generator)
    return map_tensors(lambda x: _mixed(x, mixing, indices), input), take_rows(target, indices), mixing


def draw_mixing(alpha: float, generator: Generator = None) -> float:
    """Return the weight of the other sample: at most 1/2, and 0 for `alpha` 0."""
    mixing = 0.0 if alpha == 0 else parts.draw_beta(alpha, generator)
    return min(mixing, 1 - mixing)


def _mixed(x: Tensor, mixing: float | Tensor, indices: Tensor) -> Tensor:
    parts.check_floating(x, "MixUp")
    return torch.lerp(x, take_rows(x, indices), mixing.to(x) if isinstance(mixing, Tensor) else mixing)


def mixup(
    input: Tensor, target: Tensor, alpha: float = 0.2, num_classes: int | None = None, *, generator: Generator = None
) -> tuple[Tensor, Tensor]:
    """Return mixed inputs and the soft targets that belong to them; class indices need `num_classes`."""
    dense = dense_targets(target, num_classes, "mixup")
    x, other, mixing = mixup_batch(input, dense, alpha=alpha, generator=generator)
    assert isinstance(x, Tensor) and isinstance(other, Tensor)
    return x, torch.lerp(dense, other, mixing)


def dense_targets(target: Tensor, num_classes: int | None, who: str) -> Tensor:
    """Return targets with one weight per class."""
    if target.is_floating_point():
        return target
    if num_classes is None:
        raise ConfigError(f"{who}: the targets are class indices; give num_classes to make them soft.")
    return ensure_targets_one_hot(torch.empty(len(target), num_classes, *target.shape[1:], device="meta"), target)


class MixUp(PairMixing):
    """Mixes the samples of every batch in pairs, and their targets or losses in the same proportion."""

    conflicts = {"CutMix": "both mix the samples of a batch. Apply one per batch: OneOf(MixUp(...), CutMix(...))"}

    def __init__(
        self, alpha: float = 0.2, interpolate_loss: bool = False, input_key: BatchKey = 0, target_key: BatchKey = 1
    ):
        check_numbers("MixUp", 0, alpha=alpha)
        super().__init__(interpolate_loss, input_key, target_key)
        self.alpha = alpha

    def mix_inputs(self, state: State) -> tuple[float, Tensor]:
        inputs = state.batch_get_item(self.input_key)
        first = first_tensor(inputs, str(self))
        rows = torch.arange(len(first), device=first.device)
        mixed, index, mixing = mixup_batch(inputs, rows, alpha=self.alpha, generator=state.rng(type(self).__name__))
        assert isinstance(index, Tensor) and isinstance(mixing, float)
        state.batch_set_item(self.input_key, mixed)
        return 1 - mixing, index
