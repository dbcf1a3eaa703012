"""Wrap a model in DistributedDataParallel and keep its attributes reachable.

The wrapper forwards unknown attributes to the model: reading `model.config` and setting `model.temperature` work as before. What
DDP itself defines (`device`, `logger`, `module`...) is DDP's. A method called through the wrapper runs on the inner module, so
DDP synchronises gradients only when the wrapper itself is called; `averaging_missed` does it for the Trainer's other steps.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.core.errors import DistributedError, UnsupportedMethodError, unknown_name
from drivetrain.core.plain import plain_text
from drivetrain.module.gradient_sync import average_gradients
from drivetrain.module.wrapping import is_compiled_shell, is_fully_sharded
from drivetrain.runtime.ranks import data_group, get_rank, require_group

_ASKED_BY_DDP = frozenset({"buffer_hook"})  # DDP tests for these with hasattr; a model's own must not answer


class TransparentDDP(DistributedDataParallel):
    """DistributedDataParallel that keeps the model's own attributes and methods reachable."""

    def __init__(self, module: nn.Module, **settings: Any):
        super().__init__(module, **settings)
        self.__dict__["_own_names"] = frozenset(self.__dict__)  # from here on, other names may be the model's

    def _pre_forward(self, *inputs: object, **kwargs: object) -> object:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.__dict__["_is_reducing"] = True
        try:
            return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in plain_text(error):
                raise
            raise DistributedError(_explain_unused(self, str(error))) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None or name in _ASKED_BY_DDP or (name.startswith("__") and name.endswith("__")):
                raise
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self.__dict__
        own_names = fields.get("_own_names")
        is_own = (
            own_names is None or name in fields or name in own_names or name == "module" or hasattr(type(self), name)
        )
        if not is_own and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


def check_reduced(model: object) -> None:
    """Raise an error if DDP still waits for a gradient of the last backward pass: the others have not been averaged.

    DDP itself says so in the next forward pass, after an update that differs between ranks.
    """
    ddp = model._orig_mod if isinstance(model, nn.Module) and is_compiled_shell(model) else model
    if isinstance(ddp, DistributedDataParallel):
        try:
            ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise DistributedError(_explain_unused(ddp, str(error))) from error


@contextmanager
def averaging_missed(model: object, *, watches_backward: bool) -> Iterator[None]:
    """Average the gradients of a closing window afterwards if DDP had no chance to: ranks would train different weights.

    Its reducer runs if a forward pass of the wrapper prepared it, which a step that calls the model itself (`get_model()`,
    `functional_call`) does not, and if a backward pass reaches the parameters, which a user's own need not (`watches_backward`).
    """
    if not isinstance(model, TransparentDDP):
        yield
        return
    fields = model.__dict__
    reached: list[torch.Tensor] = []
    fields["_is_reducing"] = False
    trained = next((p for p in model.module.parameters() if p.requires_grad), None) if watches_backward else None
    watch = None if trained is None else trained.register_post_accumulate_grad_hook(reached.append)
    try:
        yield
    finally:
        if watch is not None:
            watch.remove()
    if not fields["_is_reducing"] or (watch is not None and not reached):
        average_gradients(list(model.module.parameters()), model.process_group)


def _explain_unused(model: DistributedDataParallel, text: str) -> str:
    """Answer torch's error about gradients that did not come, naming the parameters whose numbers it gives."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    ignored = getattr(model, "parameters_to_ignore", ())
    names = [name for name, one in model.module.named_parameters() if one.requires_grad and name not in ignored]
    numbers = [int(number) for number in found.group(1).split()] if found is not None else []
    unused = ", ".join(names[number] for number in numbers if number < len(names)) or "some parameters"
    return (
        f"rank {get_rank()}: {unused} did not contribute to the loss of the last step, and DDP waits for their gradients. Pass "
        "find_unused_parameters=True: to Trainer(...), to auto_accelerate(...), in a strategy as "
        "('parallel_mode', {'find_unused_parameters': True}), or to wrap_ddp(model, ...). If the same ones are unused in every step, "
        "static_graph=True is cheaper. Freeze parameters that are never trained with requires_grad_(False)."
    )


def check_embeddings(model: nn.Module) -> None:
    """Reject embeddings that data ranks would train differently."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedMethodError(
                f"the embedding {name!r} has max_norm, which scales rows of its weight in forward: data ranks read different samples, so "
                "they would train different weights. Remove max_norm, or train without data ranks."
            )


