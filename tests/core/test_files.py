"""Files are opened without following links or waiting, read up to a limit, and replaced in one step."""

import contextlib
import os
import stat
from pathlib import Path

import pytest

from drivetrain.core import files
from drivetrain.core.errors import ConfigError
from drivetrain.core.files import (
    PRIVATE_FILE,
    absolute,
    atomic_write,
    home_cache,
    is_real_folder,
    is_regular,
    make_inner_folder,
    open_regular,
    read_end,
    read_limited,
    replace_bytes,
)


@pytest.fixture(params=["fifo", "link", "device", "dangling", "folder"])
def trap(request, tmp_path):
    """Something that is not a regular file, under a name where one is expected."""
    path = tmp_path / "status.json"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    else:
        (tmp_path / "secret").write_text("{}")
        path.symlink_to({"link": tmp_path / "secret", "device": "/dev/zero", "dangling": tmp_path / "x"}[request.param])
    return path


@pytest.mark.parametrize(
    "open_it",
    [
        lambda path: read_limited(path, 100),
        lambda path: read_end(path, 100),
        lambda path: open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        lambda path: open_regular(path, os.O_RDWR | os.O_CREAT),
    ],
    ids=["read", "end", "append", "lock"],
)
def test_what_is_not_a_regular_file_is_not_opened_and_nobody_waits(trap, open_it):
    with pytest.raises(OSError):
        open_it(trap)
    assert not is_regular(trap)


def test_a_sparse_file_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "huge"
    with open(path, "wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(OSError, match="larger than 1,000 bytes"):
        read_limited(path, 1000)
    assert read_end(path, 10) == bytes(10)


def test_content_is_read_whole_up_to_the_limit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_limited(path, 5) == read_limited(path, None) == b"12345" and read_end(path, 2) == b"45"


def test_a_file_appears_when_it_is_complete_and_not_after_an_error(tmp_path):
    path = tmp_path / "a"
    replace_bytes(path, b"old")
    with contextlib.suppress(RuntimeError), atomic_write(path) as stream:
        stream.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]
    with atomic_write(path) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]


def test_names_of_unfinished_files_cannot_be_guessed(tmp_path):
    names = set()
    for _ in range(3):
        with atomic_write(tmp_path / "a"):
            names |= {name for name in os.listdir(tmp_path) if name.startswith(".tmp-")}
    assert len(names) == 3 and not any(str(os.getpid()) == part for name in names for part in name.split("-"))


def test_a_link_in_the_place_of_a_file_is_replaced_and_its_target_untouched(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "a").symlink_to("target")
    replace_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "target").read_text() == "mine" and is_regular(tmp_path / "a")


def test_permissions_are_those_asked_for_within_the_umask_and_outlive_a_replacement(tmp_path):
    path = tmp_path / "a"
    before = os.umask(0o027)
    try:
        replace_bytes(path, b"")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        replace_bytes(tmp_path / "b", b"", mode=PRIVATE_FILE)
        assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
        path.chmod(0o604)
        replace_bytes(path, b"again")
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert home_cache() == Path("/home/me/.cache/drivetrain")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    with pytest.raises(OSError):
        home_cache().mkdir(parents=True)
    assert not home_cache().exists() and list(home_cache().glob("*")) == []


def test_folders_are_not_made_through_links(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "images").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="link"):
        make_inner_folder(tmp_path / "run", tmp_path / "run" / "images" / "a")
    make_inner_folder(tmp_path / "run", tmp_path / "run" / "figures" / "a")
    assert is_real_folder(tmp_path / "run" / "figures" / "a") and os.listdir(tmp_path / "outside") == []


def test_nothing_in_the_library_renames_a_file_of_its_own_making():
    """Writing aside and renaming has one home; folders of checkpoints are renamed by their writer, a claim becomes a lock."""
    package = Path(__file__).parents[2] / "src" / "drivetrain"
    allowed = {"core/files.py", "core/locking.py", "checkpoint/writer.py"}
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(
            word in path.read_text() for word in ("os.replace(", "rename_over(", "os.rename(", "mkstemp(", ".rename(")
        )
    }
    assert found == allowed


def test_a_relative_path_in_a_deleted_folder_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="'runs' is a relative path, and the current folder has been deleted"):
        absolute("runs")
    assert absolute(tmp_path / "runs") == tmp_path / "runs"


def test_a_file_that_windows_holds_is_renamed_a_moment_later(tmp_path, monkeypatch):
    real, tries = os.replace, []

    def held(source, target):
        tries.append(target)
        if len(tries) < 3:
            raise PermissionError(13, "The process cannot access the file because it is being used by another process")
        real(source, target)

    monkeypatch.setattr(files, "os", OtherSystem("nt", replace=held))
    monkeypatch.setattr(files, "_TRY_SECONDS", 0)
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    files.rename_over(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new" and len(tries) == 3
    tries.clear()
    monkeypatch.setattr(files, "os", OtherSystem("posix", replace=held))
    with pytest.raises(PermissionError):  # elsewhere it is a real lack of permission
        files.rename_over(tmp_path / "old", tmp_path / "new")
    assert len(tries) == 1


class OtherSystem:
    """The module `os` with another name of the system, and some functions replaced."""

    def __init__(self, name, **functions):
        self.name = name
        vars(self).update(functions)

    def __getattr__(self, name):
        return getattr(os, name)
