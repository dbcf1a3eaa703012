"""Files that went wrong: valid ones, changed at random, and everything that reads them.

`tests/test_fuzzed_files.py` tries a few hundred of them, `benchmarks/torture.py` as many as it is asked for. The same seed gives the
same files.
"""

import copy
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 1.5, 10**30, -(10**400), float("nan"), float("inf"), "", "x", "a\0b", "../../etc/passwd", "1e999",
    "\ud800", [], {}, [None], [[]], {"": 0}, {"a": {"b": []}}, ["x"] * 3, {"kind": "scalar"}, [["parallel_mode"], 3],
)  # fmt: skip
DEEP = 5000


def change_value(value: Any, chance: random.Random) -> Any:
    """Return a copy of a plain value with one place of it replaced, removed, doubled or nested."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return chance.choice(JUNK)
    holder, key = chance.choice(places)
    act = chance.randrange(5)
    if act == 0:
        del holder[key]
    elif act == 1 and isinstance(holder, dict):
        holder[chance.choice(["", "index", "params", "version", "x" * 1000])] = chance.choice(JUNK)
    elif act == 2:
        for _ in range(chance.choice([3, 70, 200])):
            holder[key] = [holder[key]] if chance.random() < 0.5 else {"a": holder[key]}
    else:
        holder[key] = chance.choice(JUNK)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(entries):
        yield value, key
        yield from _places(item)


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with a few of them flipped, cut, repeated or replaced by hostile text."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        place, act = chance.randrange(len(data) + 1), chance.randrange(6)
        if act == 0:
            data = data[:place]
        elif act == 1 and place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        elif act == 2:
            data[place:place] = chance.randbytes(chance.randint(1, 8))
        elif act == 3:
            data[place:place] = chance.choice([b"[", b'{"a":', b"- "]) * DEEP
        elif act == 4:
            data[place:place] = chance.choice(
                [b"9" * 5000, b"NaN", b"\\ud800", b'"', b"\n", b"&a [*a]", b"!!python/object:os.system"]
            )
        else:
            data += data[place : place + 200]
    return bytes(data)


@dataclass(frozen=True)
class Reader:
    """A kind of file, an example of it, and what reads it."""

    name: str
    example: Any
    """Lines of plain values, or one of them."""
    read: Callable[[Path], object]
    lines: bool = False
    expected: tuple[type[Exception], ...] = (DrivetrainError,)
    """What reading may raise; for readers that pass over what they cannot read, nothing."""

    def write(self, values: Any) -> bytes:
        """Return the content of a file."""
        rows = values if self.lines and isinstance(values, list) else [values]
        return b"".join(json.dumps(row).encode("utf-8", "surrogatepass") + b"\n" for row in rows)

    def changed(self, chance: random.Random) -> bytes:
        """Return a file that went wrong."""
        if chance.random() < 0.5:
            return change_bytes(self.write(self.example), chance)
        value = self.example
        for _ in range(chance.randint(1, 3)):
            value = change_value(value, chance) if isinstance(value, dict | list) else value
        return self.write(value)


def try_reader(reader: Reader, folder: Path, count: int, seed: int) -> Iterator[str]:
    """Yield a line for each file on which a reader ended in an error that is not ours."""
    file = folder / f"{reader.name}.json"
    for number in range(count):
        chance = random.Random(f"{reader.name}/{seed}/{number}")
        content = reader.changed(chance)
        file.write_bytes(content)
        try:
            reader.read(file)
        except reader.expected:
            continue
        except Exception as error:
            yield f"{reader.name}, seed {seed}, file {number}: {type(error).__name__}: {str(error)[:100]} for {content[:200]!r}"


def _journal(file: Path) -> object:
    from drivetrain.experiment.sweeps.result import read_sweep

    folder = file.parent / "journal-folder"
    folder.mkdir(exist_ok=True)
    (folder / "sweep.jsonl").write_bytes(file.read_bytes())
    result = read_sweep(folder)
    return result.table(), result.rows(), result.to_csv(folder / "trials.csv"), repr(result)


def _mailbox(file: Path) -> object:
    from drivetrain.experiment.sweeps.jobs import Mailbox

    letters, _ = Mailbox(file, file.with_suffix(".stop")).read(0)
    return [(letter["value"], letter["step"]) for letter in letters if "began" not in letter]


def _metrics(file: Path) -> object:
    from drivetrain.record.jsonl import read_metrics

    return [(row["step"], row["kind"], row["tag"].strip(), repr(row["value"])) for row in read_metrics(file)]


def _summary(file: Path) -> object:
    from drivetrain.experiment.sweeps.loop import _summary

    return {name: float(value) for name, value in _summary(file).items()}


def _device(file: Path) -> object:
    from drivetrain.strategy.device_spec import DeviceSpec

    spec = DeviceSpec.load(file)
    return spec.rates, repr(spec), spec.memory + spec.per_node


def _machine(file: Path) -> object:
    from drivetrain.strategy.profile.machine import read_machine

    machine = read_machine(file)
    return None if machine is None else (repr(machine), machine.memory + machine.bandwidth)


def _plan(file: Path) -> object:
    from drivetrain.strategy.value import Strategy

    plan = Strategy.load(file)
    return repr(plan), plan.to_json()


def _yaml(file: Path) -> object:
    from drivetrain.core.yaml import load_yaml

    with io.BytesIO(file.read_bytes()) as stream:
        return repr(load_yaml(stream))


def _run_folder(file: Path) -> object:
    from drivetrain.experiment.records import read_run

    folder = file.parent / "run-folder"
    folder.mkdir(exist_ok=True)
    for name in ("manifest.json", "status.json", "parameters.yaml"):
        (folder / name).write_bytes(file.read_bytes())
    record = read_run(folder)
    return repr(record), record.started, record.state


def _checkpoint_manifest(file: Path) -> object:
    from drivetrain.checkpoint.layout import Manifest

    return Manifest.from_json(file.read_bytes())


def _checkpoint_structure(file: Path) -> object:
    from drivetrain.checkpoint.tree import parse_structure, unflatten

    return unflatten(parse_structure(file.read_bytes(), "state.json"), {})


def _lock(file: Path) -> object:
    from drivetrain.core.locking import _look

    return str(_look(file))


def readers() -> list[Reader]:
    """Return every reader of files that others may have written."""
    from drivetrain.checkpoint.tree import flatten
    from drivetrain.strategy.device_spec import DeviceSpec
    from drivetrain.strategy.profile.machine import _VERSION
    from drivetrain.strategy.value import Strategy

    trial = {
        "index": 0,
        "value": 0.5,
        "metrics": {"loss": 0.5},
        "run_dir": "trial-0000",
        "error": None,
        "seconds": 1.5,
        "attempts": 1,
    }
    journal = [
        {"event": "sweep", "time": 1.0, "schema": 1, "experiment": "bowl", "space": {"lr": [0.1, 0.3]}, "direction": "min"},
        {"event": "asked", "time": 1.0, "index": 0, "params": {"lr": 0.1}},
        {"event": "started", "time": 1.0, "index": 0, "attempts": 1, "run_dir": "trial-0000"},
        {"event": "finished", "time": 2.0, **trial},
        {"event": "asked", "time": 1.0, "index": 1, "params": {"lr": 0.3}},
        {"event": "timed out", "time": 2.0, **trial, "index": 1, "value": None, "error": "too long"},
    ]  # fmt: skip
    row = {"step": 3, "time": 1.0, "kind": "scalar", "tag": "loss", "value": 0.5}
    metrics = [
        row, {**row, "value": "nan"}, {"kind": "resume", "step": 3, "time": 2.0, "lines": 1}, {**row, "kind": "summary", "value": {"a": 1}},
        {"kind": "resume", "step": 3, "time": 2.0}, row, {**row, "kind": "histogram", "value": {"low": 0.0, "high": 1.0, "counts": [1]}},
    ]  # fmt: skip
    device = {**vars(DeviceSpec.preset("h100")), "memory": "80GiB", "capability": [9, 0]}
    link = {"latency": 1e-5, "bandwidth": 1e9}
    machine = {
        "device": "cpu", "kind": "cpu", "free": 2**33, "launch": 1e-5, "memory": 2**34,
        "flops": {"float32": 1e11}, "bandwidth": 1e10, "intra": link, "inter": link,
        "capability": None, "corrections": {"a": 1.0},
    }  # fmt: skip
    plan = json.loads(Strategy([("amp_native", "bf16"), "checkpoint", ("parallel_mode", [("data", 2)])]).to_json())
    run = {
        "experiment": "bowl",
        "state": "finished",
        "started": "2026-11-16T10:00:00",
        "result": 0.5,
        "git": {"commit": "abc"},
    }
    manifest = {
        "format": "drivetrain-checkpoint",
        "version": 1,
        "id": "ba3",
        "files": [],
        "metrics": {},
        "sha256": "0" * 64,
    }
    structure = flatten({"a": [1, 2.5, None, {"b": (1, 2)}], "c": "text", "d": b"x"}).structure
    lock = {"host": "a", "machine": "b", "pid": 3, "started": "c", "since": "d", "token": "0" * 16}
    return [
        Reader("journal", journal, _journal, lines=True),
        Reader("mailbox", [{"began": True}, {"value": 0.5, "step": 1}], _mailbox, lines=True, expected=()),
        Reader("metrics", metrics, _metrics, lines=True),
        Reader("summary", metrics, _summary, lines=True, expected=()),
        Reader("device", device, _device),
        Reader("machine", {"version": _VERSION, "machine": machine}, _machine, expected=()),
        Reader("plan", plan, _plan),
        Reader("yaml", {"lr": 0.1, "betas": [0.9, 0.99], "units": {"a": {"lr": "1e-3"}}}, _yaml),
        Reader("run-folder", run, _run_folder, expected=()),
        Reader("checkpoint-manifest", manifest, _checkpoint_manifest),
        Reader("checkpoint-structure", structure, _checkpoint_structure),
        Reader("lock", lock, _lock, expected=()),
    ]
