import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from drivetrain.checkpoint.files import replace_file, safetensors_pieces, write_file
from drivetrain.checkpoint.tree import SAFETENSORS_DTYPES


def sample(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([[True, False, True]])
    values = torch.tensor([[0.0, 1.0, 3.0]])
    return values.to(dtype)


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES)
def test_the_safetensors_library_reads_every_type_we_write(tmp_path, dtype):
    value = sample(dtype)
    write_file(tmp_path, "x.safetensors", safetensors_pieces({"x": value, "odd": torch.ones(3, dtype=torch.uint8)}))
    back = load_file(tmp_path / "x.safetensors")
    assert back["x"].dtype is dtype and back["x"].shape == value.shape
    assert torch.equal(back["x"].view(torch.uint8), value.view(torch.uint8))
    assert back["odd"].tolist() == [1, 1, 1]


def test_any_shape_and_stride_is_written_by_value(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "transposed": base.t(),
        "slice": base[1:, ::2],
        "expanded": torch.ones(1).expand(7),
        "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    write_file(tmp_path, "x.safetensors", safetensors_pieces(tensors))
    back = load_file(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_a_tensor_larger_than_one_piece_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.checkpoint.files.PIECE", 1000)
    value = torch.randn(1003)
    write_file(tmp_path, "x.safetensors", safetensors_pieces({"x": value}))
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], value)


def test_size_and_hash_are_those_of_the_file(tmp_path):
    for entry in (
        write_file(tmp_path, "a", [b"hello"]),
        write_file(tmp_path, "b", safetensors_pieces({"x": torch.randn(100)}, {"note": "å"})),
    ):
        data = (tmp_path / entry.path).read_bytes()
        assert entry.size == len(data) and entry.sha256 == hashlib.sha256(data).hexdigest()
    with safe_open(tmp_path / "b", framework="pt") as file:
        assert file.metadata() == {"note": "å"}


def test_an_existing_file_is_never_written_over(tmp_path):
    write_file(tmp_path, "a", [b"1"])
    with pytest.raises(FileExistsError):
        write_file(tmp_path, "a", [b"2"])


def test_replacing_a_text_leaves_no_other_file(tmp_path):
    replace_file(tmp_path / "last", [b"one\n"])
    replace_file(tmp_path / "last", [b"two\n"])
    assert [path.name for path in tmp_path.iterdir()] == ["last"] and (tmp_path / "last").read_text() == "two\n"
