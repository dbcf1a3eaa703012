"""What preparing a run decides, in one object.

`train()` makes a new `Run` and `setup.py` fills it, from top to bottom, before the first step. The loop, evaluations, checkpoints
and callbacks read it afterwards. Nothing in it refers to the Trainer, so a finished run keeps no loader alive through a reference
cycle.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from drivetrain.core.engine import Engine, Fire
from drivetrain.core.errors import ResumeError, StateError, warn
from drivetrain.core.event import Event
from drivetrain.core.time import Clock, Interval
from drivetrain.core.types import Settings, StateDict
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.randomness import generator_states, held_generators, set_generators
from drivetrain.module.compilation import JointStep, replays_graphs
from drivetrain.module.loss_items import LossWatch
from drivetrain.module.stepper import Stepper
from drivetrain.module.wrapping import own_loss
from drivetrain.runtime.codec import pack, unpack
from drivetrain.runtime.ranks import data_rank, num_data_ranks
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.train import loaders
from drivetrain.train.agreement import Agreement
from drivetrain.train.batches import BatchForm, BatchOutput, WholeForm, batch_size_of, find_form
from drivetrain.train.checkpoints import CheckpointSchedule
from drivetrain.train.failures import LastGoodState, Recovery
from drivetrain.train.items import WHOLE, KnownBatch, LossCounting, Part
from drivetrain.train.joint_step import JointForm
from drivetrain.train.settings import TrainerOptions, TrainerRunConfig, TrainSettings
from drivetrain.train.tracking import LossTracker, MetricSet, MetricWatch, of_data_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from drivetrain.optim.optim_set import OptimSet
    from drivetrain.train.closures import WindowRepeat
    from drivetrain.train.logbook import StepLosses, StepTimes


@dataclass(kw_only=True, eq=False, slots=True)
class TrainingData:
    """The loaders of a run, and what the loop must know about their batches."""

    train: Any = None  # the training loader
    evaluation: Any = None  # the evaluation loader, or one for each of several evaluation sets
    train_kwargs: Settings | None = None
    """The arguments that the training loader was built with; None when the user built it."""
    eval_kwargs: Settings | None = None
    batches_per_epoch: int | None = None  # None for a loader without a length
    source: SmartDataLoader[Any] | KnownBatch | None = None
    """The `SmartDataLoader` behind the training loader, which counts samples over all ranks; None for a loader of the user's own."""
    may_pad: bool = False
    """Whether a batch may be padding, which only keeps this rank synchronized with ranks that still have samples."""
    replay: "LoaderReplay | None" = None  # for a training loader that cannot restore its position
    reads_index: bool = False  # whether a plugin reads which samples are in a batch
    count_tokens: Callable[..., int] | None = None

    def count(self, batch: object, output: BatchOutput | None, world: int) -> tuple[int, int]:
        """Return the samples and tokens of a batch over all data ranks. `output` is the result of a loss hook, if it is known."""
        tokens = 0 if self.count_tokens is None else self.count_tokens(batch) * world
        source = self.source
        if source is not None and source.batch_info is not None:
            return source.batch_info.global_size, tokens
        return (batch_size_of(None, batch) if output is None else output["batch_size"]) * world, tokens

    def is_padding(self) -> bool:
        """Return whether the current batch has no sample of this rank."""
        info = None if self.source is None else self.source.batch_info
        return self.may_pad and info is not None and info.size == 0


@dataclass(kw_only=True, eq=False, slots=True)
class LossStep:
    """How batches become losses in the current phase: training, evaluation or prediction."""

    after_forward: str = Event.AFTER_FORWARD.value  # the event that `forward` fires
    before_loss: bool = True  # whether `compute_loss` fires BEFORE_LOSS: only in training
    listens_before_loss: bool = False
    is_first: bool = False  # whether the current batch is the first of the run, which is checked
    in_region: bool = False  # whether the default loss hook has opened its autocast region, for model and loss together
    saw_forward: bool = False
    saw_loss: bool = False
    find_form: Callable[[object, object, bool], BatchForm] = find_form
    form: BatchForm | None = None
    form_type: type | None = None
    joint: JointStep | None = None  # model and loss function as one compiled graph, where nothing acts between them
    keeps_outputs: bool = True  # whether it returns outputs
    own_loss: Callable[..., Tensor] | None = None  # the model's `loss(outputs, batch)`, where it has one
    watch: LossWatch | None = None  # follows the loss function of a compiled model's first batch
    copies: bool = False  # whether losses are copied, because the model's next call would overwrite them

    def form_of(self, batch: object, model: object, loss_func: object) -> BatchForm:
        """Return how batches of this type are passed to the model; decided when the type changes."""
        if type(batch) is self.form_type and self.form is not None:
            return self.form
        form = self.form = self.find_form(batch, model, loss_func is not None)
        self.form_type = type(batch)
        self.own_loss = own_loss(model) if isinstance(form, WholeForm) else None
        self.copies = replays_graphs(model) or replays_graphs(loss_func)
        if self.joint is not None:
            form = self.form = JointForm(form, self.joint, self.keeps_outputs)
        return form


