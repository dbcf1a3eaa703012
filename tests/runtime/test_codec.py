"""Values become plain data and come back, without pickle."""

import io
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from enum import Enum, Flag, IntEnum, auto
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.core.errors import StateError
from drivetrain.core.event import Event
from drivetrain.core.time import Time
from drivetrain.runtime.codec import is_packed_generator, pack, unpack
from drivetrain.runtime.coders import TAG


class Colour(Enum):
    RED = 1
    BLUE = "b"


class Level(IntEnum):
    LOW = 1


class Access(Flag):
    READ = auto()
    WRITE = auto()


Point = namedtuple("Point", "x y")


@dataclass(frozen=True, slots=True)
class Record:
    epoch: int
    tags: list = field(default_factory=list)
    best: Any = None


class Text(str):
    pass


def through_file(value):
    """Save and load as a checkpoint file is: without unrestricted pickle."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


VALUES = [
    None,
    True,
    3,
    2**100,
    1.5,
    float("inf"),
    1 + 2j,
    "text",
    b"\x00\xff",
    bytearray(b"ab"),
    Path("a/b"),
    datetime(2024, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
    date(2024, 1, 2),
    time(3, 4),
    timedelta(days=-1, microseconds=7),
    torch.float16,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    range(1, 9, 2),
    Colour.BLUE,
    Level.LOW,
    Access.READ | Access.WRITE,
    Event.BATCH_END,
    Time(3, "ep"),
    Point(1, Path("x")),
    Record(1, [Colour.RED], {"a": (1,)}),
    {1, "a", (2, 3)},
    frozenset({Colour.RED}),
    deque([1, 2], maxlen=2),
    Counter({"a": 2, "b": -1}),
    OrderedDict([("b", 1), ("a", 2)]),
    {1: "a", (1, 2): [None], "x": {"y": ()}},
    {Path("k"): 1, Colour.RED: 2},
    {TAG: "path", "value": 3},
    [{TAG: {TAG: 1}}],
    ((), [], {}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_with_its_type_through_a_file_without_pickle(value):
    back = unpack(through_file(pack(value)), live=value)
    assert back == value
    assert type(back) is type(value)


def test_subclasses_of_plain_types_and_numpy_scalars_become_plain():
    packed = pack([Text("a"), np.float32(0.5), np.int64(3), np.bool_(True), defaultdict(int, a=1)])
    assert packed == ["a", 0.5, 3, True, {"a": 1}]
    assert [type(value) for value in packed] == [str, float, int, bool, dict]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just(TAG), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_any_nesting_of_plain_values_comes_back(value):
    assert unpack(through_file(pack(value))) == value


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 2), dtype=np.int64),
        np.arange(6).reshape(2, 3)[:, ::-1],
        np.array([True, False]),
        np.array([1 + 2j]),
        np.arange(3, dtype=">i4"),
        np.array(["ab", "c"]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_keep_dtype_shape_and_values(array):
    array.flags.writeable = False
    back = unpack(through_file(pack(array)))
    assert back.dtype == array.dtype and back.shape == array.shape and back.flags.writeable
    assert np.array_equal(back, array)


def test_tensors_are_shared_and_detached():
    parameter = torch.nn.Parameter(torch.ones(2))
    packed = pack([parameter])
    assert not packed[0].requires_grad and packed[0].data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g).tolist()),
        (random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
        (np.random.default_rng(3), lambda g: g.normal(size=3).tolist()),
        (np.random.Generator(np.random.MT19937(3)), lambda g: g.normal(size=3).tolist()),
        (np.random.RandomState(3), lambda g: g.normal(size=3).tolist()),
    ],
    ids=["torch", "random", "numpy", "numpy-mt", "numpy-legacy"],
)
def test_generators_continue_where_they_were(generator, draw):
    draw(generator)
    packed = pack(generator)
    assert is_packed_generator(packed)
    back = unpack(through_file(packed))
    assert draw(back) == draw(generator)


def test_module_metadata_is_kept():
    state = torch.nn.BatchNorm1d(2).state_dict()
    back = unpack(through_file(pack(state)))
    assert back._metadata == state._metadata
    assert isinstance(back, OrderedDict)


def test_a_class_named_in_a_file_is_never_imported():
    packed = {TAG: "dataclass", "value": {"class": "subprocess.Popen", "fields": {"args": ["true"]}}}
    with pytest.raises(StateError, match="never imported by name"):
        unpack(packed)
    with pytest.raises(StateError, match=r"add_safe_globals\(\[Record\]\)"):
        unpack(pack(Record(1)))


def test_a_declared_class_is_found():
    packed = pack([Record(1), Colour.RED])
    with torch.serialization.safe_globals([Record, Colour]):
        assert unpack(packed) == [Record(1), Colour.RED]


@pytest.mark.parametrize(
    "packed",
    [
        {TAG: "no such tag", "value": 1},
        {TAG: 3},
        {TAG: ["path"]},
        {TAG: "path"},
        {TAG: "datetime", "value": "yesterday"},
        {TAG: "dtype", "value": "load"},
        {TAG: "generator", "value": {"device": "cpu", "seed": 1, "state": torch.zeros(3)}},
        {TAG: "numpy_generator", "value": {"bit_generator": "__import__"}},
        {TAG: "enum", "value": {"class": "drivetrain.core.event.Event", "name": "NO_SUCH"}},
        {TAG: "enum", "value": {"class": "drivetrain.core.time.Time", "name": "value"}},
        {TAG: "dataclass", "value": {"class": "drivetrain.core.event.Event", "fields": {}}},
        {TAG: "dict", "value": [[1]]},
        {TAG: "set", "value": [[]]},
    ],
    ids=str,
)
def test_damaged_data_is_refused_as_a_state_error(packed):
    with pytest.raises(StateError):
        unpack([packed])


def test_what_cannot_be_plain_data_is_named_with_its_path():
    with pytest.raises(StateError, match=r"a\.1: a object cannot be saved"):
        pack({"a": [1, object()]})
    with pytest.raises(StateError, match="cannot be saved"):
        pack(np.array([object()]))
    cycle: list = []
    cycle.append({"again": cycle})
    with pytest.raises(StateError, match="contains itself"):
        pack(cycle)


class Doubled(namedtuple("Doubled", "x y")):
    def __new__(cls, x):
        return super().__new__(cls, x, 2 * x)


@pytest.mark.parametrize(
    "value",
    [np.datetime64("2026-01-02T03:04:05.123456789"), np.timedelta64(5, "ns"), np.timedelta64("NaT", "ns"), Doubled(4)],
)
def test_times_of_numpy_and_namedtuples_with_their_own_constructor_come_back(value):
    back = unpack(through_file(pack({"value": value})), live=value)["value"]
    assert type(back) is type(value) and repr(back) == repr(value)


def test_masked_array_is_rejected_because_its_mask_would_be_lost():
    with pytest.raises(StateError, match="MaskedArray"):
        pack({"seen": np.ma.array([1.0, 2.0], mask=[False, True])})


def test_value_that_is_nested_too_deeply_is_rejected_by_name():
    value: list = []
    for _ in range(400):
        value = [value]
    with pytest.raises(StateError, match=r"deep\.0\.0.*levels deep"):
        pack({"deep": value})


@pytest.mark.parametrize(("saved_in", "live_in"), [("__main__", "paint_script"), ("paint_script", "__main__")])
def test_a_class_of_a_script_is_found_whether_the_script_runs_or_is_imported(saved_in, live_in, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="/somewhere/paint_script.py"))
    saved, live = Enum("Paint", "RED GREEN", module=saved_in), Enum("Paint", "RED GREEN", module=live_in)
    assert unpack(pack(saved.GREEN), live.RED) is live.GREEN
    with torch.serialization.safe_globals([live]):
        assert unpack(pack(saved.RED)) is live.RED
    other = Enum("Paint", "RED GREEN", module="other_script")
    with pytest.raises(StateError, match=r"needs its class"):
        unpack(pack(saved.GREEN), other.RED)
