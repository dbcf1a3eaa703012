"""Progress on a terminal and elsewhere."""

import io
import os
import pty
import re
import select
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.core.errors import ConfigError
from drivetrain.train.callbacks import ProgressBarCallback, StepBasedEvaluationCallback, TrainerCallback
from drivetrain.train.callbacks import progress as module
from tests.train.tasks import calls_of, make_data, make_trainer, train

PROGRAM = """
from drivetrain.train.callbacks import ProgressBarCallback, StepBasedEvaluationCallback
from tests.train.tasks import make_data, make_trainer, train
import time, sys
class Slow(type(make_trainer())):
    def calculate_train_batch_loss(self, batch):
        time.sleep(0.02)
        return super().calculate_train_batch_loss(batch)
trainer = make_trainer(cls=Slow, callbacks=[ProgressBarCallback(refresh_per_second=20), StepBasedEvaluationCallback(4)])
train(trainer, make_data(64), eval_dataset=make_data(16))
print("the end")
"""


def on_a_terminal(program, **variables):
    """Run a program with a terminal as its output and return everything it wrote."""
    leader, follower = pty.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": "100",
        "PYTHONPATH": ":".join(sys.path),
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=follower, stderr=subprocess.STDOUT, env=environment, close_fds=True
    )
    os.close(follower)
    written = b""
    while process.poll() is None or select.select([leader], [], [], 0.1)[0]:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                written += os.read(leader, 65536)
            except OSError:
                break
    os.close(leader)
    assert process.wait() == 0, written.decode()
    return written.decode()


def test_a_terminal_gets_bars_with_loss_rate_speed_and_time(tmp_path):
    written = on_a_terminal(PROGRAM, NO_COLOR="1")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert re.search(r"epoch 1/1 .*8/8 +0:\d\d +loss [\d.]+ +lr 0\.1 +[\d.]+k? samples/s", text)
    assert re.search(r"evaluation .*2/2", text)
    assert re.search(r"[1-7]/8 +0:\d\d < 0:\d\d", text)
    assert "\x1b[?25h" in written  # the cursor is back
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", written)  # NO_COLOR is obeyed
    assert text.rstrip().endswith("the end")


def test_a_narrow_terminal_keeps_the_counts_and_shortens_the_bar():
    display = module._BarDisplay(Console(width=60, file=io.StringIO(), force_terminal=True, color_system=None))
    phase = module._Phase("epoch 2/5", 12, 0, 0)
    display.begin(phase)
    phase.done = 12
    display.draw(phase, "loss 0.06444  lr 0.01  37.9k samples/s", is_end=True)
    display.close()
    assert "12/12 0:00 loss 0.06444  lr 0.01  37.9k samples/s" in display._progress.console.file.getvalue()


def test_a_file_gets_plain_lines_one_per_phase(capsys):
    trainer = make_trainer(callbacks=[ProgressBarCallback()])
    train(trainer, eval_dataset=make_data(16), num_epochs=2)
    trainer.evaluate()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.split("  ")[:2] for line in lines] == [
        ["epoch 1/2", "3/3"], ["evaluation", "2/2"], ["epoch 2/2", "3/3"], ["evaluation", "2/2"], ["evaluation", "2/2"],
    ]  # fmt: skip
    assert re.fullmatch(r"epoch 1/2  3/3  loss [\d.]+  lr 0\.1  [\d.]+[kM]? samples/s  took 0:00", lines[0])


def test_training_again_with_the_history_kept_counts_all_epochs(capsys):
    trainer = make_trainer(callbacks=[ProgressBarCallback()])
    train(trainer, num_epochs=3)
    train(trainer, num_epochs=2, reset_run_history=False)
    train(trainer, num_epochs=1)
    epochs = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert epochs == ["epoch 1/3", "epoch 2/3", "epoch 3/3", "epoch 4/5", "epoch 5/5", "epoch 1/1"]


