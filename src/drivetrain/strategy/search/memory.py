"""Predicted memory of a candidate on one rank, by category, in closed form.

With Adam in float32, a replicated model takes 16 bytes a parameter, ZeRO-1 8 + 8/d, ZeRO-2 and ZeRO-3 16/d and what is gathered
(Rajbhandari et al., 2020, arXiv 1910.02054). Activations grow linearly with the micro-batch; what checkpoints leave of them is Chen et al.,
2016 (arXiv 1604.06174), what tensor parallelism leaves is Korthikanti et al., 2022 (arXiv 2205.05198).

The peak is the largest of three moments: the end of the forward pass, the start of backward where the loss's gradient appears, and the
update. Gradients arrive as activations leave, so they count at the first two only where they outlive a pass: in DDP's buckets and
inside an accumulation window.
"""

from drivetrain.strategy.effects import Effects, Recompute
from drivetrain.strategy.profile.values import COMPILED, MachineProfile, ModelProfile, UnitProfile

_RECORDED_SHARE = 0.1
"""What recorded kernels keep in addition, as a share of the activations: their pool is not shared."""


def predict_memory(effects: Effects, profile: ModelProfile, machine: MachineProfile) -> dict[str, float]:
    """Return bytes by category at the moment of the peak, on the rank that needs most."""
    e = effects
    peak = _largest_moment(e, profile)
    peak["activations"] = max(0.0, peak.get("activations", 0.0) + tracked_excess(e, profile))
    peak["reserve"] = machine.reserve_bytes + machine.reserve_share * sum(peak.values())
    if e.is_recorded:
        peak["reserve"] += _RECORDED_SHARE * peak["activations"]
    return peak


def tracked_excess(e: Effects, profile: ModelProfile) -> float:
    """Return by how much a tracked run of the plain model on one rank was above the closed form: what lives for a moment only.

    With it, the prediction for an eager plan on one rank is the tracked peak itself. A model that is compiled whole has figures of its own;
    under compiled blocks, head and loss still run as they are.
    """
    if not e.is_tracked:
        return 0.0
    micro = e.micro / e.parts
    tracked = profile.peak(e.arithmetic + e.recompute.tracked_part, micro)
    if tracked is None:
        return 0.0
    alone = Effects(
        micro=max(1, int(micro)),
        arithmetic=e.arithmetic,
        cast_width=0.0 if e.arithmetic == "float32" else 2.0,
        recompute=e.recompute.in_every_block(),
        update_temporary=0.0,
    )
    return (tracked - sum(_largest_moment(alone, profile).values())) / (e.work_ranks * e.stages)


def parts_read(e: Effects) -> frozenset[str]:
    """Return the parts of a model's profile that a prediction reads, in addition to those that every one does."""
    found = {e.arithmetic + COMPILED} if e.is_compiled else set()
    if e.recompute.tracked_part and e.is_tracked:
        found.add(e.arithmetic + e.recompute.tracked_part)
    return frozenset(found)


def _largest_moment(e: Effects, profile: ModelProfile) -> dict[str, float]:
    """Return what is held at the end of forward or during the update, whichever is more."""
    state = _fixed_state(e, profile)
    temporary = e.update_temporary * profile.optimizer_temporary_bytes / e.parameter_ranks / e.optimizer_shards
    outlives = e.holds_gradients or e.accumulation > 1 or (e.data_ranks > 1 and not e.is_sharded)
    held = {"params": state["params"], "optimizer": state["optimizer"]}
    moments = [
        {
            **held,
            "grads": state["grads"] if outlives else 0.0,
            "activations": activation_bytes(e, profile),
            "gathered": gathered_bytes(e, profile),
            "temporary": e.cast_width * profile.parameters / e.parameter_ranks + output_gradient_bytes(e, profile),
        },
        {**held, "grads": state["grads"], "temporary": temporary, "gathered": _unreduced_window(e, profile)},
    ]
    return max(moments, key=lambda moment: sum(moment.values()))


def _fixed_state(e: Effects, profile: ModelProfile) -> dict[str, float]:
    """Return parameters, gradients and optimizer state, which do not grow with the batch."""
    whole = profile.parameter_bytes / e.parameter_ranks
    trainable = profile.trainable / max(profile.parameters, 1)
    held = whole if e.parameter_width is None else e.parameter_width * profile.parameters / e.parameter_ranks
    params, grads = held / e.shards, held * trainable / e.shards
    optimizer = profile.optimizer_bytes / e.parameter_ranks / e.optimizer_shards
    if e.parameter_width is not None:
        optimizer += whole * trainable / e.optimizer_shards  # the float32 copies
    if e.optimizer_on_host:
        optimizer = 0.0
    if e.parameters_on_host:
        params = grads = 0.0
    return {"params": params + profile.buffer_bytes, "grads": grads, "optimizer": optimizer}


