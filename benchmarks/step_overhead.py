"""What the loop costs: microseconds per step over a bare PyTorch loop, on a model so small that nothing else matters.

    python benchmarks/step_overhead.py [--blocks 120] [--steps 100]

The bare loop and each trainer run alternating blocks of steps on the same ready batches; low percentiles are compared, so that a
busy machine disturbs little, and the bare loop against itself shows the noise. Peers that are installed run beside us.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.timing import environment, write_result


def make_task() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    batches = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(100)]
    return model, batches, torch.optim.SGD(model.parameters(), lr=0.01)


def bare_loop() -> Callable[[int], None]:
    model, batches, optimizer = make_task()
    loss_func = nn.CrossEntropyLoss()
    model.train()

    def run(steps: int) -> None:
        for step in range(steps):
            x, y = batches[step % len(batches)]
            loss = loss_func(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


class Steps:
    """A ready loader of exactly so many batches."""

    def __init__(self, batches, steps: int):
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        for step in range(self.steps):
            yield self.batches[step % len(self.batches)]


def drivetrain_loop(**kwargs) -> Callable[[int], float]:
    """Return a timer of the Trainer's steps: set-up and the ends of the run are outside the clock."""
    from drivetrain import Trainer
    from drivetrain.callbacks import TrainerCallback

    class Stopwatch(TrainerCallback):
        def epoch_start(self, state, logger):
            self.began = time.perf_counter()

        def epoch_end(self, state, logger):
            self.seconds = time.perf_counter() - self.began

    model, batches, optimizer = make_task()
    watch = Stopwatch()
    callbacks = (*kwargs.pop("callbacks", ()), watch)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, **kwargs)

    def run(steps: int) -> float:
        trainer.train(Steps(batches, steps), num_epochs=1)
        return watch.seconds

    return run


