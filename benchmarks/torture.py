"""Break training runs on purpose, many times, and count what survived: `make torture`, or `python -m benchmarks.torture --share 0.05`.

    kills      SIGKILL at random moments: hand-written loops and Trainer runs on 1, 2 and 4 ranks, with loader workers, with saves in the
               foreground and in the background, with FSDP and tensor-parallel checkpoints. The run is started again until it is through,
               and must end bit-identical to one that was left alone.
    stops      SIGTERM to the process and to its group: status 143, a checkpoint, no process left.
    inputs     files and Trainer arguments that went wrong: an error of ours that names the culprit, or a documented meaning.
    history    values logged by one run, and what a save costs with them.
    disks      saves on a disk that is full or fails now and then: earlier checkpoints stay valid.

The whole (share 1) is 1,000 kills, 200 stops, 100,000 inputs, 10,000,000 values and 2,000 saves, and takes hours. `--only` and `--limit`
(seconds for each kind) make it fit. Results are written as JSON, and those of earlier runs in the same file are added up.
"""

import argparse
import contextlib
import errno
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint import files
from drivetrain.checkpoint.chaos import kill_repeatedly
from drivetrain.checkpoint.layout import problem_with
from drivetrain.checkpoint.store import load_checkpoint, save_checkpoint
from drivetrain.core.errors import DrivetrainError
from tests.checkpoint import victim
from tests.checkpoint.victim import Forked

WHOLE = {"kills": 1000, "stops": 200, "inputs": 100_000, "history": 10_000_000, "disks": 2000}
CONFIGURATIONS = ("loop", "loop-async", "loop-workers", "trainer", "trainer-2", "trainer-4", "fsdp-2", "tensor-2")
"""What is killed: hand-written loops and Trainer runs; a number at the end is that of ranks."""
SHARES = (3, 3, 1, 3, 1, 0.5, 1, 1)
"""How often each is chosen."""


@dataclass
class Tally:
    """What was tried of one kind, and what went wrong."""

    tried: int = 0
    survived: int = 0
    details: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, kind: str, problem: str | None = None, count: int = 1) -> None:
        """Count an attempt."""
        self.tried += count
        self.details[kind] = self.details.get(kind, 0) + count
        if problem is None:
            self.survived += count
        else:
            self.problems.append(f"{kind}: {problem}")


class Clock:
    """Says when the time for one kind is up."""

    def __init__(self, limit: float | None):
        self._end = float("inf") if limit is None else time.monotonic() + limit

    def is_up(self) -> bool:
        """Return whether to stop."""
        return time.monotonic() > self._end


# ---------------------------------------------------------------------------------------------------------------- kills


class Group(Forked):
    """A forked process that leads a process group of its own, so that a kill reaches its ranks and workers too."""

    def __init__(self, action: Callable[[], object], output: Path):
        def be_leader() -> None:
            os.setsid()
            with output.open("ab") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            sys.__stderr__ = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            action()

        super().__init__(be_leader)


def start(configuration: str, folder: Path) -> Group:
    """Start the program of a configuration, which resumes by itself and writes `result` when it is through."""
    folder.mkdir(parents=True, exist_ok=True)
    return Group(lambda: be_victim(configuration, folder), folder.parent / f"{folder.name}.log")


def be_victim(configuration: str, folder: Path) -> None:
    """Train as a configuration says, and write a hash of everything that the run ended with."""
    kind, _, rest = configuration.partition("-")
    if kind == "loop":
        victim.main(str(folder), {"": 45, "async": 46, "workers": 48}[rest], 2 if rest == "workers" else 0, 1)
        return
    ranks = int(rest or 1)
    if ranks == 1:
        results = [run_trainer(kind, folder)]
    else:
        store = Path(tempfile.mkdtemp(dir=folder.parent))
        children = [Forked(partial(be_rank, kind, folder, store, rank, ranks)) for rank in range(ranks)]
        statuses = [child.wait() for child in children]
        if any(statuses):
            raise SystemExit(1)
        results = [(store / f"result-{rank}").read_text() for rank in range(ranks)]
    (folder / "result").write_text(" ".join(results))


