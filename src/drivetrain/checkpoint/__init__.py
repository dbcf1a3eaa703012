"""Checkpoints: written atomically, read back as the newest valid one, removed when they are no longer needed."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".checkpointer": ["Checkpointer", "Listed"],
        ".layout": ["CheckpointNotFoundError", "Manifest", "problem_with"],
        ".reader": ["Rejected"],
        ".progress": ["Restored"],
        ".files": ["export_safetensors"],
        ".store": ["load_checkpoint", "save_checkpoint"],
        ".writer": ["WriteFailedError"],
    },
)
