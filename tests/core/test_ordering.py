"""Tests of who runs when, and of who cannot run together."""

import itertools
import random

import pytest

from drivetrain.core.engine import Engine
from drivetrain.core.errors import ConfigTypeError, PluginConflictError, PluginOrderError
from drivetrain.core.event import TRUE_PAIRS, Event
from drivetrain.core.one_of import OneOf
from drivetrain.core.ordering import check_conflicts, refers_to
from drivetrain.core.plugin import Algorithm, Callback
from tests.core.helpers import Notes, NoteState, fired

LOADED, LOSS, AFTER_LOSS = Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS


def engine_of(*plugins, **kwargs):
    return Engine(NoteState(), plugins=plugins, **kwargs)


def test_the_users_order_stands_without_declarations():
    for names in itertools.permutations("abc"):
        assert fired(engine_of(*(Notes(name, LOADED) for name in names)), LOADED) == list(names)


def test_before_a_tag_moves_a_plugin_only_as_far_as_it_must():
    augment = {"tags": frozenset({"augment"})}
    plugins = [
        Notes("first", LOADED),
        Notes("cutout", LOADED, **augment),
        Notes("other", LOADED),
        Notes("colout", LOADED, **augment),
        Notes("selective", LOADED, before=("#augment",)),
    ]
    assert fired(engine_of(*plugins), LOADED) == ["first", "other", "selective", "cutout", "colout"]


def test_after_names_a_class_or_a_class_name_and_ignores_the_absent():
    class Surgery(Notes):
        """A plugin that others refer to."""

    for reference in (Surgery, "Surgery"):
        norm = Notes("norm", Event.INIT, after=(reference, "NotHere", "#nothing"))
        assert fired(engine_of(norm, Surgery("blur", Event.INIT), Notes("x", Event.INIT)), "init") == [
            "blur",
            "norm",
            "x",
        ]


def test_an_order_is_kept_per_event():
    one = Notes("one", LOADED, Event.INIT, after=("#late",))
    two = Notes("two", LOADED, tags=frozenset({"late"}))
    engine = engine_of(one, two, Notes("three", Event.INIT))
    assert fired(engine, LOADED) == ["two", "one"]
    assert fired(engine, Event.INIT) == ["one", "three"]


def test_the_sort_is_the_first_valid_order_in_the_users_order():
    draw = random.Random(0)
    for _ in range(60):
        pairs = [(i, j) for i in range(5) for j in range(5) if i != j and draw.random() < 0.15]
        befores = {i: tuple(f"#{b}" for a, b in pairs if a == i) for i in range(5)}
        plugins = [Notes(str(i), LOADED, tags=frozenset({str(i)}), before=befores[i]) for i in range(5)]
        orders = itertools.permutations(range(5))  # comes in lexicographic order
        best = next((o for o in orders if all(o.index(a) < o.index(b) for a, b in pairs)), None)
        if best is None:
            with pytest.raises(PluginOrderError):
                engine_of(*plugins)
        else:
            assert fired(engine_of(*plugins), LOADED) == [str(i) for i in best]


def test_a_circle_of_declarations_is_printed_as_a_chain():
    class A(Notes):
        before = ("B",)

    class B(Notes):
        before = ("C",)

    class C(Notes):
        before = ("A",)

    plugins = [Notes("free", LOADED), A("a", LOADED), B("b", LOADED), C("c", LOADED)]
    with pytest.raises(PluginOrderError, match=r"AFTER_DATALOADER.*cyclic order") as error:
        engine_of(*plugins)
    chain = str(error.value).split("cyclic order: ")[1].split(".")[0].split(" → ")
    assert chain[0] == chain[-1] and set(chain) == {"a", "b", "c"} and len(chain) == 4
    assert all((one, two) in [("a", "b"), ("b", "c"), ("c", "a")] for one, two in itertools.pairwise(chain))
    assert isinstance(error.value, ValueError)
    engine_of(A("a", LOADED), B("b", LOADED), C("c", LOSS))  # never in one event: no circle


@pytest.mark.parametrize(("first", "second"), TRUE_PAIRS)
def test_true_pairs_unwind_last_in_first_out_and_the_rest_follows(first, second):
    plugins = [
        Notes("a", first, second),
        Notes("only_second", second),
        Notes("b", first, second),
        Notes("only_first", first),
        Notes("c", first, second),
    ]
    engine = engine_of(*plugins)
    assert fired(engine, first) == ["a", "b", "only_first", "c"]
    assert fired(engine, second) == ["c", "b", "a", "only_second"]


@pytest.mark.parametrize("event", [event for event in Event if event.partner is None])
def test_events_that_are_no_true_pair_are_never_reversed(event):
    everywhere = [Notes(name, *Event) for name in "abc"]
    assert fired(engine_of(*everywhere), event) == ["a", "b", "c"]


def test_the_second_half_reverses_the_sorted_first_half_and_keeps_other_declarations():
    inner = Notes("inner", LOSS, AFTER_LOSS, after=("#outer",))
    outer = Notes("outer", LOSS, AFTER_LOSS, tags=frozenset({"outer"}))
    early = Notes("early", AFTER_LOSS, before=("#outer",))
    engine = engine_of(inner, outer, early)
    assert fired(engine, LOSS) == ["outer", "inner"]
    assert fired(engine, AFTER_LOSS) == ["inner", "early", "outer"]


