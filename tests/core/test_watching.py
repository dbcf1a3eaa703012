"""Tests of strict mode, on real tensors."""

from types import SimpleNamespace

import pytest
import torch

from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Callback


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
