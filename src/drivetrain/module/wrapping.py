"""One doorway to everything that wraps a model or looks through a wrapper."""

from drivetrain.module.clean_state import clean_state_dict, load_clean_state_dict
from drivetrain.module.ddp import TransparentDDP, rewrap_ddp, wrap_ddp
from drivetrain.module.sharding import rebind_optimizer, shard_fully
from drivetrain.module.wrappers import clean_key, clean_name, is_wrapped, named_clean_parameters, unwrap, wrapping_of

__all__ = [
    "TransparentDDP",
    "clean_key",
    "clean_name",
    "clean_state_dict",
    "is_wrapped",
    "load_clean_state_dict",
    "named_clean_parameters",
    "rebind_optimizer",
    "rewrap_ddp",
    "shard_fully",
    "unwrap",
    "wrap_ddp",
    "wrapping_of",
]
