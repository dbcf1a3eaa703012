"""Who runs when inside an event, and who cannot run together: decided once, from declarations alone.

The user's order is kept unless a plugin declares otherwise. Declared edges (`before`, `after`) reorder it as little as
they can: a stable topological sort takes the earliest plugin of the user's list that nothing holds back. On the second
half of a true pair, algorithms that attended the first half unwind last-in-first-out, like nested brackets; callbacks
never do. Algorithms run before callbacks, callbacks before sinks.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from drivetrain.core.binding import phase_of
from drivetrain.core.errors import ConfigTypeError, PluginConflictError, PluginOrderError
from drivetrain.core.event import TRUE_PAIRS, Event
from drivetrain.core.plugin import PHASES, plugin_name

EXCLUSIVE_TAGS: Mapping[str, str] = {
    "interpolates_loss": "both interpolate the loss between two targets, and the second would undo the first",
    "average": "both replace the evaluated weights by an average of their own",
    "optimizer": "both replace the optimizer",
}
"""Tags that only one plugin of a run may have, and why. A plugin adds its own through `exclusive`."""

Edges = Mapping[int, frozenset[int]]
"""For each plugin, by identity (a plugin may define its own ==), those that must run before it."""

_FIRST_HALF: dict[Event, Event] = {second: first for first, second in TRUE_PAIRS}
_PER_BATCH = frozenset({"batch", "outputs", "loss"})


def refers_to(reference: object, plugin: object) -> bool:
    """Return whether `reference` (a class, a class name or a `"#tag"`) means `plugin` or a member of it."""
    if any(refers_to(reference, member) for member in getattr(plugin, "members", ())):
        return True
    if isinstance(reference, type):
        return isinstance(plugin, reference)
    if not isinstance(reference, str):
        raise ConfigTypeError(f"{reference!r} is not a plugin: expected a class, a class name or a '#tag'.")
    if reference.startswith("#"):
        return reference[1:] in getattr(plugin, "tags", ())
    return any(base.__name__ == reference for base in type(plugin).__mro__)


def check_conflicts(plugins: Sequence[object]) -> None:
    """Reject plugins that exclude each other, naming both and a way out."""
    for one, other in combinations(plugins, 2):
        if one is other:
            raise PluginConflictError(f"{plugin_name(one)} is listed twice. Remove one of them.")
        _check_pair(one, other)
    for plugin in plugins:
        for one, other in combinations(getattr(plugin, "members", ()), 2):
            if not _write_only_batch_state(one, other):  # what outlasts the batch meets the other's turn
                _check_pair(one, other)


def order_events(plugins: Sequence[object], attending: Mapping[Event, Sequence[object]]) -> dict[Event, list[object]]:
    """Return the run order of every event, given in the user's order all plugins and those that attend each event."""
    edges = _edges(plugins)
    orders: dict[Event, list[object]] = {}
    for event in Event:
        first = _FIRST_HALF.get(event)
        orders[event] = _order(event, attending[event], orders[first] if first is not None else (), edges)
    return orders


def _order(event: Event, attending: Sequence[object], first_half: Sequence[object], edges: Edges) -> list[object]:
    """Return those who attend `event` in the order in which they run."""
    present = {id(plugin) for plugin in attending}
    nested = [one for one in reversed(first_half) if id(one) in present and phase_of(one) == "algorithm"]
    unwinding = {id(plugin) for plugin in nested}
    ordered: list[object] = []
    for phase in PHASES:
        group = [one for one in attending if phase_of(one) == phase and id(one) not in unwinding]
        ordered += _stable_sort([*nested, *group] if phase == "algorithm" else group, edges, unwinding, event)
    _check_phases(event, ordered, edges)
    return ordered


def _stable_sort(plugins: Sequence[object], edges: Edges, unwinding: set[int], event: Event) -> list[object]:
    """Sort by declared edges, otherwise keeping the given order; brackets that unwind keep theirs among themselves."""
    waits_for = {
        id(plugin): {one for one in edges[id(plugin)] if not (one in unwinding and id(plugin) in unwinding)}
        for plugin in plugins
    }
    left = {id(plugin): plugin for plugin in plugins}
    ordered: list[object] = []
    while left:
        ready = next((one for one in left if waits_for[one].isdisjoint(left)), None)
        if ready is None:
            raise PluginOrderError(
                f"the plugins at {event.name} declare a cyclic order: {_find_cycle(left, waits_for)}. "
                "Each arrow means 'runs before'. Remove one `before` or `after`."
            )
        ordered.append(left.pop(ready))
    return ordered


