"""Every moment of a run that a plugin can attend, as one enumeration, and how trainer callbacks spell each.

The picture below is the loop itself. It is a constant, because `Engine.explain()` prints the same picture with every
plugin in place: the documentation and the report cannot drift apart.
"""

from enum import StrEnum
from typing import NamedTuple

from drivetrain.core.errors import ConfigError, unknown_name

LOOP = """The loop, as a picture: what happens in a run, in order.

INIT                          the end of the constructor: the model is still plain, surgery happens here
BEFORE_LOAD                   in every train(), whether or not something is restored
AFTER_LOAD                    the model is final from here on
FIT_START                     training_run_start()
per iteration (only when an iteration length is set)
  ITERATION_START
  per epoch
    EPOCH_START               train_epoch_start()
    per batch from the loader
      BEFORE_DATALOADER
      AFTER_DATALOADER        the batch is on the device
      BATCH_START
      BEFORE_TRAIN_BATCH      when an accumulation window opens
      per micro-batch
        BEFORE_FORWARD        calculate_train_batch_loss(batch)
        AFTER_FORWARD
        BEFORE_LOSS
        AFTER_LOSS            the loss that is trained on
        STEP_OUTPUT           once per batch, before its last backward
        BEFORE_BACKWARD       backward_step(loss)
        AFTER_BACKWARD
      when the accumulation window closes
        AFTER_TRAIN_BATCH     gradients are complete and unscaled: clip, inspect
        BEFORE_STEP           optimizer_step()
        AFTER_STEP            then scheduler_step(), optimizer_zero_grad()
      BATCH_END
      BATCH_CHECKPOINT
    EPOCH_END                 train_epoch_end()
    evaluation, when it is due (a stand-alone evaluate() wraps it in its own pair)
      EVAL_STANDALONE_START   evaluation_run_start()
      EVAL_BEFORE_ALL
      per evaluator
        EVAL_START            eval_epoch_start()
        per batch
          EVAL_BATCH_START
          EVAL_BEFORE_FORWARD calculate_eval_batch_loss(batch)
          EVAL_AFTER_FORWARD
          EVAL_BATCH_END
        EVAL_END              eval_epoch_end()
      EVAL_AFTER_ALL
      EVAL_STANDALONE_END     evaluation_run_end()
    EPOCH_CHECKPOINT          training_run_epoch_end()
  ITERATION_END
  ITERATION_CHECKPOINT
FIT_END                       training_run_end()
STOP                          when StopTrainingError ends the run
predict()
  PREDICT_START
  per batch
    PREDICT_BATCH_START
    PREDICT_BEFORE_FORWARD    calculate_predict_batch(batch)
    PREDICT_AFTER_FORWARD
    PREDICT_BATCH_END
  PREDICT_END
"""


class Event(StrEnum):
    __doc__ = LOOP

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    STEP_OUTPUT = "step_output"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BEFORE_STEP = "before_step"
    AFTER_STEP = "after_step"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"
    STOP = "stop"

    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_END = "eval_standalone_end"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    # An event is looked up on every fire: str's hash is cached in the object, and "batch_end" finds Event.BATCH_END.
    __hash__ = str.__hash__

    @classmethod
    def _missing_(cls, value: object) -> "Event":
        if isinstance(value, str) and (folded := value.strip().lower()) in cls._value2member_map_:
            return cls(folded)
        raise ConfigError(unknown_name("event", value, [event.value for event in cls]))

    @property
    def is_before_event(self) -> bool:
        """Whether something is about to happen: `before_*` and `*_start`."""
        return "before_" in self or self.endswith("_start")

    @property
    def is_after_event(self) -> bool:
        """Whether something has just happened: `after_*` and `*_end`."""
        return "after_" in self or self.endswith("_end")

    @property
    def canonical_name(self) -> str:
        """The event without `before_`, `after_`, `_start`, `_end`: both halves of a pair share it."""
        name = self._value_.replace("before_", "").replace("after_", "")
        return name.removesuffix("_start").removesuffix("_end")

    @property
    def is_eval(self) -> bool:
        """Whether the event belongs to evaluation."""
        return self.startswith("eval_")

    @property
    def is_predict(self) -> bool:
        """Whether the event belongs to prediction."""
        return self.startswith("predict_")

    @property
    def partner(self) -> "Event | None":
        """The other half of a true pair, or None.

        What an algorithm sets up in the first half of a true pair it takes down in the second; only those unwind in
        reverse. `BEFORE_DATALOADER`/`AFTER_DATALOADER` and their like are two moments, not a bracket.
        """
        return _PARTNERS.get(self)


