"""Optimizers that torch does not have, all of them are `torch.optim.Optimizer`s.

They work on lists of tensors at once, read nothing back from the device, keep plain numbers and tensors as their state, and
treat sharded parameters shard by shard where the arithmetic allows it.
"""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".muon_hybrid": ["MuonHybrid"],
        ".schedule_free": ["AdamWScheduleFree", "SGDScheduleFree"],
        ".decoupled": ["DecoupledAdamW", "DecoupledSGDW", "Lion"],
        ".shampoo": ["SOAP"],
        ".wrapper": ["Cautious", "Lookahead", "SAM=SAMOptimizer", "SAMOptimizer"],
    },
)
