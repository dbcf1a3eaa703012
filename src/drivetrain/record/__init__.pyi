# Written by `make stubs` from the lazy exports of this module.
from drivetrain.record.recorder import Recorder as Recorder
from drivetrain.record.jsonl import read_metrics as read_metrics
from drivetrain.record.jsonl import JsonlSink as JsonlSink
from drivetrain.record.jsonl import CsvSink as CsvSink
from drivetrain.record.sink import Sink as Sink
from drivetrain.record.sink import Resume as Resume
from drivetrain.record.sink import ConsoleSink as ConsoleSink
from drivetrain.record.buffer import Histogram as Histogram
from drivetrain.record.images import Picture as Picture
from drivetrain.record.trackers import TensorBoardSink as TensorBoardSink
from drivetrain.record.trackers import WandbSink as WandbSink
from drivetrain.record.trackers import MlflowSink as MlflowSink

__all__ = [
    "Recorder",
    "read_metrics",
    "JsonlSink",
    "CsvSink",
    "Sink",
    "Resume",
    "ConsoleSink",
    "Histogram",
    "Picture",
    "TensorBoardSink",
    "WandbSink",
    "MlflowSink",
]
