"""Sequence length warm-up (Li et al., 2021, arXiv 2108.06084): short sequences first, which is cheaper and steadier."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.algorithms.surgery import warn_no_effect
from drivetrain.algorithms.utils.passes import warm_up_memory
from drivetrain.algorithms.utils.run import elapsed_fraction, num_batches
from drivetrain.context.batch import BatchKey, batch_get, batch_set
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, ConfigTypeError, Event, Logger, TimeUnit
from drivetrain.core.arguments import check_counts, check_fractions
from drivetrain.core.types import Batch, StateDict


def set_batch_sequence_length(
    batch: object,
    curr_seq_len: int,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
    *,
    ignore_keys: Iterable[object] = (),
) -> Batch:
    """Return a batch whose sequences have at most `curr_seq_len` places; the one given stays as it is.

    Every tensor (B, S, ...) of a mapping, list or tuple is cut to its first places, or, with `truncate=False`, flattened and
    cut into more rows. `preserve_end_of_sequence` writes each row's last real token (by `attention_mask`) at its new end.

    >>> set_batch_sequence_length({"input_ids": torch.arange(8).view(1, 8)}, 4, truncate=False)["input_ids"].tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    check_counts("set_batch_sequence_length", 1, curr_seq_len=curr_seq_len)
    ignored = set(ignore_keys)
    sequences = {key: value for key, value in _entries(batch) if isinstance(value, Tensor) and key not in ignored}
    for key, value in sequences.items():
        if value.ndim < 2:
            raise ConfigError(
                f"the entry {key!r} has shape {tuple(value.shape)}, not (B, S, ...). Remove it from the batch, or "
                f"list it in ignore_keys=({key!r},)."
            )
    if curr_seq_len >= max((value.shape[1] for value in sequences.values()), default=0):
        return batch
    if not truncate:
        changed = _reshaped(sequences, curr_seq_len)
    elif preserve_end_of_sequence:
        changed = _cut_before_end(sequences, curr_seq_len)
    else:
        changed = {key: value[:, :curr_seq_len].contiguous() for key, value in sequences.items()}
    result = copy.copy(batch)
    for key, value in changed.items():
        result = batch_set(result, key, value)
    return result


def _entries(batch: object) -> list[tuple[int | str, object]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, list | tuple):
        return list(enumerate(batch))
    raise ConfigTypeError(
        f"a batch of type {type(batch).__name__} has no entries to shorten; expected a mapping, list or tuple of tensors. Name the "
        "part with input_key."
    )


def _cut_before_end(sequences: dict[int | str, Tensor], length: int) -> dict[int | str, Tensor]:
    if "attention_mask" not in sequences:
        raise ConfigError(
            "preserve_end_of_sequence=True finds the end of each sequence from the entry 'attention_mask', which the batch does not have. "
            f"Entries: {', '.join(map(str, sequences))}."
        )
    mask = sequences["attention_mask"]
    rows = torch.arange(mask.shape[0], device=mask.device)
    end = mask.sum(dim=1).long() - 1
    new_end = end.clamp(max=length - 1)
    changed = {}
    for key, value in sequences.items():
        changed[key] = short = value[:, :length].clone()
        short[rows, new_end] = value[rows, end]
    return changed


def _reshaped(sequences: dict[int | str, Tensor], length: int) -> dict[int | str, Tensor]:
    key = "input_ids" if "input_ids" in sequences else next(iter(sequences))
    shape = sequences[key].shape
    for name, value in sequences.items():
        if value.shape != shape:
            raise ConfigError(
                f"truncate=False makes new rows of all entries alike, but {name!r} has shape {tuple(value.shape)} and {key!r} "
                f"{tuple(shape)}. Use truncate=True, or list it in ignore_keys."
            )
    kept = sequences[key].numel() // length * length
    return {name: value.reshape(-1)[:kept].view(-1, length) for name, value in sequences.items()}


