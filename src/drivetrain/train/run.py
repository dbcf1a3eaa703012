"""What preparing a run decides, in one object.

`train()` makes a new `Run` and `setup.py` fills it, from top to bottom, before the first step. The loop, evaluations, checkpoints and
callbacks read it afterwards. Nothing in it refers to the Trainer, so a run that has ended keeps no loader alive through a cycle.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.engine import Engine, Fire
from drivetrain.core.event import Event
from drivetrain.core.time import Clock, Interval
from drivetrain.module.loss_items import LossWatch
from drivetrain.module.stepper import Stepper
from drivetrain.train.agreement import Agreement
from drivetrain.train.batches import BatchForm, batch_size_of, find_form
from drivetrain.train.checkpoints import CheckpointSchedule
from drivetrain.train.evaluation_state import EvaluationState
from drivetrain.train.items import WHOLE, LossCounting, Part
from drivetrain.train.recovery import LastGoodState
from drivetrain.train.run_config import TrainerRunConfig
from drivetrain.train.settings import TrainSettings
from drivetrain.train.tracking import LossTracker, MetricWatch

if TYPE_CHECKING:
    from drivetrain.optim.optim_set import OptimSet
    from drivetrain.train.closures import WindowRepeat
    from drivetrain.train.logbook import StepLosses
    from drivetrain.train.step_times import StepTimes


@dataclass(kw_only=True, eq=False, slots=True)
class TrainingData:
    """The loaders of a run, and what the loop must know of their batches."""

    train: Any = None
    """The training loader."""
    evaluation: Any = None
    """The evaluation loader, or one for each of several evaluation sets."""
    train_kwargs: dict[str, Any] | None = None
    """The arguments that the training loader was built with; None when the user built it."""
    eval_kwargs: dict[str, Any] | None = None
    batches_per_epoch: int | None = None
    """None for a loader without a length."""
    source: Any = None
    """The `SmartDataLoader` behind the training loader, which counts samples over all ranks; None for a loader of the user's own."""
    may_pad: bool = False
    """Whether a batch may only keep this rank in step with others that still have samples."""
    reads_index: bool = False
    """Whether a plugin reads which samples are in a batch."""
    count_tokens: Callable[[Any], int] | None = None

    def count(self, batch: object, output: Mapping[str, Any] | None, world: int) -> tuple[int, int]:
        """Return the samples and tokens of a batch over all data ranks; `output` is what a loss hook returned, where that is known."""
        tokens = 0 if self.count_tokens is None else self.count_tokens(batch) * world
        source = self.source
        if source is not None and source.batch_info is not None:
            return source.batch_info.global_size, tokens
        return (batch_size_of(None, batch) if output is None else output["batch_size"]) * world, tokens

    def is_padding(self) -> bool:
        """Return whether the batch in hand has no sample of this rank."""
        return self.may_pad and self.source.batch_info.size == 0


@dataclass(kw_only=True, eq=False, slots=True)
class LossStep:
    """How batches become losses in the phase under way: training, evaluation or prediction."""

    after_forward: str = Event.AFTER_FORWARD.value
    """The event that `forward` fires."""
    before_loss: bool = True
    """Whether `compute_loss` fires BEFORE_LOSS: only in training."""
    listens_before_loss: bool = False
    is_first: bool = False
    """Whether the batch in hand is the first of the run, which is checked."""
    in_region: bool = False
    """Whether the default loss hook has opened its autocast region, for model and loss together."""
    saw_forward: bool = False
    saw_loss: bool = False
    find_form: Callable[[Any, Any, bool], BatchForm] = find_form
    form: BatchForm | None = None
    form_type: type | None = None
    own_loss: Callable[..., Any] | None = None
    """The model's `loss(outputs, batch)`, where it has one."""
    watch: LossWatch | None = None
    """Follows the loss function of a compiled model's first batch."""