def wrap_ddp(model: nn.Module, device: torch.device | str | None = None, **kw: object) -> nn.Module:
    """Return the model in DDP, which averages gradients over the data ranks.

    A model without trainable parameters, or already in DDP, is returned as it is. `device` moves the model first;
    keywords are those of DistributedDataParallel, with `gradient_as_bucket_view=True` unless given.
    """
    if isinstance(model._orig_mod if is_compiled_shell(model) else model, DistributedDataParallel):
        return model
    valid = [name for name in inspect.signature(DistributedDataParallel).parameters if name != "module"]
    for name in kw:
        if name not in valid:
            raise TypeError("wrap_ddp: " + unknown_name("keyword", name, valid))
    if any(is_fully_sharded(module) for module in model.modules()):
        raise TypeError(
            f"{type(model).__name__} is sharded by fully_shard, which already averages gradients: do not wrap it in DDP as well."
        )
    if device is not None:
        model.to(device)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    require_group("DDP")
    settings = {"gradient_as_bucket_view": True, **kw}
    if "process_group" not in settings and "device_mesh" not in settings:
        settings["process_group"] = data_group()
    if torch.distributed.get_world_size() > 1:
        check_embeddings(model)
    devices = {parameter.device for parameter in model.parameters()}
    if "device_ids" not in settings and len(devices) == 1 and next(iter(devices)).type == "cuda":
        settings["device_ids"] = list(devices)
    wrapped = TransparentDDP(model, **settings)
    is_exact = all(device.type == "cpu" for device in devices) or torch.are_deterministic_algorithms_enabled()
    if is_exact and isinstance(wrapped, DistributedDataParallel):  # a simulated world has a stand-in
        _build_ddp_buckets(wrapped)
    wrapped.__dict__["_wrap_settings"] = dict(kw)
    return wrapped


def _build_ddp_buckets(wrapped: DistributedDataParallel) -> None:
    """Lay DDP's buckets out once, before the first step, in the order in which most backward passes end: last parameters first.

    DDP lays them out again after the first backward pass it sees, and with more than two ranks the place of a gradient in its bucket
    decides in which order the ranks are added up. A resumed run would round its first step in another way than the run that was never
    stopped. Backward passes of zeros, one for each parameter, make every run lay the buckets out alike, and cost one exchange.
    """
    parameters = [p for p in wrapped.module.parameters() if p.requires_grad]
    is_watched = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    is_sparse = any(getattr(module, "sparse", False) is True for module in wrapped.module.modules())
    lays_out_again = not (wrapped.find_unused_parameters or wrapped.static_graph)
    if not lays_out_again or is_watched or is_sparse or torch.distributed.get_world_size(wrapped.process_group) <= 2:
        return
    held = [None if p.grad is None else p.grad.clone() for p in parameters]  # they may lie in the buckets themselves
    for parameter in parameters:
        parameter.grad = None
    wrapped.reducer.prepare_for_forward()
    wrapped.reducer.prepare_for_backward([])
    for parameter in reversed(parameters):
        torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
    wrapped.reducer._rebuild_buckets()
    for parameter, grad in zip(parameters, held):
        parameter.grad = grad


def rewrap_ddp(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Wrap a DDP model again with the same settings, after its parameters were frozen, unfrozen or moved.

    DDP looks at `requires_grad` and devices only when it is built. Anything that is not in DDP is returned as it is.
    """
    if not isinstance(model, DistributedDataParallel):
        return model
    return wrap_ddp(model.module, device, **model.__dict__.get("_wrap_settings", {}))
