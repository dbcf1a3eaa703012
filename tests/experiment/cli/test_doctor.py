"""`doctor`: the machine, runs that died in different ways, and programs that resume exactly or do not."""

import json
import shlex
import subprocess
import time

import pytest

from drivetrain.experiment.cli import doctor as health
from tests.experiment.folders import hold_lock, make_run


def checks_of(command, *words):
    """Run doctor and return its status and what it found, by name of the check."""
    status, out, err = command("doctor", "--json", *words)
    assert out, err
    return status, {check["check"]: check for check in json.loads(out)}


def test_the_machine_is_described(command, tmp_path):
    status, checks = checks_of(command, "--output-dir", tmp_path / "o")
    assert status == 0
    assert checks["torch"]["good"] and checks["process group"]["good"] and "gloo" in checks["process group"]["found"]
    assert "free disk" in checks and "a run will use" in checks and "CPUs" in checks
    missing = [check for check in checks.values() if "not installed" in check["found"]]
    assert all(check["good"] is None and check["remedy"].startswith("pip install") for check in missing)


def test_lines_carry_marks_and_remedies(command, tmp_path):
    status, out, _ = command("doctor", make_run(tmp_path, state="failed", error="RuntimeError: CUDA out of memory"))
    assert status == 1
    assert "✗ cause: memory ran out  → use a smaller batch" in out and "✓ manifest.json" in out


def test_a_contradicting_launcher_is_found(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, checks = checks_of(command)
    assert status == 1 and "RANK" in checks["launcher"]["found"]


def test_a_finished_run_is_well(command, tmp_path):
    status, checks = checks_of(command, make_run(tmp_path))
    assert status == 0 and checks["state"]["found"].startswith("finished")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk was full"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "memory ran out"),
        ("RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error.", "a data worker died"),
        ("NonFiniteLossError: the loss is NaN", "the loss became NaN"),
    ],
)
def test_the_log_names_the_cause_of_death(command, tmp_path, text, cause):
    folder = make_run(tmp_path, state="running")
    (folder / "log.rank-1.txt").write_text(f"[ERROR] {text}\n")
    status, checks = checks_of(command, folder)
    assert status == 1 and checks["cause"]["found"].startswith(cause) and checks["state"]["found"].startswith("lost")


def test_a_run_that_vanished_was_killed(command, tmp_path):
    status, checks = checks_of(command, make_run(tmp_path, state="running"))
    assert status == 1 and "without a message" in checks["cause"]["found"]


def test_a_restarted_machine_is_named(tmp_path, monkeypatch):
    import platform

    from drivetrain.experiment.records import read_run

    folder = make_run(tmp_path, state="running")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["host"]["name"] = platform.node()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(health, "_boot_time", time.time)
    assert "this machine was restarted" in health._cause_without_message(read_run(folder))
    (folder / "status.json").write_bytes(b"\x00 broken")  # when it lived is not known
    assert "this machine was restarted" not in health._cause_without_message(read_run(folder))


def test_an_interrupted_run_names_the_signal(command, tmp_path):
    status, checks = checks_of(command, make_run(tmp_path, state="interrupted"))
    assert status == 1 and "SIGTERM" in checks["cause"]["found"]


def test_a_live_run_that_gives_no_sign_may_hang(command, tmp_path):
    folder = make_run(tmp_path, state="running")
    with hold_lock(folder):
        status, checks = checks_of(command, folder)
        assert status == 1 and "may hang" in checks["state"]["remedy"]


def test_damaged_files_and_nan_are_found_and_the_way_on_is_told(command, tmp_path):
    import torch

    from drivetrain.checkpoint.store import save_checkpoint

    folder = make_run(tmp_path, state="failed", error="x", losses=[1.0, float("nan")])
    for step in (1, 2):
        path = save_checkpoint({"weight": torch.ones(3)}, step, path=folder / "checkpoints")
    (path / "tensors.safetensors").write_bytes(b"short")
    (folder / "checkpoints" / ".tmp-x").mkdir()
    (folder / "status.json").write_text((folder / "status.json").read_text())
    status, checks = checks_of(command, folder)
    assert status == 1
    assert checks["train/loss"]["found"] == "not finite from step 1 on"
    assert "damaged" in checks["checkpoint-2"]["found"] and checks["checkpoint-1"]["good"]
    assert (
        checks["next"]["remedy"].endswith(f"drivetrain resume {shlex.quote(str(folder))}")
        and "died while saving" in checks["half a checkpoint"]["found"]
    )


