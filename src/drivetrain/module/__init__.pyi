# Written by `make stubs` from the lazy exports of this module.
from drivetrain.module.surgery import ReplacementFunction as ReplacementFunction
from drivetrain.module.surgery import count_module_instances as count_module_instances
from drivetrain.module.surgery import replace_module_classes as replace_module_classes
from drivetrain.module.surgery import update_params_in_optimizer as update_params_in_optimizer
from drivetrain.module.blocks import BlockGroup as BlockGroup
from drivetrain.module.blocks import find_blocks as find_blocks
from drivetrain.module.blocks import repeated_blocks as repeated_blocks
from drivetrain.module.blocks import select_modules as select_modules
from drivetrain.module.wrapping import clean_name as clean_name
from drivetrain.module.wrapping import clean_state_dict as clean_state_dict
from drivetrain.module.wrapping import is_wrapped as is_wrapped
from drivetrain.module.wrapping import load_clean_state_dict as load_clean_state_dict
from drivetrain.module.wrapping import unwrap as unwrap
from drivetrain.module.ddp import rewrap_ddp as rewrap_ddp
from drivetrain.module.ddp import wrap_ddp as wrap_ddp
from drivetrain.module.sharding import rebind_optimizer as rebind_optimizer
from drivetrain.module.sharding import shard_fully as shard_fully
from drivetrain.module.average import AveragedWeights as AveragedWeights
from drivetrain.module.params import MuonGroups as MuonGroups
from drivetrain.module.params import muon_groups as muon_groups
from drivetrain.module.params import select_parameters as select_parameters
from drivetrain.module.compilation import compile_module as compile_module
from drivetrain.module.compilation import set_recompile_limit as set_recompile_limit
from drivetrain.module.checkpointing import checkpoint_blocks as checkpoint_blocks
from drivetrain.module.accumulation import AccumulationWindow as AccumulationWindow
from drivetrain.module.accumulation import scale_gradients as scale_gradients
from drivetrain.module.fp8 import Float8Linear as Float8Linear
from drivetrain.module.fp8 import convert_linears_to_fp8 as convert_linears_to_fp8
from drivetrain.module.fp8 import supports_fp8 as supports_fp8
from drivetrain.module.attention import AttentionAdapter as AttentionAdapter
from drivetrain.module.attention import AttentionBias as AttentionBias
from drivetrain.module.attention import find_attention as find_attention
from drivetrain.module.attention import register_attention as register_attention
from drivetrain.module.precision import Precision as Precision
from drivetrain.module.precision import parse_precision as parse_precision
from drivetrain.module.convolutions import channels_last_input as channels_last_input
from drivetrain.module.convolutions import is_worth_channels_last as is_worth_channels_last
from drivetrain.module.convolutions import to_channels_last as to_channels_last
from drivetrain.module.convolutions import whiten_convolution as whiten_convolution
from drivetrain.module.convolutions import whitening_kernel as whitening_kernel

__all__ = [
    "ReplacementFunction",
    "count_module_instances",
    "replace_module_classes",
    "update_params_in_optimizer",
    "BlockGroup",
    "find_blocks",
    "repeated_blocks",
    "select_modules",
    "clean_name",
    "clean_state_dict",
    "is_wrapped",
    "load_clean_state_dict",
    "unwrap",
    "rewrap_ddp",
    "wrap_ddp",
    "rebind_optimizer",
    "shard_fully",
    "AveragedWeights",
    "MuonGroups",
    "muon_groups",
    "select_parameters",
    "compile_module",
    "set_recompile_limit",
    "checkpoint_blocks",
    "AccumulationWindow",
    "scale_gradients",
    "Float8Linear",
    "convert_linears_to_fp8",
    "supports_fp8",
    "AttentionAdapter",
    "AttentionBias",
    "find_attention",
    "register_attention",
    "Precision",
    "parse_precision",
    "channels_last_input",
    "is_worth_channels_last",
    "to_channels_last",
    "whiten_convolution",
    "whitening_kernel",
]