def be_rank(kind: str, folder: Path, store: Path, rank: int, ranks: int) -> None:
    """Be one rank of a configuration."""
    from drivetrain.runtime.group import init_distributed
    from drivetrain.runtime.store import store_variables

    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= store_variables(store)
    init_distributed(backend="gloo", timeout=120)
    (store / f"result-{rank}").write_text(run_trainer(kind, folder))


def run_trainer(kind: str, folder: Path) -> str:
    """Train with a Trainer, from the newest checkpoint if there is one, and return a hash of what it ends with."""
    from torch import nn
    from torch.utils.data import TensorDataset

    from drivetrain.algorithms import EMA
    from drivetrain.train.trainer import Trainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0 if kind == "tensor" else 0.5), nn.Linear(16, 4))
    data = TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(1)), torch.arange(96) % 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plans: dict[str, Any] = {
        "trainer": None,
        "fsdp": [("parallel_mode", [("zero", 2)]), "fsdp"],
        "tensor": [("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"plan": {"0": "colwise", "3": "rowwise"}})],
    }
    algorithms = [EMA("4ba", update_interval="1ba")] if kind == "trainer" else []
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optimizer, (), algorithms=algorithms, seed=3, device="cpu", strategy=plans[kind]
    )
    history = trainer.train(
        data, num_epochs=4, eval_dataset=data, per_device_batch_size=4, gradient_accumulation_steps=2,
        checkpoint_dir=str(folder / "checkpoints"), checkpoint_every="2ba", keep_checkpoints=2, resume_from="auto",
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        train_dataloader_kwargs={"num_workers": 0}, eval_dataloader_kwargs={"num_workers": 0},
    )  # fmt: skip
    digest = hashlib.sha256()
    states = [trainer.get_model().state_dict(), *(algorithm.state_dict() for algorithm in algorithms)]
    for tensor in _tensors(states):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    digest.update(repr(list(history.get_metric_values("train_loss_epoch"))).encode())
    return digest.hexdigest()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.full_tensor() if hasattr(value, "full_tensor") else value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def kill_runs(count: int, clock: Clock, seed: int, only: set[str], place: Path) -> Tally:
    """Kill runs until enough have been killed, a few times each."""
    tally, chance = Tally(), random.Random(seed)
    expected: dict[str, str] = {}
    victim.run(str(place / "first"), 4, 0)  # so that forks need not import again what a first step loads
    run_trainer("trainer", place / "first-trainer")
    shares = {name: share for name, share in zip(CONFIGURATIONS, SHARES) if not only or name in only}
    for number in range(10**9):
        if tally.tried >= count or clock.is_up():
            return tally
        name = chance.choices(list(shares), list(shares.values()))[0]
        if name not in expected:
            whole = place / f"whole-{name}"
            if status := start(name, whole).wait():
                tally.note(name, f"the run that was left alone ended with {status}: {_end_of(whole)}")
                del shares[name]
                continue
            expected[name] = (whole / "result").read_text()
        folder = place / f"{name}-{number}"
        longest = 0.4 if name in ("loop", "loop-async", "trainer") else 2.5
        kills = min(chance.randint(2, 5), count - tally.tried)
        attempts = kill_repeatedly(
            lambda name=name, folder=folder: start(name, folder),
            folder if name.startswith("loop") else folder / "checkpoints",
            kills=kills, longest=longest, seed=chance.randrange(2**31), in_saves=0.5,
        )  # fmt: skip
        killed = sum(attempt.ended == "killed" for attempt in attempts)
        result = folder / "result"
        if not result.is_file():
            tally.note(name, f"it did not finish ({attempts[-1]}): {_end_of(folder)}", max(1, killed))
        elif result.read_text() != expected[name]:
            tally.note(
                name,
                f"it ended otherwise than the run that was left alone (seed {seed}, {folder.name})",
                max(1, killed),
            )
        else:
            tally.note(name, None, killed)
        tally.details["kills inside a save"] = tally.details.get("kills inside a save", 0) + sum(
            attempt.during_save for attempt in attempts
        )
    return tally


def _end_of(folder: Path) -> str:
    log = folder.parent / f"{folder.name}.log"
    return log.read_text(errors="replace")[-300:] if log.is_file() else "no output"


# ---------------------------------------------------------------------------------------------------------------- stops


def stop_runs(count: int, clock: Clock, seed: int, place: Path) -> Tally:
    """Send SIGTERM to processes and to their groups, at random moments of training."""
    from tests.train.test_group_signals import Program, runs

    tally, chance = Tally(), random.Random(seed)
    for number in range(count):
        if clock.is_up():
            break
        ranks, kind = chance.choice([(1, "none"), (1, "dataset"), (1, "torch"), (2, "none"), (2, "dataset")])
        to_group = chance.random() < 0.5
        name = f"{'group' if to_group else 'process'}, {ranks} ranks, workers: {kind}"
        folder = place / f"stop-{number}"
        folder.mkdir()
        with Program(folder, ranks, kind) as program:
            time.sleep(chance.uniform(0, 1.5))
            (os.killpg if to_group else os.kill)(program.process.pid, signal.SIGTERM)
            try:
                status = program.process.wait(120)
            except subprocess.TimeoutExpired:
                tally.note(name, "it did not end in two minutes")
                continue
            deadline, pids = time.monotonic() + 20, program.pids()
            while any(map(runs, pids)) and time.monotonic() < deadline:
                time.sleep(0.05)
            left = [pid for pid in pids if runs(pid)]
            saved = list((folder / "checkpoints").glob("checkpoint-*"))
            problem = None
            if status != 143:
                problem = f"status {status}: {program.report()[-300:]}"
            elif left:
                problem = f"{len(left)} processes were left"
            elif not saved or problem_with(saved[-1]):
                problem = "no valid checkpoint"
            tally.note(name, problem)
    return tally


# ---------------------------------------------------------------------------------------------------------------- inputs


def fuzz_inputs(count: int, clock: Clock, seed: int, place: Path) -> Tally:
    """Read files that went wrong, and give a Trainer junk."""
    from tests.fuzzing import readers, try_reader

    tally, kinds = Tally(), readers()
    junk = min(count // 20, 2000)  # a Trainer run each, so they take most of the time
    _junk_arguments(junk, clock, seed, place, tally)
    each = max(1, (count - junk) // len(kinds))
    for reader in kinds:
        done = 0
        while done < each and not clock.is_up():
            part = min(200, each - done)
            problems = list(try_reader(reader, place, part, seed * 1_000_003 + done))
            done += part
            tally.note(f"{reader.name} files", None, part - len(problems))
            for problem in problems:
                tally.note(f"{reader.name} files", problem)
    return tally


def _junk_arguments(count: int, clock: Clock, seed: int, place: Path, tally: Tally) -> None:
    from drivetrain.train import loaders
    from tests.train.test_junk_arguments import ARGUMENTS, JUNK, MEANT, SAME_NAME, use

    chance, before, cpus = random.Random(seed), Path.cwd(), loaders.usable_cpus
    pairs = [(verb, argument, label) for verb, argument in ARGUMENTS for label in JUNK]
    chance.shuffle(pairs)
    os.chdir(place)
    loaders.usable_cpus = lambda: 0  # no worker processes
    try:
        for verb, argument, label in pairs[:count]:
            if clock.is_up():
                break
            problem = None
            try:
                with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                    warnings.simplefilter("ignore")
                    use(verb, argument, JUNK[label])
                if label not in MEANT.get(argument, "").split():
                    problem = f"{verb}({argument}={label}) was accepted"
            except Exception as error:
                text = "\n".join([str(error), *getattr(error, "__notes__", ())])
                if SAME_NAME.get(argument, argument) not in text:
                    problem = (
                        f"{verb}({argument}={label}): {type(error).__name__} does not name the argument: {text[:100]}"
                    )
            tally.note("Trainer arguments", problem)
    finally:
        os.chdir(before)
        loaders.usable_cpus = cpus


# ---------------------------------------------------------------------------------------------------------------- history


def log_values(count: int, place: Path) -> tuple[Tally, dict[str, Any]]:
    """Log many values in one run with ten saves on the way, resume, and compare every one of them."""
    from benchmarks.history import measure

    tally = Tally()
    try:
        measured = measure(place, count)
        tally.note("values", None, count)
    except AssertionError as error:
        measured = {}
        tally.note("values", f"a value was lost: {error}", count)
    return tally, measured


# ---------------------------------------------------------------------------------------------------------------- disks


@contextlib.contextmanager
def bad_disk(chance: random.Random) -> Iterator[None]:
    """Let writes of checkpoints fail: all of them after some bytes (a full disk), or now and then (a flaky one)."""
    real, left, is_full = files.put, chance.randrange(1, 60_000), chance.random() < 0.5

    def put(stream: Any, piece: Any) -> None:
        nonlocal left
        left -= len(piece)
        if left < 0 and (is_full or chance.random() < 0.3):
            real(stream, piece[: len(piece) // 2])
            number = errno.ENOSPC if is_full else chance.choice([errno.EIO, errno.ESTALE, errno.EDQUOT])
            raise OSError(number, os.strerror(number))
        real(stream, piece)

    files.put = put  # type: ignore[assignment]
    try:
        yield
    finally:
        files.put = real


def save_on_bad_disks(count: int, clock: Clock, seed: int, place: Path) -> Tally:
    """Save again and again while writes fail; whatever was saved before must stay valid."""
    tally, chance = Tally(), random.Random(seed)
    newest = 0
    save_checkpoint({"step": 0, "x": torch.zeros(2000)}, 0, path=place)
    for number in range(1, count + 1):
        if clock.is_up():
            break
        state, saved = {"step": number, "x": torch.full((chance.randrange(1, 12_000),), float(number))}, True
        try:
            with bad_disk(chance):
                save_checkpoint(state, number, path=place)
        except (OSError, DrivetrainError):
            saved = False
        newest = number if saved else newest
        try:
            found = load_checkpoint(place)["step"]
            problem = None if found == newest else f"checkpoint {found} was loaded, {newest} is the newest"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        tally.note("save failed" if not saved else "save succeeded", problem)
        if number % 50 == 0:
            for old in sorted(place.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)[:-2]:
                for file in old.rglob("*"):
                    file.unlink() if file.is_file() else None
                with contextlib.suppress(OSError):
                    old.rmdir()
    return tally


# ---------------------------------------------------------------------------------------------------------------- main


def main(arguments: argparse.Namespace) -> int:
    """Run the kinds that were asked for, add the results to the file, and print a table."""
    wanted = arguments.only or list(WHOLE)
    results: dict[str, Any] = {}
    for kind in wanted:
        count, clock = max(1, int(WHOLE[kind] * arguments.share)), Clock(arguments.limit)
        with tempfile.TemporaryDirectory(prefix="drivetrain-torture-") as folder:
            place, began = Path(folder), time.monotonic()
            extra: dict[str, Any] = {}
            if kind == "kills":
                tally = kill_runs(count, clock, arguments.seed, set(arguments.configurations or ()), place)
            elif kind == "history":
                tally, extra = log_values(count, place)
            else:
                act: Callable[..., Tally] = {"stops": stop_runs, "inputs": fuzz_inputs, "disks": save_on_bad_disks}[
                    kind
                ]
                tally = act(count, clock, arguments.seed, place)
        seconds = round(time.monotonic() - began, 1)
        results[kind] = {**vars(tally), "seconds": seconds, **({"measured": extra} if extra else {})}
        print(
            f"{kind:8} {tally.survived:,} of {tally.tried:,} survived ({WHOLE[kind]:,} in the whole), {seconds} s",
            flush=True,
        )
        for problem in tally.problems[:10]:
            print(f"         {problem}", flush=True)
    entry = {
        "date": time.strftime("%Y-%m-%d"), "seed": arguments.seed, "share": arguments.share, "torch": torch.__version__,
        "python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count(), "results": results,
    }  # fmt: skip
    if arguments.output is not None:
        earlier = json.loads(arguments.output.read_text()) if arguments.output.is_file() else []
        arguments.output.write_text(json.dumps([*earlier, entry], indent=1) + "\n")
    return 1 if any(result["problems"] for result in results.values()) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="how much of the whole to do")
    parser.add_argument("--only", action="append", choices=list(WHOLE), help="a kind; may be repeated")
    parser.add_argument(
        "--configurations", action="append", choices=CONFIGURATIONS, help="what is killed; may be repeated"
    )
    parser.add_argument("--limit", type=float, default=None, help="seconds for each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="a JSON file to which the results are added")
    sys.exit(main(parser.parse_args()))