def test_a_factory_of_trainers_is_certified(command, program):
    path = program("FACTORY")
    status, checks = checks_of(command, "--resume-check", "4", f"{path}:build")
    assert status == 0 and checks["resume"]["found"].startswith("bit-exact: yes")
    status, _, err = command("doctor", "--resume-check", "4", f"{path}:wrong")
    assert status == 2 and "returned int" in err


@pytest.mark.slow
def test_an_experiment_is_killed_resumed_and_compared(command, program):
    status, checks = checks_of(command, "--resume-check", "6", program("SMALL"), "--epochs", "3")
    assert status == 0, checks
    assert checks["resume"]["found"].startswith("bit-exact: yes (6 steps, killed after 3") and "kill -9" in checks


def test_the_first_difference_of_two_checkpoints_is_named_and_times_do_not_count(tmp_path):
    import torch

    from drivetrain.checkpoint.store import save_checkpoint
    from drivetrain.experiment.cli.resume_check import _verdict

    def save(name, weight, note):
        state = {
            "weight": torch.tensor(weight),
            "nothing": torch.tensor(float("nan")),
            "note": note,
            "total_wct": len(name) / 7,
        }
        save_checkpoint(state, 1, path=tmp_path / name / "checkpoints")
        return tmp_path / name

    whole = save("whole", [1.0, 2.0], "a")
    assert _verdict(whole, save("resumed", [1.0, 2.0], "a"), 4).is_good
    assert "first difference: state.weight" in _verdict(whole, save("weights", [1.0, 2.5], "a"), 4).found
    assert "first difference: state.note" in _verdict(whole, save("notes", [1.0, 2.0], "b"), 4).found
    assert "no checkpoint to compare" in _verdict(whole, tmp_path / "empty", 4).found


def test_the_check_does_not_start_its_processes_as_ranks_of_a_launcher(monkeypatch, tmp_path):
    from drivetrain.experiment.cli import resume_check

    seen = {}

    def run(command, env, **options):
        seen.update(env)
        return subprocess.CompletedProcess(command, 143, "", "")

    monkeypatch.setattr(resume_check.subprocess, "run", run)
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE", "KEPT"):
        monkeypatch.setenv(name, "2")
    assert resume_check._start("x.py:y", [], tmp_path, "stop", 4) is None
    assert set(seen) & {"OMPI_COMM_WORLD_RANK", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE", "KEPT"} == {"KEPT"}


@pytest.mark.slow
def test_state_that_is_not_saved_shows_in_the_check(command, program):
    status, checks = checks_of(command, "--resume-check", "6", program("SMALL"), "--epochs", "3", "--drifting")
    assert status == 1 and "first difference: state." in checks["resume"]["found"]


@pytest.mark.slow
def test_an_experiment_that_is_too_short_is_said_so(command, program):
    status, checks = checks_of(command, "--resume-check", "50", program("SMALL"), "--epochs", "1")
    assert status == 1 and "ended before 50 steps" in checks["50 steps"]["found"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume-check", "2", "x.py:y"], "at least 4"),
        (["--resume-check", "8"], "needs a TARGET"),
        (["train.py:build"], "--resume-check 20 train.py:build"),
    ],
)
def test_doctor_refuses_bad_input(command, words, message):
    status, _, err = command("doctor", *words)
    assert status == 2 and message in err


def test_a_program_without_resume_check_is_answered_with_the_option(command, program):
    path = program("QUICK")
    status, _, err = command("doctor", path)
    assert status == 2 and f"--resume-check 20 {path}" in err