@dataclass(kw_only=True, eq=False, slots=True)
class EvaluationPlan:
    """When a run evaluates, and how far the evaluation under way is."""

    is_due: Callable[[Clock], bool] | None = None
    """Whether to evaluate after a batch; None: only after epochs."""
    interval: Interval | None = None
    """What `is_due` asks, unless it is a function of the user's."""
    after_epoch: bool = False
    """Whether an evaluation was due after the last batch of the epoch."""
    unfinished: Literal["", "evaluation", "epoch"] = ""
    """What a resumed run does first; saved with the state."""
    was_cut: bool = False
    """Whether a signal ended the last evaluation early."""
    set_name: str | None = None
    """The evaluation set in hand, where there are several."""
    state: EvaluationState = field(default_factory=EvaluationState)
    plateau: MetricWatch | None = None
    """The metric that a plateau schedule follows."""


@dataclass(kw_only=True, eq=False, slots=True)
class RestoredParts:
    """What a checkpoint held for parts of the run that are made after it was loaded."""

    rng: Any = None
    evaluations: Any = None
    step_losses: Mapping[str, Any] | None = None


@dataclass(kw_only=True, eq=False, slots=True)
class Measures:
    """What is measured in the phase under way, until it is recorded."""

    tracker: LossTracker = field(default_factory=LossTracker)
    """The mean loss of the epoch, or of an evaluation."""
    logged: dict[str, LossTracker] = field(default_factory=dict)
    """What `log()` collects, by name."""
    train_items: LossCounting = field(default_factory=LossCounting)
    """What the losses of training are means over."""
    eval_items: dict[str | None, LossCounting] = field(default_factory=dict)
    """The same of evaluations, by the name of the evaluation set."""
    has_train_metrics: bool = False
    step_losses: "StepLosses | None" = None
    """Sends losses inside an epoch to the loggers, where there are any."""
    step_times: "StepTimes | None" = None
    """Times the steps of this rank, on several processes."""


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Run:
    """One training run, or the idle state of a Trainer that has not trained yet."""

    agreement: Agreement
    """What may end or interrupt the run, agreed on by all ranks."""
    settings: TrainSettings | None = None
    config: TrainerRunConfig | None = None
    data: TrainingData = field(default_factory=TrainingData)
    loss: LossStep = field(default_factory=LossStep)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    measures: Measures = field(default_factory=Measures)
    checkpoints: CheckpointSchedule | None = None
    restored: RestoredParts = field(default_factory=RestoredParts)
    generate: Mapping[str, Any] | None = None
    """The arguments of the model's `generate` in evaluations; None: nothing is generated."""

    # The step.
    fire: Fire = field(default_factory=Fire)
    stepper: Stepper = field(default=None)  # type: ignore[assignment]
    repeat: "WindowRepeat" = field(default=None)  # type: ignore[assignment]
    algorithms_only: Engine | None = None
    """The events of a repeated window, which only algorithms see; not on the State, which the engine refers to."""
    units: "OptimSet | None" = None
    good: LastGoodState | None = None
    microbatch_size: int | None = None
    part: Part = WHOLE
    """Of the batch in hand, where batches are split."""
    is_ddp: bool = False
    norm_is_tested: bool = False
    """Whether the norm that clipping computes already shows that a gradient is not finite."""
    schedules_each_step: bool = True

    # Where it is.
    is_running: bool = False
    is_evaluating: bool = False
    inside_step: bool = False
    epoch_is_recorded: bool = False
    has_boundary_work: bool = True
    """Whether anything but a signal or a stop can need the host between two batches."""

    def followed_by(self, agreement: Agreement, settings: TrainSettings) -> "Run":
        """Return the next run of the same Trainer."""
        return Run(
            agreement=agreement,
            settings=settings,
            measures=Measures(tracker=self.measures.tracker),
            generate=self.generate,
            fire=self.fire,
            stepper=self.stepper,
            repeat=self.repeat,
        )

    def require_settings(self) -> TrainSettings:
        """Return the settings of a run that has begun."""
        assert self.settings is not None, "no run has begun"
        return self.settings
