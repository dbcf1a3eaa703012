"""What a loader is made of: its arguments, checked before any data is read, what it reads from, and the position in it.

The state of a loader is `{seed, epoch, position, length, version}`, and for some loaders what a user's sampler or stream adds. `position`
counts the samples that all ranks together have received in this epoch. There is no rank, world size or number of workers in it, so a
run may continue with others.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import get_args

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from drivetrain.core.arguments import check_count
from drivetrain.core.errors import ParameterError, ResumeError, StateError, unknown_name, warn
from drivetrain.core.types import Settings, StateDict
from drivetrain.data.columns import ColumnSamples, find_columns
from drivetrain.data.fetch import GatherFetch, UserFetch, dataset_length
from drivetrain.data.order import BatchInfo, BatchOrder, IndexOrder, ReplicaOrder, SampleOrder, SamplerOrder
from drivetrain.data.randomness import RngMode
from drivetrain.data.stream import IterableMode

OWN_NAMES: tuple[str, ...] = (
    *("shuffle", "random_seed", "sampler", "batch_sampler", "move_output", "loading_bar"),
    *("global_batch_size", "rng", "prefetch", "resident", "iterable", "name"),
)
TORCH_NAMES = tuple(
    name
    for name in inspect.signature(DataLoader.__init__).parameters
    if name not in ("self", "dataset", "shuffle", "sampler", "batch_sampler")
)


def check_arguments(dataset: object, own: Settings, given: Settings) -> None:
    """Reject what cannot work: names, values and combinations. Whole numbers of other libraries become Python's."""
    for name in given:
        if name not in TORCH_NAMES:
            raise ParameterError(unknown_name("argument", name, TORCH_NAMES + OWN_NAMES, where="SmartDataLoader"))
    if own["shuffle"] not in (True, False, None) or type(own["shuffle"]) is int:
        size = f" The batch size is a keyword: batch_size={own['shuffle']!r}." if type(own["shuffle"]) is int else ""
        raise ParameterError(f"shuffle={own['shuffle']!r}: expected True or False.{size}")
    words = {"rng": get_args(RngMode), "iterable": get_args(IterableMode), "resident": ("auto", True, False)}
    for name, choices in words.items():
        if own[name] not in choices or type(own[name]) is int:
            raise ParameterError(unknown_name("value", own[name], map(str, choices), where=name))
    if isinstance(own["random_seed"], bool) or not isinstance(own["random_seed"], Integral | None):
        raise ParameterError(
            f"random_seed={own['random_seed']!r}: expected a whole number, or None for the run's seed."
        )
    own["random_seed"] = None if own["random_seed"] is None else int(own["random_seed"])
    if own["name"] is not None and not isinstance(own["name"], str):
        raise ParameterError(f"name={own['name']!r}: expected a text that identifies this loader, or None.")
    for name, least in (("prefetch", 0), ("num_workers", 0), ("global_batch_size", 1), ("batch_size", 1)):
        values = own if name in own else given
        if name in values and not (least and values[name] is None):
            values[name] = check_count(name, values[name], at_least=least, error=ParameterError)
    _check_combinations(dataset, own, given)


def _check_combinations(dataset: object, own: Mapping[str, object], given: Mapping[str, object]) -> None:
    if own["global_batch_size"] is not None:
        for name in ("batch_size", "batch_sampler"):
            if name in given or own.get(name) is not None:
                raise ParameterError(
                    f"global_batch_size={own['global_batch_size']} and {name} are both set; each decides the size of a batch. "
                    "Give one: batch_size is per process, global_batch_size is over all of them."
                )
    if isinstance(dataset, IterableDataset):
        for name in ("shuffle", "sampler", "batch_sampler"):
            if own[name]:
                raise ParameterError(
                    f"{name} is set together with an IterableDataset, which has no index to choose from. Shuffle inside the "
                    "dataset, or use a dataset with __getitem__ and __len__."
                )
    if own["sampler"] is not None and own["shuffle"]:
        raise ParameterError("sampler and shuffle=True are both set; each decides the order. Give one of them.")
    if own["batch_sampler"] is not None:
        clash = [name for name in ("batch_size", "drop_last") if given.get(name, None) not in (None, 1, False)]
        clash += [name for name in ("shuffle", "sampler") if own[name]]
        if clash:
            raise ParameterError(
                f"batch_sampler is set together with {' and '.join(clash)}, which it decides itself. Remove them."
            )
    if given.get("batch_size", 1) is None and given.get("drop_last"):
        raise ParameterError(
            "batch_size=None turns batching off, so drop_last has nothing to drop. Remove one of them."
        )
    if given.get("in_order") is False:
        raise ParameterError(
            "in_order=False gives batches in no fixed order, so a position in the data has no meaning. Remove it, or use torch's "
            "DataLoader."
        )


def local_batch_size(global_batch_size: int, world: int) -> int:
    """Return one rank's part of a global batch.

    >>> local_batch_size(32, 4)
    8
    """
    size, rest = divmod(global_batch_size, world)
    if rest or not size:
        below, above = size * world, (size + 1) * world
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ParameterError(
            f"global_batch_size={global_batch_size} does not divide over {world} processes. The nearest sizes that do: {nearest}."
        )
    return size


