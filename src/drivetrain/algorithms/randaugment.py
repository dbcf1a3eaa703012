"""RandAugment (Cubuk et al., 2020, arXiv 1909.13719): a few random augmentations for each image, all of one strength."""

from torch import nn

from drivetrain.algorithms.utils import primitives
from drivetrain.algorithms.utils.datasets import DatasetTransform
from drivetrain.algorithms.utils.parts import Generator
from drivetrain.algorithms.utils.primitives import AugmentationSet, Image, find_set
from drivetrain.core.arguments import check_counts, check_number


def randaugment_image(
    img: Image,
    severity: int = 9,
    depth: int = 2,
    augmentation_set: AugmentationSet = "all",
    *,
    generator: Generator = None,
) -> Image:
    """Return an image after `depth` augmentations drawn from a set, with replacement.

    A PIL image stays one. A tensor (C, H, W), or each image of a batch (N, C, H, W) on its own, is uint8 or float from 0 to 1.
    """
    _check(severity, depth, augmentation_set, "randaugment_image")
    primitives.check_image(img, "randaugment_image")
    augmentations = find_set(augmentation_set, "randaugment_image")

    def augment(image: Image) -> object:
        for _ in range(depth):
            image = primitives.apply_one_of(augmentations, image, severity, generator)
        return image

    return primitives.each_image(augment, img)


def randaugment(
    img: Image = None,
    severity: int = 9,
    depth: int = 2,
    augmentation_set: AugmentationSet = "all",
    *,
    generator: Generator = None,
) -> Image:
    """Return the augmented image, or, without an image, a transform for a dataset's pipeline."""
    if img is None:
        return RandAugmentTransform(severity, depth, augmentation_set)
    return randaugment_image(img, severity, depth, augmentation_set, generator=generator)


def _check(severity: int, depth: int, augmentation_set: AugmentationSet, who: str) -> None:
    check_number("severity", severity, at_least=0, at_most=10, owner=who)
    check_counts(who, 0, depth=depth)
    find_set(augmentation_set, who)


class RandAugmentTransform(nn.Module):
    """RandAugment as a step of a dataset's transforms; it draws from torch's global generator, which loaders seed per batch."""

    def __init__(self, severity: int = 9, depth: int = 2, augmentation_set: AugmentationSet = "all"):
        super().__init__()
        _check(severity, depth, augmentation_set, type(self).__name__)
        self.severity, self.depth, self.augmentation_set = severity, depth, augmentation_set

    def forward(self, img: Image) -> Image:
        return randaugment_image(img, self.severity, self.depth, self.augmentation_set)

    def extra_repr(self) -> str:
        return f"severity={self.severity}, depth={self.depth}, augmentation_set={primitives.shown_set(self.augmentation_set)}"


class RandAugment(DatasetTransform):
    """Adds RandAugment to the training data; the dataset itself, which evaluation may share, is left alone."""

    def __init__(self, severity: int = 9, depth: int = 2, augmentation_set: AugmentationSet = "all"):
        _check(severity, depth, augmentation_set, "RandAugment")
        self.severity, self.depth, self.augmentation_set = severity, depth, augmentation_set
        self._transform = RandAugmentTransform(severity, depth, augmentation_set)
