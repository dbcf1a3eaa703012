"""The engine: one list of plugins per event, made once, walked many times.

When plugins are given, the engine checks them, sorts each event's list and turns it into a tuple of callables without
arguments. `fire` walks that tuple and does nothing else; tracing, timing and strict watching are wrapped around the
callables when they are switched on, so that they cost nothing otherwise.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from drivetrain.core.binding import Binding, bindings_of, call_close_method, call_named, check_plugin, phase_of, watched
from drivetrain.core.errors import ConfigError, EngineError, unknown_name
from drivetrain.core.event import LOOP, Event
from drivetrain.core.ordering import check_conflicts, order_events
from drivetrain.core.plugin import Logger, NullLogger, plugin_name

AlgorithmPass = Callable[[Sequence[Any], Event], Sequence[object]]
PassLike = AlgorithmPass | tuple[AlgorithmPass, int]


@dataclass(frozen=True, slots=True)
class Trace:
    """What one plugin did at one event."""

    name: str = ""
    event: Event | None = None
    exit_code: int | None = None
    order: int | None = None
    run: bool = False


Traces = dict[str, Trace]
"""What happened at one event: `"plugin/event"` to `Trace`, in the order of execution."""


_CLOSED = "The engine is closed."


class _RunLists(dict[Event, tuple[Callable[[], object], ...]]):
    """The callables of every event; an event may also be named by a string. Those of a closed engine are empty."""

    def __missing__(self, event: str) -> tuple[Callable[[], object], ...]:
        if not self:
            raise EngineError(f"{_CLOSED} {event} cannot be fired.")
        return self[Event(event)]


class Fire:
    """One method per event, named like it: `fire.batch_start()` lets the plugins of BATCH_START act.

    This is what a loop holds. An event without plugins is a built-in that does nothing, and one plugin is called directly, so
    neither costs a Python call of its own.
    """

    __slots__ = tuple(event.value for event in Event)

    def __getattr__(self, name: str) -> Callable[[], object]:
        raise AttributeError(unknown_name("event", name, self.__slots__))

    def set(self, event: Event, calls: tuple[Callable[[], object], ...]) -> None:
        """Set what is called at an event."""
        setattr(self, event.value, _NOTHING if not calls else calls[0] if len(calls) == 1 else partial(_walk, calls))


_NOTHING: Callable[[], object] = [].clear  # a built-in without arguments: the cheapest call there is


def _walk(calls: tuple[Callable[[], object], ...]) -> None:
    for call in calls:
        call()


class Engine:
    """Runs every plugin of an event in order.

    `host` is what trainer callbacks receive as their first argument: the trainer. It owns the engine, which therefore refers to it weakly.

    >>> from drivetrain.core.plugin import Algorithm
    >>> class Halve(Algorithm):
    ...     events, writes = frozenset({Event.AFTER_LOSS}), ("loss",)
    ...     def apply(self, event, state, logger): state.loss /= 2
    >>> from types import SimpleNamespace
    >>> state = SimpleNamespace(loss=1.0)
    >>> Engine(state, plugins=[Halve()]).fire(Event.AFTER_LOSS)
    >>> state.loss
    0.5
    """

    def __init__(
        self,
        state: object,
        logger: Logger | None = None,
        plugins: Iterable[object] = (),
        algorithm_passes: PassLike | Sequence[PassLike] | None = None,
        strict: bool = False,
        trace: int = 0,
        *,
        host: object = None,
    ) -> None:
        if not isinstance(trace, int) or trace < 0:
            raise ConfigError(f"trace={trace!r}: expected the number of traces to keep, 0 or more.")
        self.state = state
        self.logger: Logger = NullLogger() if logger is None else logger
        self._host = _weak_getter(host)
        self.strict = strict
        self.traces: deque[Trace] = deque(maxlen=trace)
        self._timed = False
        self._measured: dict[tuple[Event, int], list[float]] = {}
        self._passes: list[AlgorithmPass] = []
        self.plugins: tuple[Any, ...] = ()
        """The plugins in the user's order; `set_plugins` changes them."""
        self._found: dict[Event, tuple[Binding, ...]] = {}
        self._bindings: dict[Event, tuple[Binding, ...]] = {}
        self._calls: _RunLists = _RunLists()
        self.is_closed = False
        """Whether `close()` was called."""
        self.on = Fire()
        """The events as methods, for a loop to hold; kept up to date when plugins change."""
        self._guarded: list[tuple[Fire, Callable[[Callable[[], object]], object]]] = []
        for one in _pass_list(algorithm_passes):
            self._insert_pass(*(one if isinstance(one, tuple) else (one, -1)))
        self.set_plugins(plugins)

    def set_plugins(self, plugins: Iterable[object]) -> None:
        """Check the plugins and sort every event's list; they run from the next event on."""
        self._require_open()
        plugins = tuple(plugins)
        for plugin in plugins:
            check_plugin(plugin)
        check_conflicts(plugins)
        around = (self.state, self.logger, self._host)
        found = {event: {id(one): tuple(bindings_of(one, event, *around)) for one in plugins} for event in Event}
        attending = {event: [plugin for plugin in plugins if found[event][id(plugin)]] for event in Event}
        orders = order_events(plugins, attending)
        passed = {event: self._pass(order, event) for event, order in orders.items()}
        self.plugins = plugins
        self._measured = {key: value for key, value in self._measured.items() if key[1] in map(id, plugins)}
        self._found = {
            event: tuple(binding for plugin in passed[event] for binding in found[event][id(plugin)]) for event in Event
        }
        self._compile()

    def fire(self, event: Event) -> None:
        """Let every plugin of `event` act: what the loop calls."""
        for call in self._calls[event]:
            call()

    def run_event(self, event: Event | str) -> Traces:
        """Let every plugin of `event` act and return what each did."""
        event = Event(event)
        self._require_open()
        traces = Traces()
        for order, binding in enumerate(self._bindings[event]):
            trace = self._run_traced(binding, order)
            key, copies = f"{binding.name}/{event}", 1
            while key in traces:
                copies += 1
                key = f"{binding.name}#{copies}/{event}"
            traces[key] = trace
        return traces

    def call(self, name: str, **arguments: object) -> None:
        """Call the method `name` of every plugin that has it, with the host and those arguments it names.

        This is how hooks outside the loop (`on_exception`) and events of the user's own are called.
        """
        self._require_open()
        for plugin in self.plugins:
            call_named(plugin, name, self._host(), arguments)

    def listens(self, event: Event) -> bool:
        """Return whether a plugin uses `event`."""
        return bool(self._bindings[event])

    def listeners(self, event: Event) -> tuple[Any, ...]:
        """Return the plugins of `event`, in the order in which they run."""
        return tuple({id(binding.plugin): binding.plugin for binding in self._bindings[event]}.values())

    def has_algorithm_for(self, event: Event) -> bool:
        """Return whether `event` may change the state."""
        return any(binding.phase == "algorithm" for binding in self._bindings[event])

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a function `(algorithms, event) -> algorithms` that has the last word on the order; -1 puts it last."""
        self._require_open()
        self._insert_pass(algorithm_pass, index)
        self.set_plugins(self.plugins)

    @property
    def timed(self) -> bool:
        """Whether the time each plugin takes is measured; `explain()` then shows it."""
        return self._timed

    @timed.setter
    def timed(self, timed: bool) -> None:
        self._timed = timed
        self._compile()

    def explain(self, notes: Mapping[Event, str] | None = None) -> str:
        """Return the loop as a picture with every plugin in place; `notes` adds a line to an event."""
        return _draw(self._bindings, self._measured, notes or {})

    def close(self) -> None:
        """Let every plugin finish; afterwards the engine raises errors. A second call does nothing."""
        if not self.is_closed:
            self.is_closed, self._calls = True, _RunLists()
            for event in Event:
                self.on.set(event, (partial(self.fire, event),))  # says that the engine is closed
            self.close_plugins()

    def close_plugins(self) -> None:
        """Let every plugin finish, `close` first and `post_close` when all have closed; the engine stays usable."""
        errors: list[Exception] = []
        for method, arguments in (("close", (self.state, self.logger)), ("post_close", ())):
            for plugin in self.plugins:
                try:
                    call_close_method(plugin, method, arguments)
                except Exception as error:  # the others must be closed too; the first error is raised below
                    errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"Also, while closing: {other!r}")
            raise errors[0]

    def _compile(self) -> None:
        """Turn each event's plugins into ready callables."""
        if self.is_closed:
            return
        self._bindings = {
            event: tuple(replace(binding, act=self._instrumented(binding)) for binding in bindings)
            for event, bindings in self._found.items()
        }
        calls: tuple[Callable[[], object], ...]
        for event, bindings in self._bindings.items():
            if self.traces.maxlen:
                calls = tuple(partial(self._run_traced, binding, order) for order, binding in enumerate(bindings))
            else:
                calls = tuple(binding.call() for binding in bindings)
            self._calls[event] = calls
            self.on.set(event, calls)
            for fire, guard in self._guarded:
                fire.set(event, (partial(guard, partial(_walk, calls)),) if calls else ())

    def guarded(self, guard: Callable[[Callable[[], object]], object]) -> Fire:
        """Return the events as methods that run their plugins through `guard(run)`, which may catch what they raise.

        Those that an earlier call returned are not kept up to date any more.
        """
        fire = Fire()
        self._guarded = [(fire, guard)]
        self._compile()
        return fire

    def _instrumented(self, binding: Binding) -> Callable[[], object]:
        """Return what the plugin does, timed and watched where that was asked for."""
        act = binding.act
        if self._timed:
            act = _timed(act, self._measured.setdefault((binding.event, id(binding.plugin)), [0.0, 0.0]))
        if self.strict and binding.phase != "algorithm" and getattr(binding.plugin, "is_watched", True):
            act = watched(act, binding, self.state)
        return act

    def _run_traced(self, binding: Binding, order: int) -> Trace:
        run = binding.wants_to is None or bool(binding.wants_to())
        code = binding.act() if run else None
        exit_code = code if isinstance(code, int) and not isinstance(code, bool) else None
        trace = Trace(binding.name, binding.event, exit_code, order, run)
        if self.traces.maxlen:
            self.traces.append(trace)
            if binding.phase == "algorithm":
                self.logger.log_metrics({f"algorithm_traces/{binding.name}/{binding.event}": int(run)})
        return trace

    def _insert_pass(self, algorithm_pass: AlgorithmPass, index: int) -> None:
        if not callable(algorithm_pass):
            raise ConfigError(f"{algorithm_pass!r} is not an algorithm pass: expected a function (algorithms, event).")
        self._passes.insert(len(self._passes) if index == -1 else index, algorithm_pass)

    def _pass(self, order: list[object], event: Event) -> list[object]:
        """Let the user's passes rearrange or drop the algorithms of an event."""
        algorithms: list[object] = [plugin for plugin in order if phase_of(plugin) == "algorithm"]
        if not algorithms:
            return order
        given = {id(plugin) for plugin in algorithms}
        for one in self._passes:
            algorithms = list(one(algorithms, event))
            kept = [id(plugin) for plugin in algorithms]
            if len(set(kept)) < len(kept) or not given.issuperset(kept):
                raise ConfigError(
                    f"the pass {getattr(one, '__name__', one)!r} returned a plugin twice, or one that does not handle "
                    f"{event.name}: {', '.join(map(plugin_name, algorithms))}."
                )
        return [*algorithms, *(plugin for plugin in order if phase_of(plugin) != "algorithm")]

    def _require_open(self) -> None:
        if self.is_closed:
            raise EngineError(f"{_CLOSED} Build a new Trainer to run again.")