def _find_cycle(left: Mapping[int, object], waits_for: Mapping[int, set[int]]) -> str:
    """Return the names of one circle among the plugins that are left, the first repeated at the end."""
    path = [next(iter(left))]
    while True:
        following = next(one for one in left if one in waits_for[path[-1]])
        if following in path:
            circle = [*path[path.index(following) :], following]
            return " → ".join(plugin_name(left[one]) for one in reversed(circle))
        path.append(following)


def _check_phases(event: Event, ordered: Sequence[object], edges: Edges) -> None:
    """Reject a declaration that no order can satisfy, because the two run in different phases."""
    seen: list[object] = []
    for plugin in ordered:
        for earlier in seen:
            if id(plugin) in edges[id(earlier)] and phase_of(earlier) != phase_of(plugin):
                raise PluginOrderError(
                    f"{plugin_name(plugin)} cannot run before {plugin_name(earlier)} at {event.name}: "
                    f"{phase_of(earlier)}s always run before {phase_of(plugin)}s."
                )
        seen.append(plugin)


def _edges(plugins: Sequence[object]) -> Edges:
    edges: dict[int, set[int]] = {id(plugin): set() for plugin in plugins}
    for plugin in plugins:
        for name in ("before", "after"):
            for reference, _ in _declared(plugin, name):
                for other in plugins:
                    if other is not plugin and refers_to(reference, other):
                        first, second = (plugin, other) if name == "before" else (other, plugin)
                        edges[id(second)].add(id(first))
    return {one: frozenset(others) for one, others in edges.items()}


def _declared(plugin: object, name: str) -> Iterator[tuple[object, str | None]]:
    """Yield what `plugin` and its members list under `name`, with the advice given there."""
    references = getattr(plugin, name, ())
    if isinstance(references, str | type):
        references = (references,)
    for reference in references:
        yield reference, references[reference] if isinstance(references, Mapping) else None
    for member in getattr(plugin, "members", ()):
        yield from _declared(member, name)


def _check_pair(one: object, other: object) -> None:
    if reason := _reason_against(one, other):
        raise PluginConflictError(f"{plugin_name(one)} and {plugin_name(other)} cannot run together: {reason}")


def _reason_against(one: object, other: object) -> str | None:
    """Return why the two cannot run together and what to do, or None.

    A class that allows one plugin, also inside a composite, comes first, then advice, a tag and the bare declaration.
    """
    for first in (one, *getattr(one, "members", ())):
        for second in (other, *getattr(other, "members", ())):
            is_one_kind = type(first) is type(second) and phase_of(first) == "algorithm"
            if is_one_kind and not getattr(first, "allow_multiple", True):
                return f"a run takes one {type(first).__name__}. Remove one of them."
    clashes = [
        (plugin, advice)
        for plugin, against in ((one, other), (other, one))
        for reference, advice in _declared(plugin, "conflicts")
        if refers_to(reference, against)
    ]
    for _, advice in clashes:
        if advice:
            return f"{advice.rstrip('.')}."
    for tag in sorted(_tags(one) & _tags(other)):
        if tag in EXCLUSIVE_TAGS:
            return f"{EXCLUSIVE_TAGS[tag]}. {_suggest_fix(one, other)}"
        if tag in _tags(one, "exclusive") | _tags(other, "exclusive"):
            return f"only one plugin of a run can be #{tag}. {_suggest_fix(one, other)}"
    return f"{plugin_name(clashes[0][0])} declares this conflict. {_suggest_fix(one, other)}" if clashes else None


def _suggest_fix(one: object, other: object) -> str:
    if _write_only_batch_state(one, other) and phase_of(one) == phase_of(other) == "algorithm":
        members = [member for plugin in (one, other) for member in getattr(plugin, "members", ()) or (plugin,)]
        names = ", ".join(f"{type(member).__name__}(...)" for member in members)
        return f"Remove one of them, or let one act per batch: OneOf({names})."
    return "Remove one of them."


def _write_only_batch_state(one: object, other: object) -> bool:
    """Return whether all that both write is gone with the batch."""
    return _PER_BATCH.issuperset((*getattr(one, "writes", ()), *getattr(other, "writes", ())))


def _tags(plugin: object, name: str = "tags") -> frozenset[str]:
    own = frozenset(getattr(plugin, name, ()))
    return own.union(*(_tags(member, name) for member in getattr(plugin, "members", ())))