def arguments_of(loader: DataLoader[object]) -> Settings:
    """Return the arguments that make a loader like a plain torch one."""
    names = ["dataset", "num_workers", "pin_memory", "timeout", "worker_init_fn", "generator"]
    if loader.num_workers:
        names += ["prefetch_factor", "persistent_workers", "multiprocessing_context"]
    arguments: Settings = {name: getattr(loader, name) for name in names}
    if loader.collate_fn not in (default_collate, default_convert):
        arguments["collate_fn"] = loader.collate_fn
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return {**arguments, "batch_sampler": batches}
    # A torch batch sampler of the user's has what it was made of.
    plan: DataLoader[object] | BatchSampler = loader if batches is None else batches
    arguments |= {"batch_size": plan.batch_size, "drop_last": plan.drop_last}
    sampler: object = plan.sampler
    is_whole = getattr(sampler, "data_source", None) is loader.dataset
    if isinstance(loader.dataset, IterableDataset) or (type(sampler) is SequentialSampler and is_whole):
        return arguments
    if (
        type(sampler) is RandomSampler
        and is_whole
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return {**arguments, "shuffle": True}
    return {**arguments, "sampler": sampler}


def indexed_source(given: Settings, batched: bool) -> tuple[SampleOrder, GatherFetch | UserFetch, int | None]:
    """Return the order of data with an index, how its batches are read, and its length where it has one."""
    dataset, sampler, batch_sampler, collate = (
        given["dataset"],
        given["sampler"],
        given["batch_sampler"],
        given.get("collate_fn"),
    )
    columns = find_columns(dataset)
    has_keys = sampler is not None or batch_sampler is not None
    length = dataset_length(dataset, has_keys) if columns is None else len(columns)
    gathered = columns if collate is None and batched else None
    order: SampleOrder
    if batch_sampler is not None:
        order = BatchOrder(batch_sampler)
    elif isinstance(sampler, DistributedSampler):
        order = ReplicaOrder(sampler)
    elif sampler is not None:
        order = SamplerOrder(sampler, None if gathered is None else length)
    else:
        order = IndexOrder(dataset if columns is None else columns, bool(given["shuffle"]))
    if gathered is not None:
        return order, GatherFetch(gathered), length
    samples = ColumnSamples(columns) if columns is not None and isinstance(dataset, dict | tuple) else dataset
    return order, UserFetch(samples, collate, batched=batched, rng=given["rng"]), length


VERSION = 1
REQUIRED = ("seed", "epoch", "position", "length", "version")
OPTIONAL = ("sampler", "stream", "generators")


@dataclass(slots=True, eq=False)
class Cursor:
    """The position of one iterator; the loader's state follows the newest."""

    epoch: int = 0
    start: int = 0
    stream: object = None
    """What a state holds about the position of an iterable dataset at `start`."""
    before: BatchInfo | None = None
    """The last batch of the epoch that ended here: a loop that reads ahead may still use it."""
    started: bool = False
    """Whether an iterator has claimed this position; the next one then begins the next epoch."""
    info: BatchInfo | None = None
    """The current batch."""
    sampler: object = None
    """What the user's sampler needs to draw the stream of this epoch again."""
    generators: StateDict | None = None
    """The generators of an iterable dataset when this epoch began: a stream is opened with them again."""

    @property
    def position(self) -> int:
        """Samples received in this epoch by all ranks together; the current batch counts."""
        return self.start if self.info is None else self.info.end


def check_state(state: object, length: int | None, last: int | None, strict: bool) -> StateDict:
    """Return a saved state that fits data of `length` samples and an epoch of `last` samples, or raise a `StateError`."""
    if not isinstance(state, Mapping):
        raise StateError(f"loader state: got a {type(state).__name__}, expected a mapping as state_dict() returns it.")
    missing = [name for name in REQUIRED if name not in state]
    unknown = [name for name in state if name not in REQUIRED + OPTIONAL]
    if missing or (unknown and strict):
        wrong = [f"missing: {', '.join(missing)}"] if missing else []
        wrong += [f"unknown: {', '.join(map(str, unknown))}"] if unknown else []
        raise StateError(
            f"loader state: {'; '.join(wrong)}. Expected {', '.join(REQUIRED)} as state_dict() returns them."
        )
    for name in ("seed", "epoch", "position", "version"):
        if type(state[name]) is not int or (name != "seed" and state[name] < 0):
            raise StateError(f"loader state: {name} is {state[name]!r}, expected a whole number of at least 0.")
    if state["version"] > VERSION:
        raise ResumeError(
            f"loader state: it has version {state['version']}, this library reads up to {VERSION}. Update the library."
        )
    checked = dict(state)
    if state["length"] != length and not (state["length"] is None or length is None):
        message = (
            f"the loader's data has {length} samples, the saved state is of {state['length']}: position {state['position']} is "
            f"now a different sample. Resume with the same data, or start a new run from the weights."
        )
        if strict:
            raise ResumeError(message)
        warn(f"{message} Epoch {state['epoch']} starts from its beginning.")
        checked["position"] = 0
    elif last is not None and checked["position"] > last:
        raise StateError(f"loader state: position {checked['position']} is past the end of the epoch ({last} samples).")
    return checked