def _weak_getter(host: object) -> Callable[[], object]:
    """Return a function that gives the host without keeping it alive, where its type allows that."""
    try:
        return weakref.ref(host)
    except TypeError:  # None, a string
        return lambda: host


def _timed(act: Callable[[], object], measured: list[float]) -> Callable[[], object]:
    """Return `act` with its calls and seconds added to `measured`; work queued on a device is not waited for."""

    def call() -> object:
        start = perf_counter()
        try:
            return act()
        finally:
            measured[0] += 1
            measured[1] += perf_counter() - start

    return call


def _pass_list(passes: PassLike | Sequence[PassLike] | None) -> list[PassLike]:
    """Return the accepted forms of `algorithm_passes` as a list: a function, (function, index), or a list of either."""
    if passes is None:
        return []
    if callable(passes) or (isinstance(passes, tuple) and len(passes) == 2 and isinstance(passes[1], int)):
        return [passes]
    return list(passes)


def _draw(
    bindings: Mapping[Event, Sequence[Binding]],
    measured: Mapping[tuple[Event, int], Sequence[float]],
    notes: Mapping[Event, str],
) -> str:
    """Return the loop as text with numbered plugins under each event, and their time where it was measured."""
    lines: list[str] = []
    for line in LOOP.splitlines()[2:]:  # the first is the title, the second is empty
        lines.append(line)
        name, indent = line.split()[0], " " * (len(line) - len(line.lstrip()) + 4)
        if name not in Event.__members__:
            continue
        event = Event[name]
        if event in notes:
            lines.append(f"{indent}· {notes[event]}")
        for number, binding in enumerate(bindings[event], start=1):
            lines.append(f"{indent}{number}. {_describe(binding, measured.get((event, id(binding.plugin))))}")
    return "\n".join(lines) + "\n"


def _describe(binding: Binding, measured: Sequence[float] | None) -> str:
    words = [f"{binding.name:<24}", binding.phase]
    for verb in ("reads", "writes"):
        if names := getattr(binding.plugin, verb, ()):
            words.append(f"{verb} {', '.join(names)}")
    if binding.wants_to is not None:
        words.append("asks match")
    if measured and measured[0]:
        calls, seconds = measured
        words.append(f"{seconds / calls * 1e6:.1f} µs × {int(calls)} calls")
    return "  ".join(words)
