"""The optimization methods that come with Drivetrain: one file for each idea, listed here."""

from importlib import import_module

from drivetrain.strategy.method import Method

ROWS = (
    ("parallel_mode", "ParallelMode"),
    ("parallel_mode", "AutoDdp"),
    ("zero1", "Zero1"),
    ("fsdp", "Zero2"),
    ("fsdp", "Fsdp"),
    ("tensor_parallel", "TensorParallel"),
    ("sequence_parallel", "SequenceParallel"),
    ("pipeline_parallel", "PipelineParallel"),
    ("tf32", "Tf32"),
    ("amp_native", "AmpNative"),
    ("fp8", "Fp8"),
    ("half", "Half"),
    ("native_dynamo", "NativeDynamo"),
    ("checkpoint", "Checkpoint"),
    ("native_dynamo", "CudaGraphs"),
    ("chunked_cross_entropy", "ChunkedCrossEntropy"),
    ("fused_optimizer", "FusedOptimizer"),
    ("channels_last", "ChannelsLast"),
    ("cpu_offload", "CpuOffload"),
    ("cpu_threads", "CpuThreads"),
    ("parallel_mode", "MixedParallel"),
    ("micro_batch", "MicroBatch"),
    ("module_replace", "ModuleReplace"),
)
"""The file and the class of each, in the order in which a search combines them: `Method.fits` sees the methods of earlier rows first."""


def built_in_methods() -> list[Method]:
    """Return one object of every method."""
    return [getattr(import_module(f"drivetrain.strategy.methods.{file}"), cls)() for file, cls in ROWS]
