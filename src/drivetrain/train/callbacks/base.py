"""The callback to derive from, and the list of them that a Trainer holds.

The engine calls callbacks during a run; it asks each one once, when the list changes, which methods it has. Methods
that do nothing are marked as placeholders: they document the events, `super()` finds them, and they cost nothing.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.core.arguments import accepted_names
from drivetrain.core.binding import method_for
from drivetrain.core.event import EVENT_OF_HOOK
from drivetrain.core.plugin import Callback, placeholder

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


OnChange = Callable[[Sequence[object]], None]


class TrainerReference:
    """An attribute of a callback that refers to the trainer of a run without keeping it alive."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{name}_reference"

    def __get__(self, callback: object, owner: type | None = None) -> "Trainer | None":
        reference = vars(callback).get(self._name)
        return None if reference is None else reference()

    def __set__(self, callback: object, trainer: "Trainer | None") -> None:
        vars(callback)[self._name] = None if trainer is None else weakref.ref(trainer)


class TrainerCallback(Callback):
    """Observes a run: define the methods you need. Each is called with the trainer.

    Methods named after an event (`def after_backward(self, state, logger)`) are called too, and so are events of your
    own that `trainer.callback_handler.call_event("on_...", trainer)` fires.
    """

    allow_multiple = False
    """Whether a Trainer may have several callbacks of this class."""
    _trainer = TrainerReference()

    @placeholder
    def on_init_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """The trainer has been created."""

    @placeholder
    def on_training_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Training begins. Loaders, scheduler and configuration exist."""

    @placeholder
    def on_train_epoch_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """A training epoch begins."""

    @placeholder
    def on_train_step_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """The loader has returned a batch."""

    @placeholder
    def on_train_step_end(self, trainer: "Trainer", batch: Any, batch_output: Any, **kwargs: Any) -> None:
        """The loss of a batch is computed, before its backward; also passes `step`, from 0 in the epoch."""

    @placeholder
    def on_train_epoch_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """The batches of an epoch are done and its training metrics are recorded."""

    @placeholder
    def on_eval_epoch_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """An evaluation begins; also passes `is_intermediate`."""

    @placeholder
    def on_eval_step_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """The loader has returned an evaluation batch."""

    @placeholder
    def on_eval_step_end(self, trainer: "Trainer", batch: Any, batch_output: Any, **kwargs: Any) -> None:
        """An evaluation batch is done."""

    @placeholder
    def on_eval_epoch_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """An evaluation is done and its metrics are recorded; also passes `is_intermediate`."""

    @placeholder
    def on_intermediate_evaluation_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """An evaluation inside an epoch is done on all evaluation sets, and training is about to continue."""

    @placeholder
    def on_training_run_epoch_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Training and evaluation of an epoch are done."""

    @placeholder
    def on_training_run_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Training is done. The model is unwrapped."""

    @placeholder
    def on_evaluation_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """`evaluate()` begins."""

    @placeholder
    def on_evaluation_run_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """`evaluate()` ends."""

    @placeholder
    def on_stop_training_error(self, trainer: "Trainer", **kwargs: Any) -> None:
        """A run is stopped early and ends cleanly."""

    @placeholder
    def on_predict_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """`predict()` begins."""

    @placeholder
    def on_predict_step_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """The loader has returned a batch to predict."""

    @placeholder
    def on_predict_step_end(self, trainer: "Trainer", batch: Any, batch_output: Any, **kwargs: Any) -> None:
        """The outputs of a batch are computed."""

    @placeholder
    def on_predict_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """`predict()` ends."""

    @placeholder
    def on_exception(self, trainer: "Trainer", **kwargs: Any) -> None:
        """An exception is about to leave the trainer; also passes `exception`."""


class CallbackHandler:
    """The callbacks of a Trainer, in the user's order. Classes become instances.

    `on_change` gets the current callbacks whenever they change; a handler without an engine calls them itself, by
    `call_event`.
    """

    _is_enabled = True

    def __init__(self, callbacks: Iterable[object] = (), on_change: OnChange | None = None):
        self.watch(on_change)
        self.callbacks = callbacks

    @property
    def callbacks(self) -> tuple[object, ...]:
        """The callbacks. Add one with `add_callback`, or assign another sequence."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[object]) -> None:
        self._callbacks: tuple[object, ...] = ()
        self.add_callbacks(callbacks)

    @property
    def callback_list(self) -> list[str]:
        """The class names of the callbacks."""
        return [type(callback).__name__ for callback in self._callbacks]

    @property
    def _enabled(self) -> bool:
        """Whether callbacks are called at all."""
        return self._is_enabled

    @_enabled.setter
    def _enabled(self, enabled: bool) -> None:
        self._is_enabled = enabled
        self._changed()

    def __iter__(self) -> Iterator[object]:
        """Yield the callbacks in force: none while the handler is disabled."""
        return iter(self._callbacks if self._is_enabled else ())

    def __len__(self) -> int:
        return len(self._callbacks)

    def add_callback(self, callback: object) -> None:
        """Append one callback, or a class to instantiate."""
        self.add_callbacks([callback])

    def add_callbacks(self, callbacks: Iterable[object]) -> None:
        """Append callbacks. A second one of a class is an error unless the class allows it."""
        added = list(self._callbacks)
        for callback in callbacks:
            callback = callback() if isinstance(callback, type) else callback
            if any(type(other) is type(callback) for other in added) and not getattr(callback, "allow_multiple", False):
                present = ", ".join(type(other).__name__ for other in added)
                raise ValueError(
                    f"there are two callbacks of the class {type(callback).__name__} (present: {present}). Keep one "
                    f"of them, or set allow_multiple = True in the class if several make sense."
                )
            added.append(callback)
        self._callbacks = tuple(added)
        self._changed()

    def clear_callbacks(self) -> None:
        """Remove all callbacks."""
        self.callbacks = ()

    def call_event(self, event: str, *args: object, **kwargs: Any) -> None:
        """Call the method `event` of every callback that has it, with the keyword arguments that it takes."""
        known = EVENT_OF_HOOK.get(event)
        for callback in tuple(self):
            name = event if known is None else method_for(callback, known) or event  # whichever spelling it uses
            method = getattr(callback, name if name.startswith("on_") else event, None)
            if callable(method):
                method(*args, **_accepted(method, kwargs))

    def watch(self, on_change: OnChange | None) -> None:
        """Call a function whenever the callbacks change. The object of a bound method is not kept alive."""
        self._on_change = weakref.WeakMethod(on_change) if inspect.ismethod(on_change) else on_change

    def _changed(self) -> None:
        on_change = self._on_change() if isinstance(self._on_change, weakref.WeakMethod) else self._on_change
        if on_change is not None:
            on_change(tuple(self))

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy needs. Only this handler tells its Trainer of changes."""
        return {**vars(self), "_on_change": None}


def is_fresh_run(trainer: "Trainer") -> bool:
    """Return whether a training run starts from the beginning and is not resumed."""
    return trainer.state.clock.batch == 0


def _accepted(method: Callable[..., object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
    names = accepted_names(method)
    return kwargs if names is None else {name: value for name, value in kwargs.items() if name in names}
