"""Tests of how a plugin's methods are found, checked and called."""

import cProfile
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from drivetrain.core.engine import Engine
from drivetrain.core.errors import ConfigError, ConfigTypeError, EngineError
from drivetrain.core.event import EVENT_OF_HOOK, SPELLINGS, Event, spellings
from drivetrain.core.plugin import Algorithm, Callback, placeholder

ALIASES = {
    "on_train_run_begin": "on_training_run_start",
    "on_train_run_end": "on_training_run_end",
    "on_train_epoch_begin": "on_train_epoch_start",
    "on_train_step_begin": "on_train_step_start",
    "on_eval_epoch_begin": "on_eval_epoch_start",
    "on_eval_step_begin": "on_eval_step_start",
}


def state_of(**more):
    return SimpleNamespace(batch="batch", batch_output={"loss": 1}, step=4, is_intermediate=True, **more)


def callback_with(**methods):
    return type("Watcher", (Callback,), methods)()


def calls_of(name):
    """Return a callback that notes the arguments of its method `name`, and the notes."""
    notes = []
    return callback_with(**{name: lambda self, *args, **kwargs: notes.append((args, kwargs))}), notes


@pytest.mark.parametrize("name", EVENT_OF_HOOK)
def test_every_hook_receives_the_host_and_what_its_event_carries(name):
    callback, notes = calls_of(name)
    engine = Engine(state_of(), plugins=[callback], host="trainer")
    for event in Event:
        engine.fire(event)
    carried = {
        "on_train_step_end": {"batch": "batch", "batch_output": {"loss": 1}, "step": 4},
        "on_eval_step_end": {"batch": "batch", "batch_output": {"loss": 1}},
        "on_predict_step_end": {"batch": "batch", "batch_output": {"loss": 1}},
        "on_eval_epoch_start": {"is_intermediate": True},
        "on_eval_epoch_end": {"is_intermediate": True},
    }
    assert notes == [(("trainer",), carried.get(ALIASES.get(name, name), {}))]


@pytest.mark.parametrize("event", Event)
def test_every_event_name_in_lower_case_is_a_method(event):
    callback, notes = calls_of(event.value)
    state, logger = state_of(), Mock()
    engine = Engine(state, logger, [callback])
    for other in Event:
        engine.fire(other)
    assert notes == [((state, logger), {})]


def test_the_table_spells_each_event_once():
    assert {alias: spellings(EVENT_OF_HOOK[alias])[0] for alias in ALIASES} == ALIASES
    assert len(EVENT_OF_HOOK) == sum(len(spelling.names) for spelling in SPELLINGS.values()) == 25
    assert spellings(Event.BATCH_END) == ("batch_end",)


def test_arguments_are_read_when_the_event_fires_and_only_those_named_are_passed():
    seen = []

    class Watcher(Callback):
        def on_train_step_end(self, trainer, batch_output, step=None):
            seen.append((batch_output, step))

    state = state_of()
    engine = Engine(state, plugins=[Watcher()])
    state.batch_output, state.step = "later", 7
    engine.fire(Event.STEP_OUTPUT)
    assert seen == [("later", 7)]


def test_a_method_that_needs_an_unknown_argument_is_refused():
    with pytest.raises(
        TypeError, match=r"needs an argument 'batch_outputs'.*Did you mean 'batch_output'.*trainer, batch,"
    ):
        Engine(state_of(), plugins=[callback_with(on_train_step_end=lambda self, trainer, batch_outputs: None)])
    with pytest.raises(ConfigTypeError, match="takes no trainer"):
        Engine(state_of(), plugins=[callback_with(on_train_epoch_end=lambda self: None)])


def test_classes_of_another_family_take_part():
    seen = []

    class Reference:
        def on_train_run_begin(self, trainer, **kwargs):
            seen.append(trainer)

        def stop(self):
            """Help; `stop` with other arguments is no event."""

    class SeedForm:
        def match(self, event, state):
            return event == Event.AFTER_LOSS

        def apply(self, event, state, logger):
            seen.append(event)

    engine = Engine(state_of(), plugins=[Reference(), SeedForm()], host="trainer")
    for event in Event:
        engine.fire(event)
    assert seen == ["trainer", Event.AFTER_LOSS]
    assert engine.has_algorithm_for(Event.AFTER_LOSS) and not Engine(state_of(), plugins=[Reference()]).listens(
        Event.STOP
    )


