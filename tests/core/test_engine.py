"""Tests of the engine: firing, tracing, timing, passes, closing."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from drivetrain.core.engine import Engine, Trace
from drivetrain.core.errors import ConfigError
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Callback, NullLogger
from tests.core.helpers import Notes, NoteState, fired


class Keeper(NullLogger):
    def __init__(self):
        self.metrics = {}

    def log_metrics(self, metrics, step=None):
        self.metrics.update(metrics)


class HalveLoss(Algorithm):
    def match(self, event, state):
        return event == Event.AFTER_LOSS

    def apply(self, event, state, logger):
        state.loss = state.loss * 0.5


def test_an_algorithm_in_match_form_is_asked_everywhere_and_acts_where_it_says():
    state = SimpleNamespace(loss=1.0)
    engine = Engine(state, plugins=[HalveLoss()])
    for event in Event:
        engine.fire(event)
    assert state.loss == 0.5
    assert all(engine.listens(event) for event in Event)


def test_match_is_asked_each_time_and_only_at_declared_events():
    asked = []

    class Sometimes(Notes):
        def match(self, event, state):
            asked.append(event)
            return state.clock.batch > 0

    state = NoteState()
    engine = Engine(state, plugins=[Sometimes("s", Event.BATCH_END)])
    for event in Event:
        engine.fire(event)
    assert asked == [Event.BATCH_END] and state.notes == []
    state.clock.next_batch()
    assert fired(engine, Event.BATCH_END) == ["s"]


def test_events_can_be_fired_by_name():
    engine = Engine(NoteState(), plugins=[Notes("a", Event.BATCH_END)])
    assert fired(engine, "BATCH_END") == ["a"]
    for name in ("batch_end", "BATCH_END"):
        engine.state.notes.clear()
        engine.fire(name)
        assert engine.state.notes == ["a"]
    with pytest.raises(ConfigError, match="Did you mean 'batch_end'"):
        engine.fire("batch_edn")


def test_run_event_returns_traces_in_order():
    class Coded(Notes):
        def apply(self, event, state, logger):
            return 7

    class Never(Notes):
        def match(self, event, state):
            return False

    plugins = [Coded("coded", Event.BATCH_END), Never("never", Event.BATCH_END), Notes("coded", Event.BATCH_END)]
    traces = Engine(NoteState(), plugins=plugins).run_event("batch_end")
    assert list(traces.items()) == [
        ("coded/batch_end", Trace("coded", Event.BATCH_END, 7, 0, True)),
        ("never/batch_end", Trace("never", Event.BATCH_END, None, 1, False)),
        ("coded#2/batch_end", Trace("coded", Event.BATCH_END, None, 2, True)),
    ]
    assert Trace() == Trace(name="", event=None, exit_code=None, order=None, run=False)


def test_tracing_keeps_the_last_traces_and_logs_algorithms():
    logger = Keeper()
    engine = Engine(NoteState(), logger, [Notes("a", Event.BATCH_START, Event.BATCH_END)], trace=3)
    for _ in range(3):
        engine.fire(Event.BATCH_START)
        engine.fire(Event.BATCH_END)
    assert [trace.event for trace in engine.traces] == [Event.BATCH_END, Event.BATCH_START, Event.BATCH_END]
    assert logger.metrics == {"algorithm_traces/a/batch_start": 1, "algorithm_traces/a/batch_end": 1}
    quiet = Engine(NoteState(), logger, [Notes("a", Event.BATCH_END)])
    quiet.fire(Event.BATCH_END)
    assert len(quiet.traces) == 0
    with pytest.raises(ConfigError, match="trace=-1"):
        Engine(NoteState(), trace=-1)


def test_the_trace_order_equals_the_explained_order():
    events = (Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.INIT)
    plugins = [Notes("x", *events, after=("#y",)), Notes("y", *events, tags=frozenset({"y"})), HalveLoss()]
    state = NoteState()
    state.loss = 1.0
    engine = Engine(state, plugins=plugins, trace=100)
    for event in events:
        engine.traces.clear()
        engine.fire(event)
        ran = [trace.name for trace in engine.traces]
        lines = engine.explain().splitlines()
        place = next(i for i, line in enumerate(lines) if line.split()[0] == event.name)
        assert [line.split()[1] for line in lines[place + 1 : place + 1 + len(ran)]] == ran


def test_who_listens_is_known():
    watcher = type("Watcher", (Callback,), {"batch_end": lambda self, state, logger: None})()
    algorithm = Notes("a", Event.BATCH_END, Event.INIT)
    engine = Engine(NoteState(), plugins=[watcher, algorithm])
    assert engine.listeners(Event.BATCH_END) == (algorithm, watcher)
    assert engine.has_algorithm_for(Event.INIT) and engine.listens(Event.INIT)
    assert not engine.listens(Event.EPOCH_END) and engine.listeners(Event.EPOCH_END) == ()
    only = Engine(NoteState(), plugins=[watcher])
    assert only.listens(Event.BATCH_END) and not only.has_algorithm_for(Event.BATCH_END)


def test_plugins_can_be_replaced_also_from_within_an_event():
    state = NoteState()

    class Replacer(Callback):
        def batch_end(self, state, logger):
            engine.set_plugins([Notes("new", Event.BATCH_END)])

    late = Notes("late", Event.BATCH_END, phase="callback")
    engine = Engine(state, plugins=[Replacer(), late])
    fire = engine.fire  # a loop may hold on to the method
    fire(Event.BATCH_END)
    assert state.notes == ["late"], "the event that is under way is finished as it began"
    fire(Event.BATCH_END)
    assert state.notes == ["late", "new"] and [str(one) for one in engine.plugins] == ["new"]


def test_a_refused_replacement_leaves_the_old_plugins():
    engine = Engine(NoteState(), plugins=[Notes("old", Event.BATCH_END)])
    with pytest.raises(TypeError):
        engine.set_plugins([object()])
    assert fired(engine, Event.BATCH_END) == ["old"]


def test_passes_have_the_last_word_on_algorithms():
    def reverse(algorithms, event):
        return algorithms[::-1] if event is Event.INIT else algorithms

    def drop_b(algorithms, event):
        return [one for one in algorithms if str(one) != "b"]

    def plugins():
        return [Notes(name, Event.INIT, Event.BATCH_END) for name in "abc"] + [Notes("w", Event.INIT, phase="callback")]

    for form in (reverse, (reverse, 0), [reverse], [(reverse, -1)]):
        engine = Engine(NoteState(), plugins=plugins(), algorithm_passes=form)
        assert fired(engine, "init") == ["c", "b", "a", "w"] and fired(engine, "batch_end") == ["a", "b", "c"]
    engine.register_pass(drop_b)
    assert fired(engine, "init") == ["c", "a", "w"]
    seen = []
    engine.register_pass(lambda algorithms, event: seen.append(len(algorithms)) or algorithms, index=0)
    assert set(seen) == {3}, "put first, it sees what the others have not changed yet"


def test_a_pass_that_invents_or_repeats_plugins_is_refused():
    for bad in (lambda algorithms, event: [*algorithms, *algorithms], lambda algorithms, event: [object()]):
        with pytest.raises(ConfigError, match="returned a plugin twice, or one that does not handle INIT"):
            Engine(NoteState(), plugins=[Notes("a", Event.INIT)], algorithm_passes=bad)
    with pytest.raises(ConfigError, match="is not an algorithm pass"):
        Engine(NoteState(), algorithm_passes=["nonsense"])


def test_closing_reaches_everyone_and_then_nothing_works():
    notes = []

    class First(Callback):
        def close(self, state, logger):
            notes.append("first")
            raise OSError("disk full")

        def post_close(self):
            notes.append("first post")

    class Second:
        def on_train_epoch_end(self, trainer):
            """Watch."""

        def close(self):
            notes.append("second")

    engine = Engine(NoteState(), plugins=[First(), Second()])
    with pytest.raises(OSError, match="disk full"):
        engine.close()
    assert notes == ["first", "second", "first post"] and engine.is_closed
    engine.close()
    assert len(notes) == 3
    for call in (
        lambda: engine.fire(Event.INIT),
        lambda: engine.run_event(Event.INIT),
        lambda: engine.set_plugins([]),
        lambda: engine.call("on_exception"),
        lambda: engine.register_pass(lambda algorithms, event: algorithms),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_plugins_can_be_closed_while_the_engine_goes_on():
    class Closing(Notes):
        def close(self, state, logger):
            state.notes.append("closed")

    engine = Engine(NoteState(), plugins=[Closing("a", Event.INIT)])
    engine.close_plugins()
    assert engine.state.notes == ["closed"] and not engine.is_closed
    assert fired(engine, Event.INIT) == ["a"]


def test_an_exception_of_a_guest_passes_unchanged():
    class Raises(Callback):
        def batch_end(self, state, logger):
            raise KeyError("mine")

    for options in ({}, {"trace": 1}, {"strict": True}):
        engine = Engine(NoteState(), plugins=[Raises()], **options)
        engine.timed = True
        with pytest.raises(KeyError, match="mine"):
            engine.fire(Event.BATCH_END)


def test_timing_counts_calls_and_shows_in_the_explanation():
    engine = Engine(NoteState(), plugins=[Notes("slow", Event.BATCH_END)])
    assert "calls" not in engine.explain() and not engine.timed
    engine.timed = True
    for _ in range(5):
        engine.fire(Event.BATCH_END)
    engine.timed = False
    engine.fire(Event.BATCH_END)
    line = next(line for line in engine.explain().splitlines() if "slow" in line)
    assert line.endswith("× 5 calls") and "µs" in line


def test_core_loads_no_torch():
    code = (
        "import sys, pkgutil, importlib, drivetrain.core as core\n"
        "[importlib.import_module(f'drivetrain.core.{m.name}') for m in pkgutil.iter_modules(core.__path__)]\n"
        "[getattr(core, name) for name in dir(core)]\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"})


class Counting(Algorithm):
    events = frozenset({Event.BATCH_END, Event.AFTER_LOSS})

    def __init__(self):
        self.seen = []

    def apply(self, event, state, logger):
        self.seen.append(event)


def test_events_are_methods_and_follow_the_guests():
    first, second = Counting(), Counting()
    engine = Engine(SimpleNamespace(), plugins=[first])
    fire = engine.on
    fire.batch_end()
    fire.epoch_end()  # nobody attends
    engine.set_plugins([first, second])
    fire.batch_end()
    engine.set_plugins([])
    fire.batch_end()
    assert first.seen == [Event.BATCH_END] * 2 and second.seen == [Event.BATCH_END]
    assert all(callable(getattr(fire, event.value)) for event in Event)


def test_a_guard_catches_what_guests_raise_and_sees_no_silent_event():
    class Stop(Exception):
        pass

    class Raising(Algorithm):
        events = frozenset({Event.AFTER_LOSS})

        def apply(self, event, state, logger):
            raise Stop

    caught = []

    def guard(run):
        try:
            run()
        except Stop as stop:
            caught.append(stop)

    engine = Engine(SimpleNamespace(), plugins=[Raising()])
    fire = engine.guarded(guard)
    fire.after_loss()
    fire.batch_end()
    assert len(caught) == 1
    with pytest.raises(Stop):
        engine.on.after_loss()


def test_a_misspelt_event_method_names_the_nearest_and_a_closed_engine_refuses():
    engine = Engine(SimpleNamespace(), plugins=[Counting()])
    with pytest.raises(AttributeError, match="batch_end"):
        engine.on.batch_edn()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.on.batch_end()