TRUE_PAIRS: tuple[tuple[Event, Event], ...] = (
    (Event.BEFORE_FORWARD, Event.AFTER_FORWARD),
    (Event.BEFORE_LOSS, Event.AFTER_LOSS),
    (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
    (Event.BEFORE_STEP, Event.AFTER_STEP),
    (Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END),
    (Event.EVAL_START, Event.EVAL_END),
    (Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD),
    (Event.PREDICT_START, Event.PREDICT_END),
    (Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD),
)
_PARTNERS: dict[Event, Event] = {a: b for first, second in TRUE_PAIRS for a, b in ((first, second), (second, first))}


class Spelling(NamedTuple):
    """How a trainer callback spells one event: its `on_*` method, the older names for it, and the arguments it receives.

    `on_*` methods are called `method(trainer, **arguments)`. The arguments are read from attributes of the same name of the state
    when the event fires. The first name is canonical.
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()


def _spelt(*names: str, carries: str = "") -> Spelling:
    return Spelling(names, tuple(carries.split()))


SPELLINGS: dict[Event, Spelling] = {
    Event.INIT: _spelt("on_init_end"),
    Event.FIT_START: _spelt("on_training_run_start", "on_train_run_begin"),
    Event.EPOCH_START: _spelt("on_train_epoch_start", "on_train_epoch_begin"),
    Event.BATCH_START: _spelt("on_train_step_start", "on_train_step_begin"),
    Event.STEP_OUTPUT: _spelt("on_train_step_end", carries="batch batch_output step"),
    Event.EPOCH_END: _spelt("on_train_epoch_end"),
    Event.EPOCH_CHECKPOINT: _spelt("on_training_run_epoch_end"),
    Event.FIT_END: _spelt("on_training_run_end", "on_train_run_end"),
    Event.STOP: _spelt("on_stop_training_error"),
    Event.EVAL_STANDALONE_START: _spelt("on_evaluation_run_start"),
    Event.EVAL_START: _spelt("on_eval_epoch_start", "on_eval_epoch_begin", carries="is_intermediate"),
    Event.EVAL_BATCH_START: _spelt("on_eval_step_start", "on_eval_step_begin"),
    Event.EVAL_BATCH_END: _spelt("on_eval_step_end", carries="batch batch_output"),
    Event.EVAL_END: _spelt("on_eval_epoch_end", carries="is_intermediate"),
    Event.EVAL_STANDALONE_END: _spelt("on_evaluation_run_end"),
    Event.PREDICT_START: _spelt("on_predict_start"),
    Event.PREDICT_BATCH_START: _spelt("on_predict_step_start"),
    Event.PREDICT_BATCH_END: _spelt("on_predict_step_end", carries="batch batch_output"),
    Event.PREDICT_END: _spelt("on_predict_end"),
}

# Hooks that are not events of the loop: they are called by name when they are needed.
OCCASIONAL_HOOKS: frozenset[str] = frozenset({"on_exception", "on_intermediate_evaluation_end"})

EVENT_OF_HOOK: dict[str, Event] = {name: event for event, spelling in SPELLINGS.items() for name in spelling.names}


def spellings(event: Event) -> tuple[str, ...]:
    """Return every method name that means `event`, in order of preference.

    >>> spellings(Event.FIT_START)
    ('on_training_run_start', 'on_train_run_begin', 'fit_start')
    """
    spelling = SPELLINGS.get(event)
    return (*(spelling.names if spelling else ()), event.value)
