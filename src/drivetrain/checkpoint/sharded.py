"""Tensors that are split over ranks: each rank writes its part, any number of ranks reads them back.

The files have the layout of torch's `HuggingFaceStorageWriter(save_distributed=True)`: safetensors whose header says
at which offsets each part belongs (`DCP_SHARDING_INFO`). They hold no pickle, unlike torch's default distributed
format, and torch's own `HuggingFaceStorageReader` works out which slices of which files make up a rank's part now,
whatever the number of ranks was then. We write the parts ourselves because the writer of torch first makes a second
copy of all of them in memory and takes no hash.

This module is imported only when there are such tensors.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.tree import flatten
from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import StateDict
from drivetrain.runtime.codec import JsonUnpacker


def own_parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the parts that this rank writes, and the header with their positions.

    Of equal replicas the first rank along each replicating axis writes; a rank may have nothing to write.
    """
    parts: dict[str, Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor)
        if any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(
                f"{name} is a partial sum, not yet reduced over its ranks ({tensor.placements}). Reduce it before saving."
            )
        place = tensor.device_mesh.get_coordinate()
        if place is None or any(c for c, p in zip(place, tensor.placements) if p.is_replicate()):
            continue
        local = tensor.to_local()
        if local.numel() == 0 and tensor.numel() > 0:
            continue  # fewer rows than ranks
        (chunk,) = tensor.__create_chunk_list__()
        parts[name] = local.detach()
        offsets[name] = {"saved_offsets": list(chunk.offsets)}
    return parts, {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"} if parts else {}


def read_parts(folder: Path, names: Iterable[str], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the named tensors from a folder of parts, each with the layout of its live counterpart, or full without one.

    Everything lands in host memory: a restored copy on the device next to the live one could need more memory than there is.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        return _read(reader, folder, names, live)
    except CheckpointError:
        raise
    except Exception as error:  # torch's reader trusts its files, and stumbles over a forged header in many ways
        raise CheckpointError(f"{folder.name} cannot be read ({type(error).__name__}: {error})") from error


def _read(
    reader: HuggingFaceStorageReader, folder: Path, names: Iterable[str], live: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    stored = reader.read_metadata()
    wanted: StateDict = {}
    for name in names:
        if name not in stored.state_dict_metadata:
            raise CheckpointError(f"{name} is missing from the files in {folder}. Use an earlier checkpoint.")
        meta: Any = stored.state_dict_metadata[name]
        if sum(chunk.sizes.numel() for chunk in meta.chunks) != meta.size.numel():
            raise CheckpointError(f"the parts of {name} in {folder} do not cover the whole tensor.")
        counterpart = live.get(name)
        if isinstance(counterpart, DTensor) and counterpart.shape == meta.size:
            local = torch.empty(counterpart.to_local().shape, dtype=meta.properties.dtype, device="cpu")
            # `from_local` would move it to the device.
            wanted[name] = DTensor(local, counterpart._spec, requires_grad=False)
        else:
            wanted[name] = torch.empty(meta.size, dtype=meta.properties.dtype, device="cpu")
    planner = _TensorsOnly(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, stored, is_coordinator=True)
    reader.set_up_storage_reader(stored, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return wanted


def find_layouts(names: set[str], structure: object, live: object) -> dict[str, Tensor]:
    """Return, for each saved name, a live sharded tensor of the layout it should have.

    Mostly that is the tensor of the same name. An optimizer that has not stepped yet has no state to compare with:
    there a saved entry takes the layout of the parameter it belongs to, which the saved state knows by name.
    """
    live_tensors = flatten(live).sharded
    layouts = {name: live_tensors[name] for name in names if name in live_tensors}
    saved = JsonUnpacker({"$tensor": itemgetter("$tensor"), "$local": lambda reference: None}).unpack(structure)
    for item in _everything(saved):
        if isinstance(item, dict) and "param_groups" in item and "state" in item:
            owners: dict[object, str] = {}
            for group in item["param_groups"]:
                owners |= zip(group.get("params", ()), group.get("param_names", ()))
            for number, kept in item["state"].items():
                if (owner := owners.get(number)) in live_tensors:
                    for name in names.intersection(text for text in _everything(kept) if isinstance(text, str)):
                        layouts.setdefault(name, live_tensors[owner])
    return layouts


def _everything(value: object) -> Iterator[object]:
    """Yield a value and all that is in it."""
    yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in items:
        yield from _everything(item)


class _TensorsOnly(DefaultLoadPlanner):
    """A planner that rejects the pickled objects torch's own would load; safetensors files hold none."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor. Pickled objects are never loaded.")
