"""How well are the time and the memory of a training step predicted before it is run? Twenty models, eager and compiled.

    python -m benchmarks.step_prediction                                   # all, on the device at hand
    python -m benchmarks.step_prediction --models gpt2,bert --modes eager --limit 300
    python -m benchmarks.step_prediction --resume benchmarks/results/step_prediction.json   # what that file does not have yet
    python -m benchmarks.step_prediction --only predict                    # rows of a device again, anywhere, with its table in results/
    python -m benchmarks.step_prediction --tiny --models gpt2,unet         # small versions, on any machine

Each model trains in a process of its own: bfloat16 autocast, fused AdamW, images with channels last where a model is convolutional; three
micro-batches each. Processes compile at the same time, and are stopped while one of them measures. Every row is written as soon as it is
there. The prediction comes from the operators recorded on fake tensors and from the machine's table of times, which is measured once and
kept next to the rows. `--dump FOLDER` also writes what torch's profiler saw.
"""

import argparse
import contextlib
import gc
import gzip
import json
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory_prediction import CUDA_WORKSPACE_BYTES
from benchmarks.timing import RESULTS, environment
from drivetrain.runtime.device import usable_cpus
from drivetrain.strategy.profile.machine import profile_machine, read_machine, write_machine
from drivetrain.strategy.profile.model import ModelProfiler
from drivetrain.strategy.profile.step_time import PHASES, How, operator_seconds, pass_time, queued
from drivetrain.strategy.profile.values import COMPILED, FUSED, MachineProfile, ModelProfile, Work
from drivetrain.strategy.task import CallModel, TrainingTask

MODES = ("eager", "compiled")
ARITHMETIC = "bfloat16"
_CALL = CallModel("unpack_dict")
_GIB = 2**30
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model: how it is built, what goes in, and its three micro-batches."""

    build: Callable[[bool], nn.Module]
    """Takes whether it is the tiny version."""
    batch: Callable[[int, bool], Batch]
    sizes: tuple[int, int, int]
    channels_last: bool = False
    modes: tuple[str, ...] = MODES
    needs: str | None = None


# Models.


def hugging(name: str, settings: Mapping[str, object], tiny: Mapping[str, object], is_tiny: bool) -> nn.Module:
    """Return a model of transformers from its configuration; "GPT2:LMHeadModel" names both classes."""
    import transformers

    prefix, _, head = name.partition(":")
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **(tiny if is_tiny else {})})
    config.use_cache = False
    return getattr(transformers, f"{prefix}{head}")(config)


def timm_model(name: str, is_tiny: bool) -> nn.Module:
    """Return a model of timm, without weights."""
    import timm

    return timm.create_model(name, pretrained=False, num_classes=1000)


def text(size: int, is_tiny: bool, *, length: int, vocabulary: int, labels: str = "tokens", targets: int = 0) -> Batch:
    """Return random tokens with labels: the tokens themselves, others of a length, or one class."""
    length, vocabulary = (16, 64) if is_tiny else (length, vocabulary)
    ids = torch.randint(3, vocabulary, (size, length))
    if labels == "class":
        return {"input_ids": ids, "labels": torch.randint(0, 2, (size,))}
    other = torch.randint(3, vocabulary, (size, min(targets, 16) if is_tiny else targets)) if targets else ids
    return {"input_ids": ids, "labels": other}


def images(size: int, is_tiny: bool, *, side: int = 224, key: str = "x") -> Batch:
    """Return random pictures with classes."""
    side = 32 if is_tiny and side < 256 else 64 if is_tiny else side
    return {key: torch.randn(size, 3, side, side), "labels": torch.randint(0, 1000, (size,))}


def speech(size: int, is_tiny: bool) -> Batch:
    """Return random spectrograms with text."""
    frames, vocabulary, length = (100, 64, 12) if is_tiny else (3000, 51864, 128)
    bins = 16 if is_tiny else 80
    return {"input_features": torch.randn(size, bins, frames), "labels": torch.randint(3, vocabulary, (size, length))}


class Images(nn.Module):
    """A classifier whose batch also carries labels."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x).float(), labels)


