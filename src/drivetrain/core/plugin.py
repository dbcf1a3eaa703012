"""What a plugin of the loop declares: where it runs, what it reads and writes, and which plugins it can run with.

A plugin says what it does in class attributes, so that the engine can order, reject and explain it before a step is taken. An `Algorithm`
may change the state, a `Callback` only watches (or lists in `writes` what it changes), and everything else about them is the same.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

from drivetrain.core.arguments import accepted_names
from drivetrain.core.errors import did_you_mean
from drivetrain.core.event import Event
from drivetrain.core.types import JsonValue, Settings, StateDict

Phase = Literal["algorithm", "callback", "sink"]
PHASES: tuple[Phase, ...] = ("algorithm", "callback", "sink")
PluginReference = type | str
"""Another plugin, named by its class, its class name, or a `"#tag"`."""

F = TypeVar("F", bound=Callable[..., object])


@runtime_checkable
class Logger(Protocol):
    """Where plugins send metrics, hyperparameters and images; one object behind it feeds history, recorder and sinks."""

    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Record named values."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """Record settings of the run."""

    def log_images(self, images: object, name: str = "images", step: int | None = None) -> None:
        """Record one image or a batch of them."""


class NullLogger:
    """A logger that keeps nothing, so that callers need not check whether there is one."""

    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Drop the values."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """Drop the settings."""

    def log_images(self, images: object, name: str = "images", step: int | None = None) -> None:
        """Drop the images."""


class Plugin:
    """A plugin of the loop: it declares its events and acts in `apply`."""

    events: frozenset[Event] = frozenset()
    """Where it runs; may be set per instance in `__init__`."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    """Parts of the state: model batch outputs loss grads optimizers schedulers dataloader timestamp settings."""
    before: Iterable[PluginReference] = ()
    after: Iterable[PluginReference] = ()
    conflicts: Iterable[PluginReference] = ()
    """Plugins it cannot run with. A mapping also gives the alternative: `{"CutMix": "put both into OneOf"}`."""
    tags: frozenset[str] = frozenset()
    exclusive: frozenset[str] = frozenset()
    """Those of its tags that only one plugin of a run may carry."""
    members: tuple["Plugin", ...] = ()
    """The plugins a composite is made of."""
    custom_events: frozenset[str] = frozenset()
    """`on_*` methods that are events of the user's own although their names resemble one of ours."""
    phase: Phase = "algorithm"

    _arguments: tuple[tuple[object, ...], dict[str, object]]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Recorded here rather than in __init__, which subclasses replace without calling ours.
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")  # what Python says when there is no __new__
        names = (accepted_names(cls.__init__) if kwargs else None) or [*kwargs]
        if unknown := next((name for name in kwargs if name not in names), None):
            hint = did_you_mean(unknown, names[1:]) or f" Arguments: {', '.join(names[1:])}."
            raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {unknown!r}.{hint}")
        plugin = super().__new__(cls)
        object.__setattr__(plugin, "_arguments", (args, kwargs))
        return plugin

    def match(self, event: Event, state: Any) -> bool:
        """Return whether to act at `event`; must be pure."""
        return event in self.events

    def apply(self, event: Event, state: Any, logger: Logger) -> int | None:
        """Act; the number returned, if any, is kept in the trace."""
        raise NotImplementedError(f"{type(self).__name__} declares events but defines no apply(event, state, logger)")

    def state_dict(self) -> StateDict:
        """Return what must be saved to continue."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take back what `state_dict` returned."""

    def config(self) -> Settings:
        """Return the constructor's arguments as JSON-able values, defaults included."""
        args, kwargs = self._arguments
        if type(self).__init__ is object.__init__:
            return {}
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *parameters = bound.signature.parameters.values()
        named: Settings = {}
        for parameter in parameters:
            value = bound.arguments[parameter.name]
            named.update(value if parameter.kind is parameter.VAR_KEYWORD else {parameter.name: value})
        return {name: jsonable(value) for name, value in named.items()}

    def inference_weights(self, state: Any) -> Mapping[str, object] | None:
        """Return the weights to evaluate or export instead of the trained ones, or None."""
        return None

    def close(self, state: Any, logger: Logger) -> None:
        """Finish: the run is over, the logger still works."""

    def post_close(self) -> None:
        """Release what must outlive every other plugin's `close`."""

    def __str__(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        args, kwargs = self._arguments
        shown = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"{type(self).__name__}({', '.join(shown)})"


class Algorithm(Plugin):
    """A plugin that may change the state."""

    allow_multiple: bool = True
    """Whether a run may hold several of the class."""
    find_unused_parameters: bool = False
    """Whether some parameters may get no gradient in a step, which distributed wrappers must know."""
    backwards_create_graph: bool = False
    """Whether the backward pass must itself be differentiable."""

    @staticmethod
    def required_on_load() -> bool:
        """Return whether a saved model can only be loaded after this algorithm has changed the new one."""
        return False


class Callback(Plugin):
    """A plugin that watches.

    It has one method per event, either in the loop's words, `def batch_end(self, state, logger)`, or in a trainer
    callback's, `def on_train_epoch_end(self, trainer)`; or one `run_event` for all of them, which then replaces the
    first kind (`super().run_event(...)` calls them).
    """

    phase: Phase = "callback"

    def run_event(self, event: Event, state: Any, logger: Logger) -> None:
        """Call this callback's method for `event`, if it has one."""
        method = getattr(self, event.value, None)
        if method is not None:
            method(state, logger)


def placeholder(method: F) -> F:
    """Mark a method that does nothing, so that it can be documented and called with `super()` and still costs nothing.

    >>> class Watcher(Callback):
    ...     @placeholder
    ...     def on_train_epoch_end(self, trainer, **kwargs): ...
    """
    method.is_placeholder = True  # type: ignore[attr-defined]
    return method


def _event_method(event: Event) -> Callable[[object, object, Logger], None]:
    """Return a method of the base for one event: it does nothing, and `super().batch_end(state, logger)` finds it."""

    @placeholder
    def method(self: object, state: object, logger: Logger) -> None: ...

    method.__name__, method.__qualname__ = event.value, f"Callback.{event.value}"
    method.__doc__ = f"Handle {event.name}. The default does nothing."
    return method


for _event in Event:
    setattr(Callback, _event.value, _event_method(_event))


def plugin_name(plugin: object) -> str:
    """Return the name a report uses for `plugin`, which need not be a `Plugin`."""
    return str(plugin) if isinstance(plugin, Plugin) else type(plugin).__name__


def jsonable(value: object) -> JsonValue:
    """Return `value` as JSON can hold it; what JSON cannot hold becomes `{"__repr__": text}`."""
    if isinstance(value, str):
        return str(value)
    if value is None or type(value) in (bool, int, float):
        return value  # type: ignore[return-value]
    if isinstance(value, Plugin):
        return {"name": type(value).__name__, "config": value.config()}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=repr)
    if isinstance(value, Sequence):
        return [jsonable(item) for item in value]
    if hasattr(value, "to_timestring"):
        return value.to_timestring()
    if isinstance(value, type) or inspect.isroutine(value):
        return {"__repr__": f"{value.__module__}.{value.__qualname__}"}
    return {"__repr__": repr(value)}
