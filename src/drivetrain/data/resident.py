"""Small tensor data lives on the accelerator and is gathered there: no batch crosses the bus.

`resident="auto"` does it for data of at most 1 GiB that takes at most a tenth of the device's free memory, and says so once.
`resident=True` insists. The order of samples is the same either way; only the place of the gather changes.
"""

import logging
from typing import Any, Literal

import torch

from drivetrain.core.display import shown_bytes
from drivetrain.core.errors import ParameterError
from drivetrain.data.columns import Columns
from drivetrain.runtime.device import choose_device, device_memory

logger = logging.getLogger(__name__)

Residence = bool | Literal["auto"]

AUTO_BYTES = 2**30
AUTO_FRACTION = 0.1


def resident_columns(
    columns: Columns | None, device: torch.device, mode: Residence, max_fraction: float | None = None
) -> Columns | None:
    """Return the data on `device`, or None if it stays where it is; `mode` True makes a error an error."""
    if mode is False or (mode == "auto" and device.type == "cpu"):
        return None
    if columns is None:
        if mode is True:
            raise ParameterError(
                "resident=True needs data that is tensors (a TensorDataset, tensors, arrays, a dict or tuple of them) without a "
                "collate_fn: per-sample Python code cannot run on the device. Give tensors, or resident=False."
            )
        return None
    if columns.device == device:
        return columns
    size = columns.num_bytes
    free, _ = device_memory(device)
    limit = min(AUTO_BYTES, AUTO_FRACTION * free) if mode == "auto" else free * (max_fraction or 1.0)
    if size > limit:
        if mode is True:
            raise ParameterError(
                f"resident=True: the data has {shown_bytes(size)}, but {str(device)!r} has {shown_bytes(free)} free, of which "
                f"{shown_bytes(limit)} may be used. Use resident=False, a smaller dtype, or less data."
            )
        return None
    placed = columns.to(device)
    logger.info(
        "%s of tensor data now live on %s and are gathered there (resident=False keeps them on the host)",
        shown_bytes(size),
        device,
    )
    return placed


def make_resident(
    loader: Any, device: torch.device | str, *, max_fraction: float = 0.5, dtype: torch.dtype | None = None
) -> None:
    """Keep a loader's tensor data on `device` from its next iteration on; order, position and seed stay as they are.

    Floating-point tensors are stored as `dtype` if one is given. Data that does not fit in `max_fraction` of the free memory, or
    that is not made of tensors, is rejected.
    """
    target = choose_device(device)
    columns = loader.columns
    if columns is not None and dtype is not None:
        columns = columns.cast(dtype)
    placed = resident_columns(columns, target, True, max_fraction)
    assert placed is not None
    loader.place(placed, placed.device)
