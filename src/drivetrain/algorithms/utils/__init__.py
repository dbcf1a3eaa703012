"""What several algorithms share: random draws, images, parts of batches, extra passes through a model, changed datasets."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {".primitives": ["augmentation_sets"], ".datasets": ["with_transform"]}
)
