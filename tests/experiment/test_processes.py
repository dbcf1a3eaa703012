"""Experiments on several processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.core.errors import ExperimentError, ResumeError
from drivetrain.experiment import find_runs
from drivetrain.experiment.processes import must_launch
from drivetrain.runtime.launch import WorkerFailed
from tests.experiment import samples

ROOT = Path(__file__).parents[2]


def test_distributed_starts_workers_that_share_folder_and_seed(tmp_path):
    result = samples.describe.run(output_dir=str(tmp_path), distributed=True, nproc_per_node=2, cuda=False, tag="two")
    (record,) = find_runs(tmp_path)
    assert (result["rank"], result["world"], result["tag"]) == (0, 2, "two")
    assert set(result["folders"]) == {str(record.folder)} and len(set(result["seeds"])) == 1
    assert record.state == "finished" and record.manifest["processes"] == 2 and record.result == result
    assert (record.folder / "log.rank-1.txt").is_file()
    assert any("had no effect" in note for note in record.manifest["notes"])


def test_a_run_name_that_is_taken_is_refused_before_workers_start(tmp_path):
    """Workers are given a folder, and would continue the run they find in it."""
    samples.describe.run(output_dir=str(tmp_path), run_name="taken", cuda=False, tag="first")
    words = ["--output-dir", str(tmp_path), "--run-name", "taken", "--tag", "first", "--no-cuda", "--distributed"]
    with pytest.raises(ExperimentError, match="already exists"):
        samples.describe.cli([*words, "--resume", "never"], exit_on_error=False)
    (record,) = find_runs(tmp_path)
    assert record.manifest["processes"] == 1 and not record.manifest["resumed"]


def run_here(output_dir, resume="never"):
    """Run on a rank of a world that exists already, as under torchrun."""
    return samples.describe.run(output_dir=output_dir, distributed=True, nproc_per_node=7, resume=resume)


def test_in_a_launched_world_nothing_is_spawned_and_rank_0_decides(world2, tmp_path):
    results = world2(run_here, str(tmp_path))
    (record,) = find_runs(tmp_path)
    assert [result["rank"] for result in results] == [0, 1] and {result["world"] for result in results} == {2}
    assert {result["folder"] for result in results} == {str(record.folder)}
    assert len({result["seed"] for result in results}) == 1
    assert results[0]["first"] == results[1]["first"]  # equal until the model is distributed


def refused_everywhere(output_dir):
    with pytest.raises(ResumeError, match="neither the folder of a run"):
        run_here(output_dir, resume=output_dir)
    return True


def test_what_rank_0_cannot_do_fails_on_every_rank(world2, tmp_path):
    assert world2(refused_everywhere, str(tmp_path)) == [True, True]


def masks_differ(output_dir):
    import torch

    from drivetrain import Context
    from drivetrain.experiment import experiment

    @experiment
    def drop():
        ctx = Context(model=torch.nn.Linear(64, 64))
        ctx.autotransform()
        weights = (
            ctx.model.module.weight.flatten().tolist()
            if hasattr(ctx.model, "module")
            else ctx.model.weight.flatten().tolist()
        )
        return weights, torch.nn.functional.dropout(torch.ones(64)).tolist()

    return drop.run(output_dir=output_dir)


def test_ranks_start_with_equal_weights_and_different_dropout(world2, tmp_path):
    (weights, mask), (other_weights, other_mask) = world2(masks_differ, str(tmp_path))
    assert weights == other_weights and mask != other_mask


def test_a_subprocess_or_worker_is_not_launched_again(monkeypatch):
    resolved = samples.describe.resolve({"distributed": True})
    assert must_launch(resolved)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert not must_launch(resolved)


@pytest.mark.slow
def test_a_failing_rank_is_named_and_ends_the_run(tmp_path):
    with pytest.raises(WorkerFailed, match="rank 1 has bad data") as caught:
        samples.fails_on_rank_one.run(output_dir=str(tmp_path), distributed=True, nproc_per_node=2, cuda=False)
    (record,) = find_runs(tmp_path)
    assert caught.value.rank == 1 and record.state != "finished"
    assert any(str(record.folder) in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_a_restarted_group_continues_in_its_folder(tmp_path):
    place = {"output_dir": str(tmp_path), "marker": str(tmp_path / "marker")}
    result = samples.dies_once.run(place, distributed=True, nproc_per_node=2, max_restarts=1, cuda=False)
    (record,) = find_runs(tmp_path)
    assert result == {"folder": str(record.folder), "resume": "auto", "ranks": [0, 1]}
    assert record.status["restarts"] == 1 and record.state == "finished"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_only_the_node_of_rank_0_names_the_run_folder(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr("drivetrain.runtime.launch.launch", lambda *_, args, **__: named.append(args[2]) or [None])
    place = {"output_dir": str(tmp_path), "distributed": True, "nnodes": 2, "cuda": False}
    for node in (0, 1):
        samples.describe.run(place, node_rank=node)
    assert named[0]["folder"] is not None and named[1]["folder"] is None


def test_a_run_begins_in_a_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    samples.describe.run(output_dir=str(tmp_path / "runs"), cuda=False)
    (record,) = find_runs(tmp_path / "runs")
    assert record.manifest["host"]["folder"] == ""


SCRIPT = "from tests.experiment import samples; import json; print(json.dumps(samples.describe.cli()))"


@pytest.mark.slow
def test_two_simulated_nodes_share_one_folder_and_one_seed(tmp_path):
    import json

    port = free_port()
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    line = ["--output-dir", str(tmp_path), "--distributed", "--nnodes", "2", "--master-port", str(port), "--no-cuda"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    start = lambda rank: subprocess.Popen([sys.executable, "-c", SCRIPT, *line, "--node-rank", rank], env=env, **pipes)
    nodes = [start("0"), start("1")]
    answers = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], answers
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in answers)
    assert first["folder"] == second["folder"] and first["seed"] == second["seed"] and second["rank"] == 1
    assert len(list(find_runs(tmp_path))) == 1


@pytest.mark.slow
def test_under_torchrun_the_processes_join_and_spawn_nothing(tmp_path):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*line, "--output-dir", str(tmp_path / "out"), "--distributed", "--nproc-per-node", "5", "--no-cuda"],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (record,) = find_runs(tmp_path / "out")
    assert record.manifest["processes"] == 2 and record.result["world"] == 2