def test_a_method_set_on_the_instance_counts():
    callback = callback_with(on_train_epoch_end=lambda self, trainer: None)
    callback.on_train_epoch_end = Mock()
    Engine(state_of(), plugins=[callback], host="trainer").fire(Event.EPOCH_END)
    callback.on_train_epoch_end.assert_called_once_with("trainer")


def test_of_two_spellings_the_most_derived_definition_wins():
    notes = []

    class Base(Callback):
        def on_training_run_start(self, trainer):
            notes.append("base")

    class Derived(Base):
        def on_train_run_begin(self, trainer):
            notes.append("derived")

    class Further(Derived):
        def fit_start(self, state, logger):
            notes.append("further")

    for cls, expected in ((Base, "base"), (Derived, "derived"), (Further, "further")):
        notes.clear()
        Engine(state_of(), plugins=[cls()]).fire(Event.FIT_START)
        assert notes == [expected]


def test_two_spellings_in_one_class_are_refused():
    twice = {"on_training_run_start": lambda self, trainer: None, "on_train_run_begin": lambda self, trainer: None}
    with pytest.raises(ConfigError, match="FIT_START twice, as on_training_run_start and on_train_run_begin"):
        Engine(state_of(), plugins=[callback_with(**twice)])
    with pytest.raises(ConfigError, match="twice"):
        Engine(
            state_of(),
            plugins=[callback_with(init=lambda self, state, logger: None, on_init_end=lambda self, trainer: None)],
        )


def test_one_method_under_two_names_is_called_once():
    notes = []

    class Both(Callback):
        def on_train_epoch_start(self, trainer):
            notes.append(trainer)

        on_train_epoch_begin = on_train_epoch_start

    Engine(state_of(), plugins=[Both()], host="t").fire(Event.EPOCH_START)
    assert notes == ["t"]


def test_of_two_inherited_spellings_the_canonical_one_is_called():
    notes = []

    class Library(Callback):
        def on_train_run_begin(self, trainer):
            notes.append("alias")

        def on_training_run_start(self, trainer):
            notes.append("canonical")

    class Mine(Library):
        def on_train_epoch_end(self, trainer):
            """Add something of my own."""

    Engine(state_of(), plugins=[Mine()]).fire(Event.FIT_START)
    assert notes == ["canonical"]


def test_placeholders_are_never_called_but_can_be_reached_with_super():
    class Base(Callback):
        @placeholder
        def on_train_epoch_end(self, trainer, **kwargs):
            raise AssertionError("called")

        @placeholder
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            """Nothing."""

    class Mine(Base):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            super().on_train_step_end(trainer, batch, batch_output, **kwargs)

    engine = Engine(state_of(), plugins=[Base(), Mine()])
    assert [event for event in Event if engine.listens(event)] == [Event.STEP_OUTPUT]
    engine.fire(Event.STEP_OUTPUT)


def test_run_event_is_asked_for_every_event_and_reaches_methods_through_super():
    notes = []

    class Asked(Callback):
        def run_event(self, event, state, logger):
            notes.append(event)
            super().run_event(event, state, logger)

        def batch_end(self, state, logger):
            notes.append("method")

        def on_train_epoch_end(self, trainer):
            notes.append("hook")

    engine = Engine(state_of(), plugins=[Asked()])
    for event in Event:
        engine.fire(event)
    assert [note for note in notes if isinstance(note, Event)] == list(Event)
    assert notes[notes.index(Event.BATCH_END) + 1] == "method" and notes.count("method") == 1
    assert notes[notes.index(Event.EPOCH_END) + 1] == "hook" and notes.count("hook") == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_train_step_edn", "on_train_step_end"),
        ("on_training_step_end", "on_train_step_end"),
        ("on_train_epoch_ended", "on_train_epoch_end"),
        ("on_epoch_end", "on_.*epoch_end"),
        ("after_backwrad", "after_backward"),
        ("batch_edn", "batch_end"),
        ("on_train_batch_end", "on_train_step_end"),
        ("on_train_begin", "on_training_run_start"),
        ("on_validation_epoch_end", "on_eval_epoch_end"),
    ],
)
def test_a_mistyped_method_is_refused_with_the_nearest_name(name, meant):
    with pytest.raises(ConfigError, match=f"Watcher defines {name}.*Did you mean {meant}"):
        Engine(state_of(), plugins=[callback_with(**{name: lambda self, trainer, **kwargs: None})])
    declared = callback_with(**{name: lambda self, trainer, **kwargs: None}, custom_events=frozenset({name}))
    if name.startswith("on_"):
        Engine(state_of(), plugins=[declared])


