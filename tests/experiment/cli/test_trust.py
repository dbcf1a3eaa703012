"""`drivetrain resume` shows what it will run, and does not run a file that somebody else may have written."""

import hashlib
import json
import os
import sys

import pytest

from drivetrain.experiment.cli.resume import find_untrusted_reasons
from drivetrain.experiment.records import find_runs

EVIL = "from pathlib import Path\nPath(__file__).with_name('owned').touch()\n"


@pytest.fixture
def run(command, program, tmp_path):
    """A run that can go on, and the file of its program."""
    file = program("SMALL")
    assert command("run", file, "--output-dir", tmp_path / "o", "--fail")[0] == 1
    (record,) = find_runs(tmp_path / "o")
    return record.folder, file


def rewrite(folder, **fields):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in manifest.items() if value is not None}))


def test_file_function_and_command_are_shown_before_the_file_is_run(command, run):
    folder, file = run
    file.write_text("raise SystemExit('IT RAN')\n" + file.read_text())
    sys.modules.pop(file.stem)
    status, out, _ = command("resume", folder)
    assert status == "IT RAN"  # the status that the program left with
    assert f"file        {file}" in out and "function    small" in out and "command     drivetrain run" in out


def test_an_unchanged_file_is_said_to_be_so_and_a_changed_one_named_with_both_hashes(command, run):
    folder, file = run
    first = hashlib.sha256(file.read_bytes()).hexdigest()
    assert json.loads((folder / "manifest.json").read_text())["source_sha256"] == first
    _, out, _ = command("resume", folder)
    assert f"sha256 {first}, unchanged" in out
    file.write_text(file.read_text() + "\n# more\n")
    _, out, _ = command("resume", folder)
    assert f"was {first}, is {hashlib.sha256(file.read_bytes()).hexdigest()}" in out


def test_a_run_that_recorded_no_hash_is_continued_with_a_note(command, run):
    folder, _ = run
    rewrite(folder, source_sha256=None, function=None)
    status, out, err = command("resume", folder, "--set", "fail=false", "--force")
    assert status == 0, err
    assert "did not record the file's hash" in out


def test_a_file_inside_a_run_folder_is_not_run_without_trust(command, run):
    folder, file = run
    evil = folder / "artifacts" / "train.py"
    evil.write_text(EVIL + file.read_text())
    rewrite(folder, source=str(evil))
    status, out, err = command("resume", folder)
    assert status == 2 and "inside the run folder" in err and "--trust" in err and f"file        {evil}" in out
    assert not evil.with_name("owned").exists()
    status, _, err = command("resume", folder, "--trust", "--set", "fail=false", "--force")
    assert status == 0 and evil.with_name("owned").exists(), err


def test_a_link_outside_that_leads_into_a_run_folder_is_found_out(run, tmp_path):
    folder, _ = run
    (folder / "train.py").write_text(EVIL)
    (tmp_path / "link.py").symlink_to(folder / "train.py")
    assert any("inside the run folder" in reason for reason in find_untrusted_reasons(tmp_path / "link.py"))


@pytest.mark.parametrize("source", ["evil", "evil:attr", "os", "../evil.txt", 3, ["train.py"]])
def test_a_source_that_is_not_a_python_file_is_not_imported(command, run, source, monkeypatch):
    folder, _ = run
    (folder / "evil.py").write_text(EVIL)
    monkeypatch.chdir(folder)
    rewrite(folder, source=source)
    status, _, err = command("resume", folder)
    assert status == 2 and "Error: the run" in err and not (folder / "owned").exists()


def test_an_experiment_name_that_is_no_experiment_is_an_error(command, run):
    folder, _ = run
    rewrite(folder, experiment="torch")
    status, _, err = command("resume", folder)
    assert status == 2 and "not an experiment" in err


def test_permissions_that_let_others_write_are_named(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    file = folder / "train.py"
    file.write_text("")
    file.chmod(0o644)
    folder.chmod(0o755)
    assert find_untrusted_reasons(file) == []
    file.chmod(0o646)
    assert find_untrusted_reasons(file) == ["every user can write to it"]
    file.chmod(0o644)
    folder.chmod(0o777)
    assert find_untrusted_reasons(file) == [f"every user can replace files in {folder.resolve()}"]
    folder.chmod(0o1777)
    assert find_untrusted_reasons(file) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_named(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("")
    os.chown(file, 12345, -1)
    assert find_untrusted_reasons(file) == ["it belongs to another user (12345)"]


def test_json_output_stays_json(command, run):
    folder, file = run
    status, out, err = command("resume", folder, "--json", "--set", "fail=false", "--force")
    assert status == 0 and json.loads(out)["state"] == "finished" and str(file) in err
