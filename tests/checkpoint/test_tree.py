import json
import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain.checkpoint.store import load_checkpoint, save_checkpoint
from drivetrain.checkpoint.tree import flatten, parse_structure, tensor_names, unflatten
from drivetrain.core.errors import CheckpointError
from drivetrain.runtime.codec import DEPTH_LIMIT

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
)
keys = st.one_of(
    st.text(max_size=4),
    st.sampled_from(["$tensor", "$tuple", "$", "a.b"]),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.text(max_size=2), st.integers()),
)
states = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.lists(st.tuples(keys, inner), max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


def round_trip(state, **kwargs):
    flat = flatten(state, **kwargs)
    return unflatten(parse_structure(flat.to_json(), "state.json"), flat.tensors)


def same(left, right) -> bool:
    """Equal in value and type, with NaN equal to itself and the order of dicts kept."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(k, l) and same(v, w) for (k, v), (l, w) in zip(left.items(), right.items())
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


@given(states)
def test_any_plain_state_comes_back_as_it_was(state):
    assert same(round_trip(state), state)


@given(
    st.recursive(
        plain.filter(lambda x: not isinstance(x, bytes | complex)),
        lambda i: st.one_of(
            st.lists(i, max_size=4),
            st.dictionaries(
                st.one_of(
                    st.text(max_size=3),
                    st.sampled_from(
                        [
                            "$tuple",
                            "$dict",
                            "$ordered",
                            "$tensor",
                            "$local",
                            "$float",
                            "$int",
                            "$complex",
                            "$bytes",
                            "view",
                            "metadata",
                            "$x",
                        ]
                    ),
                ),
                i,
                max_size=3,
            ),
        ),
        max_leaves=12,
    )
)
def test_forged_structures_give_plain_values_or_a_checkpoint_error(forged):
    tensors = {"a": torch.zeros(2)}
    try:
        value = unflatten(json.loads(json.dumps(forged)), tensors)
    except CheckpointError:
        return
    assert_builtin(value)


def assert_builtin(value) -> None:
    assert type(value) in (
        dict,
        OrderedDict,
        list,
        tuple,
        str,
        bytes,
        int,
        float,
        bool,
        complex,
        type(None),
        torch.Tensor,
    )
    if isinstance(value, dict):
        for key, item in value.items():
            assert_builtin(key), assert_builtin(item)
    elif isinstance(value, list | tuple):
        for item in value:
            assert_builtin(item)


def test_tensors_are_named_by_their_path():
    state = {
        "model": OrderedDict({"layer.weight": torch.ones(2)}),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}},
    }
    flat = flatten(state)
    assert set(flat.tensors) == {"model.layer.weight", "optimizer.state.0.exp_avg"} == tensor_names(flat.structure)


def test_colliding_paths_get_different_names():
    state = {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}
    assert len(flatten(state).tensors) == 2
    back = round_trip(state)
    assert back["a"]["b.c"].item() == 1 and back["a.b"]["c"].item() == 0


def test_module_state_keeps_its_metadata_and_optimizer_settings_their_types():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = {
        "model": model.state_dict(),
        "optimizer": torch.optim.AdamW(model.parameters(), betas=(0.5, 0.6)).state_dict(),
    }
    back = round_trip(state)
    assert type(back["model"]) is OrderedDict
    assert back["model"]._metadata == state["model"]._metadata
    assert back["optimizer"]["param_groups"][0]["betas"] == (0.5, 0.6)
    model.load_state_dict(back["model"])


def test_tied_tensors_are_stored_once_and_tied_again():
    weight = torch.randn(3, 3)
    flat = flatten({"encoder": weight, "decoder": weight, "view": weight.t(), "part": weight[:2]})
    assert set(flat.tensors) == {"encoder", "view", "part"}
    assert flat.aliases == {"decoder": "encoder"}
    back = unflatten(flat.structure, flat.tensors)
    assert back["encoder"] is back["decoder"]
    assert torch.equal(back["view"], weight.t()) and torch.equal(back["part"], weight[:2])


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e8m0fnu, torch.float8_e4m3fnuz])
def test_types_safetensors_lacks_are_stored_as_a_view(dtype):
    if dtype.is_complex:
        value = torch.randn(3, 2, dtype=torch.complex128).to(dtype)
    else:
        value = torch.tensor([1.0, 2.0, 0.5]).to(dtype)
    flat = flatten({"x": value, "again": value})
    back = unflatten(flat.structure, flat.tensors)
    assert back["x"].dtype is dtype and back["x"] is back["again"]
    as_bytes = (lambda t: torch.view_as_real(t)) if dtype.is_complex else (lambda t: t.view(torch.uint8))
    assert torch.equal(as_bytes(back["x"]), as_bytes(value))


def test_a_conjugate_view_is_stored_by_value():
    value = torch.randn(3, dtype=torch.complex128).conj()
    assert torch.equal(round_trip({"x": value})["x"], value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(2).to_sparse(), "not dense"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2).to(torch.bool).view(torch.bits8), "type"),
        (object(), "builtins.object"),
        (lambda: 0, "function"),
        ({1, 2}, "set"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_path(value, reason):
    with pytest.raises(CheckpointError, match=r"history\.best\.0.*" + reason):
        flatten({"history": {"best": [value]}})


def test_a_tensor_as_a_key_is_refused():
    with pytest.raises(CheckpointError, match="key"):
        flatten({"x": {torch.ones(1): 1}})


def test_depth_is_limited_on_both_sides():
    deep: list = []
    deep.append(deep)
    with pytest.raises(CheckpointError, match="levels deep"):
        flatten(deep)
    for depth in (DEPTH_LIMIT + 5, 900, 200_000):
        with pytest.raises(CheckpointError):
            unflatten(parse_structure(b"[" * depth + b"]" * depth, "state.json"), {})


def test_huge_numbers_and_texts_are_kept_or_refused_never_cut(monkeypatch):
    number = 7**20_000
    for values in ([number, 2**64], [-number, 1], -number):
        assert round_trip(values) == values
    monkeypatch.setattr("drivetrain.checkpoint.tree.STATE_LIMIT", 100)
    with pytest.raises(CheckpointError, match="100"):
        flatten(["x" * 200]).to_json()
    with pytest.raises(CheckpointError, match="larger"):
        parse_structure(b" " * 200, "state.json")


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"\xff", b"{", b"", b"1" * 5000])
def test_text_that_is_no_json_is_refused(text):
    with pytest.raises(CheckpointError, match=r"state\.json"):
        parse_structure(text, "state.json")


def test_values_of_one_rank_are_kept_aside():
    state = {"rng": {"tag": 1}, "x": [1, {"tag": 1}]}
    flat = flatten(state, is_local=lambda path, value: isinstance(value, dict) and "tag" in value)
    assert flat.local == {"rng": {"tag": 1}, "x.1": {"tag": 1}}
    assert unflatten(flat.structure, {}, {"rng": 5, "x.1": 6}) == {"rng": 5, "x": [1, 6]}
    with pytest.raises(CheckpointError, match=r"\$local"):
        unflatten(flat.structure, {}, {})


def test_nan_and_infinity_survive():
    back = round_trip([math.nan, math.inf, -math.inf, complex(math.nan, -0.0)])
    assert math.isnan(back[0]) and back[1:3] == [math.inf, -math.inf] and math.copysign(1, back[3].imag) == -1


def test_tensor_may_have_a_name_that_the_file_format_uses_or_cannot_write(tmp_path):
    state = {"__metadata__": torch.ones(2), "\ud800": torch.zeros(1), "plain": torch.ones(1)}
    save_checkpoint(state, 1, path=tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