@pytest.mark.parametrize("name", ["on_my_thing", "on_pruning_done", "save", "load_weights", "_after_backwrad", "log"])
def test_events_of_ones_own_and_helpers_are_allowed(name):
    methods = {name: lambda self, trainer: None, "batch_end": lambda self, state, logger: None}
    Engine(state_of(), plugins=[callback_with(**methods)])


def test_custom_events_and_occasional_hooks_are_called_by_name():
    seen = []

    class Watcher(Callback):
        def on_my_thing(self, trainer, value):
            seen.append((trainer, value))

        def on_exception(self, trainer, exception):
            seen.append(exception)

    class Other(Callback):
        def batch_end(self, state, logger):
            """Have no such method."""

    engine = Engine(state_of(), plugins=[Watcher(), Other()], host="t")
    engine.call("on_my_thing", value=3, other=4)
    error = RuntimeError()
    engine.call("on_exception", exception=error)
    assert seen == [("t", 3), error]


def test_a_plugin_that_attends_nothing_is_a_type_error():
    for nothing in (callback_with(), object(), type("Idle", (Algorithm,), {})()):
        with pytest.raises(TypeError, match="handles no event"):
            Engine(state_of(), plugins=[nothing])
    with pytest.raises(TypeError, match=r"is a class; pass an instance: Callback\(\)"):
        Engine(state_of(), plugins=[Callback])


def test_events_without_apply_are_a_type_error():
    with pytest.raises(TypeError, match="handles no event"):
        Engine(state_of(), plugins=[type("Idle", (Algorithm,), {"events": frozenset({Event.INIT})})()])


def test_wrong_forms_are_type_errors_that_show_the_right_one():
    def algorithm(**methods):
        methods = {
            "apply": lambda self, event, state, logger: None,
            "match": lambda self, event, state: True,
            **methods,
        }
        return type("Mine", (Algorithm,), methods)()

    Engine(state_of(), plugins=[algorithm(apply=lambda self, e, s, log=None: None)])
    wrong = [
        (
            {"apply": lambda self, event, state: None},
            r"Mine.apply\(event, state\).*apply\(self, event, state, logger\)",
        ),
        ({"apply": lambda self, state, event, logger: None}, r"apply\(self, event, state, logger\)"),
        ({"match": lambda self, state, event, logger: True}, r"match\(self, event, state\)"),
        ({"match": lambda self, state, event: True}, r"match\(self, event, state\)"),
        ({"batch_end": lambda self, trainer: None}, r"batch_end\(self, state, logger\)"),
        ({"close": lambda self, trainer: None}, r"close\(self, state, logger\)"),
    ]
    for methods, message in wrong:
        with pytest.raises(TypeError, match=message):
            Engine(state_of(), plugins=[algorithm(**methods)])


def test_events_must_be_events():
    mine = type("Mine", (Algorithm,), {"events": {"batch_edn"}, "apply": lambda self, event, state, logger: None})
    with pytest.raises(TypeError, match=r"holds 'batch_edn'.*Event.BATCH_END"):
        Engine(state_of(), plugins=[mine()])


@pytest.mark.parametrize("name", ["events", "reads", "writes", "tags", "exclusive", "before", "after", "conflicts"])
@pytest.mark.parametrize("given", [None, 3, True])
def test_declarations_must_be_collections(name, given):
    act = {"batch_end": lambda self, state, logger: None}
    with pytest.raises(ConfigTypeError, match=rf"Observer.{name} is {given}; expected a .*set.* = \(\)"):
        Engine(state_of(), plugins=[type("Observer", (Callback,), {name: given, **act})()])


@pytest.mark.parametrize("name", ["reads", "writes", "tags", "exclusive"])
def test_a_single_name_is_not_read_letter_by_letter(name):
    act = {"batch_end": lambda self, state, logger: None}
    with pytest.raises(ConfigTypeError, match=rf"Observer.{name} is 'loss'.*{name} = \('loss',\)"):
        Engine(state_of(), plugins=[type("Observer", (Callback,), {name: "loss", **act})()])
    for reference in ("before", "after", "conflicts"):  # here one name is a reference
        Engine(state_of(), plugins=[type("Observer", (Callback,), {reference: "Other", **act})()])


def test_an_unknown_phase_is_refused():
    with pytest.raises(ConfigError, match=r"phase is 'sinks'.*sink"):
        Engine(state_of(), plugins=[callback_with(phase="sinks", batch_end=lambda self, state, logger: None)])


