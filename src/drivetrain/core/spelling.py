"""How a trainer callback spells each event: its `on_*` method, the older names for it, and the arguments it receives.

`on_*` methods are called `method(trainer, **arguments)`. The arguments are read from attributes of the same name of the
state at the moment the event fires.
"""

from dataclasses import dataclass

from drivetrain.core.event import Event


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The trainer-callback names of one event; the first is canonical."""

    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()


def _spelt(*names: str, carries: str = "") -> Spelling:
    return Spelling(names=names, arguments=tuple(carries.split()))


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

# Hooks that are no event of the loop: they are called by name, when their occasion arises.
OCCASIONAL_HOOKS: frozenset[str] = frozenset({"on_exception", "on_intermediate_evaluation_end"})

EVENT_OF_HOOK: dict[str, Event] = {name: event for event, spelling in SPELLINGS.items() for name in spelling.names}


def spellings(event: Event) -> tuple[str, ...]:
    """Return every method name that means `event`, in order of preference.

    >>> spellings(Event.FIT_START)
    ('on_training_run_start', 'on_train_run_begin', 'fit_start')
    """
    spelling = SPELLINGS.get(event)
    return (*(spelling.names if spelling else ()), event.value)


def hook_name(event: Event) -> str | None:
    """Return the canonical `on_*` name of `event`, or None when trainer callbacks have no word for it."""
    spelling = SPELLINGS.get(event)
    return spelling.names[0] if spelling else None