class EvaluationState:
    """Counts the evaluations of each set, and stores which sets an interrupted evaluation has finished."""

    def __init__(self, evaluation_loader: object = None):
        several = evaluation_loader if isinstance(evaluation_loader, loaders.EvaluationLoaders) else None
        single = {} if evaluation_loader is None else {"": evaluation_loader}
        self.sets: dict[str, object] = single if several is None else dict(several.items())  # the only one is called ""
        self.counts = dict.fromkeys(self.sets, 0)
        self.finished: list[str] = []  # sets that need not be evaluated again in an evaluation that was interrupted

    @contextmanager
    def counting(self, name: str, loader: object) -> Iterator[list[bool]]:
        """Give a loader the number of this evaluation. An interrupted one (True is put into the list) is not counted."""
        number, before, was_cut = self.counts.get(name, 0), loader_state(loader), list[bool]()
        self.counts[name] = number + 1
        _set_number(loader, number)
        yield was_cut
        if was_cut:
            self.counts[name] = number
            load_loader_state(loader, before, number)
        else:
            _set_number(loader, self.counts[name])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run evaluations that do not count."""
        before = self.state_dict()
        yield
        self.load_state_dict(before)

    def state_dict(self) -> StateDict:
        """Return the counts and the loaders' states."""
        return {
            "counts": dict(self.counts),
            "finished": list(self.finished),
            "loaders": {name: loader_state(loader) for name, loader in self.sets.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a saved state. New sets start from the beginning."""
        self.finished = [name for name in state["finished"] if name in self.sets]
        for name, loader in self.sets.items():
            self.counts[name] = state["counts"].get(name, 0)
            load_loader_state(loader, state["loaders"].get(name), self.counts[name])


@dataclass(kw_only=True, eq=False, slots=True)
class EvaluationPlan:
    """When a run evaluates, and the progress of the current evaluation."""

    is_due: Callable[[Clock], bool] | None = None  # whether to evaluate after a batch; None: only after epochs
    restored_interval: StateDict | None = None  # of the checkpoint, for the interval that is made after it was loaded
    interval: Interval | None = None  # what `is_due` asks, unless it is a function of the user's
    after_epoch: bool = False  # whether an evaluation was due after the last batch of the epoch
    unfinished: Literal["", "evaluation", "epoch", "nothing"] = ""
    """What a resumed run does first; saved with the state. "nothing": the run ended inside its epoch."""
    may_be_cut: bool = (
        False  # whether a signal ends the current evaluation early: one of the run itself, not of a plugin
    )
    was_cut: bool = False  # whether it did
    set_name: str | None = None  # the current evaluation set, where there are several
    state: EvaluationState = field(default_factory=EvaluationState)
    plateau: MetricWatch = field(default_factory=lambda: MetricWatch("", greater_is_better=False))
    """The metric that a plateau schedule follows."""

    def begin_epoch(self) -> None:
        """Forget that the run before ended inside the epoch."""
        self.unfinished = "" if self.unfinished == "nothing" else self.unfinished

    def end_epoch(self, ended: bool) -> None:
        """Note that the epoch needs nothing more; `ended`: the run has reached an end inside it."""
        self.unfinished = "nothing" if ended else ""


@dataclass(kw_only=True, eq=False, slots=True)
class Measures:
    """What is measured in the current phase, until it is recorded."""

    tracker: LossTracker = field(default_factory=LossTracker)  # the mean loss of the epoch, or of an evaluation
    logged: dict[str, LossTracker] = field(default_factory=dict)  # what `log()` collects, by name
    train_items: LossCounting = field(default_factory=LossCounting)  # what the losses of training are means over
    eval_items: dict[str | None, LossCounting] = field(default_factory=dict)
    """The same of evaluations, by the name of the evaluation set."""
    train_metrics: MetricSet = field(default_factory=MetricSet)
    eval_metrics: MetricSet = field(default_factory=MetricSet)
    has_train_metrics: bool = False
    restored_steps: StateDict | None = None  # of the checkpoint, for `step_losses`
    step_losses: "StepLosses | None" = None  # sends losses inside an epoch to the loggers, where there are any
    step_times: "StepTimes | None" = None  # times the steps of this rank, on several processes


@dataclass(kw_only=True, eq=False, slots=True)
class SharedParts:
    """What all runs of one Trainer have in common."""

    options: TrainerOptions = field(default_factory=TrainerOptions)
    own_folders: set[Path] = field(default_factory=set)
    """Checkpoint folders that earlier runs have written to, and that later ones may write to again."""
    scheduler_is_ours: bool = False  # whether a run made the scheduler, so that the next one makes another
    data_ranks: "tuple[int, int, ProcessGroup | None] | None" = None
    """Which samples this rank reads by the plan; None: by its rank."""
    planned_model: nn.Module | None = None  # the model after the plan was applied, in its DDP wrapper
    joint: JointStep | None = None  # model and loss function as one graph, where the plan compiles them so


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Run:
    """One training run, or the idle state of a Trainer that has not trained yet."""

    agreement: Agreement  # what may stop or interrupt the run; all ranks agree on it
    shared: SharedParts = field(default_factory=SharedParts)
    settings: TrainSettings | None = None
    config: TrainerRunConfig | None = None
    data: TrainingData = field(default_factory=TrainingData)
    loss: LossStep = field(default_factory=LossStep)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    measures: Measures = field(default_factory=Measures)
    checkpoints: CheckpointSchedule | None = None
    restored_rng: StateDict | None = None  # of the checkpoint, until the first resumed step
    generate: Mapping[str, object] | None = None
    """The arguments of the model's `generate` in evaluations; None: nothing is generated."""

    # The step.
    fire: Fire = field(default_factory=Fire)
    stepper: Stepper = field(default=None)  # type: ignore[assignment]
    repeat: "WindowRepeat" = field(default=None)  # type: ignore[assignment]
    algorithms_only: Engine | None = None
    """The events of a repeated window, which only algorithms see; not on the State, which the engine refers to."""
    units: "OptimSet | None" = None
    good: LastGoodState | None = None
    recovery: Recovery | None = None  # what to do about skipped updates
    microbatch_size: int | None = None
    part: Part = WHOLE  # of the current batch, where batches are split
    is_ddp: bool = False
    norm_is_tested: bool = False  # whether the norm that clipping computes already shows that a gradient is not finite
    schedules_each_step: bool = True

    # Where it is.
    is_running: bool = False
    is_evaluating: bool = False
    inside_step: bool = False
    epoch_is_recorded: bool = False
    has_boundary_work: bool = True  # whether anything but a signal or a stop can need the host between two batches

    def followed_by(self, agreement: Agreement, settings: TrainSettings) -> "Run":
        """Return the next run of the same Trainer."""
        now = self.measures
        measures = Measures(tracker=now.tracker, train_metrics=now.train_metrics, eval_metrics=now.eval_metrics)
        kept = {name: getattr(self, name) for name in ("shared", "generate", "fire", "stepper", "repeat")}
        return Run(agreement=agreement, settings=settings, measures=measures, **kept)

    def require_settings(self) -> TrainSettings:
        """Return the settings of a run that has begun."""
        assert self.settings is not None, "no run has started"
        return self.settings


# ---------------------------------------------------------------------- what a loader's next iteration depends on
# An evaluation with random data then gives a resumed run the same numbers. A `SmartDataLoader` draws by its seed and the number of the
# evaluation. Of another loader the state is kept, or the generators that it, its samplers and its dataset hold. Those of the process need
# nothing: an evaluation starts from those of training, and restores them.


def loader_state(loader: object) -> StateDict | None:
    """Return what a loader's next iteration depends on, as far as it is known."""
    inner, state = loaders.unsliced(loader), StateDict()
    if isinstance(inner, SmartDataLoader):
        place = inner.state_dict()
        state["smart"] = {name: place[name] for name in ("seed", "sampler") if name in place}
    elif hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict"):
        try:
            return {"own": pack(inner.state_dict())}
        except StateError:  # it holds what cannot be saved
            return None
    held = generator_states(held_generators(inner))
    return {**state, "generators": held} if held else state or None


def load_loader_state(loader: object, state: StateDict | None, number: int) -> None:
    """Make a loader's next iteration evaluation `number` of the saved run."""
    inner = loaders.unsliced(loader)
    _set_number(inner, number)
    if state is None:
        return
    if isinstance(inner, SmartDataLoader) and "smart" in state:
        place = inner.state_dict()
        saved = {name: value for name, value in state["smart"].items() if name in place}
        inner.load_state_dict({**place, **saved, "epoch": number, "position": 0})
    elif "own" in state and hasattr(inner, "load_state_dict"):
        inner.load_state_dict(unpack(state["own"]))
    set_generators(held_generators(inner), state.get("generators", {}))


def _set_number(loader: object, number: int) -> None:
    if (smart := loaders.smart_loader(loader)) is not None:
        smart.set_epoch(number)


class LoaderReplay:
    """Lets a loader that cannot restore its position go on inside an epoch, by reading the epoch's first batches again.

    Their order follows from the random generators as they were when the epoch began, which are saved.
    """

    def __init__(self, loader: Iterable[object]):
        self._loader = inner = loaders.unsliced(loader)
        self._name = type(inner).__name__
        self._settings = {"batch_size": getattr(inner, "batch_size", None), "number of batches": loaders.length(inner)}
        self._num_workers = getattr(inner, "num_workers", None)
        self._last = loaders.length(loader)  # after so many batches an epoch ends; None if that is not known
        self._start: StateDict | None = None  # how the current epoch began
        self._saved: list[StateDict | None] = []  # of each data rank of a checkpoint
        self._restored: StateDict | None = None
        self._before_ahead: StateDict | None = None  # the random state when the batch ahead of the loop was read

    def state_dict(self) -> list[StateDict | None]:
        """Return how the epoch began on each data rank. All ranks must call this."""
        settings = {"settings": self._settings, "num_workers": self._num_workers}
        now = {"now": pack(loader_state(self._loader)), "before_ahead": self._before_ahead}
        return of_data_ranks({**(self._start or {}), **now, **settings})

    def load_state_dict(self, state: list[StateDict | None]) -> None:
        """Take what `state_dict` returned; `go_on_after` uses it."""
        self._saved = state

    def go_on_after(self, done: int) -> str:
        """Let the next epoch go on after its first batches, as the checkpoint did, and return a line that says so."""
        if done in (0, self._last):
            if len(self._saved) == num_data_ranks() and (saved := self._saved[data_rank()]) is not None:
                load_loader_state(self._loader, unpack(saved["now"]), 0)
            return ""
        where = f"the checkpoint was taken {done} batches into an epoch, and the training loader ({self._name}) has no load_state_dict"
        advice = (
            "Give train() the dataset instead of the loader, use drivetrain.SmartDataLoader, or resume from a checkpoint at the end of an "
            "epoch."
        )
        if len(self._saved) != num_data_ranks():
            ranks = f"is of {len(self._saved)} data ranks, not {num_data_ranks()}" if self._saved else "lacks them"
            raise ResumeError(
                f"{where}. Its first batches could be read again, but what is saved of them {ranks}. {advice}"
            )
        saved = self._saved[data_rank()]
        if saved is None or "rng" not in saved:
            raise ResumeError(f"{where}, and how the epoch began is not in the checkpoint. {advice}")
        for name, now in self._settings.items():
            if saved["settings"][name] != now:
                raise ResumeError(
                    f"{where}. Its {name} was {saved['settings'][name]} and is {now}, so other batches would follow. {advice}"
                )
        if saved["num_workers"] != self._num_workers:
            warn(
                f"the training loader had num_workers={saved['num_workers']} and has {self._num_workers}: random changes to its samples "
                "will differ from those of the interrupted run."
            )
        self._start = self._restored = saved
        return f" {self._name} cannot skip {done} batches, so they are read again. A dataset or a SmartDataLoader skips at once."

    def batches(self, loader: Iterable[object], clock: Clock, *, ahead: int) -> Iterator[object]:
        """Iterate over the rest of an epoch. `ahead` is how many batches the loop has read before it trains on them."""
        start, done = self._restored, clock.batch_in_epoch
        if start is None:
            self._start = {"rng": capture_rng(), "loader": pack(loader_state(self._loader))}
            return self._noting(iter(loader)) if ahead else iter(loader)
        self._restored, now = None, capture_rng()
        loaders.set_epoch(loader, clock.epoch)
        restore_rng(start["rng"])
        load_loader_state(self._loader, unpack(start["loader"]), clock.epoch)
        batches = iter(loader)
        found = sum(1 for _ in islice(batches, done))
        if found < done:
            raise ResumeError(
                f"the training loader ({self._name}) has {found} batches, but the checkpoint was taken after {done} batches of the epoch. "
                "Resume with the data of the interrupted run, or from a checkpoint at the end of an epoch."
            )
        before = start.get("before_ahead")
        self._before_ahead, following = before if ahead else None, list[object]()
        if before is not None:  # the saved run had read one more batch
            restore_rng(before)
            following = list(islice(batches, 1))
        restore_rng(now)
        return chain(following, self._noting(batches) if ahead else batches)

    def _noting(self, batches: Iterator[object]) -> Iterator[object]:
        """Keep the random state before each batch that this process makes: training draws numbers in between."""
        if self._num_workers:
            yield from batches
            return
        while True:
            self._before_ahead = capture_rng()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
