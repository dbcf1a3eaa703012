"""The session as one object: Context and State, what they hold, and how it moves, is saved and is restored."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".context": ["Context", "TorchContext=Context"],
        ".state": ["State"],
        ".loading": ["LoadReport"],
        ".moving": ["move_to_device", "move_optimizer_state"],
        "drivetrain.runtime.codec": ["pack", "unpack"],
        ".batch": "batch_get batch_set infer_target_type ensure_targets_one_hot check_for_index_targets".split(),
    },
)
