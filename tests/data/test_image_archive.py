"""Pictures of a tar file come back as tensors, decoded once."""

import io
import tarfile

import pytest
import torch

from drivetrain.data.image_archive import load_image_archive

Image = pytest.importorskip("PIL.Image")


def write_archive(path, colours, size=(4, 3)):
    """One PNG per (split, class, name): {name: colour}."""
    with tarfile.open(path, "w:xz") as tar:
        for name, colour in colours.items():
            data = io.BytesIO()
            Image.new("RGB", size, colour).save(data, format="PNG")
            entry = tarfile.TarInfo(name)
            entry.size = data.tell()
            data.seek(0)
            tar.addfile(entry, data)


COLOURS = {
    "train/dog/0002.png": (5, 6, 7),
    "train/cat/0001.png": (1, 2, 3),
    "train/dog/0001.png": (9, 9, 9),
    "test/cat/0001.png": (4, 4, 4),
    "test/dog/0001.png": (8, 8, 8),
}


def test_splits_classes_and_names_are_in_order(tmp_path):
    write_archive(tmp_path / "a.tar.xz", COLOURS)
    splits = load_image_archive(tmp_path / "a.tar.xz", tmp_path / "cache")
    images, labels = splits["train"]
    assert images.shape == (3, 3, 3, 4) and images.dtype == torch.uint8
    assert images[:, :, 0, 0].tolist() == [[1, 2, 3], [9, 9, 9], [5, 6, 7]] and labels.tolist() == [0, 1, 1]
    assert splits["test"][1].tolist() == [0, 1]


def test_the_second_time_comes_from_the_cache_and_a_changed_archive_does_not(tmp_path, monkeypatch):
    write_archive(tmp_path / "a.tar.xz", COLOURS)
    first = load_image_archive(tmp_path / "a.tar.xz", tmp_path / "cache")
    monkeypatch.setattr("drivetrain.data.image_archive._decode", lambda archive: pytest.fail("decoded again"))
    again = load_image_archive(tmp_path / "a.tar.xz", tmp_path / "cache")
    assert torch.equal(first["train"][0], again["train"][0]) and len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.undo()
    write_archive(tmp_path / "a.tar.xz", {**COLOURS, "train/cat/0007.png": (0, 0, 0)}, size=(4, 3))
    assert len(load_image_archive(tmp_path / "a.tar.xz", tmp_path / "cache")["train"][0]) == 4


def test_what_is_no_such_archive_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        load_image_archive(tmp_path / "none.tar")
    write_archive(tmp_path / "flat.tar", {"picture.png": (0, 0, 0)})
    with pytest.raises(ValueError, match="holds no"):
        load_image_archive(tmp_path / "flat.tar", tmp_path)
