"""Compare one step of a plan with one of the plain model, on the same samples.

The plain model may be too large for a device, or be on the meta device and have no weights. Then a model of the same classes with the
first blocks of each family represents it, with its own weights or with random ones.
"""

import math

import torch
from torch import nn

from drivetrain.module.probing import copy_model
from drivetrain.module.tensor_trials import random_state_dict
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.device import device_memory
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.runtime.seeds import preserve_rng_state
from drivetrain.strategy.profile.few_blocks import cut_model, find_cuttable
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.checking import (
    fitting_reference,
    plain_number,
    planned_step,
    share_of_plan,
    train_window,
    use_weights_of_first_rank,
    verdict,
)
from drivetrain.strategy.trial.report import OutcomeKind
from drivetrain.strategy.value import Strategy

_COPIES = 8
"""How often the weights are in memory during a comparison: gradients, states of the optimizer, the updates of both steps."""


class PlainDoesNotFit(Exception):
    """The plain model does not fit on the device of some rank, or has no weights yet."""


def on_meta(model: nn.Module) -> bool:
    """Return whether a model has tensors without values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def compare_plan(plan: Strategy, task: TrainingTask, model: nn.Module, device: torch.device) -> tuple[OutcomeKind, str]:
    """Return whether a plan trains `model` as it is trained without the plan, with the numbers. It is changed by that.

    All ranks call it. Raises `PlainDoesNotFit` on all of them where the plain model is too large for one, or has no weights.
    """
    if on_meta(model):
        raise PlainDoesNotFit
    resolved = resolve_plan(plan, model=model, device=device)
    batch = resolved.batch_of(plan, task.global_batch_size)
    share = share_of_plan(resolved, batch)
    use_weights_of_first_rank(model)
    expected = fitting_reference(model, task, device, share.samples)
    if expected is None:
        raise PlainDoesNotFit
    mode = model.training
    ctx = task.shaped(model, resolved, batch)
    found = planned_step(ctx, task.rows, share, task.call, quiet=expected.is_quiet)
    kind, numbers = verdict(found, expected, resolved)
    if kind != "ok":
        return kind, numbers
    ctx.model.train(mode)
    rows = max(share.rows, min(batch.micro, 2))  # a batch norm cannot train on one value
    last = plain_number(train_window(ctx, task.batch(rows), task.call))
    if not math.isfinite(last):
        return "nonfinite", f"the first training step has the loss {last}"
    return "ok", numbers


def compare_with_fewer_blocks(
    plan: Strategy, task: TrainingTask, model: nn.Module, device: torch.device
) -> tuple[OutcomeKind | None, str]:
    """Do what `compare_plan` does, with a smaller model of the same classes. `model` is unchanged. None: no such model fits."""
    cause = "the model is on the meta device" if on_meta(model) else "the plain model does not fit"
    families, stages = find_cuttable(model), resolve_plan(plan, model=model, device=device).site.axis("pipe")
    room = min(all_gather_values(_room(device)))
    text = ""
    for least in (2 * stages, stages):
        counts = tuple(min(len(family.names), least) for family in families)
        gone = [name for family, count in zip(families, counts) for name in family.names[count:]]
        elements = _num_elements(model) - sum(_num_elements(model.get_submodule(name)) for name in gone)
        if not gone and not on_meta(model):
            return None, f"{cause}, and it has no equal blocks to leave out"
        text = f"{cause}, and {sum(counts)} of its blocks have {elements:,} elements"
        if elements > room:
            continue
        small = copy_model(model, {id(block): block for block in map(model.get_submodule, gone)})
        cut_model(small, families, counts)
        if on_meta(small):
            _fill(small)
        try:
            kind, numbers = compare_plan(plan, task, small, device)
        except PlainDoesNotFit:
            continue
        weights = "random" if on_meta(model) else "its own"
        made = f"a smaller one with {sum(counts)} blocks and {weights} weights was compared"
        return kind, f"{cause}, so {made}; {numbers}"
    return None, text


def _room(device: torch.device) -> int:
    """Return how many elements a model may have that is compared on this rank."""
    free, _ = device_memory(device)
    return free // (4 * _COPIES * (get_num_processes() if device.type == "cpu" else 1))


def _num_elements(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


def _fill(model: nn.Module) -> None:
    """Give a model on the meta device random values, the same on all ranks."""
    with preserve_rng_state():
        torch.manual_seed(0)
        state = random_state_dict(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(state[name])
