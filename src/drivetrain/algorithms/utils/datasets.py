"""Adding a transform to the data of a loader without touching the dataset it was made from.

Training and evaluation often share one dataset object. So the dataset is copied (its data is not), the copy's transform is
replaced by a copy with one more step, and only the training loader gets it.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from drivetrain.algorithms.utils.primitives import is_pil
from drivetrain.context.state import State
from drivetrain.core import Algorithm, Event, Logger
from drivetrain.core.containers import same_tuple
from drivetrain.core.errors import ConfigError, ConfigTypeError
from drivetrain.data.loader import SmartDataLoader
from drivetrain.runtime.ranks import is_distributed

Transform = Callable[[Any], Any]

TO_TENSOR = frozenset(
    {"ToTensor", "PILToTensor", "ToImage", "ToImageTensor", "ToDtype", "ConvertImageDtype", "Normalize"}
)
"""Classes of torchvision after which an image is no longer what an image transform expects."""


class Steps:
    """Transforms one after another."""

    def __init__(self, *transforms: Transform):
        self.transforms = list(transforms)

    def __call__(self, image: object) -> object:
        for transform in self.transforms:
            image = transform(image)
        return image

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.transforms))})"


class TransformedDataset(Dataset[object]):
    """A dataset whose images pass through a transform; of a sample the image is the first entry, or the first that is one."""

    def __init__(self, dataset: Any, transform: Transform):
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> object:
        sample = self.dataset[index]
        if isinstance(sample, list | tuple):
            items = [self.transform(sample[0]), *sample[1:]]
            return same_tuple(sample, items) if isinstance(sample, tuple) else type(sample)(items)
        if isinstance(sample, Mapping):
            for name, value in sample.items():
                if is_pil(value) or (isinstance(value, Tensor) and value.ndim == 3):
                    return {**sample, name: self.transform(value)}
            raise ConfigTypeError(f"{self.transform} found no image among {', '.join(map(str, sample))}.")
        return self.transform(sample)


def with_transform(dataset: object, transform: Transform) -> object:
    """Return a dataset whose images also pass through `transform`; the one given stays as it is.

    The transform is placed before the first step that makes tensors, in a copy of the dataset's own.
    """
    changed: Any = copy.copy(dataset)
    if isinstance(dataset, Subset):
        changed.dataset = with_transform(dataset.dataset, transform)
        return changed
    if not hasattr(dataset, "transform"):
        if isinstance(dataset, IterableDataset):
            raise ConfigTypeError(
                f"{type(dataset).__name__} is a stream without a `transform`: apply {transform} inside the dataset, "
                f"or give it that attribute."
            )
        return TransformedDataset(dataset, transform)
    changed.transform = _extended(dataset.transform, transform)
    paired = getattr(dataset, "transforms", None)
    if hasattr(paired, "transform"):  # torchvision keeps the same transform a second time, next to the target's
        changed.transforms = copy.copy(paired)
        changed.transforms.transform = changed.transform
    return changed


def _extended(old: Any, transform: Transform) -> Transform:
    """Return a copy of a transform with one more step at its place."""
    if old is None:
        return transform
    steps = getattr(old, "transforms", None)
    if not isinstance(steps, list | tuple):
        return Steps(transform, old) if type(old).__name__ in TO_TENSOR else Steps(old, transform)
    place = next((place for place, step in enumerate(steps) if type(step).__name__ in TO_TENSOR), len(steps))
    changed = copy.copy(old)
    changed.transforms = [*steps[:place], transform, *steps[place:]]
    return changed


def rebuild_in_place(loader: SmartDataLoader[object], **changes: object) -> None:
    """Give a loader other arguments, as `rebuild` does, without those who hold it having to change theirs."""
    changed = loader.rebuild(**changes)
    vars(loader).clear()
    vars(loader).update(vars(changed))


def join_dataset(state: State, transform: Transform, who: str) -> None:
    """Add a transform to the training data of a run, unless the loader kept it from an earlier one; order, place and seed stay."""
    loader = getattr(state.train_dataloader, "dl", state.train_dataloader)  # a limited loader is a slice of one
    dataset = getattr(loader, "dataset", None)
    if _carries(dataset, transform):
        return
    changed = with_transform(dataset, transform)
    if isinstance(loader, SmartDataLoader):
        if is_distributed():
            loader.ddp()  # the seed that is carried over must be everyone's
        place = loader.state_dict()
        rebuild_in_place(loader, dataset=changed)
        loader.load_state_dict(place)
    elif isinstance(loader, DataLoader):
        # Torch guards the attribute, because a sampler may not fit; here the length stays.
        vars(loader).update(dataset=changed, _iterator=None)
    else:
        raise ConfigError(
            f"{who} changes the training data, but the loader is a {type(loader).__name__} whose dataset cannot be reached. Give train() a "
            "dataset or a DataLoader."
        )


class DatasetTransform(Algorithm):
    """Adds a transform to the training data; the dataset itself, which evaluation may share, is left alone."""

    events = frozenset({Event.FIT_START})
    reads, writes = ("dataloader",), ("dataloader",)
    tags = frozenset({"augment"})
    _transform: Transform

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        join_dataset(state, self._transform, str(self))


def _carries(dataset: object, transform: Transform) -> bool:
    if isinstance(dataset, Subset):
        return _carries(dataset.dataset, transform)
    held = getattr(dataset, "transform", None)
    return held is transform or any(step is transform for step in getattr(held, "transforms", None) or ())