def test_resuming_with_more_epochs_counts_up_to_the_new_number(capsys, tmp_path):
    train(make_trainer(), num_epochs=2, checkpoint_dir=tmp_path)
    trainer = make_trainer(callbacks=[ProgressBarCallback()])
    train(trainer, num_epochs=4, checkpoint_dir=tmp_path, resume_from="auto")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == ["epoch 3/4", "epoch 4/4"]


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_without_widgets_gets_lines(monkeypatch, has_widgets):
    import rich.console

    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(module, "find_spec", lambda name: has_widgets or None)
    monkeypatch.setattr(module, "_BarDisplay", lambda console: "bars")
    display = module._make_display()
    assert display == "bars" if has_widgets else type(display) is module._Display


def test_a_long_phase_gets_a_line_every_so_often(capsys, monkeypatch):
    now = SimpleNamespace(seconds=0.0)

    class TenSeconds(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            now.seconds += 10

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    train(make_trainer(callbacks=[TenSeconds(), ProgressBarCallback(plain_interval=35)]), make_data(80))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["4/10", "8/10", "10/10"]
    assert lines[0].endswith("0.8 samples/s  1:00 left")
    assert lines[2].endswith("0.8 samples/s  took 1:40")


def test_an_evaluation_inside_an_epoch_does_not_end_its_progress(capsys):
    trainer = make_trainer(callbacks=[ProgressBarCallback(), StepBasedEvaluationCallback(2)])
    train(trainer, make_data(40), eval_dataset=make_data(8))
    lines = [line.split("  ")[:2] for line in capsys.readouterr().out.splitlines() if "samples/s" in line]
    assert lines == [["evaluation", "1/1"], ["evaluation", "1/1"], ["epoch 1/1", "5/5"], ["evaluation", "1/1"]]


def test_a_resumed_epoch_starts_where_it_was_left(capsys, tmp_path):
    first = make_trainer()
    train(first, make_data(80), max_num_train_steps=6, checkpoint_dir=tmp_path)
    second = make_trainer(callbacks=[ProgressBarCallback()])
    train(second, make_data(80), checkpoint_dir=tmp_path, resume_from="auto")
    assert "10/10" in capsys.readouterr().out


def test_a_loader_without_a_length_is_counted(capsys):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(make_data(40))

    train(make_trainer(callbacks=[ProgressBarCallback()]), DataLoader(Stream(), batch_size=8))
    assert capsys.readouterr().out.startswith("epoch 1/1  5  loss")
    assert module._Phase("epoch 1", None, 0, 0).seconds_left() is None


def test_the_display_is_put_away_after_an_error(monkeypatch):
    closed = []

    class Display(module._Display):
        def close(self):
            closed.append(True)

    class Fail(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            raise RuntimeError("not today")

    monkeypatch.setattr(module, "_make_display", Display)
    with pytest.raises(RuntimeError):
        train(make_trainer(callbacks=[ProgressBarCallback(), Fail()]))
    assert closed


def test_a_step_only_reads_the_clock():
    callback = ProgressBarCallback()
    assert calls_of(lambda: callback.batch_end(None, None)) == 2  # itself and the clock


def test_nothing_is_imported_from_rich_without_a_bar():
    program = "import sys, drivetrain.train.callbacks; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (3723, "1:02:03"), (59.7, "1:00")]
)
def test_durations_read_like_a_clock(seconds, text):
    assert module._clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (950, "950"), (1240, "1.24k"), (31_234, "31.2k"), (4.1e6, "4.1M")]
)
def test_speeds_are_short(number, text):
    assert module._short(number) == text


@pytest.mark.parametrize("wrong", [{"refresh_per_second": 0}, {"plain_interval": -1}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ProgressBarCallback(**wrong)


def _lines_of_ranks():
    from contextlib import redirect_stdout

    written = io.StringIO()
    with redirect_stdout(written):
        train(make_trainer(callbacks=[ProgressBarCallback()]), make_data(32))
    return written.getvalue()


def test_other_processes_are_silent(world2):
    first, second = world2(_lines_of_ranks)
    assert "epoch 1/1" in first
    assert second == ""
