"""The optimization methods that come with Drivetrain: listed here with their files."""

ROWS = (
    ("parallel_mode", "ParallelMode"),
    ("parallel_mode", "AutoDdp"),
    ("fsdp", "Zero1"),
    ("fsdp", "Zero2"),
    ("fsdp", "Fsdp"),
    ("tensor_parallel", "TensorParallel"),
    ("sequence_parallel", "SequenceParallel"),
    ("pipeline_parallel", "PipelineParallel"),
    ("precision", "Tf32"),
    ("precision", "AmpNative"),
    ("precision", "Fp8"),
    ("precision", "Half"),
    ("native_dynamo", "NativeDynamo"),
    ("checkpoint", "Checkpoint"),
    ("native_dynamo", "CudaGraphs"),
    ("chunked_cross_entropy", "ChunkedCrossEntropy"),
    ("kernels", "FusedOptimizer"),
    ("kernels", "ChannelsLast"),
    ("cpu_offload", "CpuOffload"),
    ("kernels", "CpuThreads"),
    ("parallel_mode", "MixedParallel"),
    ("parallel_mode", "MicroBatch"),
    ("module_replace", "ModuleReplace"),
)
"""The file and the class of each, in the order in which a search combines them: `Method.fits` sees the methods of earlier rows first."""
