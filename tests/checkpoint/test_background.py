import threading

import pytest
import torch

from drivetrain.checkpoint.writer import BackgroundJob, HostBuffers, Snapshot


def test_a_staged_snapshot_no_longer_follows_the_live_tensors():
    live = {"plain": torch.arange(6.0), "turned": torch.arange(6.0).reshape(2, 3).t(), "empty": torch.empty(0)}
    expected = {name: tensor.clone() for name, tensor in live.items()}
    snapshot = Snapshot(state=b"", tensors=dict(live), local_tensors={"rng": live["plain"]})
    HostBuffers().stage(snapshot)()
    for tensor in live.values():
        tensor.fill_(-1)
    assert all(torch.equal(snapshot.tensors[name], expected[name]) for name in live)
    assert torch.equal(snapshot.local_tensors["rng"], expected["plain"])


def test_buffers_are_used_again_unless_the_tensor_changed():
    buffers = HostBuffers()

    def stage(**tensors) -> dict[str, int]:
        snapshot = Snapshot(state=b"", tensors=tensors)
        buffers.stage(snapshot)
        return {name: tensor.data_ptr() for name, tensor in snapshot.tensors.items()}

    first = stage(a=torch.ones(100), b=torch.ones(100))
    assert stage(a=torch.zeros(100), b=torch.zeros(100)) == first
    second = stage(a=torch.zeros(100), b=torch.zeros(50))
    assert second["a"] == first["a"]
    stage(a=torch.zeros(100, dtype=torch.float64))
    assert {key: tuple(buffer.shape) for key, buffer in buffers._buffers.items()} == {("tensors", "a"): (100,)}


def test_a_job_runs_beside_and_its_error_is_kept_for_the_main_thread(caplog):
    job, gate = BackgroundJob(), threading.Event()
    job.start(gate.wait, "checkpoint-1")
    assert job.is_busy
    gate.set()
    job.wait()
    assert not job.is_busy and job.take_error() is None

    def fail() -> None:
        raise ValueError("boom")

    job.start(fail, "checkpoint-2")
    job.wait()
    error = job.take_error()
    assert isinstance(error, ValueError) and job.take_error() is None and "checkpoint-2 failed" in caplog.text
    with pytest.raises(ValueError, match="boom"):
        raise error
