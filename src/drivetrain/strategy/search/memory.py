"""Predicted memory of a candidate on one rank, by category, in closed form.

With Adam in float32, a replicated model takes 16 bytes a parameter, ZeRO-1 8 + 8/d, ZeRO-2 and ZeRO-3 16/d and what is gathered
(Rajbhandari et al., 2020, arXiv 1910.02054). Activations grow linearly with the micro-batch; what checkpoints leave of them is Chen et al.,
2016 (arXiv 1604.06174), what tensor parallelism leaves is Korthikanti et al., 2022 (arXiv 2205.05198).

The peak is the largest of three moments: the end of the forward pass, the start of backward where the loss's gradient appears, and the
update. Gradients arrive as activations leave, so they count at the first two only where they outlive a pass: in DDP's buckets and
inside an accumulation window.
"""

from drivetrain.strategy.profile.values import COMPILED, MachineProfile, ModelProfile, UnitProfile
from drivetrain.strategy.search.candidates import Candidate

_KEPT_BY_TENSOR_PARALLEL = 10 / 34
"""Share of a transformer block's activations that tensor parallelism leaves on every rank."""
_CHUNKS = 8
"""Into how many parts a chunked cross-entropy cuts the logits, at least."""
_GRAPH_SHARE = 0.1
"""What recorded kernels keep beside, as a share of the activations: their pool is not shared."""


def predict_memory(candidate: Candidate, profile: ModelProfile, machine: MachineProfile) -> dict[str, float]:
    """Return bytes by category at the moment of the peak, on the rank that needs most."""
    c = candidate
    peak = _largest_moment(c, profile)
    peak["activations"] = max(0.0, peak.get("activations", 0.0) + tracked_excess(c, profile))
    peak["reserve"] = machine.reserve_bytes + machine.reserve_share * sum(peak.values())
    if c.graphs:
        peak["reserve"] += _GRAPH_SHARE * peak["activations"]
    return peak


def tracked_excess(c: Candidate, profile: ModelProfile) -> float:
    """Return by how much a tracked run of the plain model on one rank was above the closed form: what lives for a moment only.

    With it, the prediction for an eager plan on one rank is the tracked peak itself. A model that is compiled whole has figures of its own;
    under compiled blocks, head and loss still run as they are.
    """
    if c.compile == "model" or c.cpu_offload:
        return 0.0
    mode = _tracked_mode(c)
    micro = c.micro / c.microbatches if c.pipe > 1 else c.micro
    tracked = profile.peak(c.arithmetic + mode, micro)
    if tracked is None:
        return 0.0
    alone = Candidate(
        precision="float32" if c.arithmetic == "float32" else "bfloat16",
        checkpoint={"": "none", "/selective": "selective"}.get(mode, "full"),
        micro=max(1, int(micro)),
        fused=True,
    )
    return (tracked - sum(_largest_moment(alone, profile).values())) / (c.tensor * c.sequence * c.pipe)


def _tracked_mode(c: Candidate) -> str:
    return {"none": "", "selective": "/selective"}.get(c.checkpoint, "/full")


def parts_read(c: Candidate) -> frozenset[str]:
    """Return the parts of a model's profile that the prediction for a candidate reads, beside those that every one does."""
    found = {c.arithmetic + COMPILED} if c.is_compiled else set()
    if c.checkpoint != "none" and c.compile != "model" and not c.cpu_offload:
        found.add(c.arithmetic + _tracked_mode(c))
    return frozenset(found)


def _largest_moment(c: Candidate, profile: ModelProfile) -> dict[str, float]:
    """Return what is held at the end of forward or during the update, whichever is more."""
    split = c.tensor * c.pipe
    shards = c.zero if c.is_sharded else 1
    state = _fixed_state(c, profile, split, shards)
    activations = activation_bytes(c, profile)
    gathered = gathered_bytes(c, profile)
    temporary = 0.0 if c.fused or c.cpu_offload else profile.optimizer_temporary_bytes / split / _optimizer_shards(c)
    outlives = c.accumulation > 1 or c.pipe > 1 or (c.data_ranks > 1 and not c.is_sharded)
    kept_grads = state["grads"] if outlives else 0.0
    held = {"params": state["params"], "optimizer": state["optimizer"]}
    moments = [
        {
            **held,
            "grads": kept_grads,
            "activations": activations,
            "gathered": gathered,
            "temporary": casts_bytes(c, profile) + output_gradient_bytes(c, profile),
        },
        {**held, "grads": state["grads"], "temporary": temporary, "gathered": _unreduced_window(c, profile)},
    ]
    return max(moments, key=lambda moment: sum(moment.values()))


def _fixed_state(c: Candidate, profile: ModelProfile, split: int, shards: int) -> dict[str, float]:
    """Return parameters, gradients and optimizer state, which do not grow with the batch."""
    whole = profile.parameter_bytes / split
    trainable = profile.trainable / max(profile.parameters, 1)
    is_half = c.precision == "half" and not c.is_sharded  # shards stay in float32 and are gathered in 16 bits
    held = 2.0 * profile.parameters / split if is_half else whole
    params, grads = held / shards, held * trainable / shards
    optimizer = profile.optimizer_bytes / split / _optimizer_shards(c)
    if is_half:
        optimizer += whole * trainable / _optimizer_shards(c)  # the float32 copies
    if c.cpu_offload:
        optimizer = 0.0
        if c.is_sharded:
            params = grads = 0.0
    return {"params": params + profile.buffer_bytes, "grads": grads, "optimizer": optimizer}


