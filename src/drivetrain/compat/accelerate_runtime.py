"""A runtime around a user's own `accelerate.Accelerator`, for trainers that override `_create_accelerator` as in pytorch-accelerated.

The Accelerator chooses device, precision, gradient scaler and DDP settings, and its other members (trackers, `log`, `accumulate`) stay
within reach; the loop runs on `TrainerRuntime`. accelerate is never imported here: an Accelerator can only exist where the user has.
"""

from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.module.precision import Precision
from drivetrain.train.accelerator import TrainerRuntime

_ELSEWHERE = {
    "FSDP": "Trainer(strategy=['parallel_mode', 'fsdp'])",
    "DEEPSPEED": "Trainer(strategy=['parallel_mode', 'fsdp'])",
    "MEGATRON_LM": "Trainer(strategy='auto')",
    "TP": "Trainer(strategy='auto')",
}


def wrap_accelerator(given: object, precision: str | Precision | None = None) -> Any:
    """Return a runtime around accelerate's own `Accelerator`; anything else as it is."""
    is_accelerate = any(base.__module__.split(".")[0] == "accelerate" for base in type(given).__mro__)
    return AccelerateRuntime(given, precision) if is_accelerate else given


class AccelerateRuntime(TrainerRuntime):
    """Runs the loop where an Accelerator says; what the loop does not need is asked of the Accelerator itself."""

    def __init__(self, accelerator: Any, precision: str | Precision | None = None):
        self.accelerator = accelerator
        _reject_unused(accelerator)
        super().__init__(accelerator.device, accelerator.mixed_precision if precision is None else precision)
        if self.scaler is not None and accelerator.scaler is not None:
            self.scaler = accelerator.scaler  # so that its own `backward` and ours scale alike

    def __getattr__(self, name: str) -> Any:
        if name == "accelerator":  # not set yet, as while a copy is being made
            raise AttributeError(name)
        return getattr(self.accelerator, name)

    def prepare_model(self, model: object, **ddp_kwargs: object) -> Any:
        """Wrap a model for gradient averaging with the Accelerator's settings of DDP."""
        handler = getattr(self.accelerator, "ddp_handler", None)
        return super().prepare_model(model, **{**(handler.to_kwargs() if handler is not None else {}), **ddp_kwargs})


def _reject_unused(accelerator: Any) -> None:
    """Raise for settings of an Accelerator that would silently have no effect here."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _ELSEWHERE:
        raise ConfigError(
            f"_create_accelerator returned an Accelerator with distributed_type={kind}, which is not supported: accelerate's plugins wrap "
            f"the model in their own loop. Use {_ELSEWHERE[kind]} instead, and an Accelerator without that plugin."
        )
    steps = getattr(accelerator, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise ConfigError(
            f"_create_accelerator returned an Accelerator with gradient_accumulation_steps={steps}. Give it to "
            f"train(gradient_accumulation_steps={steps}) instead."
        )
