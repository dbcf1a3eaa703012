"""Data on its way to the model: a loader that saves its position, its order, and what makes it fast."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".loader": ["SmartDataLoader"],
        ".order": ["BatchInfo", "epoch_permutation"],
        ".columns": ["make_resident"],
        ".packing": [
            *("PackedDataset", "PackedStream"),
            *("document_mask", "document_mask_mod", "num_targets", "pack_documents", "pack_lengths"),
        ],
    },
)
