"""What a plan was made for: the model's structure, the device, the world and the batch, as short hashes that can be compared."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def fingerprint(model: nn.Module, device: torch.device, world: int, global_batch: int | None) -> dict[str, Any]:
    """Return what identifies the place a plan was applied in."""
    text = "\n".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    )
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "model": hashlib.sha256(text.encode()).hexdigest()[:16],
        "device": kind,
        "torch": torch.__version__.partition("+")[0],
        "world": world,
        "global_batch": global_batch,
    }


def changes_since(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """Return one line for each part of a fingerprint that differs from that of a loaded plan."""
    if old is None:
        return []
    return [
        f"loaded plan: {name} was {old[name]}, is {value}"
        for name, value in new.items()
        if name in old and old[name] != value
    ]
