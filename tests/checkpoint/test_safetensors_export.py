import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.files import export_safetensors
from drivetrain.context.context import Context
from drivetrain.core.errors import CheckpointError, ConfigError
from tests.checkpoint.test_sharded import make_session


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight


def test_other_programs_read_the_weights_under_their_own_names(tmp_path):
    ctx = Context(model=nn.Linear(2, 3), head=nn.Linear(3, 1), epoch=2)
    with Checkpointer(ctx, dir=tmp_path / "c") as keeper:
        path = keeper.export_safetensors(tmp_path / "out")
        assert path == tmp_path / "out" / "model.safetensors"
        assert {name: tuple(t.shape) for name, t in load_file(path).items()} == {"weight": (3, 2), "bias": (3,)}
        path = keeper.export_safetensors(tmp_path / "both.safetensors", ("model", "head"))
        back = load_file(path)
        assert torch.equal(back["head.bias"], ctx.head.bias) and torch.equal(back["model.weight"], ctx.model.weight)


def test_tied_weights_are_stored_once_and_load_with_safetensors_own_function(tmp_path):
    model = Tied()
    path = export_safetensors(Context(model=model), tmp_path / "m.safetensors")
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"encoder.weight", "decoder.bias"}
        assert file.metadata() == {"format": "pt", "decoder.weight": "encoder.weight"}
    other = Tied()
    load_model(other, path)
    assert torch.equal(other.decoder.weight, model.encoder.weight)


def test_large_weights_are_split_with_an_index(tmp_path):
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))
    path = export_safetensors(Context(model=model), tmp_path, split_above=900)
    assert path.name == "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert index["metadata"]["total_size"] == 4 * 440 and set(index["weight_map"]) == set(model.state_dict())
    back = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_bad_names_and_types_are_refused(tmp_path):
    ctx = Context(model=nn.Linear(2, 2), step=3, spectrum=torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ConfigError, match="'model'"):
        export_safetensors(ctx, tmp_path, ("modle",))
    with pytest.raises(CheckpointError, match="no tensors"):
        export_safetensors(ctx, tmp_path, ("step",))
    with pytest.raises(CheckpointError, match="complex128"):
        export_safetensors(ctx, tmp_path, ("model", "spectrum"))
    assert list(tmp_path.iterdir()) == []


def export_sharded(folder: str) -> str:
    return str(export_safetensors(make_session(sharded=True), folder))


def test_a_sharded_model_is_exported_whole(world2, tmp_path):
    assert world2(export_sharded, str(tmp_path)) == [str(tmp_path / "model.safetensors")] * 2
    state = make_session(sharded=False).model.state_dict()
    back = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(back[name], value) for name, value in state.items())
