"""GPT-2 124M on one GPU: a hand-tuned loop against `auto_accelerate`, the Trainer, and what more a plan can do.

    python -m benchmarks.gpt2 [--variants plan,trainer,half] [--steps 100] [--limit 230] [--lr 6e-4] [--smoke]

64 x 1,024 tokens a step. The hand-written loop has bfloat16 autocast, one compiled region of model and loss, and fused AdamW. Every other
variant takes turns with it in blocks of ten steps on the same tokens, and its throughput is divided by that of the hand-written blocks
beside it. The tokens are a Markov chain, so that the loss of the last block shows whether a variant still learns: all begin with the same
weights and a rate that warms up, without which the loss is a matter of luck. `trainer+...` are methods in the Trainer, the others what
`auto_accelerate` returns. Results are written after every turn and add up over sittings; a variant that there is no time left for is
listed, not started.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.models import cross_entropy, loss_func, make_model
from benchmarks.timing import RESULTS, alternate, environment, write_result

BASE = "hand"
PLAN: list[Any] = [("amp_native", "bf16"), "fused_optimizer"]
PLANS: dict[str, list[Any]] = {
    "plan": PLAN,
    "half": [("half", "bf16"), "fused_optimizer"],
    "fp8_head": [*PLAN, ("fp8", {"include": ("head",)})],
    "half_fp8_head": [("half", "bf16"), "fused_optimizer", ("fp8", {"include": ("head",)})],
    "chunked": [*PLAN, "chunked_cross_entropy"],
    "cuda_graphs": [*PLAN, "cuda_graphs"],
}
"""What `auto_accelerate` is given, beside the compiler."""
IN_TRAINER = "trainer+"
VARIANTS = (
    "plan",
    "trainer",
    "half",
    "chunked",
    "cuda_graphs",
    "fp8_head",
    "trainer+half",
    "trainer+fp8_head",
    "trainer+half_fp8_head",
)
BLOCK = 10
WARM_UP = 30
"""Steps in which the learning rate rises."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all variants of a sitting share."""

    device: torch.device
    rows: Tensor
    """Samples of inputs and one token more, in the order in which every variant sees them."""
    size: int
    """Samples of a batch."""
    tiny: bool
    backend: str
    lr: float

    def block(self, first: int, steps: int) -> Tensor:
        """Return the rows of so many steps, going round."""
        index = torch.arange(first * self.size, (first + steps) * self.size) % len(self.rows)
        return self.rows[index]

    def dataset(self, first: int, steps: int) -> TensorDataset:
        """Return those rows as a dataset of inputs and labels."""
        rows = self.block(first, steps)
        return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.size * (self.rows.shape[1] - 1)

    def warm_up(self, optimizer: Any, step: int) -> None:
        """Set the learning rate of a step."""
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (step + 1) / WARM_UP)


@dataclass
class Variant:
    """A loop that goes on where it stopped."""

    run: Callable[[int, int], float | None]
    """Trains from one step on for so many steps; may return its own seconds."""
    losses: list[Tensor] = field(default_factory=list)
    """Losses of the block in hand, on the device."""
    done: int = 0
    notes: Sequence[str] = ()
    step_memory: int = 0
    """Bytes that a step adds to what lies in memory between steps."""
    losses_read: list[float] = field(default_factory=list)
    """Mean loss of every block."""

    def __call__(self, steps: int) -> float:
        """Run one block and return its seconds; the host waits for the device before and after, not in between."""
        self.losses.clear()
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        start = time.perf_counter()
        own = self.run(self.done, steps)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.done += steps
        self.step_memory = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        self.losses_read.append(torch.stack(self.losses).float().mean().item())
        return seconds if own is None else own


def hand_written(setting: Setting) -> Variant:
    """What an expert writes: autocast, one compiled region with the loss inside, fused AdamW."""
    device = setting.device
    model = make_model("gpt2", tiny=setting.tiny).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, fused=True)

    def forward(inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(inputs), labels)

    compiled = torch.compile(forward, backend=setting.backend)
    variant = Variant(run=lambda first, steps: None)

    def run(first: int, steps: int) -> None:
        rows = setting.block(first, steps)
        rows = rows.pin_memory() if device.type == "cuda" else rows
        for step, batch in enumerate(rows.split(setting.size), first):
            setting.warm_up(optimizer, step)
            batch = batch.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            variant.losses.append(loss.detach())

    variant.run = run
    return variant


def as_input(batch: Any, device: torch.device) -> dict[str, Tensor]:
    """Return the model's input for what a loader of a TensorDataset yields."""
    inputs, labels = (part.to(device, non_blocking=True) for part in batch)
    return {"inputs": inputs, "labels": labels}


