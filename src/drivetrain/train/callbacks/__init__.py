"""Callbacks: plugins that observe the loop, and a few that act on it."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "drivetrain.core.errors": ["CallbackMethodNotImplementedError", "StopTrainingError"],
        ".base": ["CallbackHandler", "TrainerCallback"],
        ".control": [
            *("ConvertSyncBatchNormCallback", "LimitBatchesCallback", "LimitEvalStepsCallback"),
            *("MoveModulesToDeviceCallback", "StepBasedEvaluationCallback"),
            *("DEFAULT_CALLBACKS", "get_default_callbacks", "with_limit_from_environment"),
        ],
        ".ema": ["ModelEmaCallback"],
        ".monitors": ["LRMonitor", "LearningRateMonitor", "MemoryMonitor", "SpeedMonitor", "ThroughputMonitor"],
        ".progress": ["LogMetricsCallback", "PrintProgressCallback", "ProgressBarCallback"],
        ".saving": ["SaveBestModelCallback", "SaveTrainingStateCallback", "WSDCheckpointCallback"],
        ".stopping": ["EarlyStoppingCallback", "LossSpike", "TerminateOnNaNCallback"],
    },
)