class SeqLengthWarmup(Algorithm):
    """Lengthens the sequences from `min_seq_length` to `max_seq_length` during the first part of the run.

    `input_key` names the part of the batch that holds the sequences; None is the whole batch. The first batch runs once at full
    length, so that memory is reserved in one piece; the model does not notice.
    """

    allow_multiple = False
    events = frozenset({Event.INIT, Event.AFTER_DATALOADER})
    reads, writes = ("model", "batch"), ("batch",)

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
        *,
        ignore_keys: Iterable[object] = (),
        input_key: BatchKey | None = None,
    ):
        who = "SeqLengthWarmup"
        check_fractions(who, duration=duration)
        check_counts(who, 1, min_seq_length=min_seq_length, max_seq_length=max_seq_length, step_size=step_size)
        if max_seq_length < min_seq_length:
            raise ConfigError(f"{who}: max_seq_length={max_seq_length} is less than min_seq_length={min_seq_length}.")
        self.duration, self.min_seq_length, self.max_seq_length = duration, min_seq_length, max_seq_length
        self.step_size, self.truncate, self.preserve_end_of_sequence = step_size, truncate, preserve_end_of_sequence
        self.ignore_keys, self.input_key = tuple(ignore_keys), input_key
        self._has_reserved = False
        self._logged: tuple[int, int] | None = None

    def count_shapes(self) -> int:
        """Return how many lengths the run goes through, which is how often a compiled model is compiled."""
        return -(-(self.max_seq_length - self.min_seq_length) // self.step_size) + 1

    def length_at(self, state: State) -> int:
        """Return the sequence length of the present batch."""
        length = self.step_size * self._steps_done(state) + self.min_seq_length
        return min(max(length, self.min_seq_length), self.max_seq_length)

    def _steps_done(self, state: State) -> int:
        total, num_steps = num_batches(state), max(1, (self.max_seq_length - self.min_seq_length) // self.step_size)
        if total is not None:
            return state.clock.batch // max(1, int(total * self.duration) // num_steps)
        if state.max_duration is not None and state.max_duration.unit is TimeUnit.EPOCH:
            raise ConfigError(
                "SeqLengthWarmup: the run is measured in epochs, and the loader has no length. "
                "Give max_duration in batches ('10000ba')."
            )
        elapsed = elapsed_fraction(state, str(self))
        return int(elapsed / self.duration * num_steps) if elapsed < self.duration else num_steps + 1

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.INIT:
            self._has_reserved = False
            return
        if not self._has_reserved:
            self._has_reserved = True
            part = self._part(state.batch)
            if set_batch_sequence_length(part, self.min_seq_length, ignore_keys=self.ignore_keys) is part:
                warn_no_effect(
                    f"{self}: no sequence of the first batch is longer than min_seq_length={self.min_seq_length}."
                )
            warm_up_memory(state, self._shortened(state.batch, self.max_seq_length))
        length = self.length_at(state)
        state.batch = self._shortened(state.batch, length)
        rows = next((value.shape[0] for _, value in _entries(self._part(state.batch)) if isinstance(value, Tensor)), 0)
        if (length, rows) != self._logged:  # once per length: a history of every step would grow without end
            self._logged = (length, rows)
            logger.log_metrics({"seq_length_warmup/curr_seq_len": length, "seq_length_warmup/curr_bs": rows})

    def _part(self, batch: object) -> Batch:
        part = batch if self.input_key is None else batch_get(batch, self.input_key)
        return (part,) if isinstance(part, Tensor) else part

    def _shortened(self, batch: object, length: int) -> Batch:
        part = self._part(batch)
        short = set_batch_sequence_length(
            part, length, self.truncate, self.preserve_end_of_sequence, ignore_keys=self.ignore_keys
        )
        if self.input_key is None:
            return short
        is_single = isinstance(batch_get(batch, self.input_key), Tensor)
        return batch_set(copy.copy(batch), self.input_key, batch_get(short, 0) if is_single else short)

    def state_dict(self) -> StateDict:
        return {"logged": self._logged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._logged = None if state["logged"] is None else tuple(state["logged"])
