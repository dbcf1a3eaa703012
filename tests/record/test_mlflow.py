"""MLflow's folder store, read back with its client."""

import contextlib
import os

import pytest
import torch

pytest.importorskip("mlflow")
from drivetrain.record import MlflowSink, Recorder
from drivetrain.record.trackers import _folder_store_allowed


@pytest.fixture(autouse=True)
def _no_server(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(tmp_path)


def client(folder):
    from mlflow import MlflowClient

    with _folder_store_allowed():
        return MlflowClient(tracking_uri=(folder / "mlruns").as_uri())


def test_a_run_is_read_back_and_continued(tmp_path):
    first = Recorder(tmp_path, tensorboard=False, sinks=("mlflow",))
    first.params({"lr": 0.1, "name": "x"})
    for value in (0.5, 0.25):
        first.scalars({"train/loss": torch.tensor(value), 'a,"b"': 1})
        first.step()
    first.image("sample", torch.zeros(3, 4))
    first.text("note", "hello")
    first.summary({"best": 0.25, "verdict": "good"})
    state = first.state_dict()
    first.close()
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    found, run_id = client(tmp_path), state["runs"]["mlflow"]
    run = found.get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == tmp_path.name
    assert run.data.params == {"lr": "0.1", "name": "x"} and run.data.tags["verdict"] == "good"
    assert run.data.metrics == {"train/loss": 0.25, "a:2C:22b:22": 1.0, "best": 0.25}
    assert [(row.step, row.value) for row in found.get_metric_history(run_id, "train/loss")] == [(0, 0.5), (1, 0.25)]
    artifacts = tmp_path / "mlruns" / run.info.experiment_id / run_id / "artifacts"
    assert (artifacts / "texts/note/2.txt").read_text() == "hello"
    assert (artifacts / "images/sample/2.png").read_bytes() == (tmp_path / "images/sample/2.png").read_bytes()

    with Recorder(tmp_path, tensorboard=False, sinks=("mlflow",)) as second:
        second.load_state_dict(state)
        second.params({"lr": 0.2, "new": True})  # MLflow never changes a parameter
        second.scalar("train/loss", 0.125)
        second.flush()
        assert found.get_run(run_id).info.status == "RUNNING"
    run = found.get_run(run_id)
    assert run.data.params == {"lr": "0.1", "name": "x", "new": "True"} and run.data.tags["lr"] == "0.2"
    assert run.data.metrics["train/loss"] == 0.125 and len(found.search_runs([run.info.experiment_id])) == 1


def test_a_server_that_is_not_there_does_not_stop_training(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    sink = MlflowSink("http://127.0.0.1:9")
    with Recorder(tmp_path, tensorboard=False, sinks=(sink,)) as recorder:
        for value in (1.0, 2.0):
            recorder.scalar("x", value)
            recorder.flush()
        assert recorder.last("x") == 2.0
    assert [record.name for record in caplog.records if "mlflow failed" in record.message] == ["drivetrain.record.sink"]


def test_all_runs_of_an_experiment_share_one_store_under_its_name_with_their_parameters(tmp_path):
    from drivetrain.experiment import experiment

    @experiment
    def blobs(lr: float = 0.1, api_key: str = "none", depth: int = 2):
        with Recorder(tensorboard=False, sinks=("mlflow",)) as recorder:
            recorder.scalar("loss", lr)

    for lr in (0.1, 0.2):
        blobs.run(lr=lr, api_key="hunter2", output_dir=str(tmp_path / "output"), cuda=False)
    found = client(tmp_path)
    made = found.get_experiment_by_name("blobs")
    runs = found.search_runs([made.experiment_id])
    assert sorted(run.data.params["lr"] for run in runs) == ["0.1", "0.2"]
    assert all(run.data.params["depth"] == "2" and run.data.metrics for run in runs)
    assert not any("hunter2" in text for run in runs for text in run.data.params.values())
    assert all("output_dir" not in run.data.params and "random_seed" in run.data.params for run in runs)
    assert {run.data.tags["drivetrain.folder"] for run in runs} == {
        str(path) for path in (tmp_path / "output" / "blobs").iterdir()
    }
    assert not list((tmp_path / "output").rglob("mlruns"))


def test_the_experiment_is_the_argument_then_the_variable_then_our_name(tmp_path, monkeypatch):
    def record(**options):
        with Recorder(tmp_path / str(len(options)), tensorboard=False, sinks=(MlflowSink(**options),)) as recorder:
            recorder.scalar("x", 1.0)

    record()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by variable")
    record(experiment="by argument")
    record(experiment=None, tracking_uri=None)
    names = {entry.name for entry in client(tmp_path).search_experiments()} - {"Default"}
    assert names == {"drivetrain", "by argument", "by variable"}


def test_more_settings_than_a_server_takes_at_once_and_a_run_that_is_resumed_elsewhere(tmp_path, monkeypatch, caplog):
    many = {f"option_{number}": number for number in range(250)}
    first = Recorder(tmp_path / "run", tensorboard=False, sinks=("mlflow",))
    first.params(many)
    first.scalar("x", 1.0)
    state = first.state_dict()
    first.close()
    run = client(tmp_path).get_run(state["runs"]["mlflow"])
    assert len(run.data.params) == 250
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Recorder(tmp_path / "run", tensorboard=False, sinks=("mlflow",)) as second:
        second.load_state_dict(state)
        second.params({name: value + 1 for name, value in many.items()})
        second.scalar("x", 2.0)
        second.flush()
        other = second.state_dict()["runs"]["mlflow"]
    assert other != state["runs"]["mlflow"] and "a new one is started" in caplog.text
    assert client(tmp_path / "elsewhere").get_run(other).data.metrics == {"x": 2.0}


def test_a_tag_longer_than_mlflow_takes_loses_no_other_metric(tmp_path):
    long = "layer/" * 60
    with Recorder(tmp_path, tensorboard=False, sinks=("mlflow",)) as recorder:
        recorder.scalars({"loss": 0.5, long: 1.0, "accuracy": 0.25})
    found = client(tmp_path)
    (run,) = found.search_runs([found.get_experiment_by_name("drivetrain").experiment_id])
    short = next(name for name in run.data.metrics if name.startswith("layer"))
    assert run.data.metrics == {"loss": 0.5, "accuracy": 0.25, short: 1.0} and len(short) <= 250


def test_a_batch_that_is_rejected_twice_does_not_hold_up_the_next_one(tmp_path):
    sink, sent = MlflowSink(), []

    class Server:
        def log_batch(self, run_id, metrics):
            if any(metric.value < 0 for metric in metrics):
                raise ValueError("rejected")
            sent.extend(metric.value for metric in metrics)

    sink._client, sink.run_id = Server(), "run"
    for values in ([-1.0], [], [2.0]):
        for value in values:
            sink.scalar("x", value, 0, 0.0)
        with contextlib.suppress(ValueError):
            sink.flush()
    assert sent == [2.0]


def test_metrics_that_could_not_be_sent_are_sent_the_next_time(tmp_path, monkeypatch):
    sink = MlflowSink()
    with Recorder(tmp_path, tensorboard=False, sinks=(sink,)) as recorder:
        recorder.scalar("x", 1.0)
        recorder.flush()
        recorder.scalar("x", 2.0)
        recorder.step()
        with monkeypatch.context() as broken:
            broken.setattr(sink._client, "log_batch", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("gone")))
            recorder.flush()
    rows = client(tmp_path).get_metric_history(sink.run_id, "x")
    assert [row.value for row in rows] == [1.0, 2.0]
