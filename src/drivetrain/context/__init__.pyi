# Written by `make stubs` from the lazy exports of this module.
from drivetrain.context.context import Context as Context
from drivetrain.context.context import Context as TorchContext
from drivetrain.context.state import State as State
from drivetrain.context.loading import LoadReport as LoadReport
from drivetrain.context.moving import move_to_device as move_to_device
from drivetrain.context.moving import move_optimizer_state as move_optimizer_state
from drivetrain.runtime.codec import pack as pack
from drivetrain.runtime.codec import unpack as unpack
from drivetrain.context.batch import batch_get as batch_get
from drivetrain.context.batch import batch_set as batch_set
from drivetrain.context.batch import infer_target_type as infer_target_type
from drivetrain.context.batch import ensure_targets_one_hot as ensure_targets_one_hot
from drivetrain.context.batch import check_for_index_targets as check_for_index_targets
from drivetrain.runtime import codec as codec
from drivetrain.module import params as params
from drivetrain.module import surgery as surgery

__all__ = [
    "Context",
    "TorchContext",
    "State",
    "LoadReport",
    "move_to_device",
    "move_optimizer_state",
    "pack",
    "unpack",
    "batch_get",
    "batch_set",
    "infer_target_type",
    "ensure_targets_one_hot",
    "check_for_index_targets",
]
