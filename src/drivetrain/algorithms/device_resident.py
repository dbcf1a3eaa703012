"""Device-resident data (as in Jordan's airbench, arXiv 2404.00498): small data moves to the device once, batches are gathered there."""

import torch

from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.core.arguments import check_choice, check_number
from drivetrain.data.columns import make_resident
from drivetrain.data.loader import SmartDataLoader

_DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceResidentData(Algorithm):
    """Keeps the training data on the device, in the same order as before; data that does not fit is rejected.

    `dtype` stores floating-point tensors in another type.
    """

    allow_multiple = False
    events = frozenset({Event.FIT_START})
    reads, writes = ("dataloader",), ("dataloader",)
    conflicts = dict.fromkeys(
        ("RandAugment", "AugMix"), "augmentation of single samples needs them on the host. Remove one of them"
    )

    def __init__(self, max_fraction: float = 0.5, dtype: str = "keep"):
        hint = ", so that something fits"
        check_number("max_fraction", max_fraction, above=0, at_most=1, owner="DeviceResidentData", hint=hint)
        check_choice("dtype", dtype, _DTYPES, owner="DeviceResidentData")
        self.max_fraction, self.dtype = max_fraction, dtype

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        loader = state.train_dataloader
        if not isinstance(loader, SmartDataLoader):
            raise ConfigError(
                f"DeviceResidentData needs a SmartDataLoader; this run uses a {type(loader).__name__}. "
                "Give train() a TensorDataset, or SmartDataLoader.from_loader(loader)."
            )
        make_resident(loader, state.device, max_fraction=self.max_fraction, dtype=_DTYPES[self.dtype])
