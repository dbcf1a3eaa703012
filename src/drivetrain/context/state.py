"""The State: the Context that a Trainer drives and algorithms change.

Everything an algorithm may look at or replace at an event is a plain attribute here. Fields of one step (batch,
outputs, loss, timings) are transient: never saved, never moved. Time is kept by `clock`, whose counters the loop
advances; `timestamp` is a picture of it. Randomness of algorithms comes from `rng(name)`: one generator for each
name, different on each rank, saved and restored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drivetrain.context.attributes import AttributesKind, PlainAttributes
from drivetrain.context.batch import BatchKey, batch_get, batch_set
from drivetrain.context.context import Context
from drivetrain.context.kinds import GeneratorsKind, HeldKind, Kind, PluginsKind
from drivetrain.context.loading import LoadReport
from drivetrain.core.plugin import Plugin
from drivetrain.core.time import Clock, Time, TimeLike, Timestamp, TimeUnit, elapsed_duration, ensure_time
from drivetrain.core.types import Item, StateDict
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.ranks import data_rank
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import capture_rng, derive_seed, restore_rng

_PLUGINS, _HELD, _GENERATORS = PluginsKind(), HeldKind(), GeneratorsKind()


class State(Context):
    """A training session with a clock, plugins and the parts of the present step.

    >>> state = State(model=torch.nn.Linear(2, 1), rank_zero_seed=1, max_duration="2ep", epoch_notes=[])
    >>> state.set_dataloader(range(4), "train")
    >>> state.clock.next_batch(samples=8)
    >>> state.get_elapsed_duration(), state.timestamp.sample
    (Time(0.125, TimeUnit.DURATION), 8)
    """

    transient: ClassVar[frozenset[str]] = frozenset(
        (
            "batch outputs loss losses batch_output total_loss_dict metric_outputs sample_index step is_intermediate timings dataloader "
            "dataloader_label profiler make_optimizer previous_timestamp eval_timestamp predict_timestamp"
        ).split()
    )
    # Settings of this run, not state of the session: a resumed run brings its own.
    _excluded = frozenset(
        (
            "run_name evaluators precision precision_config accumulation_steps device_train_microbatch_size auto_microbatching "
            "dataset_resumption"
        ).split()
    )
    _kinds: ClassVar[dict[str, Kind]] = {
        "algorithms": _PLUGINS,
        "callbacks": _PLUGINS,
        "generators": _GENERATORS,
        "plain_attributes": AttributesKind(),
    }
    _holders = frozenset({"model", "loss_fn", "optimizers", "schedulers", "scaler", "train_dataloader"})

    window_batches: Item
    history: Item
    epoch_loss: Item
    gradients: Item
    loggers: list[object]
    custom_entries: Item
    trained_apart: list[Tensor]
    _rank_local: dict[str, Callable[..., object]]
    make_optimizer: Callable[..., torch.optim.Optimizer] | None
    """`make_optimizer(name, groups, **settings)`, installed by the Trainer for algorithms that bring an optimizer."""
    dataloader_label: str | None

    def __init__(
        self,
        model: Item = None,
        rank_zero_seed: int | None = None,
        run_name: str = "",
        device: torch.device | str | None = None,
        max_duration: TimeLike | None = None,
        *,
        seed: int | None = None,
        optimizers: object = (),
        schedulers: object = (),
        dataloader_len: TimeLike | None = None,
        **items: object,
    ):
        unset: Item = None  # whatever a driver or a step assigns later
        self.model, self.loss_fn = model, unset
        self.optimizers, self.schedulers, self.scaler = _as_tuple(optimizers), _as_tuple(schedulers), unset
        self.rank_zero_seed, self.run_name = (rank_zero_seed if seed is None else seed), run_name
        self.clock = Clock()
        self.plain_attributes = PlainAttributes()
        self.generators: dict[str, torch.Generator] = {}
        self.algorithms: list[Plugin] = []
        self.callbacks: list[object] = []
        self.device, self.max_duration = device, max_duration

        self.train_dataloader = self.dataset_state = unset
        self.evaluators: list[object] = []
        self.train_metrics: StateDict = {}
        self.eval_metrics: StateDict = {}
        self.precision = self.precision_config = self.device_train_microbatch_size = unset
        self.auto_microbatching, self.accumulation_steps = False, 1
        self.dataset_resumption: StateDict = {}

        self.batch = self.outputs = self.loss = self.losses = self.batch_output = unset
        self.total_loss_dict: StateDict = {}
        self.metric_outputs = self.sample_index = self.timings = self.profiler = unset
        self.make_optimizer, self.dataloader, self.dataloader_label = None, unset, None
        self.step, self.is_intermediate = 0, False
        self.previous_timestamp: Timestamp | None = None
        self.eval_timestamp, self.predict_timestamp = Timestamp(), Timestamp()
        super().__init__(**items)
        self.dataloader_len = dataloader_len

    _before_load: Callable[[StateDict], None] | None = None  # a driver may bring the session into the saved shape

    def load_state_dict(self, state: StateDict, strict: bool = True) -> LoadReport:
        """Restore a saved state; what drives this State may first add what the saved model was made with."""
        if self._before_load is not None:
            self._before_load(state)
        return super().load_state_dict(state, strict)

    _side_file: object = None  # an item that checkpoints refer to instead of holding it, see `checkpoint.snapshot`

    # Time.

    @property
    def timestamp(self) -> Timestamp:
        """The present moment, as a value that stays."""
        return self.clock.snapshot()

    @property
    def max_duration(self) -> Time | None:
        """When the run ends; a string such as `"10ep"` is understood, a bare number counts epochs."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, value: TimeLike | None) -> None:
        self._max_duration = None if value is None else ensure_time(value, TimeUnit.EPOCH)
        self._planned_duration = self._max_duration

    def get_elapsed_duration(self) -> Time | None:
        """Return how much of the run is done, as a fraction (`dur`), or None when its length is not known."""
        fraction = elapsed_duration(self.clock, self._max_duration, self._batches_per_epoch)
        return None if fraction is None else Time(fraction, TimeUnit.DURATION)

    def stop_training(self) -> None:
        """End the run after the present batch."""
        self.stop_at(Time(self.clock.batch, TimeUnit.BATCH))

    def stop_at(self, end: Time) -> None:
        """End the run earlier than planned; its schedules keep the planned length, so that a resumed run continues them."""
        self._max_duration = end

    @property
    def planned_duration(self) -> Time | None:
        """`max_duration` as it was before the run was stopped."""
        return self._planned_duration

    # Data.

    _dataloader_len: Time | None = None
    _batches_per_epoch: int | None = None

    @property
    def dataloader_len(self) -> Time | None:
        """The length of the present loader in batches, or None when it is not known."""
        return self._dataloader_len

    @dataloader_len.setter
    def dataloader_len(self, value: TimeLike | None) -> None:
        self._dataloader_len = None if value is None else ensure_time(value, TimeUnit.BATCH)
        if self.dataloader_label in (None, "train"):  # the fraction of an epoch is measured in training batches
            self._batches_per_epoch = None if self._dataloader_len is None else int(self._dataloader_len)

    def set_dataloader(
        self, dataloader: object = None, dataloader_label: str | None = None, dataloader_len: TimeLike | None = None
    ) -> None:
        """Set the loader that the loop reads now; its length is computed unless given."""
        self.dataloader = dataloader
        self.dataloader_label = None if dataloader is None else dataloader_label
        if dataloader is None:
            self._dataloader_len = None
        else:
            self.dataloader_len = length(dataloader) if dataloader_len is None else dataloader_len

    def batch_get_item(self, key: BatchKey) -> Any:
        """Return a part of the current batch; `drivetrain.context.batch` describes the keys."""
        return batch_get(self.batch, key)

    def batch_set_item(self, key: BatchKey, value: object) -> None:
        """Replace a part of the present batch."""
        self.batch = batch_set(self.batch, key, value)

    @property
    def output(self) -> Any:
        """Another name for `outputs`."""
        return self.outputs

    @output.setter
    def output(self, value: Item) -> None:
        self.outputs = value

    # Device and randomness.

    @property
    def device(self) -> torch.device:
        """Where the session is; setting it moves nothing, `to` does."""
        return super().device

    @device.setter
    def device(self, value: torch.device | str | None) -> None:
        self._device = None if value is None else choose_device(value)

    @property
    def seed(self) -> int:
        """The seed of the run, the same on all ranks; without one given, the experiment's or torch's."""
        if self.rank_zero_seed is None:
            run = current_run()
            self.rank_zero_seed = torch.initial_seed() if run is None else run.seed
        return self.rank_zero_seed

    @seed.setter
    def seed(self, value: int | None) -> None:
        self.rank_zero_seed = value

    def rng(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return the generator of that name on a device: made on first use, different on each rank, saved and restored."""
        if device == "cpu" and name in self.generators:
            return self.generators[name]
        kind = torch.device(device).type
        key = name if kind == "cpu" else f"{name}@{kind}"
        generator = self.generators.get(key)
        if generator is None or generator.device.type != kind:
            generator = torch.Generator(device=device).manual_seed(derive_seed(self.seed, name, data_rank()))
            self.generators[key] = generator
        return generator

    def capture_random(self) -> StateDict:
        """Return the random states of the process (`rng`) and of the algorithms (`generators`)."""
        own = {name: generator.get_state() for name, generator in self.generators.items()}
        return {"rng": capture_rng(), "generators": own}

    def restore_random(self, rng: StateDict, generators: Mapping[str, Tensor]) -> None:
        """Restore what `capture_random` returned. A generator that was made since then starts again."""
        restore_rng(rng)
        for name, generator in self.generators.items():
            if name in generators:
                generator.set_state(generators[name])
            else:
                generator.manual_seed(generator.initial_seed())

    @contextmanager
    def preserve_random(self) -> Iterator[None]:
        """Restore all random states at the end of the block: around a pass through the model that the run must not notice."""
        captured = self.capture_random()
        try:
            yield
        finally:
            self.restore_random(**captured)

    def _seed(self) -> int:
        self.rank_zero_seed = broadcast_from_master(self.seed)
        return self.rank_zero_seed

    def _watch(self, trained: Iterable[Tensor] = ()) -> None:
        """Take down the attributes of new parts, and save what is trained outside of the model and the loss: a function may refer to it."""
        self.plain_attributes.watch(self)
        known = set(map(id, self.loss_fn.parameters())) if isinstance(self.loss_fn, nn.Module) else set()
        if apart := [tensor for tensor in trained if id(tensor) not in known]:
            self.trained_apart = apart

    def _own_kind(self, name: str, item: object) -> Kind | None:
        if name in self._holders and (item is None or isinstance(item, list | tuple)):
            return _HELD
        return self._kinds.get(name)


def _as_tuple(value: object) -> tuple[Item, ...]:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def length(loader: Any) -> int | None:
    """Return the number of batches of a loader, None for one without a length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):  # an iterable dataset has no length
        return None
