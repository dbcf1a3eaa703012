# Written by `make stubs` from the lazy exports of this module.
from drivetrain.algorithms.utils.primitives import augmentation_sets as augmentation_sets
from drivetrain.algorithms.utils.datasets import with_transform as with_transform

__all__ = [
    "augmentation_sets",
    "with_transform",
]