def test_callbacks_run_in_the_users_order_in_both_halves_and_after_algorithms():
    class Watch(Notes):
        phase = "callback"

    class Sink(Notes):
        phase = "sink"

    plugins = [Sink("sink", *Event), Watch("w1", *Event), Watch("w2", *Event), Notes("a1", *Event), Notes("a2", *Event)]
    engine = engine_of(*plugins)
    assert fired(engine, Event.INIT) == ["a1", "a2", "w1", "w2", "sink"]
    assert fired(engine, LOSS) == ["a1", "a2", "w1", "w2", "sink"]
    assert fired(engine, AFTER_LOSS) == ["a2", "a1", "w1", "w2", "sink"]


def test_an_order_across_phases_that_cannot_be_is_refused():
    class Watch(Notes):
        phase = "callback"

    with pytest.raises(PluginOrderError, match="w cannot run before a at INIT: algorithms always run before callbacks"):
        engine_of(Notes("a", Event.INIT, after=("Watch",)), Watch("w", Event.INIT))
    with pytest.raises(PluginOrderError, match="w cannot run before a"):
        engine_of(Notes("a", Event.INIT), Watch("w", Event.INIT, before=(Notes,)))
    engine_of(Notes("a", Event.INIT, before=("Watch",)), Watch("w", Event.INIT))


class MixUp(Algorithm):
    events, writes, conflicts = frozenset({Event.BEFORE_FORWARD}), ("batch",), ("CutMix",)

    def apply(self, event, state, logger):
        """Mix."""


class CutMix(MixUp):
    conflicts = ()


def test_conflicts_name_both_and_a_way_out_whoever_declares_them():
    for plugins in ([MixUp(), CutMix()], [CutMix(), MixUp()]):
        with pytest.raises(PluginConflictError, match=r"MixUp.*CutMix|CutMix.*MixUp") as error:
            Engine(NoteState(), plugins=plugins)
        assert "OneOf(" in str(error.value) and isinstance(error.value, ValueError)


def test_a_conflict_can_bring_its_own_advice():
    one = Notes("one", Event.INIT, conflicts={"#other": "use `both=True` of one instead"})
    with pytest.raises(PluginConflictError, match="one and two cannot run together: use `both=True` of one instead"):
        engine_of(one, Notes("two", Event.INIT, tags=frozenset({"other"})))


@pytest.mark.parametrize(
    ("tag", "words"), [("interpolates_loss", "loss"), ("average", "average"), ("optimizer", "replace the optimizer")]
)
def test_exclusive_tags_admit_one_plugin(tag, words):
    plugins = [Notes(name, Event.INIT, tags=frozenset({tag}), writes=("model",)) for name in ("one", "two")]
    with pytest.raises(PluginConflictError, match=f"one and two.*{words}.*Remove one of them"):
        engine_of(*plugins)
    engine_of(plugins[0])


def test_a_plugin_can_declare_a_tag_exclusive():
    shared = {"tags": frozenset({"tokenizer"})}
    with pytest.raises(PluginConflictError, match="only one plugin of a run can be #tokenizer"):
        engine_of(Notes("one", Event.INIT, exclusive=shared["tags"], **shared), Notes("two", Event.INIT, **shared))
    engine_of(Notes("one", Event.INIT, **shared), Notes("two", Event.INIT, **shared))


def test_the_same_object_cannot_attend_twice():
    one = Notes("one", Event.INIT)
    with pytest.raises(PluginConflictError, match="one is listed twice"):
        engine_of(one, one)


def test_a_reference_is_a_class_a_name_or_a_tag():
    plugin = Notes("x", Event.INIT, tags=frozenset({"t"}))
    assert all(refers_to(reference, plugin) for reference in (Notes, Algorithm, "Notes", "Algorithm", "#t"))
    assert not any(refers_to(reference, plugin) for reference in (Callback, "notes", "t", "#u"))
    with pytest.raises(ConfigTypeError, match="3 is not a plugin"):
        engine_of(Notes("x", Event.INIT, before=(3,)), Notes("y", Event.INIT))


class Lone(Algorithm):
    allow_multiple = False
    events = frozenset({Event.BATCH_START})

    def apply(self, event, state, logger): ...


class Sociable(Lone):
    allow_multiple = True


class Lasting(Lone):
    writes = ("optimizers",)


def test_a_class_that_allows_one_is_rejected_twice_also_inside_a_composite():
    check_conflicts([Lone(), Sociable(), Sociable(), OneOf(Sociable(), Sociable())])
    check_conflicts([OneOf(Lone(), Lone())])  # they take turns
    for pair in ([Lone(), Lone()], [Lone(), OneOf(Lone(), Sociable())]):
        with pytest.raises(PluginConflictError, match="a run takes one Lone"):
            check_conflicts(pair)
    with pytest.raises(PluginConflictError, match="a run takes one Lasting"):
        check_conflicts([OneOf(Lasting(), Lasting())])
