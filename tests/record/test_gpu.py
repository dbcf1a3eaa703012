"""On a CUDA device: recording never makes the host wait."""

import itertools
import time

import pytest
import torch

from drivetrain.record import Recorder, read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def no_waiting():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_ten_scalars_a_step_cause_no_synchronisation(tmp_path, no_waiting):
    values = torch.arange(10, device="cuda", dtype=torch.float32)
    with Recorder(tmp_path, flush_every=0.01) as recorder:
        recorder.scalars({f"warm/{place}": value for place, value in enumerate(values)})
        recorder.flush()
        no_waiting()
        for _ in range(300):
            values = values + 1
            for place in range(10):
                recorder.scalar(f"metric/{place}", values[place])
            recorder.histogram("values", values)
            recorder.image("picture", values.reshape(2, 5) / 400)
            recorder.step()
        torch.cuda.set_sync_debug_mode("default")
    rows = read_metrics(tmp_path, kind="scalar")
    assert [row["value"] for row in rows if row["tag"] == "metric/3"] == [3.0 + step for step in range(1, 301)]
    assert [row["step"] for row in rows if row["tag"] == "metric/9"] == list(range(300))


def test_the_host_runs_ahead_of_the_device(tmp_path):
    with Recorder(tmp_path, tensorboard=False, flush_every="1h") as recorder:
        recorder.scalar("x", torch.ones((), device="cuda"))
        recorder.flush()
        torch.cuda._sleep(2_000_000_000)  # about a second of device time
        value = torch.ones((), device="cuda") * 2
        begun = time.perf_counter()
        for _ in range(100):
            recorder.scalar("x", value)
            recorder.step()
        assert time.perf_counter() - begun < 0.5
        assert recorder.last("x") == 2.0


def test_a_value_overwritten_by_a_graph_replay_is_kept(tmp_path):
    source, result = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        source.add_(1)
        result.copy_(source * 2)
    with Recorder(tmp_path, tensorboard=False) as recorder:
        for _ in range(5):
            graph.replay()
            recorder.scalar("x", result)
            recorder.step()
    values = [row["value"] for row in read_metrics(tmp_path)]
    assert [late - early for early, late in itertools.pairwise(values)] == [2.0] * 4


def test_types_arrive_exactly_and_streams_do_not_mix(tmp_path):
    with Recorder(tmp_path, tensorboard=False) as recorder:
        recorder.scalar("int", torch.tensor(2**53 + 1, device="cuda"))
        recorder.scalar("half", torch.tensor(1.5, device="cuda", dtype=torch.bfloat16))
        recorder.scalar("bool", torch.tensor(True, device="cuda"))
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            recorder.scalar("side", torch.full((), 7.0, device="cuda"))
        recorder.scalar("main", torch.full((), 8.0, device="cuda"))
        assert [recorder.last(tag) for tag in ("int", "half", "bool", "side", "main")] == [2**53 + 1, 1.5, 1, 7.0, 8.0]
