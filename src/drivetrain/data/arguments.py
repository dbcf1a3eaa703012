"""The loader's arguments, checked while it is built: wrong ones are named before any data is read."""

import inspect
from collections.abc import Mapping
from typing import Any, get_args

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from drivetrain.core.arguments import check_count
from drivetrain.core.errors import ParameterError, unknown_name
from drivetrain.core.types import Settings
from drivetrain.data.iterable import IterableMode
from drivetrain.data.randomness import RngMode

OWN_NAMES: tuple[str, ...] = (
    *("shuffle", "random_seed", "sampler", "batch_sampler", "move_output", "loading_bar"),
    *("global_batch_size", "rng", "prefetch", "resident", "iterable", "name"),
)
TORCH_NAMES = tuple(
    name
    for name in inspect.signature(DataLoader.__init__).parameters
    if name not in ("self", "dataset", "shuffle", "sampler", "batch_sampler")
)


def check_arguments(dataset: object, own: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Reject what cannot work: names, values and combinations."""
    for name in given:
        if name not in TORCH_NAMES:
            raise ParameterError(unknown_name("argument", name, TORCH_NAMES + OWN_NAMES, where="SmartDataLoader"))
    _check_values(own, given)
    _check_combinations(dataset, own, given)


def _check_values(own: Mapping[str, object], given: Mapping[str, object]) -> None:
    if own["shuffle"] not in (True, False, None) or type(own["shuffle"]) is int:
        raise ParameterError(
            f"shuffle={own['shuffle']!r}: expected True or False. The second argument is shuffle; the batch size is a keyword: "
            f"batch_size={own['shuffle']!r}."
        )
    for name, choices in (
        ("rng", get_args(RngMode)),
        ("iterable", get_args(IterableMode)),
        ("resident", ("auto", True, False)),
    ):
        if own[name] not in choices or (
            name == "resident" and isinstance(own[name], int) and not isinstance(own[name], bool)
        ):
            raise ParameterError(unknown_name("value", own[name], map(str, choices), where=name))
    check_count("prefetch", own["prefetch"], at_least=0, error=ParameterError)
    if own["random_seed"] is not None and not _is_whole(own["random_seed"]):
        raise ParameterError(
            f"random_seed={own['random_seed']!r}: expected a whole number, or None for the run's seed."
        )
    if own["name"] is not None and not isinstance(own["name"], str):
        raise ParameterError(f"name={own['name']!r}: expected a text that identifies this loader, or None.")
    if own["global_batch_size"] is not None:
        check_count("global_batch_size", own["global_batch_size"], at_least=1, error=ParameterError)
    if given.get("batch_size", 1) is not None:
        check_count("batch_size", given.get("batch_size", 1), at_least=1, error=ParameterError)
    check_count("num_workers", given.get("num_workers", 0), at_least=0, error=ParameterError)


def _check_combinations(dataset: object, own: Mapping[str, object], given: Mapping[str, object]) -> None:
    if own["global_batch_size"] is not None:
        for name in ("batch_size", "batch_sampler"):
            if name in given or own.get(name) is not None:
                raise ParameterError(
                    f"global_batch_size={own['global_batch_size']} and {name} are both given; each decides the size of a batch. "
                    "Give one: batch_size is per process, global_batch_size is over all of them."
                )
    if isinstance(dataset, IterableDataset):
        for name in ("shuffle", "sampler", "batch_sampler"):
            if own[name]:
                raise ParameterError(
                    f"{name} is given with an IterableDataset, which has no index to choose from. Shuffle inside the dataset, or use a "
                    "dataset with __getitem__ and __len__."
                )
    if own["sampler"] is not None and own["shuffle"]:
        raise ParameterError("sampler and shuffle=True are both given; each decides the order. Give one of them.")
    if own["batch_sampler"] is not None:
        clash = [name for name in ("batch_size", "drop_last") if given.get(name, None) not in (None, 1, False)]
        clash += [name for name in ("shuffle", "sampler") if own[name]]
        if clash:
            raise ParameterError(
                f"batch_sampler is given with {' and '.join(clash)}, which it decides itself. Leave them out."
            )
    if given.get("batch_size", 1) is None and given.get("drop_last"):
        raise ParameterError(
            "batch_size=None turns batching off, so drop_last has nothing to drop. Leave one of them out."
        )
    if given.get("in_order") is False:
        raise ParameterError(
            "in_order=False gives batches in no fixed order, so a position in the data has no meaning. Leave it out, or use torch's "
            "DataLoader."
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that make a loader like a plain torch one."""
    arguments: Settings = {
        "dataset": loader.dataset,
        "collate_fn": None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn,
        **{
            name: getattr(loader, name)
            for name in ("num_workers", "pin_memory", "timeout", "worker_init_fn", "generator")
        },
    }
    if loader.num_workers:
        names = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
        arguments.update({name: getattr(loader, name) for name in names})
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return {**arguments, "batch_sampler": loader.batch_sampler}
    arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if isinstance(loader.dataset, IterableDataset) or type(loader.sampler) is SequentialSampler:
        return arguments
    sampler = loader.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return {**arguments, "shuffle": True}
    return {**arguments, "sampler": sampler}
