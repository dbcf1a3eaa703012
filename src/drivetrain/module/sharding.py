"""Shard a model's parameters over ranks with `fully_shard`: each block a unit, then the rest.

The units are those of `find_blocks`. A parameter that a block shares with something outside must live in the unit that
holds both users, or it would be sharded twice and come untied; such a block is opened, and only its unshared parts
become units. All units have the same parameter and reduction types, because a block in bfloat16 under a root in float32
would meet the head with the wrong type; only the root turns its output back to float32.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError, StateError, unknown_name
from drivetrain.module.blocks import select_modules
from drivetrain.module.distributed_tensors import is_dtensor, like_sharded, synchronise
from drivetrain.module.families import is_plain_container
from drivetrain.module.wrapping import is_fully_sharded, named_clean_parameters, parameter_places, unwrap
from drivetrain.runtime.ranks import num_data_ranks, require_group

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def shard_fully(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    wrap: object = "auto",
    mixed_precision: "torch.dtype | MixedPrecisionPolicy | None" = None,
    keeps_float64: bool = False,
    **fully_shard_kwargs: Any,
) -> nn.Module:
    """Shard the model in place over a device mesh and return it. Names and tied parameters are kept.

    `wrap` says what becomes a unit: "auto" for the model's blocks, a class, a class name, a dotted name or pattern, a
    list of these, or an int for every subtree of at least that many elements. `mixed_precision` is a dtype for
    computation (gradients are then reduced in float32) or a torch MixedPrecisionPolicy. Buffers keep their type: where a
    float32 one is added between layers, call the model under `torch.autocast`, as a plan does, or give the buffer the dtype
    of the computation. With `keeps_float64` it leaves
    such parameters and all inputs and outputs alone, as autocast does. All ranks start from the first rank's values, as
    with DDP. A DDP shell is removed first; a model that is sharded already is returned as it is.
    """
    from torch.distributed.fsdp import fully_shard

    model = unwrap(model)
    if is_fully_sharded(model):
        return model
    require_group("fully_shard")
    mesh = _default_mesh(model) if mesh is None else mesh
    units = _without_shared(model, _units(model, wrap))
    whole = [p for p in model.parameters() if p.ndim == 0 or p.numel() == 0]  # nothing to shard in those
    ignored = set(fully_shard_kwargs.pop("ignored_params", None) or ())
    inner, outer = _policies(mixed_precision)
    if keeps_float64 and any(p.dtype is torch.float64 for p in model.parameters()):
        inner = outer = dataclasses.replace(outer, cast_forward_inputs=False, output_dtype=None)
    norms: dict[nn.Module, None] = {}
    if inner.param_dtype not in (None, torch.float32):
        # Statistics of a batch stay in float32, and torch's kernels want the weights in the same type.
        batch_norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        norms = dict.fromkeys(norm for norm in batch_norms if next(norm.parameters(), None) is not None)
    typed, others = _by_type(model, list(norms | dict.fromkeys(units)), {*ignored, *whole})
    whole = [p for p in (*whole, *others) if p not in ignored]
    if any(parameter.is_meta and parameter.numel() for parameter in whole):
        names = [name for name, parameter in model.named_parameters() if any(parameter is one for one in whole)]
        raise ConfigError(
            f"{', '.join(names)}: a parameter without dimensions, or of another type than those around it, cannot be sharded on the meta "
            "device. Give it the shape (1,) and their type, or materialise the model before sharding."
        )
    settings = {"mesh": mesh, "ignored_params": {*ignored, *whole}, **fully_shard_kwargs}

    synchronise([t for t in [*model.parameters(), *model.buffers()] if t not in ignored and not is_dtensor(t)], mesh)
    for unit, kind in typed:
        policy = outer if unit is model else inner
        is_kept = kind is torch.float64 and (keeps_float64 or policy.param_dtype is None)
        if unit in norms or is_kept or (kind is not None and kind.is_complex):
            is_narrower = policy.reduce_dtype is torch.float32 or not is_kept
            reduce_dtype = None if is_narrower else policy.reduce_dtype
            policy = dataclasses.replace(policy, param_dtype=None, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        fully_shard(unit, mp_policy=policy, **settings)
    _share_statistics(model, mesh)
    for layer in model.modules() if inner.param_dtype is not None and mesh.device_type == "cpu" else ():
        if isinstance(layer, nn.LayerNorm | nn.GroupNorm) and layer.weight is not None:
            # Kernels of the CPU want inputs and weights of one type, also under autocast.
            layer.register_forward_pre_hook(lambda layer, args: (args[0].to(layer.weight.dtype), *args[1:]))
    for parameter in whole:
        parameter.data = parameter.data.to(mesh.device_type)
        if parameter.requires_grad and parameter.numel():
            # Averaging what is already the same on all ranks changes nothing, so several backward passes may accumulate.
            parameter.register_post_accumulate_grad_hook(lambda tensor: _average(tensor.grad, mesh))
    return model


def rebind_optimizer(optimizer: Optimizer, old_names: Mapping[str, Tensor], model: nn.Module) -> None:
    """Make an optimizer that was built before sharding train the sharded parameters, with its groups and state.

    `old_names` is `dict(model.named_parameters())` from before. State shaped like its parameter is sharded like it,
    without communication; scalars such as the step count are kept.
    """
    names = {id(parameter): name for name, parameter in old_names.items()}
    new = dict(named_clean_parameters(model))
    pairs: list[tuple[Tensor, nn.Parameter]] = []
    for group in optimizer.param_groups:
        for old in group["params"]:
            name = names.get(id(old))
            if name is None:
                raise StateError(
                    f"the optimizer holds a parameter of shape {tuple(old.shape)} that is not among the {len(names)} "
                    "names given. Pass dict(model.named_parameters()) taken before the model was sharded."
                )
            if name not in new:
                raise StateError("rebind_optimizer: " + unknown_name("parameter of the sharded model", name, new))
            pairs.append((old, new[name]))
    states = [
        (_sharded_state(optimizer.state[old], old, fresh), fresh) for old, fresh in pairs if old in optimizer.state
    ]
    replacement = {id(old): fresh for old, fresh in pairs}
    for group in optimizer.param_groups:
        group["params"] = [replacement[id(old)] for old in group["params"]]
    for old, _ in pairs:
        optimizer.state.pop(old, None)
    optimizer.state.update({fresh: state for state, fresh in states})


def _sharded_state(state: Mapping[str, object], old: Tensor, new: Tensor) -> dict[str, object]:
    """Return optimizer state for `new` made of that for `old`."""
    if not is_dtensor(new):
        return dict(state)
    result = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim > 0 and not is_dtensor(value):
            if value.shape != old.shape:
                raise StateError(
                    f"optimizer state {key!r} has shape {tuple(value.shape)} for a parameter of shape {tuple(old.shape)}, so it cannot be "
                    "sharded with it. Shard the model before the first step, or make a new optimizer afterwards."
                )
            value = like_sharded(value, new)
        result[key] = value
    return result


def _default_mesh(model: nn.Module) -> DeviceMesh:
    if num_data_ranks() != dist.get_world_size():
        raise ConfigError(
            f"the data is split over {num_data_ranks()} of {dist.get_world_size()} ranks, so the mesh has other axes. "
            "Pass the part of it to shard over, such as mesh['data']."
        )
    kind = next((p.device.type for p in model.parameters()), "cpu")
    if kind == "cpu" and "nccl" in dist.get_backend_config():
        kind = "cuda"  # not moved yet; fully_shard moves each shard
    elif kind == "meta":
        accelerator = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
        kind = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),))


def _units(model: nn.Module, wrap: object) -> list[nn.Module]:
    """Return the modules asked for, inner ones before the ones around them."""
    if isinstance(wrap, bool) or wrap is None:
        raise ConfigError(f"wrap={wrap!r} is not valid. Give 'auto', classes, names, or a smallest number of elements.")
    if isinstance(wrap, int):
        chosen = _subtrees_of_size(model, wrap)
    else:
        chosen = [module for _, module in select_modules(model, wrap, where="wrap")]
    # Reversed definition order puts children before parents; containers without forward cannot be units.
    return [m for m in reversed(chosen) if m is not model and type(m).forward is not nn.Module.forward]


def _subtrees_of_size(model: nn.Module, smallest: int) -> list[nn.Module]:
    """Return subtrees of at least `smallest` elements, not counting what is in units inside them."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if size < smallest or is_plain_container(module):
            return size
        chosen.append(module)
        return 0

    visit(model)
    return chosen[::-1]


