import random
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.checkpoint.layout import read_manifest
from drivetrain.checkpoint.store import load_checkpoint, save_checkpoint
from drivetrain.core.errors import CheckpointError, ConfigError, DeviceError
from drivetrain.runtime.run import Run, set_current_run
from tests.checkpoint.training import assert_same_state, make_context, train


def test_a_dict_comes_back_as_it_was(tmp_path):
    state = {
        "epoch": 3,
        "root": Path("data"),
        "array": np.arange(6).reshape(2, 3),
        "scalar": np.float64(0.5),
        "set": {1, 2},
        "tuple": (1, (2.5, None)),
        "numbers": {1: "a", (2, 3): b"b"},
        "dtype": torch.bfloat16,
        "tagged": {"__drivetrain__": "path", "value": "not a tag of ours"},
    }
    back = load_checkpoint(save_checkpoint(state, 1, path=tmp_path))
    assert np.array_equal(back.pop("array"), state.pop("array"))
    assert back == state and type(back["root"]) is type(state["root"])


def test_generators_in_a_dict_continue_their_stream(tmp_path):
    state = {"torch": torch.Generator().manual_seed(1), "python": random.Random(2), "numpy": np.random.default_rng(3)}
    back = load_checkpoint(save_checkpoint(state, 1, path=tmp_path))
    assert torch.equal(torch.rand(3, generator=state["torch"]), torch.rand(3, generator=back["torch"]))
    assert state["python"].random() == back["python"].random()
    assert state["numpy"].random() == back["numpy"].random()


def test_a_context_state_goes_through_both_doors(tmp_path):
    ctx = make_context()
    train(ctx, 3)
    for id, given in (("context", ctx), ("dict", ctx.state_dict())):
        save_checkpoint(given, id, path=tmp_path)
        other = make_context(seed=9)
        other.load_state_dict(load_checkpoint(tmp_path / f"checkpoint-{id}"))
        assert_same_state(ctx.state_dict(), other.state_dict())


def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path):
    class Colour(Enum):
        RED = 1

    save_checkpoint({"colour": Colour.RED}, 1, path=tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"model\.hook"):
        save_checkpoint({"model": {"hook": print}}, 1, path=tmp_path / "b")
    with pytest.raises(ConfigError, match="checkpoint id"):
        save_checkpoint({}, "../x", path=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_run_gives_the_folder_and_the_pointers(tmp_path):
    with pytest.raises(CheckpointError, match="path="):
        save_checkpoint({}, 1)
    set_current_run(Run(folder=tmp_path, seed=5, name="digits"))
    try:
        for id, metric in enumerate([0.5, 0.2, 0.3]):
            path = save_checkpoint({"id": id}, id, metric=metric)
        assert path == tmp_path / "checkpoints" / "checkpoint-2"
        assert read_manifest(path).run == "digits" and read_manifest(path).seed == 5
        assert load_checkpoint("last") == {"id": 2} and load_checkpoint("best") == {"id": 1}
    finally:
        set_current_run(None)
    assert load_checkpoint(tmp_path) == {"id": 2} and load_checkpoint(tmp_path / "checkpoints" / "best") == {"id": 1}


def test_best_without_a_metric_says_so(tmp_path):
    set_current_run(Run(folder=tmp_path, seed=5))
    try:
        save_checkpoint({}, 1)
        with pytest.raises(CheckpointError, match="metric"):
            load_checkpoint("best")
    finally:
        set_current_run(None)


def test_a_metric_is_one_number(tmp_path):
    save_checkpoint({}, 1, path=tmp_path, metric=torch.tensor(0.5))
    with pytest.raises(ConfigError, match="one number"):
        save_checkpoint({}, 2, path=tmp_path, metric="good")


def test_versions_of_modules_in_a_bare_state_dict_are_kept(tmp_path):
    state = torch.nn.BatchNorm1d(2).state_dict()
    save_checkpoint(state, 1, path=tmp_path)
    assert load_checkpoint(tmp_path)._metadata == state._metadata


@pytest.mark.parametrize("length", [188, 189, 190, 200])
def test_checkpoint_with_a_long_id_is_found_again(tmp_path, length):
    save_checkpoint({"n": 1}, "x" * length, path=tmp_path)
    assert (
        load_checkpoint(tmp_path)["n"] == 1 and (tmp_path / "last").read_text().strip() == f"checkpoint-{'x' * length}"
    )


@pytest.mark.parametrize("device", ["cuda:7", "gpuu", {"cuda:0": "cpu"}])
def test_wrong_device_is_not_the_fault_of_the_checkpoint(tmp_path, device):
    save_checkpoint({"x": torch.ones(1)}, 1, path=tmp_path)
    with pytest.raises(DeviceError):
        load_checkpoint(tmp_path, map_location=device)


def test_only_dicts_and_objects_with_a_state_are_saved(tmp_path):
    with pytest.raises(ConfigError, match="a list cannot be saved"):
        save_checkpoint([1], 1, path=tmp_path)
