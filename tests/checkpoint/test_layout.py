import json
import math
from contextlib import suppress

import pytest

from drivetrain.checkpoint.layout import (
    CheckpointNotFoundError,
    FileEntry,
    Manifest,
    checkpoint_name,
    file_inside,
    read_manifest,
    read_pointer,
)
from drivetrain.checkpoint.layout import _content_hash as content_hash
from drivetrain.core.errors import CheckpointError, ConfigError


def make_manifest(**changes) -> Manifest:
    entry = FileEntry(path="state.json", size=2, sha256="0" * 64)
    return Manifest(**({"id": "ba3", "sequence": 4, "files": (entry,), "seed": 7} | changes))


def forge(manifest: Manifest, **changes) -> bytes:
    """Change fields and make the hash good again, as an attacker would."""
    content = json.loads(manifest.to_json()) | changes
    content.pop("sha256")
    return json.dumps(content | {"sha256": content_hash(content)}).encode()


def test_a_manifest_survives_its_own_text():
    manifest = make_manifest(
        metrics={"loss": 0.25, "worst": math.inf},
        progress={"ep": 3, "ba": 12, "sec": 1.5},
        world_size=2,
        run="digits",
        versions={"torch": "2"},
    )
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert (manifest.epoch, manifest.step, manifest.samples, manifest.size) == (3, 12, 0, 2)


def test_nan_metrics_are_kept_as_nan():
    again = Manifest.from_json(make_manifest(metrics={"loss": math.nan}).to_json())
    assert math.isnan(again.metrics["loss"])


def test_every_single_changed_character_of_a_manifest_is_noticed():
    text = make_manifest(progress={"ba": 3}).to_json()
    for place in range(len(text)):
        if not text[place : place + 1].strip():
            continue  # white space between entries carries nothing
        changed = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
        with suppress(CheckpointError):
            assert Manifest.from_json(changed) == Manifest.from_json(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sequence": -1}, "sequence"),
        ({"sequence": True}, "sequence"),
        ({"world_size": 0}, "world_size"),
        ({"id": "../x"}, "id"),
        ({"files": [{"path": 3, "size": 1, "sha256": "0" * 64}]}, "malformed"),
        ({"files": [{"path": "a", "size": -1, "sha256": "0" * 64}]}, "malformed"),
        ({"files": [{"path": "a", "size": 1, "sha256": "zz"}]}, "hash"),
        ({"files": [1]}, "files"),
        ({"files": {}}, "files"),
        ({"metrics": {"a": "rm -rf"}}, "metrics.a"),
        ({"extra": 1}, "extra"),
        ({"version": 99}, "version 99"),
        ({"format": "other"}, "not the manifest"),
        ({"seed": "0"}, "seed"),
    ],
)
def test_a_forged_manifest_with_a_good_hash_is_refused_by_its_fields(changes, reason):
    with pytest.raises(CheckpointError, match=reason):
        Manifest.from_json(forge(make_manifest(), **changes))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}'])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError):
        Manifest.from_json(text)


@pytest.mark.parametrize("relative", ["../x", "/etc/passwd", "a/../../x", "", "a\\b", "C:x", "a\0b"])
def test_paths_that_leave_the_folder_are_refused(tmp_path, relative):
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        file_inside(tmp_path, relative)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path):
    inside = tmp_path / "checkpoint-1"
    inside.mkdir()
    (tmp_path / "secret").write_text("x")
    (inside / "state.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="link"):
        file_inside(inside, "state.json")
    assert file_inside(inside, "shards/a") == inside / "shards" / "a"


@pytest.mark.parametrize("id", ["../x", "a/b", "", ".hidden", "a b", True, 1.5, None, "x" * 300])
def test_an_id_that_is_no_folder_name_is_refused(id):
    with pytest.raises(ConfigError, match="checkpoint id"):
        checkpoint_name(id)


def test_ids_are_numbers_or_short_names():
    assert checkpoint_name(3) == "checkpoint-3"
    assert checkpoint_name("ep3-ba1200") == "checkpoint-ep3-ba1200"


def test_pointers_name_a_neighbour_and_nothing_else(tmp_path):
    assert read_pointer(tmp_path, "last") is None
    (tmp_path / "last").write_text("checkpoint-3\n")
    assert read_pointer(tmp_path, "last") == tmp_path / "checkpoint-3"
    for text in ("../checkpoint-3", "checkpoint-3/../..", "/etc", "", "checkpoint-" + "x" * 600):
        (tmp_path / "last").write_text(text)
        with pytest.raises(CheckpointError, match="pointer"):
            read_pointer(tmp_path, "last")
    (tmp_path / "last").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="pointer"):
        read_pointer(tmp_path, "last")


def test_a_missing_or_enormous_manifest_is_named(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b" " * 100)
    monkeypatch.setattr("drivetrain.checkpoint.layout.MANIFEST_LIMIT", 10)
    with pytest.raises(CheckpointError, match="larger"):
        read_manifest(tmp_path)


def test_a_missing_checkpoint_is_also_a_missing_file():
    error = CheckpointNotFoundError("nothing here")
    assert isinstance(error, FileNotFoundError) and isinstance(error, CheckpointError) and str(error) == "nothing here"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_progress_that_is_not_finite_makes_a_manifest_unreadable_and_the_checkpoint_passed_over(tmp_path, value):
    from drivetrain.checkpoint.checkpointer import Checkpointer
    from drivetrain.context.context import Context

    with Checkpointer(Context(x=1), dir=tmp_path, keep_every="1ba") as keeper:
        keeper.save(id=1)
        path = keeper.save(id=2) / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("sha256")
    content["progress"]["ba"] = value
    content["sha256"] = content_hash(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"progress\.ba"):
        Manifest.from_json(path.read_bytes())
    with Checkpointer(Context(x=0), dir=tmp_path, keep_every="1ba") as keeper:
        restored = keeper.restore()
        assert restored.path.name == "checkpoint-1"
        keeper.save(id=3)
