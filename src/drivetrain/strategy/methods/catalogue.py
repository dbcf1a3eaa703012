"""Every method that comes with Drivetrain."""

from drivetrain.strategy.method import Method
from drivetrain.strategy.methods.amp_native import AmpNative
from drivetrain.strategy.methods.auto_ddp import AutoDdp
from drivetrain.strategy.methods.channels_last import ChannelsLast
from drivetrain.strategy.methods.checkpoint import Checkpoint
from drivetrain.strategy.methods.cuda_graphs import CudaGraphs
from drivetrain.strategy.methods.fp8 import Fp8
from drivetrain.strategy.methods.fsdp import Fsdp
from drivetrain.strategy.methods.fused_optimizer import FusedOptimizer
from drivetrain.strategy.methods.half import Half
from drivetrain.strategy.methods.micro_batch import MicroBatch
from drivetrain.strategy.methods.module_replace import ModuleReplace
from drivetrain.strategy.methods.native_dynamo import NativeDynamo
from drivetrain.strategy.methods.parallel_mode import ParallelMode
from drivetrain.strategy.methods.tensor_parallel import TensorParallel
from drivetrain.strategy.methods.tf32 import Tf32
from drivetrain.strategy.methods.zero1 import Zero1
from drivetrain.strategy.methods.zero2 import Zero2

BUILT_IN: tuple[type[Method], ...] = (
    ParallelMode,
    AutoDdp,
    Zero1,
    Zero2,
    Fsdp,
    AmpNative,
    Half,
    Fp8,
    Checkpoint,
    ModuleReplace,
    NativeDynamo,
    CudaGraphs,
    TensorParallel,
    MicroBatch,
    FusedOptimizer,
    Tf32,
    ChannelsLast,
)
