"""A sink that fails is said once and never stops training."""

import logging

import pytest

from drivetrain.record import ConsoleSink, Recorder, read_metrics


class Broken:
    """A sink whose network is gone until told otherwise."""

    remote = True

    def __init__(self, error=RuntimeError, at="scalar"):
        self.error, self.at, self.calls, self.taken = error, at, 0, []

    def _act(self, name):
        if name == self.at:
            self.calls += 1
            raise self.error("no route to host")

    def open(self, folder, resume):
        self._act("open")

    def scalar(self, tag, value, step, time):
        self._act("scalar")
        self.taken.append(value)

    def flush(self):
        self._act("flush")

    def close(self):
        self._act("close")


def train(folder, sink, steps=5, **arguments):
    with Recorder(folder, tensorboard=False, sinks=[sink], flush_every=0.0, **arguments) as recorder:
        for _ in range(steps):
            recorder.scalar("x", 1.0)
            recorder.step()


@pytest.mark.parametrize("at", ["open", "scalar", "flush", "close"])
def test_a_remote_sink_warns_once_and_rests(tmp_path, caplog, at):
    sink = Broken(at=at)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, sink)
    assert sink.calls == 1 and len(read_metrics(tmp_path)) == 5
    assert [record.message for record in caplog.records if "no route to host" in record.message]
    missed = [record.message for record in caplog.records if "missed" in record.message]
    assert missed == (
        []
        if at == "close"
        else [
            f"the sink Broken missed {4 if at == 'flush' else 5} rows because of errors; "
            "metrics.jsonl has them, unless its own disk failed."
        ]
    )


def test_it_is_tried_again_after_its_rest(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.record.sink._FIRST_REST", 0.0)
    sink = Broken(at="open")
    with Recorder(tmp_path, tensorboard=False, sinks=[sink], flush_every=0.0) as recorder:
        recorder.scalar("x", 1.0)
        sink.at = None
        recorder.scalar("x", 2.0)
    assert sink.taken == [2.0]


def test_an_error_of_the_program_in_a_local_sink_is_not_hidden(tmp_path):
    sink = Broken(error=TypeError)
    sink.remote = False
    with pytest.raises(TypeError, match="no route"):
        train(tmp_path, sink)
    sink = Broken(error=ConnectionError)
    sink.remote = False
    train(tmp_path / "other", sink)


def test_a_full_disk_does_not_stop_training(tmp_path, monkeypatch, caplog):
    import os

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING), Recorder(tmp_path, tensorboard=False, flush_every="1h") as recorder:
        monkeypatch.setattr("drivetrain.record.sink._FIRST_REST", 0.0)
        recorder._stream.outlets[0]._rest = recorder._stream.outlets[1]._rest = 0.0
        recorder.scalar("x", 1.0)
        recorder.flush()
        monkeypatch.setattr(os, "write", full)
        recorder.scalar("x", 2.0)
        recorder.flush()
        monkeypatch.undo()
        recorder.scalar("x", 3.0)
    assert [row["value"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 3.0]  # written when there is space again
    assert "No space left" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_of_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "run", tensorboard=False)
    recorder.scalar("x", 1.0)
    with pytest.raises(OSError, match="file"):
        recorder.flush()
    recorder.silence()


def test_a_line_appears_at_each_step_that_recorded_something(tmp_path, capsys):
    with Recorder(tmp_path, tensorboard=False, console=True, flush_every="1h") as recorder:
        recorder.scalars({"loss": 0.123456789, "acc": 1})
        assert capsys.readouterr().out == ""
        recorder.step()
        assert capsys.readouterr().out == "step 0  loss 0.123457  acc 1\n"
        recorder.step()
        recorder.count = 7
        assert capsys.readouterr().out == ""
        recorder.scalar("loss", 0.1)
        recorder.count = 9
        assert capsys.readouterr().out == "step 7  loss 0.1\n"
        assert not (tmp_path / "metrics.jsonl").read_text()  # showing does not write


def test_a_console_can_write_elsewhere(tmp_path):
    with (
        (tmp_path / "out.txt").open("w") as file,
        Recorder(tmp_path / "run", tensorboard=False, sinks=[ConsoleSink(file)]) as recorder,
    ):
        recorder.text("note", "hello")
        recorder.step()
    assert (tmp_path / "out.txt").read_text() == "step 0  note: hello\n"
