"""Every method that comes with Drivetrain: one line each, the file in this folder and the class in it."""

from importlib import import_module

from drivetrain.strategy.method import Method

ROWS = {
    "parallel_mode": "ParallelMode",
    "auto_ddp": "AutoDdp",
    "zero1": "Zero1",
    "zero2": "Zero2",
    "fsdp": "Fsdp",
    "amp_native": "AmpNative",
    "half": "Half",
    "fp8": "Fp8",
    "checkpoint": "Checkpoint",
    "module_replace": "ModuleReplace",
    "native_dynamo": "NativeDynamo",
    "cuda_graphs": "CudaGraphs",
    "tensor_parallel": "TensorParallel",
    "sequence_parallel": "SequenceParallel",
    "pipeline_parallel": "PipelineParallel",
    "mixed_parallel": "MixedParallel",
    "micro_batch": "MicroBatch",
    "fused_optimizer": "FusedOptimizer",
    "tf32": "Tf32",
    "channels_last": "ChannelsLast",
    "chunked_cross_entropy": "ChunkedCrossEntropy",
    "cpu_offload": "CpuOffload",
    "cpu_threads": "CpuThreads",
}


def built_in_methods() -> list[Method]:
    """Return one object of every method."""
    return [getattr(import_module(f"drivetrain.strategy.methods.{file}"), cls)() for file, cls in ROWS.items()]
