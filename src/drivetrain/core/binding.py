"""From a plugin to what it does at each event: which of its methods means the event, and how that is called.

Every choice is made here, once, when the engine takes its plugins: the spelling, the arguments a method names, whether
`match` has to be asked. What is left for the loop is a callable without arguments.
"""

import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from drivetrain.core.arguments import only_begins
from drivetrain.core.errors import ConfigError, ConfigTypeError, EngineError, did_you_mean, nearest_name
from drivetrain.core.event import EVENT_OF_HOOK, OCCASIONAL_HOOKS, SPELLINGS, Event, spellings
from drivetrain.core.plugin import PHASES, Algorithm, Callback, Logger, Phase, Plugin, plugin_name
from drivetrain.core.types import Item, Settings

_BASES: frozenset[type] = frozenset({object, Plugin, Algorithm, Callback})
_OWN_NAMES = frozenset(name for base in _BASES for name in vars(base))
_HOOK_NAMES = (*EVENT_OF_HOOK, *OCCASIONAL_HOOKS)
_EVENT_NAMES = tuple(event.value for event in Event)
_FOREIGN = {
    f"on_{theirs}_{end}": f"on_{ours}_{'end' if end == 'end' else 'start'}"
    for ours, names in {
        "training_run": "train fit",
        "train_step": "step train_batch",
        "eval_epoch": "validation validation_epoch",
        "eval_step": "validation_batch",
    }.items()
    for theirs in names.split()
    for end in ("start", "begin", "end")
}
"""What methods of other libraries' callbacks are called here, where the nearest name means something else."""
_CALLED_BY_NAME = frozenset({*_EVENT_NAMES, "run_event", "close", "post_close"})
_REFERENCES = ("before", "after", "conflicts")  # of these one name or class may stand alone
_COLLECTIONS = ("events", "reads", "writes", *_REFERENCES, "tags", "exclusive", "members", "custom_events")
_FORMS = {"match": ("event", "state"), "apply": ("event", "state", "logger"), "close": ("state", "logger")}


Host = Callable[[], object]
"""Returns what trainer callbacks receive as their first argument."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One plugin at one event."""

    plugin: object
    event: Event
    name: str
    phase: Phase
    act: Callable[[], object]
    """What it does; for `apply` the value returned is the exit code."""
    wants_to: Callable[[], bool] | None = None
    """Its `match`, if it must be called each time."""

    def call(self) -> Callable[[], object]:
        """Return the one callable that asks, if it must, and acts."""
        if self.wants_to is None:
            return self.act
        wants_to, act = self.wants_to, self.act
        return lambda: act() if wants_to() else None


def phase_of(plugin: object) -> Phase:
    """Return the phase of an event in which `plugin` runs; without one, a plugin with `apply` is an algorithm."""
    phase = getattr(plugin, "phase", "algorithm" if hasattr(plugin, "apply") else "callback")
    if phase not in PHASES:
        raise ConfigError(f"{plugin_name(plugin)}.phase is {phase!r}; expected one of {', '.join(PHASES)}.")
    return phase


def check_plugin(plugin: object) -> None:
    """Reject what cannot be a plugin: a class, one that attends no event, one with a mistyped or ill-formed method."""
    if isinstance(plugin, type):
        raise ConfigTypeError(f"{plugin.__name__} is a class; pass an instance: {plugin.__name__}().")
    phase_of(plugin)
    for attribute in _COLLECTIONS:
        given = getattr(plugin, attribute, ())
        is_single = attribute in _REFERENCES and isinstance(given, str | type)
        if not is_single and (isinstance(given, str) or not isinstance(given, Collection)):
            example = "()" if not isinstance(given, str) else f"({given!r},)"
            if attribute == "events" and isinstance(given, str):
                example = f"frozenset({{Event.{given.upper()}}})"
            raise ConfigTypeError(
                f"{plugin_name(plugin)}.{attribute} is {given!r}; expected a tuple or set, such as {attribute} = {example}."
            )
    for event in getattr(plugin, "events", ()):
        if event not in _EVENT_NAMES:
            near = nearest_name(event, _EVENT_NAMES)
            hint = f" Did you mean Event.{near.upper()}?" if near else ""
            raise ConfigTypeError(f"{plugin_name(plugin)}.events holds {event!r}; expected members of Event.{hint}")
    _check_spelling(plugin)
    for method, expected in _FORMS.items():
        if _defines(plugin, method) and (method != "close" or _parameters(plugin, method)):
            _check_form(plugin, method, expected)
    for member in getattr(plugin, "members", ()):
        check_plugin(member)
    if not _has_any_event(plugin):
        raise ConfigTypeError(
            f"{plugin_name(plugin)} handles no event. Declare `events` or `match(self, event, state)` and define "
            "`apply(self, event, state, logger)`, or define a method named after an event: "
            "`batch_end(self, state, logger)`, `on_train_epoch_end(self, trainer)`."
        )


