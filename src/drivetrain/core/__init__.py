"""The shared nouns: events, plugins, the engine that orders them, time, and errors. Loads no torch."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".event": ["Event"],
        ".plugin": ["Plugin", "Algorithm", "Callback", "Logger", "NullLogger"],
        ".engine": ["AlgorithmPass", "Engine", "Trace", "Traces"],
        ".one_of": ["OneOf"],
        ".time": ["Time", "TimeUnit", "Timestamp", "Clock", "ensure_time"],
        ".yaml": ["load_yaml"],
        ".errors": (
            "DrivetrainError ConfigError ConfigurationError ConfigTypeError ParameterError PluginConflictError PluginOrderError "
            "EngineError TimeUnitError StateError BatchOutputError CheckpointError ResumeError DeviceError DistributedError "
            "StopTrainingError TrainingStopped NonFiniteError NonFiniteLossError NonFiniteStateError MissingExtra "
            "DrivetrainWarning DrivetrainDeprecationWarning"
        ).split(),
    },
)