def accelerated(setting: Setting, plan: Sequence[Any]) -> Variant:
    """The five lines of a hand-written loop around what `auto_accelerate` returns."""
    from drivetrain.auto import auto_accelerate

    steps = len(setting.rows) // setting.size
    status, result, strategy = auto_accelerate(
        make_model("gpt2", tiny=setting.tiny),
        torch.optim.AdamW,
        dataset=setting.dataset(0, steps),
        loss_func=loss_func,
        prepare_input=as_input,
        model_input_format="unpack_dict",
        optim_args={"lr": setting.lr},
        dataloader_args={"batch_size": setting.size},
        load_strategy=[*plan, ("native_dynamo", setting.backend)],
        ignore_dryrun_on_load_strategy=True,  # its compilation is no part of what is compared
        device=setting.device,
        strict=True,
    )
    assert status and result is not None, strategy.failure
    batches = endless(result.dataloader)
    variant = Variant(run=lambda first, steps: None)

    def run(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            setting.warm_up(result.optim, step)
            batch = result.prepare_input(next(batches), setting.device)
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
            variant.losses.append(loss.detach().clone())  # a recorded graph writes the next loss into the same place

    variant.run, variant.notes = run, result.notes  # grows: the compiler reports after the first step
    return variant


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def trained(setting: Setting, plan: Sequence[Any]) -> Variant:
    """The Trainer with the same plan; a block is an epoch, and the clock runs from its first batch to its last."""
    from drivetrain import Trainer
    from drivetrain.callbacks import TrainerCallback

    model = make_model("gpt2", tiny=setting.tiny)
    variant = Variant(run=lambda first, steps: None)

    class Stopwatch(TrainerCallback):
        seconds = 0.0

        def epoch_start(self, state: Any, logger: Any) -> None:
            wait(setting.device)
            self.began = time.perf_counter()

        def batch_start(self, state: Any, logger: Any) -> None:
            setting.warm_up(trainer.optimizer, variant.done + state.clock.step)

        def batch_end(self, state: Any, logger: Any) -> None:
            variant.losses.append(state.loss.detach())

        def epoch_end(self, state: Any, logger: Any) -> None:
            wait(setting.device)
            self.seconds = time.perf_counter() - self.began

    watch = Stopwatch()
    trainer = Trainer(
        model,
        cross_entropy,
        torch.optim.AdamW(model.parameters(), lr=setting.lr),
        callbacks=[watch],
        strategy=[*plan, ("native_dynamo", setting.backend)],
        device=setting.device,
    )
    loader_settings = {"shuffle": False, "num_workers": 0}

    def run(first: int, steps: int) -> float:
        trainer.train(
            setting.dataset(first, steps),
            num_epochs=1,
            per_device_batch_size=setting.size,
            train_dataloader_kwargs=loader_settings,
        )
        return watch.seconds

    variant.run = run
    return variant


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_variant(name: str, setting: Setting) -> Variant:
    if name == BASE:
        return hand_written(setting)
    if name == "trainer":
        return trained(setting, PLAN)
    if name.startswith(IN_TRAINER):
        return trained(setting, PLANS[name.removeprefix(IN_TRAINER)])
    return accelerated(setting, PLANS[name])


def markov_rows(rows: int, length: int, vocabulary: int, symbols: int = 256, seed: int = 0) -> Tensor:
    """Return samples of a chain in which each of `symbols` tokens has four successors: about 1.2 nats a token to learn."""
    generator = torch.Generator().manual_seed(seed)
    symbols = min(symbols, vocabulary)
    tokens = torch.randperm(vocabulary, generator=generator)[:symbols]
    successors = torch.randint(symbols, (symbols, 4), generator=generator)
    odds = torch.tensor([0.5, 0.25, 0.15, 0.1])
    choices = torch.multinomial(odds, rows * length, replacement=True, generator=generator).view(length, rows)
    states = torch.empty(length + 1, rows, dtype=torch.long)
    states[0] = torch.randint(symbols, (rows,), generator=generator)
    for step in range(length):
        states[step + 1] = successors[states[step], choices[step]]
    return tokens[states.t()]


class Report:
    """The numbers of all sittings, written whenever there are more."""

    def __init__(self, setting: Setting, folder: Path | None, limit: float):
        import json

        self.setting, self.folder, self.limit = setting, folder, limit
        self.start = time.perf_counter()
        path = (RESULTS if folder is None else folder) / "gpt2.json"
        earlier = json.loads(path.read_text()) if path.exists() else {}
        self.variants: dict[str, Any] = earlier.get("variants", {})
        self.sitting = {
            **environment(),
            "batch": setting.size,
            "lr": setting.lr,
            "warm_up": WARM_UP,
            "length": setting.rows.shape[1] - 1,
            "tiny": setting.tiny,
            "left_out": {},
        }
        self.sittings: list[Any] = [*earlier.get("sittings", []), self.sitting]

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def add(self, name: str, variant: Variant, seconds: Sequence[float], base: Sequence[float]) -> None:
        """Note the throughput of a variant, and of the hand-written blocks beside it."""
        if not seconds or not base:
            return
        steps = min(variant.done, len(self.setting.rows) // self.setting.size)
        self.variants[name] = {
            "tokens_per_second": self.setting.tokens / median(seconds),
            "ratio": median(base) / median(seconds),
            "loss": variant.losses_read[steps // BLOCK - 1],
            "loss_curve": variant.losses_read[: steps // BLOCK],
            "steps": steps,
            "milliseconds": [1e3 * value for value in seconds],
            "beside": [1e3 * value for value in base],
            "step_gib": variant.step_memory / 2**30,
            "notes": list(variant.notes),
            "sitting": len(self.sittings) - 1,
        }

    def write(self) -> Path:
        self.sitting["seconds"] = self.elapsed
        result = {"variants": self.variants, "sittings": self.sittings}
        return write_result("gpt2", result, self.folder)


def measure(names: Sequence[str], setting: Setting, steps: int, report: Report, base: Variant) -> None:
    """Let some variants and the hand-written loop take turns until each has trained `steps` steps."""
    alive = {BASE: base} if BASE in names else {}
    for name in names:
        if name == BASE:
            continue
        began = time.perf_counter()
        try:
            alive[name] = make_variant(name, setting)
            alive[name](BLOCK)  # compiles, and is no part of the numbers
        except Exception as error:  # one variant that fails must not cost the others
            alive.pop(name, None)
            report.sitting["left_out"][name] = f"{type(error).__name__}: {error}"[:2000]
            print(f"{name:16} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        else:
            print(f"{name:16} ready after {time.perf_counter() - began:.1f} s", flush=True)
        report.write()
    loops = {BASE: base, **alive}
    if len(loops) == 1 and BASE not in names:
        return

    def keep(seconds: dict[str, list[float]]) -> None:
        for name, variant in alive.items():
            report.add(name, variant, seconds[name], seconds[BASE])
        report.write()

    alternate(loops, blocks=max(1, steps // BLOCK - 1), steps=BLOCK, warm_up=False, after_turn=keep)
    for name in alive:
        row = report.variants[name]
        print(
            f"{name:16} {row['tokens_per_second']:10,.0f} tokens/s, {row['ratio']:.3f} of the hand-written loop; loss {row['loss']:.4f} "
            f"after {row['steps']} steps; a step adds {row['step_gib']:.1f} GiB",
            flush=True,
        )


def main(
    variants: Sequence[str] = VARIANTS,
    steps: int = 100,
    limit: float = 230.0,
    smoke: bool = False,
    folder: Path | None = None,
    device: str | None = None,
    lr: float = 6e-4,
) -> dict[str, Any]:
    """Measure the variants beside the hand-written loop, and return what is known of each."""
    import torch._dynamo

    unknown = [name for name in variants if name not in (*VARIANTS, BASE)]
    if unknown:
        raise SystemExit(f"no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() and not smoke else "cpu"))
    length, vocabulary, size = (16, 128, 4) if smoke else (1024, 50304, 64)
    setting = Setting(
        device=place,
        rows=markov_rows(steps * size, length, vocabulary),
        size=size,
        tiny=smoke,
        backend="eager" if smoke else "inductor",
        lr=1e-2 if smoke else lr,
    )
    if smoke and folder is None:
        folder = Path(tempfile.gettempdir())  # numbers of a tiny model are no results
    report = Report(setting, folder, limit)
    # Every variant compiles the same code once more, and is a cache entry of it.
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
        base = make_variant(BASE, setting)
        base(BLOCK)
        print(f"{BASE:16} ready after {report.elapsed:.1f} s", flush=True)
        core = [name for name in ("plan", "trainer") if name in variants]
        groups = [[BASE, *core], *([name] for name in variants if name not in (BASE, *core))]
        for group in groups:
            # What one more compilation and its blocks take, from the groups so far.
            if group is not groups[0] and report.elapsed + _NEEDED * (0 if smoke else 1) > limit:
                report.sitting["left_out"] |= dict.fromkeys(group, "no time left")
                continue
            measure(group, setting, steps, report, base)
            gc.collect()
            if place.type == "cuda":
                torch.cuda.empty_cache()
    path = report.write()
    for name, why in report.sitting["left_out"].items():
        print(f"{name:16} left out: {why[:300]}")
    print(f"{report.elapsed:.0f} s; written to {path.name}")
    return report.variants


_NEEDED = 50.0
"""Seconds that a further variant takes on an H200: about 20 to compile, and twenty blocks of ten steps."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help="comma-separated; the hand-written loop always runs"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--limit", type=float, default=230.0, help="seconds after which no further variant is started")
    parser.add_argument("--lr", type=float, default=6e-4, help="the learning rate, after a warm-up")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args()
    main(arguments.variants.split(","), arguments.steps, arguments.limit, arguments.smoke, lr=arguments.lr)
