"""One line a step."""

from drivetrain.record import ConsoleSink, Recorder


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