def _without_shared(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Open units that share a parameter with the outside, leaving the shared one to the root."""
    places = parameter_places(model)
    chosen: dict[nn.Module, None] = {}

    def take(module: nn.Module) -> None:
        inside = parameter_places(module)
        if not inside:
            return
        is_shared = any(len(held) != len(places[parameter]) for parameter, held in inside.items())
        if is_shared or type(module).forward is nn.Module.forward:
            for child in module.children():
                take(child)
        else:
            chosen[module] = None

    for unit in units:
        take(unit)
    return list(chosen)


def _by_type(
    model: nn.Module, units: list[nn.Module], ignored: set[nn.Parameter]
) -> tuple[list[tuple[nn.Module, torch.dtype | None]], list[nn.Parameter]]:
    """Return the units and the model, each with the type of its parameters, and parameters that no unit can hold.

    A unit has one type of trainable parameters. Modules inside it that have another one become units themselves.
    """
    places, taken, typed, others = parameter_places(model), set(ignored), [], []

    def kind_of(parameter: nn.Parameter) -> torch.dtype | None:
        is_free = not parameter.requires_grad and parameter.dtype is not torch.float64
        return None if is_free else parameter.dtype  # any unit can hold a frozen one

    def split(module: nn.Module, kind: torch.dtype | None) -> None:
        for child in module.children():
            inside = parameter_places(child)
            kinds = {kind_of(p) for p in inside if p not in taken} - {None}
            is_shared = any(len(held) != len(places[parameter]) for parameter, held in inside.items())
            if len(kinds) == 1 and kind not in kinds and not is_shared and type(child).forward is not nn.Module.forward:
                typed.append((child, kinds.pop()))
                taken.update(inside)
            elif kinds - {kind}:
                split(child, kind)

    for unit in (*units, model):
        sizes: dict[torch.dtype | None, int] = {}
        for parameter in unit.parameters():
            if parameter not in taken and (kind := kind_of(parameter)) is not None:
                sizes[kind] = sizes.get(kind, 0) + parameter.numel()
        main = max(sizes, key=lambda kind: sizes[kind], default=None)
        if len(sizes) > 1:
            split(unit, main)
            others += [p for p in unit.parameters() if p not in taken and kind_of(p) not in (None, main)]
            taken.update(others)
        typed.append((unit, main))
        taken.update(unit.parameters())
    return typed, others


def _policies(mixed_precision: object) -> "tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]":
    """Return the policy of the blocks and that of the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if mixed_precision is None:
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if isinstance(mixed_precision, torch.dtype):
        inner = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
        return inner, dataclasses.replace(inner, output_dtype=torch.float32)
    if isinstance(mixed_precision, MixedPrecisionPolicy):
        return dataclasses.replace(mixed_precision, output_dtype=None), mixed_precision
    raise ConfigError(
        f"mixed_precision={mixed_precision!r} is not understood. Give a torch.dtype such as torch.bfloat16, or a "
        "torch.distributed.fsdp.MixedPrecisionPolicy."
    )


def _share_statistics(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average running statistics of batch norms over ranks after each training pass, so that all ranks evaluate alike."""
    norms = [norm for norm in model.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if not isinstance(norm, nn.SyncBatchNorm) and norm.running_mean is not None]
    if not norms:
        return

    def average(module: nn.Module, args: object, outputs: object) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        # By `.data`: backward in training mode does not read them, but autograd would notice that they have changed.
        held = [tensor.data for norm in norms for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
        flat = torch.cat([tensor.reshape(-1).float() for tensor in held])
        _average(flat, mesh)
        for tensor, value in zip(held, flat.split([tensor.numel() for tensor in held])):
            tensor.copy_(value.view_as(tensor))

    model.register_forward_hook(average)


def _average(tensor: Tensor | None, mesh: DeviceMesh) -> None:
    """Replace a tensor by its mean over the ranks of a mesh."""
    assert tensor is not None
    for dim in range(mesh.ndim):
        dist.all_reduce(tensor, group=mesh.get_group(dim))
        tensor /= mesh.size(dim)