def bindings_of(plugin: Any, event: Event, state: object, logger: Logger, host: Host) -> Iterator[Binding]:
    """Yield what `plugin` does at `event`: its `apply`, its `run_event`, its method of that name."""
    make = partial(Binding, plugin=plugin, event=event, name=plugin_name(plugin), phase=phase_of(plugin))
    if _defines(plugin, "apply") and subscribes(plugin, event):
        asks = partial(plugin.match, event, state) if _defines(plugin, "match") else None
        yield make(act=partial(plugin.apply, event, state, logger), wants_to=asks)
    method = method_for(plugin, event)
    if _defines(plugin, "run_event"):
        yield make(act=partial(plugin.run_event, event, state, logger))
        if method == event.value:  # reached through run_event of the base, if the callback calls it
            return
    if method is None:
        return
    if method == event.value:
        _check_form(plugin, method, ("state", "logger"))
        yield make(act=partial(getattr(plugin, method), state, logger))
    else:
        names = _accepted(plugin, method, SPELLINGS[event].arguments)
        yield make(act=_hook_call(getattr(plugin, method), names, state, host))


def subscribes(plugin: object, event: Event) -> bool:
    """Return whether `apply` may run at `event`; a plugin that declares only `match` may run anywhere."""
    events = getattr(plugin, "events", ())
    return event in events if events else _defines(plugin, "match")


def method_for(plugin: object, event: Event) -> str | None:
    """Return the method that means `event`, or None; of several spellings the most derived class decides."""
    owner, found = _find(plugin, spellings(event))
    if event.value in found and "_" not in event.value and not _has_form(plugin, event.value, ("state", "logger")):
        found.remove(event.value)  # `init` and `stop` are ordinary words: with other arguments they are helpers
    if owner is type(plugin) and len({id(vars(owner)[name]) for name in found}) > 1:
        raise ConfigError(
            f"{plugin_name(plugin)} defines {event.name} twice, as {' and '.join(found)}. "
            f"They are two names of one event: keep {found[0]}."
        )
    return found[0] if found else None  # of two inherited from one class, the canonical one


def call_named(plugin: object, name: str, host: object, arguments: Settings) -> None:
    """Call the plugin's method `name`, if it has one, with the host and those arguments that it names."""
    if _defines(plugin, name):
        accepted = _accepted(plugin, name, tuple(arguments))
        getattr(plugin, name)(host, **{argument: arguments[argument] for argument in accepted})


def call_close_method(plugin: object, method: str, arguments: tuple[object, ...]) -> None:
    """Call `close` or `post_close`, if there is one; a trainer callback's `close()` takes no arguments."""
    bound = getattr(plugin, method, None)
    if bound is not None:
        bound(*(arguments if inspect.signature(bound).parameters else ()))


def _hook_call(bound: Callable[..., object], names: tuple[str, ...], state: object, host: Host) -> Callable[[], object]:
    """Return a callable that calls an `on_*` method with the host and the state's present values."""
    if not names:
        return lambda: bound(host())
    return lambda: bound(host(), **{name: getattr(state, name) for name in names})