class RecurrentModel(nn.Module):
    """A language model of two LSTM layers (Hochreiter and Schmidhuber, 1997)."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.lstm(self.tokens(input_ids))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Convolutions(nn.Sequential):
    """Two convolutions, each with batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int):
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            layers += [
                nn.Conv2d(width, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015): four levels down, four up, with skip connections."""

    def __init__(self, width: int):
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList([Convolutions(a, b) for a, b in zip([3, *widths], widths)])
        self.grow = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1]])
        self.up = nn.ModuleList([Convolutions(2 * w, w) for w in widths[-2::-1]])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for grow, block, skip in zip(self.grow, self.up, kept[-2::-1]):
            x = block(torch.cat([grow(x), skip], 1))
        found = self.head(x).float()
        return F.cross_entropy(found, (labels[:, None, None] % 2).expand(-1, *found.shape[2:]))


_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 1024,
}  # fmt: skip
_MIXTRAL = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 1024,
}  # fmt: skip


def _vision(name: str, sizes: tuple[int, int, int], channels_last: bool = False) -> Subject:
    return Subject(
        build=lambda is_tiny: Images(timm_model(name, is_tiny)), batch=images, sizes=sizes, channels_last=channels_last, needs="timm"
    )  # fmt: skip


def _hugging(
    name: str, settings: Mapping[str, object], tiny: Mapping[str, object], batch: Callable[[int, bool], Batch],
    sizes: tuple[int, int, int], modes: tuple[str, ...] = MODES,
) -> Subject:  # fmt: skip
    return Subject(
        build=partial(hugging, name, settings, tiny), batch=batch, sizes=sizes, modes=modes, needs="transformers"
    )


SUBJECTS: dict[str, Subject] = {
    "gpt2": _hugging("GPT2:LMHeadModel", {}, {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
                     partial(text, length=1024, vocabulary=50257), (2, 8, 32)),
    "llama": _hugging("Llama:ForCausalLM", _LLAMA, {**_SMALL, "num_key_value_heads": 4},
                      partial(text, length=1024, vocabulary=32000), (1, 4, 16)),
    "bert": _hugging("Bert:ForMaskedLM", {}, _SMALL, partial(text, length=512, vocabulary=30522), (4, 16, 64)),
    "roberta": _hugging("Roberta:ForSequenceClassification", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
                        _SMALL, partial(text, length=128, vocabulary=50265, labels="class"), (8, 32, 128)),
    "vit": _vision("vit_base_patch16_224", (16, 64, 256)),
    "convnext": _vision("convnext_tiny", (16, 64, 192), channels_last=True),
    "efficientnet": _vision("efficientnet_b0", (32, 128, 256), channels_last=True),
    "resnet50": _vision("resnet50", (16, 64, 256), channels_last=True),
    "mobilenet": _vision("mobilenetv3_large_100", (32, 128, 256), channels_last=True),
    "swin": _vision("swin_tiny_patch4_window7_224", (16, 64, 192)),
    "t5": _hugging("T5:ForConditionalGeneration", {"decoder_start_token_id": 0},
                   {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
                   partial(text, length=512, vocabulary=32128, targets=128), (4, 16, 64)),
    "whisper": _hugging("Whisper:ForConditionalGeneration", {"vocab_size": 51864},
                        {"vocab_size": 64, "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                         "max_source_positions": 50, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                         "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
                         "begin_suppress_tokens": None}, speech, (4, 16, 64)),
    "mixtral": _hugging("Mixtral:ForCausalLM", _MIXTRAL, {**_SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
                        partial(text, length=512, vocabulary=32000), (2, 8, 32)),
    "mamba": _hugging("Mamba:ForCausalLM", {"vocab_size": 50280},
                      {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "pad_token_id": 0},
                      partial(text, length=64, vocabulary=50280), (4, 16, 64), modes=("eager",)),
    "lstm": Subject(build=lambda is_tiny: RecurrentModel(*((64, 32) if is_tiny else (32000, 1024))),
                    batch=partial(text, length=256, vocabulary=32000), sizes=(16, 64, 128)),
    "unet": Subject(build=lambda is_tiny: UNet(8 if is_tiny else 64), batch=partial(images, side=256), sizes=(2, 8, 32),
                    channels_last=True),
    "mixer": _vision("mixer_b16_224", (16, 64, 256)),
    "deit": _vision("deit_small_patch16_224", (32, 128, 256)),
    "regnet": _vision("regnety_016", (32, 128, 256), channels_last=True),
    "densenet": _vision("densenet121", (16, 64, 128), channels_last=True),
}  # fmt: skip


def loss_func(batch: Batch, outputs: Any) -> Tensor:
    """Return the loss that a model computed itself."""
    return outputs if isinstance(outputs, Tensor) else outputs.loss


def make_model(name: str, is_tiny: bool) -> nn.Module:
    """Return a model in its layout, on the CPU."""
    torch.manual_seed(0)
    model = SUBJECTS[name].build(is_tiny).train()
    return model.to(memory_format=torch.channels_last) if SUBJECTS[name].channels_last else model  # type: ignore[call-overload]


def make_batch(name: str, size: int, is_tiny: bool) -> Batch:
    """Return random data in the layout of its model."""
    batch = SUBJECTS[name].batch(size, is_tiny)
    if SUBJECTS[name].channels_last:
        batch = {key: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for key, x in batch.items()}
    return batch


def sizes_of(name: str, is_tiny: bool) -> tuple[int, ...]:
    """Return the micro-batches of a model."""
    return (2, 4, 8) if is_tiny else SUBJECTS[name].sizes


# The prediction.


def profile(name: str, is_tiny: bool, *, compiled: bool, limit: float) -> ModelProfile:
    """Return what is known about a model without running it."""
    task = TrainingTask(
        model_fn=partial(make_model, name, is_tiny), call=_CALL, loss_func=loss_func, optim_func=torch.optim.AdamW,
        optim_args={"lr": 1e-4}, samples=make_batch(name, 4, is_tiny),
    )  # fmt: skip
    parts = [f"{ARITHMETIC}/compiled"] if compiled else []
    return ModelProfiler(task).profile(parts, time_limit=limit)


def predicted_seconds(found: ModelProfile, machine: MachineProfile, mode: str, size: int) -> float | None:
    """Return the predicted time of a step with a fused optimizer, or None where nothing was recorded."""
    works = found.work.get(ARITHMETIC + (FUSED if mode == "compiled" else ""))
    if not works:
        return None
    times = pass_time(works, size, machine, how="compiled" if mode == "compiled" else "eager")
    moved = 3 * found.parameter_bytes * found.trainable / max(1, found.parameters) + 2 * found.optimizer_bytes
    places = [(phase, in_block) for phase in PHASES for in_block in (True, False)]
    stretches = [(times.host.get(place, 0.0), times.device.get(place, 0.0)) for place in places]
    return queued([*stretches, update_seconds(moved, found.tensors, machine)])


def update_seconds(moved: float, tensors: int, machine: MachineProfile) -> tuple[float, float]:
    """Return the host and device time of a fused update: memory traffic over all its state, and a little for each tensor."""
    grids = [None if machine.times is None else machine.times.grid(key, "float32") for key in ("update", "elementwise")]
    if grids[0] is not None:
        device = grids[0].seconds([moved])
    else:
        device = 1.3 * (moved / machine.bandwidth if grids[1] is None else grids[1].seconds([max(moved, 1.0)]))
    return (0.0 if machine.kind == "cpu" else (0.2 * tensors + 20) * machine.launch), device


def seconds_by_kind(works: Iterable[Work], batch: float, machine: MachineProfile, how: How) -> dict[str, float]:
    """Return the device's time of a pass by kind of operator, the longest first."""
    found: dict[str, float] = {}
    for work in works:
        seconds = work.count * operator_seconds(work, batch, machine, how=how)
        found[work.key] = found.get(work.key, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def predicted_bytes(found: ModelProfile, mode: str, size: int) -> float | None:
    """Return the predicted peak of a step with a fused optimizer, or None where the profile could not say."""
    peak = found.peak(ARITHMETIC + (COMPILED if mode == "compiled" else ""), size)
    if peak is None:  # a graph that could not be captured counts as eager mode
        peak = found.peak(ARITHMETIC, size)
    return None if peak is None else peak + CUDA_WORKSPACE_BYTES


def predictions(found: ModelProfile, machine: MachineProfile, mode: str, size: int) -> dict[str, Any]:
    """Return what is predicted for one row: time, its largest parts by kind of operator, and memory."""
    works = found.work.get(ARITHMETIC + (FUSED if mode == "compiled" else ""), ())
    how: How = "compiled" if mode == "compiled" else "eager"
    return {
        "predicted_seconds": predicted_seconds(found, machine, mode, size),
        "predicted_bytes": predicted_bytes(found, mode, size),
        "predicted_kinds": dict(list(seconds_by_kind(works, size, machine, how).items())[:8]),
        "notes": list(found.notes),
    }


def machine_file(path: Path) -> Path:
    """Return where the table of the machine is kept whose rows are in a file."""
    return path.with_name(f"{path.stem}_machine.json")


# The measurement, in a process of its own.


class Worker:
    """Trains one model, and answers with one JSON line for each thing it found."""

    def __init__(self, asked: Mapping[str, Any]):
        self.name, self.is_tiny = str(asked["model"]), bool(asked["tiny"])
        self.device = torch.device(asked["device"])
        self.rows: list[tuple[str, int]] = [(mode, size) for mode, size in asked["rows"]]
        self.wants_dump = bool(asked["dump"])

    def run(self) -> None:
        """Measure row by row."""
        self._warm_up()
        for mode, size in self.rows:
            row: dict[str, Any] = {"model": self.name, "mode": mode, "batch": size}
            for attempt in range(3):
                try:
                    row |= self._measured(mode, size)
                    break
                except torch.cuda.OutOfMemoryError:  # the others may hold less a little later
                    if attempt == 2:
                        row["error"] = "out of memory"
                except Exception as error:  # a model that does not train or compile here; the others go on
                    row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
                    break
                self._free()
            self.tell(row=row)
            torch._dynamo.reset()
            self._free()

    def _warm_up(self) -> None:
        """Load the libraries of the device with the smallest batch; what does not train is said row by row."""
        with contextlib.suppress(Exception):
            model = make_model(self.name, self.is_tiny).to(self.device)
            batch = make_batch(self.name, min(sizes_of(self.name, self.is_tiny)), self.is_tiny)
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = loss_func(batch, _CALL(model, {key: value.to(self.device) for key, value in batch.items()}))
            loss.backward()
        self._free()

    def _free(self) -> None:
        """Give memory back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measured(self, mode: str, size: int) -> dict[str, Any]:
        device, is_gpu = self.device, self.device.type == "cuda"
        model = make_model(self.name, self.is_tiny).to(device)
        batch = {key: value.to(device) for key, value in make_batch(self.name, size, self.is_tiny).items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def forward() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return loss_func(batch, _CALL(model, batch))

        run = torch.compile(forward, dynamic=False) if mode == "compiled" else forward

        def step() -> None:
            run().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def steps(count: int) -> float:
            self._wait()
            begin = time.perf_counter()
            for _ in range(count):
                step()
            self._wait()
            return (time.perf_counter() - begin) / count

        first = 0.0
        if mode == "compiled":
            first = steps(1)
            steps(1)
            self._free()  # others need it for their first steps
        self._take_turn()
        try:
            steps(2)
            once = steps(1)
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
            count, times, end = int(min(max(0.1 / once, 1), 30)), [], time.perf_counter() + 0.4
            while len(times) < 3 or time.perf_counter() < end:
                times.append(steps(count))
            found: dict[str, Any] = {  # the table holds shortest times too: a busy machine only ever adds
                "seconds": min(times),
                "median_seconds": statistics.median(times),
                "spread": max(times) / min(times) - 1,
                "first_step_seconds": first,
            }
            found["host_probe_seconds"] = _probe(device)
            if is_gpu:
                found["bytes"] = torch.cuda.max_memory_allocated()
            if self.wants_dump and size == max(sizes_of(self.name, self.is_tiny)):
                self._dump_kernels(mode, size, step)
        finally:
            self.tell(turn="end")
        return found

    def _wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _take_turn(self) -> None:
        """Wait until all others are stopped."""
        self._wait()
        self.tell(turn="please")
        sys.stdin.readline()

    def _dump_kernels(self, mode: str, size: int, step: Callable[[], None]) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as traced

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        with traced(activities=activities, record_shapes=mode == "eager") as seen:
            step()
            self._wait()
        rows = []
        for event in seen.key_averages(group_by_input_shape=mode == "eager"):
            device_us = float(getattr(event, "self_device_time_total", 0.0))
            host_us = float(event.self_cpu_time_total)
            is_kernel = "CUDA" in str(event.device_type)
            if is_kernel or device_us > 0 or (event.key.startswith("aten::") and host_us > 50):
                shapes = str(event.input_shapes)[:160] if mode == "eager" else ""
                rows.append(
                    [event.key[:100], shapes, event.count, round(device_us, 1), round(host_us, 1), int(is_kernel)]
                )
        rows.sort(key=lambda row: -row[3])
        self.tell(dump=f"{self.name}.{mode}.{size}", value=rows[:400])

    def tell(self, **message: object) -> None:
        """Send one line to the parent."""
        print("@" + json.dumps(message, default=str), flush=True)


def _probe(device: torch.device) -> float:
    """Return what one small call costs the host just now; much more than the table says means that something else was running."""
    x = torch.ones(8, device=device)
    begin = time.perf_counter()
    for _ in range(200):
        x = x + 1
    return (time.perf_counter() - begin) / 200


# The parent.


@dataclass
class Child:
    """A process that measures one model."""

    name: str
    process: subprocess.Popen[str]
    end: float
    log: Path
    buffer: str = ""

    @property
    def pipe(self) -> IO[str]:
        """What it says."""
        assert self.process.stdout is not None
        return self.process.stdout


class Parent:
    """Starts a few processes, lets one of them measure at a time, and keeps what they find."""

    def __init__(self, chosen: argparse.Namespace, path: Path):
        self.chosen, self.path = chosen, path
        self.device = "cuda" if torch.cuda.is_available() and not chosen.cpu else "cpu"
        self.rows: list[dict[str, Any]] = []
        self.end = time.monotonic() + chosen.limit
        self.children: list[Child] = []
        self.waiting: list[Child] = []
        self.turn: Child | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="step-prediction-"))
        self.held: dict[str, Any] = {"environment": environment(), "tiny": chosen.tiny, "rows": self.rows}
        if path.is_file() and (chosen.resume or chosen.only == "predict"):
            before = json.loads(path.read_text())
            self.rows.extend(before["rows"])
            if chosen.only == "predict":
                self.held |= {key: before[key] for key in ("environment", "earlier", "note") if key in before}
            else:
                self.held["earlier"] = [*before.get("earlier", []), before["environment"]]

    def measure(self) -> list[dict[str, Any]]:
        """Measure what is asked for and not known, the machine's table first."""
        machine = profile_machine(torch.device(self.device), time_limit=min(80.0, self.chosen.limit / 3))
        print(
            f"{machine.device}: table of {0 if machine.times is None else len(machine.times.grids)} kinds", flush=True
        )
        write_machine(machine_file(self.path), machine)
        todo = sorted(((name, self._rows_of(name)) for name in self.chosen.models), key=lambda one: -len(one[1]))
        slots = self.chosen.workers or (1 if self.device == "cpu" else usable_cpus() + 4)
        while (todo or self.children) and time.monotonic() < self.end:
            while todo and len(self.children) < slots and self.turn is None:
                self._start(*todo.pop(0))
            self._listen()
        for child in list(self.children):
            self._kill(child, "the time limit ended")
        for name, _ in todo:
            print(f"{name}: no time left", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.rows

    def predict(self) -> list[dict[str, Any]]:
        """Predict all rows that were measured, with the machine's table next to them."""
        machine = read_machine(machine_file(self.path))
        if machine is None:
            raise SystemExit(f"{machine_file(self.path)} holds no table of this version: measure first, on the device.")
        for name in self.chosen.models:
            rows = [row for row in self.rows if row["model"] == name]
            modes = {row["mode"] for row in rows}
            if rows:
                found = profile(name, self.chosen.tiny, compiled="compiled" in modes, limit=self.chosen.model_limit)
            for row in rows:
                self._keep({**row, **predictions(found, machine, row["mode"], row["batch"])})
        return self.rows

    def _rows_of(self, name: str) -> list[tuple[str, int]]:
        """Return what is to be measured: what takes no compiler first, then the largest micro-batches."""
        known = {(row["model"], row["mode"], row["batch"]) for row in self.rows if "seconds" in row}
        modes = [mode for mode in self.chosen.modes if mode in SUBJECTS[name].modes]
        sizes = sorted(sizes_of(name, self.chosen.tiny), reverse=True)
        wanted = [(mode, size) for mode in modes for size in (sizes[0], sizes[2], sizes[1])]
        return [(mode, size) for mode, size in wanted if (name, mode, size) not in known]

    def _start(self, name: str, rows: list[tuple[str, int]]) -> None:
        seconds = min(self.chosen.model_limit, self.end - time.monotonic())
        asked = {
            "model": name,
            "tiny": self.chosen.tiny,
            "device": self.device,
            "rows": rows,
            "dump": bool(self.chosen.dump),
        }
        command = [sys.executable, "-m", "benchmarks.step_prediction", "--worker", json.dumps(asked)]
        log = self.folder / f"{name}.log"
        # Caches of their own: one that is stopped may hold the lock of a shared one. One thread: others would go on when it is stopped.
        own = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / name),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "2",
        }
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, **own},
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self.children.append(Child(name, process, time.monotonic() + seconds, log))

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                selector.register(child.pipe, selectors.EVENT_READ, child)
            ready = [key.data for key, _ in selector.select(timeout=0.5)]
        for child in ready:
            self._read(child)
        for child in list(self.children):
            if child.process.poll() is not None:
                self._read(child)
                self._remove(child)
            elif time.monotonic() > child.end:
                self._kill(child, "its time limit ended")
        self._give_turn()

    def _read(self, child: Child) -> None:
        with contextlib.suppress(BlockingIOError, OSError, TypeError):
            child.buffer += child.pipe.read() or ""
        *lines, child.buffer = child.buffer.split("\n")
        for line in lines:
            if line.startswith("@"):
                self._take(child, json.loads(line[1:]))

    def _take(self, child: Child, message: dict[str, Any]) -> None:
        if message.get("turn") == "please":
            self.waiting.append(child)
        elif message.get("turn") == "end":
            self._end_turn(child)
        elif "dump" in message:
            self.dump(message["dump"], message["value"])
        elif "row" in message:
            self._keep(message["row"])

    def _give_turn(self) -> None:
        if self.turn is not None or not self.waiting:
            return
        child = self.turn = self.waiting.pop(0)
        for other in self.children:
            if other is not child:
                _signal(other, signal.SIGSTOP)
        time.sleep(0.05)  # what they have put into the device's queue ends
        assert child.process.stdin is not None
        with contextlib.suppress(OSError):
            child.process.stdin.write("go\n")
            child.process.stdin.flush()

    def _end_turn(self, child: Child) -> None:
        if self.turn is child:
            self.turn = None
            for other in self.children:
                if other is not child:
                    _signal(other, signal.SIGCONT)

    def _remove(self, child: Child) -> None:
        self._end_turn(child)
        self.children.remove(child)
        if child in self.waiting:
            self.waiting.remove(child)
        if child.process.returncode:
            last = child.log.read_text(errors="replace").strip().splitlines()[-3:]
            print("\n  ".join([f"{child.name}: ended with status {child.process.returncode}", *last]), flush=True)

    def _kill(self, child: Child, why: str) -> None:
        print(f"{child.name}: {why}", flush=True)
        _signal(child, signal.SIGKILL)
        child.process.wait()
        self._read(child)
        self._remove(child)

    def _keep(self, row: dict[str, Any]) -> None:
        print(shown(row), flush=True)
        same = (row["model"], row["mode"], row["batch"])
        self.rows[:] = [one for one in self.rows if (one["model"], one["mode"], one["batch"]) != same]
        self.rows.append(row)
        self.held["summary"] = summary(self.rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.held, indent=1, default=str) + "\n")

    def dump(self, name: str, value: object) -> None:
        """Write a compressed file, if that was asked for."""
        if self.chosen.dump:
            folder = Path(self.chosen.dump)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(value, default=str).encode(), mtime=0))