def _optimizer_shards(c: Candidate) -> int:
    return c.zero if c.is_sharded else c.data_ranks if c.sharding == "zero1" else 1


def gathered_bytes(c: Candidate, profile: ModelProfile) -> float:
    """Return what sharding holds whole at once: parameters in use, and one unit's gradient before it is reduced."""
    if not c.is_sharded or c.zero == 1:
        return 0.0
    width = 2.0 if c.arithmetic == "bfloat16" else 4.0
    blocks = [unit for unit in profile.units if unit.path]
    block = max((unit.parameters for unit in blocks), default=0)
    rest = profile.parameters - sum(unit.parameters * unit.count for unit in blocks)
    if c.sharding == "zero2":
        parameters = profile.parameters / c.pipe
    else:  # one block in use, the next one on its way; what is outside of blocks stays
        count = sum(unit.count for unit in blocks)
        parameters = rest + min(2, count) * block
    return (width * parameters + 4.0 * max(block, rest)) / c.tensor + _unreduced_window(c, profile)


def _unreduced_window(c: Candidate, profile: ModelProfile) -> float:
    """Return whole gradients in float32, which fully_shard holds inside an accumulation window: it reduces only at the end."""
    if not c.is_sharded or c.zero == 1 or c.accumulation == 1:
        return 0.0
    return 4.0 * profile.trainable / (c.tensor * c.pipe)


def casts_bytes(c: Candidate, profile: ModelProfile) -> float:
    """Return autocast's 16-bit copies of the weights, which backward needs; compiled and sharded models count them elsewhere."""
    if c.precision not in ("bfloat16", "float16", "float8") or c.is_sharded or c.compile == "model":
        return 0.0
    return 2.0 * profile.parameters / (c.tensor * c.pipe)


def output_gradient_bytes(c: Candidate, profile: ModelProfile) -> float:
    """Return the gradient of a compiled model's output, which is there while the loss still holds the output itself.

    In a loop that calls model and loss one after the other these are two compiled graphs, and the second may not write into what it was
    given; one graph of both would. What 16 bits save of the output is half of it: the loss computes in float32 either way.
    """
    if c.compile != "model" or c.chunked_loss:
        return 0.0
    half = max(0.0, profile.logits_bytes["float32"] - profile.logits_bytes["bfloat16"])
    return c.micro / (c.tensor * c.sequence) * half * (1.0 if c.arithmetic == "bfloat16" else 2.0)


def activation_bytes(c: Candidate, profile: ModelProfile) -> float:
    """Return what is kept between forward and backward, the batch itself included."""
    kept = c.arithmetic
    ratio = compiled_ratio(c, profile)
    blocks = [unit for unit in profile.units if unit.path]
    of_blocks = sum(_block_bytes(unit, c, kept, ratio) for unit in blocks)
    largest = max((unit.largest_saved_bytes.get(kept, unit.saved_bytes[kept]) * ratio for unit in blocks), default=0.0)
    if c.checkpoint != "none":
        of_blocks += largest  # the one that is being computed again
    by_tensor = _KEPT_BY_TENSOR_PARALLEL + (1 - _KEPT_BY_TENSOR_PARALLEL) / c.tensor
    of_blocks *= by_tensor
    rest = sum(unit.count * unit.saved_bytes[kept] for unit in profile.units if not unit.path)
    rest *= ratio if c.compile == "model" else 1.0
    if c.chunked_loss:
        rest = max(rest - profile.logits_bytes[kept] * (1 - 1 / _CHUNKS), 0.0)
    fixed = 0.0
    if c.compile == "model":
        fixed = (profile.compiled_fixed_bytes or {}).get(kept, 0.0) / (c.tensor * c.pipe)
    passes = c.micro / c.sequence
    if c.pipe > 1:
        return passes / c.microbatches * _pipeline_bytes(c, of_blocks, rest) + fixed + c.micro * profile.input_bytes
    return passes * (of_blocks + rest) + fixed + c.micro * profile.input_bytes / c.sequence


def _block_bytes(unit: UnitProfile, c: Candidate, kept: str, ratio: float) -> float:
    """Return what all members of a unit keep for one sample."""
    saved, inputs = unit.saved_bytes[kept] * ratio, unit.input_bytes[kept]
    if c.checkpoint == "none":
        return unit.count * saved
    if c.checkpoint == "selective":
        return unit.count * min(unit.selective_bytes[kept], saved)
    if c.checkpoint == "second":
        computed_again = (unit.count + 1) // 2
        return computed_again * inputs + (unit.count - computed_again) * saved
    if c.checkpoint == "offload":
        return min(2, unit.count) * inputs  # one in use, one on its way
    return unit.count * inputs


def _pipeline_bytes(c: Candidate, of_blocks: float, rest: float) -> float:
    """Return what the fullest stage keeps for one sample of each micro-batch in flight: 1F1B holds min(p - i, m) on stage i."""
    first = of_blocks / c.pipe * min(c.pipe, c.microbatches)
    last = of_blocks / c.pipe + rest
    return max(first, last)


def compiled_ratio(c: Candidate, profile: ModelProfile) -> float:
    """Return what compilation keeps of the activations, as a share of what eager mode keeps; never more.

    A graph that was captured at one batch size only counts its fixed part to every sample.
    """
    known = (profile.compiled_bytes or {}).get(c.arithmetic)
    eager = profile.saved_bytes(c.arithmetic)
    return 1.0 if not c.is_compiled or known is None or not eager else min(1.0, known / eager)
