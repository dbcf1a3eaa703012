"""Recorder and sinks: what a run measured, kept in files and sent to trackers without stalling the device.

`recorder` is what a program calls, `stream` keeps the rows in order until their values have left the device (`buffer`), and
`sink` passes them to the sinks, each in the file of its format.
"""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".recorder": ["Recorder"],
        ".jsonl": ["read_metrics", "JsonlSink", "CsvSink"],
        ".sink": ["Sink", "Resume", "ConsoleSink"],
        ".buffer": ["Histogram"],
        ".images": ["Picture"],
        ".trackers": ["TensorBoardSink", "WandbSink", "MlflowSink"],
    },
)
