"""Composer's small types."""

from collections import namedtuple

import pytest
import torch
from drivetrain.compat.composer.core import (
    DataSpec,
    Evaluator,
    MemoryFormat,
    Precision,
    Serializable,
    TrainerMode,
    ensure_data_spec,
    ensure_evaluator,
    get_precision_context,
)
from drivetrain.compat.composer.utils import ensure_tuple, map_collection

from drivetrain.compat import composer_types as passes
from drivetrain.core.engine import Engine
from drivetrain.core.errors import ConfigError
from drivetrain.core.event import Event
from drivetrain.module.precision import parse_precision
from tests.core.helpers import Notes, NoteState, fired


def test_every_precision_is_one_that_the_trainer_takes():
    names = [parse_precision(precision).name for precision in Precision]
    assert names == ["no", "fp16", "bf16", "fp8"]


def test_a_precision_context_computes_in_that_precision():
    weight = torch.randn(4, 4)
    with get_precision_context(Precision.AMP_BF16):
        assert (weight @ weight).dtype is torch.bfloat16
    with get_precision_context("fp32"):
        assert (weight @ weight).dtype is torch.float32
    with pytest.raises(ConfigError, match="precision_config"):
        get_precision_context("amp_fp8", {"fp8_format": "hybrid"})


def test_names_of_formats_and_modes_are_torchs_and_composers():
    assert all(isinstance(getattr(torch, name), torch.memory_format) for name in MemoryFormat)
    assert list(TrainerMode) == ["train", "eval", "predict"]
    assert Serializable().state_dict() == {}


def test_loaders_become_specs_and_evaluators_once():
    spec = ensure_data_spec([1, 2])
    assert ensure_data_spec(spec) is spec and list(spec) == [1, 2] and len(spec) == 2
    assert list(ensure_data_spec({"dataloader": [1], "batch_transforms": lambda one: one + 1})) == [2]
    evaluator = ensure_evaluator([1])
    assert evaluator.label == "eval" and isinstance(evaluator.dataloader, DataSpec)
    assert ensure_evaluator(evaluator) is evaluator
    with pytest.raises(TypeError, match="label=3"):
        Evaluator(label=3, dataloader=[1])


def test_ensure_tuple_takes_one_value_several_or_none():
    assert ensure_tuple(None) == () and ensure_tuple("ab") == ("ab",) and ensure_tuple(3) == (3,)
    assert ensure_tuple([1, 2]) == (1, 2) and ensure_tuple({"a": 1}) == (1,)
    tensor = torch.ones(2)
    assert ensure_tuple(tensor)[0] is tensor


def test_map_collection_keeps_the_shape():
    pair = namedtuple("pair", "a b")
    mapped = map_collection({"x": [1, (2, 3)], "y": pair(4, 5)}, lambda value: value * 10)
    assert mapped == {"x": [10, (20, 30)], "y": pair(40, 50)} and type(mapped["y"]) is pair


class SelectiveBackprop(Notes):
    """Found by its name."""


class LowPrecisionLayerNorm(Notes):
    """Found by its name."""


def test_sorting_is_stable_to_front_and_back():
    items = [1, "a", 2, "b"]
    assert passes.sort_to_front(items, str) == ["a", "b", 1, 2]
    assert passes.sort_to_back(items, str) == [1, 2, "a", "b"]
    assert items == [1, "a", 2, "b"]


def test_the_named_sorts_move_their_algorithm():
    plugins = [LowPrecisionLayerNorm("norm", *Event), Notes("x", *Event), SelectiveBackprop("select", *Event)]
    both = [passes.sort_selective_backprop_first, passes.sort_low_precision_layernorm_last]
    engine = Engine(NoteState(), plugins=plugins, algorithm_passes=both)
    assert fired(engine, Event.AFTER_DATALOADER) == ["select", "x", "norm"]


def test_first_in_last_out_reverses_every_after_event():
    plugins = [Notes("a", Event.EPOCH_START, Event.EPOCH_END), Notes("b", Event.EPOCH_START, Event.EPOCH_END)]
    engine = Engine(NoteState(), plugins=plugins, algorithm_passes=passes.set_filo_order)
    assert fired(engine, Event.EPOCH_START) == ["a", "b"] and fired(engine, Event.EPOCH_END) == ["b", "a"]


def test_several_loss_interpolations_warn():
    tagged = [Notes(name, Event.INIT, tags=frozenset({"interpolates_loss"})) for name in ("mixup", "cutmix")]
    with pytest.warns(UserWarning, match="mixup and cutmix"):
        assert passes.warn_if_multiple_loss_interpolation(tagged, Event.INIT) == tagged
    assert passes.warn_if_multiple_loss_interpolation(tagged[:1], Event.INIT) == tagged[:1]
