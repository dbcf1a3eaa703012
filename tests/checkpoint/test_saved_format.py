"""A checkpoint and a dict that an earlier version wrote: they load, value by value, and are written the same way today."""

import json
from collections import Counter, OrderedDict, deque
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import nn

from drivetrain.checkpoint import load_checkpoint, save_checkpoint
from drivetrain.context import Context
from drivetrain.core.time import Time

SAVED = Path(__file__).parent / "saved_format"


def session(seed: int) -> Context:
    """Return a small session with an item of every way of being saved."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(4, 2))
    model[3].weight = model[2].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1), betas=(0.5, 0.75))
    for parameter in model.parameters():
        nn.init.constant_(parameter, seed + 1)
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    context = Context(model=model, optimizer=optimizer, epoch=seed, best=float("inf") if seed else 0.5)
    context.history = [1.0, 0.5, float("nan")][: 3 if seed else 1]
    context.generator = torch.Generator().manual_seed(seed)
    context.folder, context.due = Path("runs") / str(seed), Time(seed, "ep")
    return context


def values() -> dict:
    """Return a dict with every kind of value that a file can hold."""
    return {
        "plain": [None, True, 3, 2**100, 7**6000, 1.5, float("-inf"), 1 + 2j, "text", b"\x00\xff", ()],
        "path": Path("a/b"),
        "date": date(2024, 1, 2),
        "time": Time(3, "ba"),
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
        "range": range(1, 9, 2),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "words": np.array(["ab", "c"]),
        "sets": [{3, 4}, frozenset({"a"}), deque([1, 2], maxlen=2), Counter({"a": 2})],
        "keys": {1: "a", (1, 2): [None], "$tuple": 3, "__drivetrain__": "path"},
        "ordered": OrderedDict([("b", 1), ("a", (2,))]),
        "complex": torch.ones(2, dtype=torch.complex128),
    }


def assert_equal(left, right) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype is right.dtype and torch.equal(left, right)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and np.array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            assert_equal(one, other)
    else:
        assert left == right or left != left


def test_a_session_of_an_earlier_version_is_restored():
    expected, context = session(1), session(0)
    context.load_state_dict(load_checkpoint(SAVED / "checkpoint-session"))
    for (name, one), other in zip(context.model.state_dict().items(), expected.model.state_dict().values()):
        torch.testing.assert_close(one, other, msg=name)
    restored, wanted = context.optimizer.state_dict(), expected.optimizer.state_dict()
    assert restored["param_groups"] == wanted["param_groups"]
    for number, state in wanted["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(restored["state"][number][name], value, msg=f"{number}.{name}")
    assert context.epoch == 1 and context.best == float("inf") and context.folder == Path("runs/1")
    assert context.due == Time(1, "ep") and context.history[:2] == [1.0, 0.5] and np.isnan(context.history[2])
    assert torch.equal(torch.rand(3, generator=context.generator), torch.rand(3, generator=expected.generator))


def test_every_kind_of_value_of_an_earlier_version_comes_back():
    assert_equal(load_checkpoint(SAVED / "checkpoint-values"), values())


def test_the_structure_is_written_as_an_earlier_version_wrote_it(tmp_path):
    new = save_checkpoint(values(), "values", path=tmp_path)
    texts = [json.loads((folder / "state.json").read_text()) for folder in (new, SAVED / "checkpoint-values")]
    assert texts[0] == texts[1]
