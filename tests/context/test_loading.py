"""Saving and restoring whole Contexts: every kind of item, every kind of problem."""

import gc
import io
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.context import Context, loading
from drivetrain.core.errors import ResumeError, StateError

Pair = namedtuple("Pair", "x y")


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Record:
    epoch: int = 0
    notes: list = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    value: float


class Counting:
    """An object with state that refuses negative numbers."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "where": Path("x"), "colour": Colour.RED, "hook": len}

    def load_state_dict(self, state):
        self.value = None  # half done when the check below fails
        if state["value"] < 0:
            raise ValueError(f"{state['value']} is negative")
        assert state["where"] == Path("x") and state["colour"] is Colour.RED and "hook" not in state
        self.value = state["value"]


class Refusing(Counting):
    def load_state_dict(self, state):
        raise ResumeError("the dataset has another length")


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def restored(before, after):
    """Return what an item that holds `before` becomes when the state of `after` is loaded, and the live item."""
    ctx = Context(item=before)
    ctx.load_state_dict(through_file(Context(item=after).state_dict()))
    return ctx.item


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0, 5),
        (0, 0.5),
        (1.5, True),
        (0, 1 + 2j),
        (None, 3.5),
        (3.5, None),
        (None, [1, {"a": (2,)}]),
        ({"a": 1}, None),
        ("a", "b"),
        (b"a", b""),
        (Path("a"), Path("b/c")),
        (Colour.RED, Colour.BLUE),
        (datetime(2024, 1, 1), datetime(2025, 1, 1)),
        (timedelta(1), timedelta(2)),
        (torch.float32, torch.float16),
        (torch.device("cpu"), torch.device("cuda", 1)),
        (torch.Size([1]), torch.Size([2, 3])),
        ({}, {"loss": [1.0, 2.0], 3: None}),
        ({"a": 1, "b": 2}, {"b": 3}),
        (OrderedDict(a=1), OrderedDict(b=2, a=1)),
        (defaultdict(list), defaultdict(list, a=[1])),
        (Counter("aab"), Counter("abbb")),
        ([], [1, "a", None, [2]]),
        ([1, 2, 3], [4]),
        ((1,), (2, (3, 4))),
        (deque([1], maxlen=3), deque([1, 2, 3], maxlen=3)),
        ({1}, {2, 3}),
        (frozenset({1}), frozenset({2})),
        (Pair(1, "a"), Pair(2, "b")),
        (Record(), Record(3, ["x", (1, {})])),
        (Frozen(0.0), Frozen(1.0)),
        ([Record(1)], [Record(1), Record(2), Record(3)]),
        (np.float32(1), np.float32(2)),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_a_value_is_restored_with_its_type(before, after):
    item = restored(before, after)
    assert item == after
    assert type(item) is type(after)


def test_containers_and_dataclasses_are_restored_in_place():
    for before, after in (({}, {"a": 1}), ([], [1]), ({1}, {2}), (Record(), Record(2)), (deque(), deque([1]))):
        assert restored(before, after) is before
        assert before == after


def test_a_defaultdict_keeps_its_factory_and_the_saved_order_of_keys():
    item = restored(defaultdict(list, z=[0]), defaultdict(list, b=[1], a=[2]))
    assert list(item) == ["b", "a"] and item["new"] == []


def test_tensors_are_copied_in_place_if_they_fit_and_replaced_if_not():
    live = torch.zeros(3)
    assert restored(live, torch.ones(3)) is live and live.tolist() == [1, 1, 1]
    assert restored(torch.zeros(3), torch.ones(2, 2)).shape == (2, 2)
    assert restored(torch.zeros(3), torch.ones(3, dtype=torch.int64)).dtype is torch.int64
    expanded = torch.zeros(1).expand(3)
    assert restored(expanded, torch.arange(3.0)).tolist() == [0, 1, 2]


def test_trained_leaves_stay_the_same_objects():
    for live in (nn.Parameter(torch.zeros(3)), torch.zeros(3, requires_grad=True)):
        assert restored(live, torch.ones(3)) is live and live.tolist() == [1, 1, 1] and live.requires_grad
        assert restored(live, torch.ones(2)) is live and live.shape == (2,) and live.is_leaf


def test_a_best_loss_may_be_a_number_or_a_tensor_of_one_element():
    assert torch.equal(restored(float("inf"), torch.tensor(0.5)), torch.tensor(0.5))
    assert restored(torch.tensor(0.5), 3) == 3


def test_arrays_are_restored_in_place_if_they_fit():
    live = np.zeros(3)
    assert restored(live, np.arange(3.0)) is live and live.tolist() == [0, 1, 2]
    assert restored(np.zeros(3), np.arange(4)).tolist() == [0, 1, 2, 3]


def test_a_loaded_state_is_not_trained_along():
    state = {"grown": {"tensor": torch.zeros(2)}, "best": torch.zeros(2)}
    ctx = Context(grown={}, best=None)
    ctx.load_state_dict(state)
    ctx.grown["tensor"] += 1
    ctx.best += 1
    assert state["grown"]["tensor"].tolist() == [0, 0] and state["best"].tolist() == [0, 0]


def test_grown_tensors_come_to_the_device_of_the_context():
    ctx = Context(grown={}).to(torch.device("meta"))
    ctx.load_state_dict({"grown": {"x": torch.ones(2)}})
    assert ctx.grown["x"].device.type == "meta"


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(2, generator=g).tolist()),
        (lambda: random.Random(1), lambda g: g.random()),
        (lambda: np.random.default_rng(1), lambda g: g.random()),
        (lambda: np.random.RandomState(1), lambda g: g.random_sample()),
    ],
)
def test_generators_are_restored_in_place(make, draw):
    source, live = make(), make()
    draw(source)
    assert restored(live, source) is live
    assert draw(live) == draw(source)


def test_a_generator_of_another_kind_is_refused():
    with pytest.raises(StateError, match="saved from a PCG64, this one is a MT19937"):
        restored(np.random.Generator(np.random.MT19937(1)), np.random.default_rng(1))
    with pytest.raises(StateError, match="saved a random"):
        restored(torch.Generator(), random.Random(1))


def make_session(seed=0, **items):
    torch.manual_seed(seed)
    ctx = Context(epoch=0, history={"loss": []}, **items)
    ctx.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    ctx.optimizer = torch.optim.AdamW(ctx.model.parameters(), lr=0.01)
    ctx.scheduler = torch.optim.lr_scheduler.OneCycleLR(ctx.optimizer, 0.1, total_steps=20)
    ctx.scaler = torch.amp.GradScaler("cpu")
    ctx.rng = torch.Generator().manual_seed(seed)
    return ctx


def train(ctx, steps):
    for _ in range(steps):
        x = torch.randn(8, 3, generator=ctx.rng)
        loss = nn.functional.cross_entropy(ctx.model(x), (x.sum(1) > 0).long())
        ctx.optimizer.zero_grad()
        ctx.scaler.scale(loss).backward()
        ctx.scaler.step(ctx.optimizer)
        ctx.scaler.update()
        ctx.scheduler.step()
        ctx.history["loss"].append(loss.item())
        ctx.epoch += 1


def test_a_restored_session_continues_bit_for_bit():
    whole, first = make_session(), make_session()
    train(whole, 10)
    train(first, 4)
    second = make_session(seed=99)
    report = second.load_state_dict(through_file(first.state_dict()))
    assert report.is_complete
    assert set(report.restored) == {"epoch", "history", "model", "optimizer", "scheduler", "scaler", "rng"}
    train(second, 6)
    assert second.history == whole.history and second.epoch == 10
    for (name, one), two in zip(whole.model.state_dict().items(), second.model.state_dict().values()):
        assert torch.equal(one, two), name


def test_module_state_keeps_metadata_and_has_the_names_of_the_bare_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = Context(model=torch.compile(model, backend="eager")).state_dict()["model"]
    assert list(state) == list(model.state_dict())
    assert through_file(state)._metadata == model.state_dict()._metadata
    assert state["0.weight"].data_ptr() == model[0].weight.data_ptr()


def test_a_state_with_wrapper_prefixes_loads_into_a_bare_module():
    model = nn.Linear(2, 1)
    prefixed = OrderedDict((f"module.{name}", torch.ones_like(value)) for name, value in model.state_dict().items())
    Context(model=model).load_state_dict({"model": prefixed})
    assert model.weight.tolist() == [[1, 1]]


def test_the_file_of_the_plugin_loads_with_none_for_what_had_no_state():
    source = make_session()
    state = {
        "model": source.model.state_dict(),
        "optimizer": source.optimizer.state_dict(),
        "epoch": 3,
        "counter": None,
        "loss": None,
    }
    ctx = Context(model=make_session(1).model, epoch=0, counter=Counting(4), loss=nn.functional.mse_loss)
    ctx.optimizer = torch.optim.AdamW(ctx.model.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match="None for counter"):
        report = ctx.load_state_dict(through_file(state))
    assert ctx.epoch == 3 and ctx.counter.value == 4 and report.without_state == ("counter",)
    assert ctx.optimizer.param_groups[0]["lr"] == source.optimizer.param_groups[0]["lr"]


def test_all_problems_are_raised_at_once_before_anything_changes():
    source = Context(
        epoch="three",
        history={"best": [0.5, "x"]},
        model=nn.Linear(3, 2),
        optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
        gone=1,
        fine=7,
    )
    state = through_file(source.state_dict())
    live = nn.Sequential(OrderedDict(weight=nn.Linear(1, 1)))
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    ctx = Context(
        epoch=1, history={"best": ["a"]}, model=live, optimizer=torch.optim.SGD(parameters, lr=0.2), extra=2, fine=0
    )
    with pytest.raises(StateError) as caught:
        ctx.load_state_dict(state)
    message = str(caught.value)
    for part in (
        "nothing was changed",
        "extra",
        "gone",
        "epoch: saved str 'three', expected a int",
        "history.best.0: saved float 0.5, expected a str",
        "model.weight.weight",
        "model.bias",
        "optimizer: saved 1 parameters in group 0, this optimizer has 2 there",
        "strict=False",
    ):
        assert part in message, part
    assert ctx.fine == 0 and ctx.history == {"best": ["a"]}

    report = ctx.load_state_dict(state, strict=False)
    assert ctx.fine == 7 and ctx.epoch == 1 and report.restored == ("fine",)
    assert "extra" in report.missing and "gone" in report.unexpected and not report.is_complete
    assert any(entry.startswith("epoch: ") for entry in report.unfitting) and "fine" in str(report)


def test_shapes_that_differ_are_named_and_what_fits_is_loaded_without_strict():
    source, live = nn.Linear(3, 2), nn.Linear(4, 2)
    ctx = Context(model=live)
    with pytest.raises(StateError, match=r"model\.weight: .*\(2, 3\).*\(2, 4\)"):
        ctx.load_state_dict(Context(model=source).state_dict())
    ctx.load_state_dict(Context(model=source).state_dict(), strict=False)
    assert torch.equal(live.bias, source.bias)


def test_missing_and_unexpected_names_have_their_full_path():
    ctx = Context(inner=Context(epochs=1), models=[nn.Linear(1, 1)], table={"model": nn.Linear(1, 1)})
    with pytest.raises(StateError) as caught:
        ctx.load_state_dict({"inner": {"epoch": 1}, "models": [], "table": {}})
    message = str(caught.value)
    assert "inner.epochs" in message and "inner.epoch: nearest is 'epochs'" in message
    assert "models.0" in message and "table.model" in message


def test_the_state_of_a_module_is_never_put_in_place_of_one():
    state = through_file(Context(models=[nn.Linear(1, 1), nn.Linear(1, 1)]).state_dict())
    with pytest.raises(StateError, match=r"models\.1: the state of a module"):
        Context(models=[nn.Linear(1, 1)]).load_state_dict(state)


def test_objects_that_refuse_are_put_back_together_with_those_already_loaded():
    state = Context(a=Counting(5), b=Counting(-1), c=6).state_dict()
    ctx = Context(a=Counting(1), b=Counting(2), c=3)
    with pytest.raises(StateError, match="b: ValueError: -1 is negative"):
        ctx.load_state_dict(through_file(state))
    assert (ctx.a.value, ctx.b.value, ctx.c) == (1, 2, 3)
    report = ctx.load_state_dict(through_file(state), strict=False)
    assert (ctx.a.value, ctx.b.value, ctx.c) == (5, 2, 6) and report.unfitting


def test_an_error_of_ours_passes_as_it_is():
    ctx = Context(loader=Refusing(1))
    with pytest.raises(ResumeError, match="another length") as caught:
        ctx.load_state_dict({"loader": {"value": 1}})
    assert any("loader" in note for note in caught.value.__notes__)


def test_functions_and_datasets_are_not_state_and_keep_their_places():
    class Data(torch.utils.data.Dataset):
        pass

    ctx = Context(function=len, kind=Counting, data=Data(), mixed=[len, 1, {"f": len, "n": 2}])
    state = through_file(ctx.state_dict())
    assert list(state) == ["function", "kind", "data", "mixed"]
    live = Context(function=print, kind=Context, data=None, mixed=[print, 0, {"f": print, "n": 0}])
    assert live.load_state_dict(state).is_complete
    assert live.function is print and live.mixed == [print, 1, {"f": print, "n": 2}]


def test_an_unknown_object_is_named_once():
    ctx = Context(thing=object(), table={"x": object()}, loader=torch.utils.data.DataLoader([1]))
    with pytest.warns(UserWarning, match="has no state to save") as caught:
        ctx.state_dict()
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 3
    assert "thing is a object" in messages[0] and "state_dict()" in messages[0] and "exclude('thing')" in messages[0]
    assert "table.x" in messages[1] and "exclude('table')" in messages[1]
    assert "SmartDataLoader" in messages[2]
    assert ctx.load_state_dict(ctx.state_dict()).is_complete  # and no second warning


def test_a_context_that_contains_itself_is_an_error_and_not_a_hang():
    ctx = Context(inner=Context())
    ctx.inner.outer = ctx
    with pytest.raises(StateError, match="contains itself"):
        ctx.state_dict()


def test_a_forged_state_changes_nothing_and_raises_a_state_error():
    ctx = Context(path=Path("a"), when=datetime(2024, 1, 1), pair=Pair(1, 2), table={}, rng=torch.Generator(), n=1)
    tag = "__drivetrain__"
    forged = {
        "path": {tag: "path", "value": 3},
        "when": {tag: "datetime", "value": "soon"},
        "pair": {tag: "namedtuple", "value": 1},
        "table": {tag: "dict", "value": 4},
        "rng": {tag: "generator", "value": {}},
        "n": 2,
    }
    with pytest.raises(StateError) as caught:
        ctx.load_state_dict(forged)
    assert all(f"{name}: " in str(caught.value) for name in ("path", "when", "pair", "table", "rng"))
    assert ctx.n == 1
    with pytest.raises(StateError):
        ctx.load_state_dict([1])


def test_long_histories_load_quickly():
    ctx = Context(losses=[0.0] * 10, steps=list(range(200_000)))
    state = Context(losses=[0.5] * 200_000, steps=list(range(10))).state_dict()
    ctx.load_state_dict(state)
    assert len(ctx.losses) == 200_000 and ctx.steps == list(range(10))


@pytest.mark.parametrize(
    "item", [None, 1, 1.5, "a", {}, {"a": 1}, [], [1], (), (1, 2), set(), {1}, torch.zeros(2)], ids=repr
)
def test_the_kind_of_a_common_type_is_looked_up(monkeypatch, item):
    expected = next(kind for kind in loading.KINDS if kind.holds(item))
    monkeypatch.setattr(loading, "KINDS", ())
    assert loading.kind_of(item) is expected


def test_a_subclass_of_a_common_type_is_asked_for_its_own_kind():
    class Own(dict):
        def state_dict(self):
            return {}

        def load_state_dict(self, state): ...

    assert type(loading.kind_of(Own())).__name__ == "ObjectKind" and type(loading.kind_of({})).__name__ == "DictKind"


def test_a_loaded_state_is_released_without_a_garbage_collection():
    ctx = Context(model=nn.Linear(2, 1))
    state = {"model": {name: value.clone() for name, value in ctx.state_dict()["model"].items()}}
    released = weakref.ref(state["model"]["weight"])
    gc.disable()
    try:
        ctx.load_state_dict(state)
        del state
        assert released() is None
    finally:
        gc.enable()


class Rows:
    """Yields rows and has a state, but is not a loader: asking for its state begins nothing."""

    def __init__(self, position):
        self.position = position

    def __getitem__(self, index):
        return index

    def __iter__(self):
        return iter(range(3))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Picky(Rows):
    def load_state_dict(self, state):
        raise ValueError("too old")


def test_data_that_has_loaded_its_state_gets_its_own_again_where_another_item_fails():
    state = Context(rows=Rows(5), picky=Picky(5)).state_dict()
    ctx = Context(rows=Rows(1), picky=Picky(1))
    with pytest.raises(StateError, match="too old"):
        ctx.load_state_dict(state)
    assert ctx.rows.position == 1
