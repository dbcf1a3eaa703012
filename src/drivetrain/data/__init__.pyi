# Written by `make stubs` from the lazy exports of this module.
from drivetrain.data.loader import SmartDataLoader as SmartDataLoader
from drivetrain.data.order import BatchInfo as BatchInfo
from drivetrain.data.order import epoch_permutation as epoch_permutation
from drivetrain.data.columns import make_resident as make_resident
from drivetrain.data.packing import PackedDataset as PackedDataset
from drivetrain.data.packing import PackedStream as PackedStream
from drivetrain.data.packing import document_mask as document_mask
from drivetrain.data.packing import document_mask_mod as document_mask_mod
from drivetrain.data.packing import num_targets as num_targets
from drivetrain.data.packing import pack_documents as pack_documents
from drivetrain.data.packing import pack_lengths as pack_lengths

__all__ = [
    "SmartDataLoader",
    "BatchInfo",
    "epoch_permutation",
    "make_resident",
    "PackedDataset",
    "PackedStream",
    "document_mask",
    "document_mask_mod",
    "num_targets",
    "pack_documents",
    "pack_lengths",
]
