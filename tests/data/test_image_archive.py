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
    monkeypatch.setattr("drivetrain.data.image_archive._decode", lambda *_: pytest.fail("decoded again"))
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


def add(tar, name, data):
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def picture_bytes(form, size=(4, 3)):
    data = io.BytesIO()
    Image.new("RGB", size).save(data, format=form)
    return data.getvalue()


@pytest.mark.parametrize("compression", ["", ":gz", ":bz2", ":xz"])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_png_and_jpeg_are_decoded_in_every_compression(tmp_path, form, compression):
    with tarfile.open(tmp_path / "a.tar", "w" + compression) as tar:
        add(tar, "train/cat/1", picture_bytes(form))
    assert load_image_archive(tmp_path / "a.tar", tmp_path)["train"][0].shape == (1, 3, 3, 4)


@pytest.mark.parametrize("form", ["EPS", "GIF", "BMP", "PPM", "TIFF"])
def test_other_formats_are_not_decoded_whatever_their_name(tmp_path, form, monkeypatch):
    import subprocess

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a program was started"))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "train/cat/1.png", picture_bytes(form))
    with pytest.raises(ValueError, match="neither JPEG nor PNG"):
        load_image_archive(tmp_path / "a.tar", tmp_path)


def test_a_picture_is_measured_before_it_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.data.image_archive.MAX_PIXELS", 11)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    write_archive(tmp_path / "a.tar", {"train/cat/1.png": (0, 0, 0)})
    with pytest.raises(ValueError, match="4 x 3 pixels, more than 11"):
        load_image_archive(tmp_path / "a.tar", tmp_path)


def test_all_pictures_together_are_limited(tmp_path):
    write_archive(tmp_path / "a.tar", COLOURS)
    with pytest.raises(ValueError, match="max_bytes"):
        load_image_archive(tmp_path / "a.tar", tmp_path, max_bytes=4 * 36)
    assert len(load_image_archive(tmp_path / "a.tar", tmp_path, max_bytes=5 * 36)["train"][0]) == 3


def test_an_archive_that_unpacks_without_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.data.image_archive.MAX_FILE", 2**16)
    with tarfile.open(tmp_path / "file.tar.gz", "w:gz") as tar:
        add(tar, "train/cat/1.png", bytes(2**20))
    with tarfile.open(tmp_path / "header.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        entry = tarfile.TarInfo("train/cat/1.png")
        entry.pax_headers = {"comment": "x" * 2**20}
        tar.addfile(entry)
    for name in ("file.tar.gz", "header.tar.gz"):
        with pytest.raises(ValueError, match="more than 65,536 bytes"):
            load_image_archive(tmp_path / name, tmp_path)
    with tarfile.open(tmp_path / "many.tar.gz", "w:gz") as tar:
        for number in range(20):
            add(tar, f"skipped{number}", bytes(2**15))
    with pytest.raises(ValueError, match="unpacks to more than"):
        load_image_archive(tmp_path / "many.tar.gz", tmp_path, max_bytes=2**17)


@pytest.mark.parametrize("damage", ["truncated", "empty", "other", "fields"])
def test_a_damaged_cache_is_made_again(tmp_path, damage):
    write_archive(tmp_path / "a.tar", COLOURS)
    first = load_image_archive(tmp_path / "a.tar", tmp_path / "cache")
    (cache,) = (tmp_path / "cache").iterdir()
    whole = cache.read_bytes()
    if damage == "truncated":
        cache.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        cache.write_bytes(b"")
    else:
        torch.save([1] if damage == "other" else {"train": (torch.zeros(2), torch.zeros(3))}, cache)
    again = load_image_archive(tmp_path / "a.tar", tmp_path / "cache")
    assert torch.equal(first["train"][0], again["train"][0])
    assert torch.equal(torch.load(cache, weights_only=True)["train"][0], first["train"][0])


def test_the_cache_follows_the_content_and_not_the_date(tmp_path):
    import os

    write_archive(tmp_path / "a.tar", COLOURS)
    load_image_archive(tmp_path / "a.tar", tmp_path / "cache")
    facts = (tmp_path / "a.tar").stat()
    changed = {**COLOURS, "train/cat/0001.png": (3, 2, 1)}
    write_archive(tmp_path / "a.tar", changed)
    with open(tmp_path / "a.tar", "ab") as stream:  # the same size and the same date as before
        stream.write(bytes(max(0, facts.st_size - (tmp_path / "a.tar").stat().st_size)))
    os.utime(tmp_path / "a.tar", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    images, _ = load_image_archive(tmp_path / "a.tar", tmp_path / "cache")["train"]
    assert images[0, :, 0, 0].tolist() == [3, 2, 1]


def test_a_class_has_one_number_in_all_splits(tmp_path):
    write_archive(
        tmp_path / "a.tar", {"train/cat/1.png": (1, 1, 1), "train/dog/1.png": (2, 2, 2), "val/dog/1.png": (3, 3, 3)}
    )
    splits = load_image_archive(tmp_path / "a.tar", tmp_path)
    assert splits["train"][1].tolist() == [0, 1] and splits["val"][1].tolist() == [1]


@pytest.mark.parametrize("compression", ["", ":gz", ":bz2", ":xz"])
def test_a_truncated_archive_is_an_error_wherever_it_is_cut(tmp_path, compression):
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w" + compression) as tar:
        for number in range(4):
            add(tar, f"train/cat/{number}", picture_bytes("PNG"))
    whole = archive.read_bytes()
    # In a header, at its beginning, in a picture, and before the mark of the end; compressed ones anywhere.
    cuts = (1024 + 100, 2048, 2048 + 520, 4096) if not compression else (len(whole) // 3, len(whole) // 2)
    for cut in cuts:
        archive.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="truncated|cannot be read"):
            load_image_archive(archive, tmp_path)
    if not compression:  # a damaged header is not the end either
        archive.write_bytes(whole[:2048] + b"x" * 512 + whole[2560:])
        with pytest.raises(ValueError, match="damaged"):
            load_image_archive(archive, tmp_path)


def test_pictures_of_16_bits_are_rejected_instead_of_clipped(tmp_path):
    data = io.BytesIO()
    Image.new("I;16", (2, 2), 30000).save(data, format="PNG")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "train/cat/1.png", data.getvalue())
    with pytest.raises(ValueError, match="16 bits"):
        load_image_archive(tmp_path / "a.tar", tmp_path)
