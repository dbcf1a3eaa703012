# Written by `make stubs` from the lazy exports of this module.
from drivetrain.checkpoint.checkpointer import Checkpointer as Checkpointer
from drivetrain.checkpoint.checkpointer import Listed as Listed
from drivetrain.checkpoint.layout import CheckpointNotFoundError as CheckpointNotFoundError
from drivetrain.checkpoint.layout import Manifest as Manifest
from drivetrain.checkpoint.layout import problem_with as problem_with
from drivetrain.checkpoint.reader import Rejected as Rejected
from drivetrain.checkpoint.progress import Restored as Restored
from drivetrain.checkpoint.files import export_safetensors as export_safetensors
from drivetrain.checkpoint.store import load_checkpoint as load_checkpoint
from drivetrain.checkpoint.store import save_checkpoint as save_checkpoint
from drivetrain.checkpoint.writer import WriteFailedError as WriteFailedError

__all__ = [
    "Checkpointer",
    "Listed",
    "CheckpointNotFoundError",
    "Manifest",
    "problem_with",
    "Rejected",
    "Restored",
    "export_safetensors",
    "load_checkpoint",
    "save_checkpoint",
    "WriteFailedError",
]