def make_state():
    model = torch.nn.Linear(2, 1)
    batch = {"x": torch.ones(3, 2), "y": [torch.zeros(3, 1)]}
    outputs = model(batch["x"])
    loss = outputs.mean()
    loss.backward()
    return SimpleNamespace(model=model, batch=batch, outputs=outputs, loss=loss, seed=5, _cache=None)


def add_in_place(tensor):
    with torch.no_grad():
        tensor.add_(1)


ACTIONS = {
    "loss": lambda state: setattr(state, "loss", state.loss * 2),
    "batch['x']": lambda state: state.batch["x"].add_(1),
    r"batch\['y'\]\[0\]": lambda state: state.batch["y"][0].zero_(),
    "outputs": lambda state: add_in_place(state.outputs),
    "model.weight": lambda state: add_in_place(state.model.weight),
    "model.bias.grad": lambda state: state.model.bias.grad.zero_(),
    "model.weight.grad": lambda state: setattr(state.model.weight, "grad", None),
    "seed": lambda state: setattr(state, "seed", 6),
    "invented": lambda state: setattr(state, "invented", 1),
    "batch": lambda state: setattr(state, "batch", (state.batch["x"], state.batch["y"][0])),
}


def watcher(action, **declarations):
    class Meddler(Callback):
        def batch_end(self, state, logger):
            action(state)

    return type("Meddler", (Meddler,), declarations)()


@pytest.mark.parametrize("field", ACTIONS)
def test_a_callback_that_changes_the_state_is_named_with_the_field(field):
    Engine(make_state(), plugins=[watcher(ACTIONS[field])]).fire(Event.BATCH_END)
    pattern = field.replace("batch['x']", r"batch\['x'\]")
    with pytest.raises(RuntimeError, match=rf"Meddler changed state.{pattern} at BATCH_END"):
        Engine(make_state(), plugins=[watcher(ACTIONS[field])], strict=True).fire(Event.BATCH_END)


@pytest.mark.parametrize(
    ("field", "writes"), [("loss", "loss"), ("model.weight", "model"), ("model.bias.grad", "grads")]
)
def test_what_is_declared_may_be_written(field, writes):
    Engine(make_state(), plugins=[watcher(ACTIONS[field], writes=(writes,))], strict=True).fire(Event.BATCH_END)


def test_watching_and_private_fields_are_free():
    def look(state):
        state._cache = state.loss.item() + state.batch["x"].sum().item()

    engine = Engine(make_state(), plugins=[watcher(look)], strict=True)
    for _ in range(300):  # version counters and other numbers grow past Python's small integers
        engine.state.batch["x"].add_(0)
        engine.fire(Event.BATCH_END)


def test_a_module_or_parameter_that_a_callback_exchanges_is_noticed():
    for exchange in (
        lambda model: model.add_module("more", torch.nn.Linear(2, 1)),
        lambda model: setattr(model, "0", torch.nn.Linear(2, 1)),
        lambda model: model[0].register_parameter("scale", torch.nn.Parameter(torch.ones(1))),
    ):
        state = make_state()
        state.model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        add_in_place(state.model[0].weight)
        actions = [exchange, lambda model: None]
        engine = Engine(state, plugins=[watcher(lambda state, todo=actions: todo.pop()(state.model))], strict=True)
        engine.fire(Event.BATCH_END)
        with pytest.raises(EngineError, match=r"Meddler changed state.model"):
            engine.fire(Event.BATCH_END)


def test_watching_calls_few_functions_for_each_parameter():
    def calls(layers):
        state = make_state()
        state.model = torch.nn.Sequential(*(torch.nn.Linear(2, 1) for _ in range(layers)))
        engine = Engine(state, plugins=[watcher(lambda state: None)], strict=True)
        engine.fire(Event.BATCH_END)
        with cProfile.Profile() as profile:
            engine.fire(Event.BATCH_END)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(40) - calls(20) <= 20 * 5


def test_a_watched_plugin_may_ask_for_no_watching():
    meddler = watcher(ACTIONS["loss"])
    meddler.is_watched = False
    Engine(make_state(), plugins=[meddler], strict=True).fire(Event.BATCH_END)


def test_algorithms_may_write():
    class Double(Algorithm):
        events, writes = frozenset({Event.BATCH_END}), ("loss",)

        def apply(self, event, state, logger):
            state.loss = state.loss * 2

    state = make_state()
    Engine(state, plugins=[Double()], strict=True).fire(Event.BATCH_END)


def test_sinks_are_watched_too():
    with pytest.raises(RuntimeError, match=r"Meddler changed state.loss"):
        Engine(make_state(), plugins=[watcher(ACTIONS["loss"], phase="sink")], strict=True).run_event("batch_end")