def gathered_bytes(e: Effects, profile: ModelProfile) -> float:
    """Return what sharding holds whole at once: parameters in use, and one unit's gradient before it is reduced."""
    if not e.is_sharded or e.shards == 1:
        return 0.0
    width = 2.0 if e.arithmetic == "bfloat16" else 4.0
    blocks = [unit for unit in profile.units if unit.path]
    block = max((unit.parameters for unit in blocks), default=0)
    rest = profile.parameters - sum(unit.parameters * unit.count for unit in blocks)
    if e.gathers_whole:
        parameters = profile.parameters / e.stages
    else:  # one block in use, the next one on its way; what is outside of blocks stays
        count = sum(unit.count for unit in blocks)
        parameters = rest + min(2, count) * block
    within = e.parameter_ranks // e.stages
    return (width * parameters + 4.0 * max(block, rest)) / within + _unreduced_window(e, profile)


def _unreduced_window(e: Effects, profile: ModelProfile) -> float:
    """Return whole gradients in float32, which sharding holds inside an accumulation window: it reduces only at the end."""
    if not e.is_sharded or e.shards == 1 or e.accumulation == 1:
        return 0.0
    return 4.0 * profile.trainable / e.parameter_ranks


def output_gradient_bytes(e: Effects, profile: ModelProfile) -> float:
    """Return the gradient of a compiled model's output, which is there while the loss still holds the output itself.

    In a loop that calls model and loss one after the other these are two compiled graphs, and the second may not write into what it was
    given; one graph of both would. What 16 bits save of the output is half of it: the loss computes in float32 either way.
    """
    if e.compiled != "model" or e.logits_share < 1:
        return 0.0
    half = max(0.0, profile.logits_bytes["float32"] - profile.logits_bytes["bfloat16"])
    return e.micro / e.work_ranks * half * (1.0 if e.arithmetic == "bfloat16" else 2.0)


def activation_bytes(e: Effects, profile: ModelProfile) -> float:
    """Return what is kept between forward and backward, the batch itself included."""
    kept = e.arithmetic
    ratio = compiled_ratio(e, profile)
    blocks = [unit for unit in profile.units if unit.path]
    of_blocks = sum(_block_bytes(unit, e.recompute, kept, ratio) for unit in blocks)
    largest = max((unit.largest_saved_bytes.get(kept, unit.saved_bytes[kept]) * ratio for unit in blocks), default=0.0)
    if e.recompute.keeps != "all":
        of_blocks += largest  # the one that is being computed again
    of_blocks *= e.block_share
    rest = sum(unit.count * unit.saved_bytes[kept] for unit in profile.units if not unit.path)
    rest *= ratio if e.compiled == "model" else 1.0
    if e.logits_share < 1:
        rest = max(rest - profile.logits_bytes[kept] * (1 - e.logits_share), 0.0)
    fixed = 0.0
    if e.compiled == "model":
        fixed = (profile.compiled_fixed_bytes or {}).get(kept, 0.0) / e.parameter_ranks
    samples = e.micro / e.token_ranks
    return samples / e.parts * _of_fullest_stage(e, of_blocks, rest) + fixed + samples * profile.input_bytes


def _block_bytes(unit: UnitProfile, recompute: Recompute, kept: str, ratio: float) -> float:
    """Return what all members of a unit keep for one sample."""
    saved, inputs = unit.saved_bytes[kept] * ratio, unit.input_bytes[kept]
    if recompute.keeps == "all":
        return unit.count * saved
    if recompute.keeps == "products":
        return unit.count * min(unit.selective_bytes[kept], saved)
    computed_again = -(-unit.count // recompute.every)
    on_device = computed_again if recompute.on_device is None else min(recompute.on_device, computed_again)
    return on_device * inputs + (unit.count - computed_again) * saved


def _of_fullest_stage(e: Effects, of_blocks: float, rest: float) -> float:
    """Return what the fullest stage keeps for one sample of each micro-batch in flight: 1F1B holds min(p - i, m) on stage i."""
    first = of_blocks / e.stages * min(e.stages, e.parts)
    last = of_blocks / e.stages + rest
    return max(first, last)


def compiled_ratio(e: Effects, profile: ModelProfile) -> float:
    """Return what compilation keeps of the activations, as a share of what eager mode keeps; never more.

    A graph that was captured at one batch size only counts its fixed part to every sample.
    """
    known = (profile.compiled_bytes or {}).get(e.arithmetic)
    eager = profile.saved_bytes(e.arithmetic)
    return 1.0 if not e.is_compiled or known is None or not eager else min(1.0, known / eager)
