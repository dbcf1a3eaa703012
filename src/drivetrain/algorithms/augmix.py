"""AugMix (Hendrycks et al., 2020, arXiv 1912.02781): mix several chains of random augmentations with the image itself."""

import torch
from torch import Tensor, nn

from drivetrain.algorithms.utils import primitives
from drivetrain.algorithms.utils.datasets import DatasetTransform
from drivetrain.algorithms.utils.parts import Generator, draw_beta, draw_integer, draw_weights
from drivetrain.algorithms.utils.primitives import AugmentationSet, Image, find_set, is_pil
from drivetrain.core.arguments import check_counts, check_number
from drivetrain.core.errors import ConfigError


def augmix_image(
    img: Image,
    severity: int = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: AugmentationSet = "all",
    *,
    generator: Generator = None,
) -> Image:
    """Return `(1 - m) img + m sum(w_i chain_i)` over `width` chains of augmentations.

    The weights w are a Dirichlet sample, m a sample of Beta(alpha, alpha). Each chain has `depth` augmentations, or one to three
    where `depth` is not positive. A PIL image stays one; tensors are uint8 or float from 0 to 1.
    """
    _check(severity, depth, width, alpha, augmentation_set, "augmix_image")
    primitives.check_image(img, "augmix_image")
    augmentations = find_set(augmentation_set, "augmix_image")

    def augment(image: Image) -> object:
        weights = draw_weights(width, alpha, generator)
        mixing = draw_beta(alpha, generator)
        total = (1 - mixing) * _values(image)
        for weight in weights:
            chain = image
            for _ in range(depth if depth > 0 else draw_integer(1, 4, generator)):
                chain = primitives.apply_one_of(augmentations, chain, severity, generator)
            total += mixing * weight * _values(chain)
        return _like(image, total)

    return primitives.each_image(augment, img)


def _values(image: Image) -> Tensor:
    return primitives.as_tensor(image).float() if is_pil(image) else image.float()


def _like(image: Image, values: Tensor) -> Image:
    """Return values as an image of the same kind; whole numbers are cut, not rounded."""
    if is_pil(image):
        return primitives.as_pil(values.clamp(0, 255).to(torch.uint8), image.mode)
    return values.clamp(0, 255).to(image.dtype) if image.dtype is torch.uint8 else values.to(image.dtype)


def _check(severity: int, depth: int, width: int, alpha: float, augmentation_set: AugmentationSet, who: str) -> None:
    check_number("severity", severity, at_least=0, at_most=10, owner=who)
    check_number("alpha", alpha, above=0, owner=who)
    check_counts(who, 1, width=width)
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise ConfigError(
            f"{who}(depth={depth!r}): expected a whole number; 0 or less draws one to three for each chain."
        )
    find_set(augmentation_set, who)


class AugmentAndMixTransform(nn.Module):
    """AugMix as a step of a dataset's transforms; it draws from torch's global generator, which loaders seed per batch."""

    def __init__(
        self,
        severity: int = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: AugmentationSet = "all",
    ):
        super().__init__()
        _check(severity, depth, width, alpha, augmentation_set, type(self).__name__)
        self.severity, self.depth, self.width = severity, depth, width
        self.alpha, self.augmentation_set = alpha, augmentation_set

    def forward(self, img: Image) -> Image:
        return augmix_image(img, self.severity, self.depth, self.width, self.alpha, self.augmentation_set)

    def extra_repr(self) -> str:
        return (
            f"severity={self.severity}, depth={self.depth}, width={self.width}, alpha={self.alpha}, "
            f"augmentation_set={primitives.shown_set(self.augmentation_set)}"
        )


class AugMix(DatasetTransform):
    """Adds AugMix to the training data; the dataset itself, which evaluation may share, is left alone."""

    def __init__(
        self,
        severity: int = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: AugmentationSet = "all",
    ):
        _check(severity, depth, width, alpha, augmentation_set, "AugMix")
        self.severity, self.depth, self.width = severity, depth, width
        self.alpha, self.augmentation_set = alpha, augmentation_set
        self._transform = AugmentAndMixTransform(severity, depth, width, alpha, augmentation_set)
