"""A signal to the whole process group, as SLURM, systemd and Kubernetes send it, and a launcher that is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")

PROGRAM = """
import os, sys, time, torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset
from drivetrain import Trainer
from drivetrain.callbacks import TrainerCallback
from drivetrain.runtime import init_distributed
from drivetrain.runtime.launch import launch

class Samples(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        Path(sys.argv[1], "pids", str(os.getpid())).touch()
        return torch.ones(4) * index / 4000, index % 2

class Slow(TrainerCallback):
    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        if trainer.state.clock.batch == 2:
            Path(sys.argv[1], "trains", str(os.getpid())).touch()
        time.sleep(0.02)

def main():
    folder, ranks, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if ranks > 1:
        init_distributed(backend="gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data, options = Samples(), {"num_workers": 0 if kind == "none" else 2}
    if kind == "torch":
        data = DataLoader(data, batch_size=2, num_workers=2)
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Slow()], device="cpu")
    trainer.train(data, num_epochs=9, per_device_batch_size=2, train_dataloader_kwargs=options,
                  checkpoint_dir=folder + "/checkpoints", checkpoint_every=None)

if __name__ == "__main__":
    main() if sys.argv[2] == "1" else launch(main, int(sys.argv[2]))
"""


class Program:
    """The program in a process group of its own."""

    def __init__(self, folder: Path, ranks: int, kind: str):
        self.folder, self.ranks = folder, ranks
        (folder / "pids").mkdir()
        (folder / "trains").mkdir()
        (folder / "program.py").write_text(PROGRAM)
        arguments = [str(folder / "program.py"), str(folder), str(ranks), kind]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            start_new_session=True,
            stderr=self.errors,
            stdout=self.errors,
        )

    def __enter__(self):
        wait_until(lambda: len(list((self.folder / "trains").iterdir())) == self.ranks, self.process)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()

    def pids(self) -> set[int]:
        """Return the ranks and the workers."""
        return {int(file.name) for name in ("pids", "trains") for file in (self.folder / name).iterdir()}

    def report(self) -> str:
        self.errors.seek(0)
        return self.errors.read()


def wait_until(is_true, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + 300
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        assert process is None or process.poll() is None, "the program ended early"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(1, "dataset"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, "none"), (1, "torch"), (2, "none"), (2, "dataset")])],
)  # fmt: skip
def test_sigterm_to_the_process_group_saves_and_ends_with_143(tmp_path, ranks, kind):
    with Program(tmp_path, ranks, kind) as program:
        os.killpg(program.process.pid, signal.SIGTERM)
        assert program.process.wait(300) == 143, program.report()
        assert list((tmp_path / "checkpoints").glob("*")), program.report()
        assert "Traceback" not in program.report()
        wait_until(lambda: not any(runs(pid) for pid in program.pids()))


@pytest.mark.slow
def test_ranks_and_their_workers_end_when_the_launcher_is_killed(tmp_path):
    with Program(tmp_path, 2, "dataset") as program:
        pids = program.pids()
        assert len(pids) == 6
        program.process.kill()
        program.process.wait()
        wait_until(lambda: not any(runs(pid) for pid in pids))
    assert list((tmp_path / "checkpoints").glob("*"))


def test_workers_end_when_the_process_that_trains_is_killed(tmp_path):
    with Program(tmp_path, 1, "dataset") as program:
        workers = program.pids() - {program.process.pid}
        assert len(workers) == 2
        program.process.kill()
        program.process.wait()
        wait_until(lambda: not any(runs(pid) for pid in workers))