def fabric_loop() -> Callable[[int], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, batches, optimizer = make_task()
    model, optimizer = fabric.setup(model, optimizer)
    loss_func = nn.CrossEntropyLoss()

    def run(steps: int) -> None:
        for step in range(steps):
            x, y = batches[step % len(batches)]
            fabric.backward(loss_func(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return run


def accelerate_loop() -> Callable[[int], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, batches, optimizer = make_task()
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_func = nn.CrossEntropyLoss()

    def run(steps: int) -> None:
        for step in range(steps):
            with accelerator.accumulate(model):
                x, y = batches[step % len(batches)]
                accelerator.backward(loss_func(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return run


def lightning_loop() -> Callable[[int], float]:
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, batches, optimizer = make_task()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.loss_func = model, nn.CrossEntropyLoss()

        def training_step(self, batch, index):
            return self.loss_func(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer

        def on_train_epoch_start(self):
            self.began = time.perf_counter()

        def on_train_epoch_end(self):
            self.seconds = time.perf_counter() - self.began

    module = Module()
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}

    def run(steps: int) -> float:
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, use_distributed_sampler=False, **off)
        trainer.fit(module, Steps(batches, steps))
        return module.seconds

    return run


def hugging_face_loop() -> Callable[[int], float]:
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    inner, batches, optimizer = make_task()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.loss_func = inner, nn.CrossEntropyLoss()

        def forward(self, x, labels):
            logits = self.inner(x)
            return {"loss": self.loss_func(logits, labels), "logits": logits}

    class Stopwatch(TrainerCallback):
        def on_epoch_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_epoch_end(self, *args, **kwargs):
            self.seconds = time.perf_counter() - self.began

    watch, model, folder = Stopwatch(), Model(), tempfile.mkdtemp()
    named = [{"x": x, "labels": y} for x, y in batches]

    def run(steps: int) -> float:
        class Ready(Trainer):
            def get_train_dataloader(self):
                return Steps(named, steps)

        off = {
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        arguments = TrainingArguments(folder, num_train_epochs=1, max_steps=steps, **off)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        Ready(model, arguments, optimizers=(optimizer, constant), callbacks=[watch], train_dataset=named).train()
        return watch.seconds

    return run


def reference_loop() -> Callable[[int], float]:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import TrainerCallback

    class Stopwatch(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            self.began = time.perf_counter()

        def on_train_epoch_end(self, trainer, **kwargs):
            self.seconds = time.perf_counter() - self.began

    model, batches, optimizer = make_task()
    watch = Stopwatch()

    class Ready(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            rows = [(x[k], y[k]) for x, y in batches for k in range(len(x))]
            self._train_dl_kwargs = {}
            return torch.utils.data.DataLoader(rows[: 32 * self.steps], batch_size=32)

    trainer = Ready(model, nn.CrossEntropyLoss(), optimizer, callbacks=(watch,))

    def run(steps: int) -> float:
        trainer.steps = steps
        trainer.train([0], num_epochs=1, per_device_batch_size=32)
        return watch.seconds

    return run


def composer_loop() -> Callable[[int], float]:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    import composer

    logging.getLogger("composer").setLevel(logging.ERROR)
    inner, batches, optimizer = make_task()

    class Model(composer.models.ComposerModel):
        def __init__(self):
            super().__init__()
            self.inner, self.loss_func = inner, nn.CrossEntropyLoss()

        def forward(self, batch):
            return self.inner(batch[0])

        def loss(self, outputs, batch, *args, **kwargs):
            return self.loss_func(outputs, batch[1])

    class Stopwatch(composer.Callback):
        def epoch_start(self, state, logger):
            self.began = time.perf_counter()

        def epoch_end(self, state, logger):
            self.seconds = time.perf_counter() - self.began

    watch, model = Stopwatch(), Model()
    off = {"progress_bar": False, "console_log_interval": "1000ep", "device": "cpu", "device_train_microbatch_size": 32}

    def run(steps: int) -> float:
        # It wants a data specification with the number of samples where the loader is not torch's own.
        data = composer.core.DataSpec(Steps(batches, steps), get_num_samples_in_batch=lambda batch: len(batch[1]))
        trainer = composer.Trainer(
            model=model, train_dataloader=data, max_duration="1ep", optimizers=optimizer, callbacks=[watch], **off
        )
        trainer.fit()
        trainer.close()
        return watch.seconds

    return run


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def measure(runs: dict[str, Callable[[int], object]], blocks: int, steps: int) -> dict[str, float]:
    """Return microseconds per step of each loop: the 10th percentile over alternating blocks."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(steps)
    for _ in range(blocks):
        for name, run in runs.items():
            began = time.perf_counter()
            own = run(steps)
            seconds = own if isinstance(own, float) else time.perf_counter() - began
            times[name].append(seconds / steps * 1e6)
    return {name: percentile(values, 0.1) for name, values in times.items()}


def main(blocks: int = 60, steps: int = 100) -> dict[str, float]:
    import contextlib
    import io

    from drivetrain.callbacks import DEFAULT_CALLBACKS

    torch.set_num_threads(1)
    runs: dict[str, Callable[[int], object]] = {
        "bare loop": bare_loop(),
        "bare loop again": bare_loop(),
        "drivetrain, callbacks=()": drivetrain_loop(),
        "drivetrain, default callbacks": drivetrain_loop(callbacks=DEFAULT_CALLBACKS),
    }
    peers = {
        "Lightning Fabric": fabric_loop,
        "HF accelerate": accelerate_loop,
        "pytorch-accelerated": reference_loop,
        "Lightning, all off": lightning_loop,
        "HF Trainer": hugging_face_loop,
        "Composer": composer_loop,
    }
    for name, make in peers.items():
        with contextlib.suppress(ImportError):
            runs[name] = make()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        times = measure(runs, blocks, steps)
    bare = times["bare loop"]
    over = {name: value - bare for name, value in times.items()}
    for name, value in times.items():
        print(f"{name:32} {value:8.1f} µs a step, {over[name]:+8.1f} over the bare loop")
    ratio = times["drivetrain, default callbacks"] / bare
    print(f"ratio of drivetrain with default callbacks to the bare loop: {ratio:.3f}")
    write_result(
        "step_overhead",
        {"microseconds": times, "over_bare": over, "ratio": ratio, "blocks": blocks, "steps": steps} | environment(),
    )
    return over


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    main(arguments.blocks, arguments.steps)
