"""SmartDataLoader: a torch DataLoader that saves its position.

The order of an epoch depends on the seed and the epoch alone, each data rank takes its slice of it, and the state is a position in that
order. So a run can stop after any batch and continue with another number of processes or workers. What each part does is in the other
modules of this folder; here they are put together once per iteration.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.core.arguments import check_count
from drivetrain.core.errors import DistributedError, ParameterError, ResumeError, warn
from drivetrain.core.types import Batch, StateDict
from drivetrain.data import source, stream
from drivetrain.data.columns import Columns, find_columns, resident_columns
from drivetrain.data.fetch import GatherFetch, UserFetch
from drivetrain.data.order import (
    BatchInfo,
    IndexOrder,
    Pairs,
    RankShare,
    SampleOrder,
    SamplerOrder,
    load_sampler_state,
    num_sliced_batches,
    sampler_state,
    set_sampler_epoch,
)
from drivetrain.data.prefetch import bar_is_wanted, pin, to_device, with_bar
from drivetrain.data.randomness import RngMode, generator_states, held_generators, set_generators
from drivetrain.data.source import Cursor, local_batch_size
from drivetrain.data.workers import WorkerPool, WorkerSide, fetch_jobs
from drivetrain.runtime.codec import pack, unpack
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.device import PINNED, choose_device
from drivetrain.runtime.ranks import data_rank, get_num_processes, is_distributed, num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import derive_seed

T_co = TypeVar("T_co", covariant=True)
_tokens = itertools.count()


class SmartDataLoader(DataLoader[T_co]):
    """Yields batches in a fixed global order, on the device, with a position that can be saved and restored.

    Args:
        dataset: anything that torch's DataLoader takes, or tensors, arrays and dicts of them.
        shuffle: draw a new order in each epoch.
        random_seed: seed of that order; the run's by default.
        sampler: an order of your own.
        batch_sampler: batches of your own.
        move_output: deliver batches on the device given by `.to(device)`.
        loading_bar: show a progress bar on a terminal.
        global_batch_size: samples of a batch over all processes, instead of `batch_size`.
        rng: what the random numbers of the dataset depend on: `"batch"`, `"sample"` or `"off"`.
        prefetch: batches that are on the device ahead of time.
        resident: keep tensor data on the device: True, False, or `"auto"` if it is small.
        iterable: how a stream is split over processes: `"filter"` or `"sharded"`.
        name: text of the progress bar, and name of the seed.
        **dataloader_kwargs: everything else that torch's DataLoader takes, such as `batch_size` (per process).

    >>> loader = SmartDataLoader(torch.arange(6), batch_size=4)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5]]
    """

    def __init__(
        self,
        dataset: Any,
        shuffle: bool = False,
        random_seed: int | None = None,
        sampler: Iterable[object] | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
        move_output: bool = True,
        loading_bar: bool = True,
        *,
        global_batch_size: int | None = None,
        rng: RngMode = "batch",
        prefetch: int = 1,
        resident: Literal["auto"] | bool = "auto",
        iterable: stream.IterableMode = "filter",
        name: str | None = None,
        **dataloader_kwargs: Any,
    ):
        own = {name: value for name, value in locals().items() if name in source.OWN_NAMES}
        source.check_arguments(dataset, own, dataloader_kwargs)
        self._arguments = {"dataset": dataset, **own, **dataloader_kwargs}
        self.move_output, self.loading_bar, self.rng, self.resident = move_output, loading_bar, rng, resident
        self.iterable, self.name, self.prefetch = iterable, name, own["prefetch"]
        self.global_batch_size: int | None = own["global_batch_size"]

        self._make_source()
        if resident is True and self.columns is None:
            resident_columns(None, torch.device("cpu"), True)  # reports what is missing
        if isinstance(self._order, IndexOrder):
            sampler = self._order
        super().__init__(dataset, sampler=sampler, batch_sampler=batch_sampler, **dataloader_kwargs)
        self._collate = self.collate_fn

        self._seed, self._seed_agrees = self._first_seed()
        self._cursor = Cursor()
        self._device: torch.device | None = None
        if self.global_batch_size is not None:
            local_batch_size(self.global_batch_size, num_data_ranks())

    @classmethod
    def from_loader(cls, loader: DataLoader[object], **changes: object) -> "SmartDataLoader[object]":
        """Return a SmartDataLoader over the same data as a plain torch loader, shuffled if that one is."""
        if isinstance(loader, SmartDataLoader):
            return loader.rebuild(**changes)
        return SmartDataLoader(**{**source.arguments_of(loader), **changes})

    def rebuild(self, **changes: Any) -> "SmartDataLoader[object]":
        """Return a loader with other arguments, and the same seed and device; it starts at epoch 0."""
        other: SmartDataLoader[object] = SmartDataLoader(**{**self._arguments, **changes})
        if "random_seed" not in changes:
            other._seed, other._seed_agrees = self._seed, self._seed_agrees
        other._device, other.loading_bar = self._device, changes.get("loading_bar", self.loading_bar)
        return other

    def _make_source(self) -> None:
        """Decide from the arguments in which order the data is read, and how."""
        given = self._arguments
        batched = given["batch_sampler"] is not None or given.get("batch_size", 1) is not None
        self._order: SampleOrder | None = None
        self._fetch: GatherFetch | UserFetch | None = None
        self._reader: stream.FilterReader | stream.ShardedReader | None = None
        self._placed: tuple[torch.device, GatherFetch | None] | None = None
        self._pool: WorkerPool | None = None
        if isinstance(given["dataset"], IterableDataset):
            kind = stream.FilterReader if self.iterable == "filter" else stream.ShardedReader
            self._reader = kind(given["dataset"], given.get("collate_fn"), batched=batched, rng=self.rng)
        else:
            self._order, self._fetch, self._length = source.indexed_source(given, batched)

    # ------------------------------------------------------------------ what a loop reads

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch on this process; None where a batch sampler decides or nothing is batched."""
        if self.global_batch_size is None:
            return self._batch_size
        return local_batch_size(self.global_batch_size, num_data_ranks())

    @batch_size.setter
    def batch_size(self, size: int | None) -> None:
        self._batch_size = size

    @property
    def seed(self) -> int:
        """The root of everything this loader draws."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the newest iterator, or the one that comes next when that has ended."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """Samples that all ranks together have received in this epoch."""
        return self._cursor.position

    @property
    def batch_info(self) -> BatchInfo | None:
        """The position of the current batch in its epoch; None before the first one."""
        cursor = self._cursor
        return cursor.info or cursor.before

    @property
    def sample_index(self) -> Tensor | None:
        """Dataset indices of the rows of the current batch, padding included; None where the order has none.

        It is on the device where the data is gathered there, else on the CPU; reading it does not synchronize.
        """
        info = self.batch_info
        rows = None if info is None else info.rows
        if rows is None or isinstance(rows, Tensor):
            return rows
        if isinstance(rows, range):
            return torch.arange(rows.start, rows.stop, device="cpu")
        try:
            return torch.tensor(rows, dtype=torch.int64, device="cpu")
        except (TypeError, ValueError):
            return None

    @property
    def columns(self) -> Columns | None:
        """The tensors the data consists of; None where it is read through a dataset's own methods."""
        return self._fetch.columns if isinstance(self._fetch, GatherFetch) else None

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this process."""
        share = self._share()
        if self._order is not None:
            return self._order.num_batches(share)
        samples = len(self.dataset)  # type: ignore[arg-type]
        return num_sliced_batches(samples, share if self.iterable == "filter" else share._replace(world=1))

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        self._look_again()
        share = self._share()
        draws = self.columns is None or getattr(self._order, "shuffle", True)
        if draws and not self._seed_agrees and get_num_processes() > 1:
            # Ranks may differ, and something is drawn from the seed: take rank 0's. A collective, once.
            self._seed, self._seed_agrees = broadcast_from_master(self._seed), True
        last = self._cursor  # claim the next epoch, or the position that was restored
        cursor = Cursor(last.epoch + 1) if last.started else Cursor(last.epoch, last.start, stream=last.stream)
        cursor.started = True
        if self._order is not None:
            cursor.sampler = sampler_state(self._order)
        else:
            held = held_generators(self, "dataset")
            if cursor.start and last.generators and not stream.has_ended(last.stream, data_rank()):
                set_generators(held, last.generators)
            cursor.generators = generator_states(held)
        self._cursor = cursor
        batches = self._open(cursor, share)
        if self.loading_bar and bar_is_wanted():
            try:
                total = len(self)
            except TypeError:
                total = None
            batches = with_bar(batches, cursor.start // share.whole, total, self.name or f"epoch {cursor.epoch}")
        return batches  # type: ignore[return-value]  # only the dataset knows what a batch is

    def _look_again(self) -> None:
        """Read what `collate_fn` and a dataset of tensors are now: they may have been replaced since the last epoch."""
        if self.collate_fn is not self._collate:
            self.close()
            self._arguments["collate_fn"] = self._collate = self.collate_fn
            self._make_source()
        columns = self.columns
        if columns is None:
            return
        found = find_columns(self.dataset)
        if found is None:
            raise ParameterError(
                f"dataset: the {type(self.dataset).__name__} held tensors when the loader was made, and does not now. Make a new loader."
            )
        if not found.reads_as(columns):
            self._fetch, self._placed, self._length = GatherFetch(found), None, len(found)
            if isinstance(self._order, IndexOrder | SamplerOrder):
                self._order.use(found)

    def _open(self, cursor: Cursor, share: RankShare) -> Iterator[Batch]:
        """Return the batches from a position on: read, brought to the device, and published one by one."""
        device, seed = self._device if self.move_output else None, self._seed
        reads_here = self.num_workers == 0
        if self._reader is not None:
            pairs = self._stream(cursor, share)
            pairs = stream.mark_last(pairs) if self.prefetch else pairs
        else:
            fetch, arrived = self._choose_fetch(device)
            assert self._order is not None
            if isinstance(fetch, GatherFetch) and fetch.columns.device.type != "cpu":
                share = share._replace(device=fetch.columns.device)
            infos = self._order.batches(seed, cursor.epoch, cursor.start, share)
            device = None if arrived else device
            reads_here = reads_here or isinstance(fetch, GatherFetch)  # gathering is faster than sending to a worker
            if reads_here:
                if isinstance(fetch, GatherFetch) and fetch.can_pin and self._pins(device):
                    fetch = GatherFetch(fetch.columns, pinned=True)
                pairs = ((info, fetch(info, seed)) for info in infos)
            else:
                pool = self._workers(fetch)
                base_seed = derive_seed(seed, "workers", cursor.epoch, share.rank)
                pairs = ((info, batch) for (info, _), batch in pool.run(fetch_jobs(infos, seed), base_seed))
        if device is not None:
            pairs = to_device(pairs, device, self.prefetch)
        elif reads_here and self._pins(device):
            pairs = ((info, pin(batch)) for info, batch in pairs)
        return self._published(cursor, pairs)

    def _published(self, cursor: Cursor, pairs: Pairs) -> Iterator[Batch]:
        """Yield the batches; only what has been yielded counts. The end of the epoch makes the next iterator begin the next one."""
        for info, batch in pairs:
            cursor.info = info
            yield batch
        if self._cursor is cursor:
            self._cursor = Cursor(cursor.epoch + 1, before=cursor.info)

    def _stream(self, cursor: Cursor, share: RankShare) -> Pairs:
        own = stream.own_stream_state(cursor.stream, self.iterable, share.rank, share.world, self.num_workers)
        start = stream.StreamStart(next(_tokens), self._seed, cursor.epoch, cursor.start, share, own)
        assert self._reader is not None
        pool = self._workers(self._reader) if self.num_workers else None
        if isinstance(self._reader, stream.FilterReader):
            return stream.filtered_batches(self._reader, start, pool)
        return stream.sharded_batches(self._reader, start, pool, self.num_workers)

    def _workers(self, answer: Any) -> WorkerPool:
        if self._pool is None:
            answer = copy.copy(answer)
            answer.restores_generators = False  # a worker has no caller
            names = "num_workers timeout worker_init_fn multiprocessing_context prefetch_factor persistent_workers"
            options = {name: getattr(self, name) for name in names.split()}
            options["pin_memory"] = self._pins(self._device if self.move_output else None)
            # A dataset that splits itself by `get_worker_info()` would, in `filter` mode, lose what the other workers have.
            is_hidden = self._reader is not None and self.iterable == "filter"
            self._pool = WorkerPool(WorkerSide(self.dataset, answer), options, is_hidden)
        return self._pool

    def _pins(self, device: torch.device | None) -> bool:
        wanted = self.pin_memory or (device is not None and device.type != "cpu")
        accelerator = torch.accelerator.current_accelerator(check_available=True) if wanted else None
        return accelerator is not None and accelerator.type in PINNED

    def _choose_fetch(self, device: torch.device | None) -> tuple[Any, bool]:
        """Return how batches are made, and whether they are then where they should be."""
        columns = self.columns
        if columns is None:
            return self._fetch, False
        target = device or columns.device
        if self._placed is None or self._placed[0] != target:
            placed = resident_columns(columns, target, self.resident)
            self._placed = (target, None if placed is None else GatherFetch(placed))
        fetch: Any = self._placed[1] or self._fetch
        return fetch, fetch.columns.device == target

    # ------------------------------------------------------------------ position and device

    def state_dict(self) -> StateDict:
        """Return the position, between any two batches; the current batch counts as used."""
        cursor = self._cursor
        state: StateDict = {
            "seed": self._seed,
            "epoch": cursor.epoch,
            "position": cursor.position,
            "length": self._samples(),
            "version": source.VERSION,
        }
        if self._order is not None:
            sampler = cursor.sampler if cursor.started else sampler_state(self._order)
            if sampler is not None:
                state["sampler"] = sampler
        else:
            saved = cursor.stream
            if cursor.info is not None:
                saved = stream.gathered_stream_state(
                    cursor.info.stream, self.iterable, data_rank(), num_data_ranks(), self.num_workers
                )
            if saved is not None:
                state["stream"] = saved
        if held := generator_states(held_generators(self, "dataset")):
            state["generators"] = pack({"now": held, "start": cursor.generators})
        return state

    def load_state_dict(self, state: StateDict | None, strict: bool = True) -> None:
        """Go to a saved position: the next iteration continues there. `strict=False` warns where it would raise."""
        if state is None:
            warn("the loader's saved state is None: it keeps its current position.")
            return
        last = None if self._order is None else self._order.samples
        checked = source.check_state(state, self._samples(), last, strict)
        self._check_continuable(checked["position"], strict)
        if self._arguments["random_seed"] is not None and checked["seed"] != self._seed:
            warn(
                f"random_seed={self._seed} was given, but the saved state has {checked['seed']}: the saved seed is used, so that "
                "the order of samples continues. Remove random_seed to resume without this warning."
            )
        if checked.get("sampler") is not None and self._order is not None:
            load_sampler_state(self._order, checked["sampler"])
        set_sampler_epoch(getattr(self._order, "sampler", None), checked["epoch"])
        generators = unpack(checked.get("generators", {"now": {}, "start": None}))
        set_generators(held_generators(self, "dataset"), generators["now"])
        self._seed, self._seed_agrees = checked["seed"], True
        self._cursor = Cursor(
            checked["epoch"], checked["position"], stream=checked.get("stream"), generators=generators["start"]
        )

    def _check_continuable(self, position: int, strict: bool) -> None:
        reads_ahead = self.num_workers > 0 or self.prefetch > 0
        if not position or self.columns is not None or self.rng != "off" or not reads_ahead:
            return
        name = f" {self.name!r}" if self.name else ""
        message = (
            f"the loader{name} has rng='off' with num_workers={self.num_workers} and prefetch={self.prefetch}: the random numbers "
            f"of its dataset depend on how far it has read ahead, so it cannot continue exactly at position {position}. "
            "Use rng='batch' (the default), or num_workers=0 and prefetch=0."
        )
        if strict:
            raise ResumeError(message)
        warn(message)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`, from its beginning; a restored position in that epoch is kept."""
        check_count("epoch", epoch, at_least=0, owner="set_epoch", error=ParameterError)
        last = self._cursor
        if last.start and not last.started and epoch > last.epoch and self._order is not None:
            # The rest of the restored epoch is left out, and the user's sampler goes on after having drawn it.
            self._order.batches(self._seed, last.epoch, last.start, self._share())
        if last.started or last.epoch != epoch:
            self._cursor = Cursor(epoch)
        set_sampler_epoch(getattr(self._order, "sampler", None), epoch)

    @property
    def device(self) -> torch.device:
        """Where batches are delivered; the CPU unless `to` was called."""
        return torch.device("cpu") if self._device is None else self._device

    def to(self, device: torch.device | str | None) -> Self:
        """Deliver batches on `device` from the next iteration on; None leaves them where they are."""
        chosen = None if device is None else choose_device(device)
        if chosen != self._device:
            self.close()
            self._device, self._pool = chosen, None
        return self

    def close(self) -> None:
        """End the worker processes; the next iteration starts new ones."""
        if self._pool is not None:
            self._pool.close()

    def place(self, columns: Columns, device: torch.device) -> None:
        """Gather from these tensors from the next iteration on."""
        self._device = device
        self._placed = (device, GatherFetch(columns))

    def ddp(self) -> Self:
        """Take rank 0's seed, so that all ranks have one order; rank and world are read at each `iter()`."""
        if not is_distributed():
            raise DistributedError(
                "ddp() needs a process group: start with torchrun or distributed=True, or call init_distributed() first."
            )
        self._seed, self._seed_agrees = broadcast_from_master(self._seed), True
        return self

    # ------------------------------------------------------------------ building

    def _first_seed(self) -> tuple[int, bool]:
        """Return the seed, and whether all ranks have the same."""
        if self._arguments["random_seed"] is not None:
            return self._arguments["random_seed"], True
        if self.generator is not None:
            return self.generator.initial_seed(), False
        run, name = current_run(), self.name
        if run is None:
            return torch.initial_seed(), False
        if name is not None:
            return derive_seed(run.seed, f"loader:{name}"), True
        return derive_seed(run.seed, "loader", run.next_index("loader")), True

    def _share(self) -> RankShare:
        size = self.batch_size if self.batch_sampler is None or self._batch_size is not None else None
        return RankShare(data_rank(), num_data_ranks(), size or 1, self.drop_last)

    def _samples(self) -> int | None:
        """Return the samples of an epoch, for the state; None where only the stream knows."""
        if self._order is not None:
            return self._length if self._order.samples is None else self._order.samples
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None