def _signal(child: Child, what: signal.Signals) -> None:
    """Send a signal to a process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, what)


def shown(row: Mapping[str, Any]) -> str:
    """Return one row as a line of the table."""

    def number(value: float | None, scale: float) -> str:
        return "        -" if value is None else f"{value * scale:9.2f}"

    def ratio(what: str) -> str:
        predicted, measured = row.get(f"predicted_{what}"), row.get(what)
        return "      -" if not predicted or not measured else f"{predicted / measured:7.3f}"

    start = f"{row['model']:13}{row['mode']:9}{row['batch']:5}"
    times = f"{number(row.get('predicted_seconds'), 1e3)}{number(row.get('seconds'), 1e3)}{ratio('seconds')}"
    memory = f"{number(row.get('predicted_bytes'), 1 / _GIB)}{number(row.get('bytes'), 1 / _GIB)}{ratio('bytes')}"
    return f"{start} {times} {memory}" + (f"  {row['error']}" if "error" in row else "")


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far predictions are off: the median error, and the share within 30 % (memory: 5 %)."""
    found: dict[str, Any] = {}
    rows = list(rows)
    for mode in (*MODES, "all"):
        for what, near in (("seconds", 0.3), ("bytes", 0.05)):
            pairs = [(row.get(f"predicted_{what}"), row.get(what)) for row in rows if mode in (row["mode"], "all")]
            errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted and measured]
            if errors:
                share = sum(error <= near for error in errors) / len(errors)
                found[f"{mode} {what}"] = {
                    "rows": len(errors),
                    "median_error": statistics.median(errors),
                    f"within_{near:.0%}": share,
                }
    return found


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Compare predictions with the device at hand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SUBJECTS), help="names, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES), help="eager, compiled, or both")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--model-limit", type=float, default=400.0, help="seconds for one model")
    parser.add_argument(
        "--workers", type=int, help="processes at a time; on an accelerator a few more than CPUs, else 1"
    )
    parser.add_argument("--resume", metavar="FILE", help="go on with this file, and write to it")
    parser.add_argument("--only", choices=("measure", "predict"), help="one of the two; predictions need no device")
    parser.add_argument("--dump", metavar="FOLDER", help="also write there what torch's profiler saw")
    parser.add_argument("--tiny", action="store_true", help="small versions of all models")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where there is an accelerator")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        Worker(json.loads(chosen.worker)).run()
        return []
    chosen.models, chosen.modes = chosen.models.split(","), chosen.modes.split(",")
    for option, given, known in (("--models", chosen.models, SUBJECTS), ("--modes", chosen.modes, MODES)):
        for name in given:
            if name not in known:
                parser.error(f"{option}: {name!r} is not one of {', '.join(known)}")
    missing = {need for name in chosen.models if (need := SUBJECTS[name].needs) and not _is_installed(need)}
    if missing:
        print(f"left out, because there is no {' and no '.join(sorted(missing))}", flush=True)
        chosen.models = [name for name in chosen.models if SUBJECTS[name].needs not in missing]
    path = (
        Path(chosen.resume)
        if chosen.resume
        else RESULTS / ("step_prediction_tiny.json" if chosen.tiny else "step_prediction.json")
    )
    times = f"{'predicted':>9}{'measured':>9}{'ratio':>7}"
    print(f"{'model':13}{'mode':9}{'batch':>5} {times} {times}   ms, GiB")
    parent = Parent(chosen, path)
    if chosen.only != "predict":
        parent.measure()
    rows = parent.rows if chosen.only == "measure" else parent.predict()
    for name, numbers in summary(rows).items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in numbers.items()))
    return rows


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


if __name__ == "__main__":
    main()