def _accepted(plugin: object, method: str, carried: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of the carried arguments the method takes; one that needs others is rejected."""
    form = f"{method}(self, {', '.join(('trainer', *carried, '**kwargs'))})"
    parameters = _parameters(plugin, method)
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise ConfigTypeError(f"{plugin_name(plugin)}.{method} takes no trainer. Expected the form {form}.")
    parameters = parameters[1:]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for parameter in parameters:
        collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not collects and parameter.name not in named.intersection(carried):
            hint = did_you_mean(parameter.name, carried)
            raise ConfigTypeError(
                f"{plugin_name(plugin)}.{method} needs an argument {parameter.name!r} that this event does not pass."
                f"{hint} Expected the form {form}."
            )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return tuple(name for name in carried if takes_all or name in named)


def _check_form(plugin: object, method: str, expected: tuple[str, ...]) -> None:
    """Reject a method that cannot be called with the expected arguments, or that names them in another order."""
    if not _has_form(plugin, method, expected):
        raise ConfigTypeError(
            f"{plugin_name(plugin)}.{method}({', '.join(map(str, _parameters(plugin, method)))}) has the wrong form. "
            f"Expected {method}(self, {', '.join(expected)})."
        )


def _has_form(plugin: object, method: str, expected: tuple[str, ...]) -> bool:
    parameters = _parameters(plugin, method)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    try:
        inspect.Signature(parameters).bind(*expected)
    except TypeError:
        return False
    return all(names.index(name) == place for place, name in enumerate(expected) if name in names)


def _check_spelling(plugin: object) -> None:
    """Reject a method whose name nearly is an event's: it would silently never be called."""
    known = {*_HOOK_NAMES, *_EVENT_NAMES, *getattr(plugin, "custom_events", ())}
    for owner in type(plugin).__mro__:
        for method, value in vars(owner).items():
            if method in known or method in _OWN_NAMES or method.startswith("_") or not _is_method(value):
                continue
            # A name that starts with on_ is hardly ever a helper, so it is suspected sooner than a plain one.
            names, cutoff = (_HOOK_NAMES, 0.8) if method.startswith("on_") else (_EVENT_NAMES, 0.85)
            near = _FOREIGN.get(method) or nearest_name(method, names, cutoff=cutoff)
            if near is not None:
                raise ConfigError(
                    f"{plugin_name(plugin)} defines {method}, which is not an event. Did you mean {near}? If it is an "
                    f"event of your own, list it in the class: custom_events = frozenset({{{method!r}}})."
                )


def _has_any_event(plugin: object) -> bool:
    if _defines(plugin, "apply") and any(subscribes(plugin, event) for event in Event):
        return True
    # A placeholder counts: a callback that replaces none of its base's methods is idle, not wrong.
    names = {name for owner in (plugin, *_own_layers(plugin)) for name in getattr(owner, "__dict__", {})}
    return any(name in _CALLED_BY_NAME or name.startswith("on_") for name in names)


def _find(plugin: object, names: tuple[str, ...]) -> tuple[object, list[str]]:
    """Return the most derived layer of `plugin` (itself, its class, a base) that defines some of `names`, and which."""
    for owner in (plugin, *_own_layers(plugin)):
        namespace = getattr(owner, "__dict__", {})
        found = [name for name in names if name in namespace and _is_method(namespace[name])]
        if found:
            return owner, found
    return None, []


def _own_layers(plugin: object) -> tuple[type, ...]:
    return tuple(owner for owner in type(plugin).__mro__ if owner not in _BASES)


def _defines(plugin: object, method: str) -> bool:
    return bool(_find(plugin, (method,))[1])


def _is_method(value: object) -> bool:
    function = getattr(value, "__func__", value)  # what a classmethod or staticmethod wraps
    return callable(function) and getattr(function, "is_placeholder", False) is not True


def _parameters(plugin: object, method: str) -> list[inspect.Parameter]:
    function = getattr(plugin, method)
    if only_begins(function):
        raise ConfigTypeError(f"{plugin_name(plugin)}.{method} has yield or async, so a call would run nothing.")
    return list(inspect.signature(function).parameters.values())


# ---------------------------------------------------------------------- strict mode
#
# After a plugin that may only watch, the state must be what it was. Two things are compared: which object each field of the state holds,
# and how often the tensors behind them were written in place. A tensor is recognised by its version counter: this file needs no torch.
# Nothing is named before something differs.

_COUNTED = ("batch", "outputs", "loss")
_ABSENT = object()

# What a name in `writes` covers besides the field of that name.
_COVERS: Mapping[str, tuple[str, ...]] = {
    "outputs": ("outputs", "output", "batch_output"),
    "loss": ("loss", "batch_output", "total_loss_dict"),
    "model": ("model", "parameters"),
    "dataloader": ("dataloader", "dataloader_len", "dataloader_label", "train_dataloader", "evaluators"),
    "timestamp": ("timestamp", "clock", "max_duration"),
}


def watched(act: Callable[[], object], binding: Binding, state: object) -> Callable[[], object]:
    """Return `act`, which raises if it changes a part of the state that its plugin does not list in `writes`."""
    writes = tuple(getattr(binding.plugin, "writes", ()))
    allowed = {field for name in writes for field in _COVERS.get(name, (name,))}

    parameters = _Parameters()

    def call() -> object:
        fields, versions = vars(state).copy(), _versions(state, parameters)
        result = act()
        now = vars(state)
        is_same = fields.keys() == now.keys() and all(map(operator.is_, fields.values(), now.values()))
        if is_same and versions == _versions(state, parameters):
            return result
        for field, what in [*_other_fields(fields, now), *_other_versions(state, versions, parameters)]:
            if field not in allowed:
                raise EngineError(
                    f"{binding.name} changed state.{what} at {binding.event.name}, but callbacks must not "
                    f"change the state. Write it as an Algorithm, or declare it: writes = {(*writes, field)!r}."
                )
        return result

    return call


def _other_fields(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return every public field that came, went or holds another object, as field and path."""
    names = [name for name in {**old, **new} if not name.startswith("_")]
    return [(name, name) for name in names if old.get(name, _ABSENT) is not new.get(name, _ABSENT)]


def _versions(state: object, parameters: "_Parameters") -> list[list[object]]:
    """Return the version of every tensor that a watcher could write in place: of each counted field, of weights and of gradients."""
    found: list[list[object]] = [[t._version for _, t in _tensors(getattr(state, name, None))] for name in _COUNTED]
    held = parameters.of(getattr(state, "model", None))
    grads = [None if p is None else p.grad for p in held]
    found.append([None if p is None else p._version for p in held])
    found.append([None if grad is None else (id(grad), grad._version) for grad in grads])
    return found


def _other_versions(state: Item, old: list[list[object]], parameters: "_Parameters") -> Iterator[tuple[str, str]]:
    """Yield field and path of every tensor that was written to; of a field with other tensors than before only the field."""
    new = _versions(state, parameters)
    for field, was, now in zip((*_COUNTED, "model", "grads"), old, new):
        if len(was) != len(now):
            yield field, "model" if field == "grads" else field
        elif was != now:
            end = ".grad" if field == "grads" else ""
            if field in _COUNTED:
                paths = [path for path, _ in _tensors(getattr(state, field), field)]
            else:
                paths = [f"model.{name}{end}" for name in parameters.names(state.model)]
            yield from ((field, path) for path, one, other in zip(paths, was, now) if one != other)


class _Parameters:
    """The parameters of a model, collected again only when its modules are others."""

    def __init__(self) -> None:
        self._model: object = None
        self._held: list[dict[str, object]] = []
        self._owners: list[dict[str, object]] = []
        self._children: list[object] = []

    def of(self, model: Item) -> list[Item]:
        """Return the parameters of all modules, with None for those that are not set."""
        if not hasattr(model, "named_modules"):
            return []
        if model is not self._model or [one for held in self._held for one in held.values()] != self._children:
            self._model, modules = model, list(model.modules())
            self._held, self._owners = [m._modules for m in modules], [m._parameters for m in modules]
            self._children = [one for held in self._held for one in held.values()]
        return [p for owner in self._owners for p in owner.values()]

    def names(self, model: Item) -> list[str]:
        """Return the names of what `of` returns."""
        return [f"{path}.{name}".lstrip(".") for path, m in model.named_modules() for name in m._parameters]


def _tensors(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(getattr(value, "_version", None), int):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _tensors(item, f"{path}[{place}]")
