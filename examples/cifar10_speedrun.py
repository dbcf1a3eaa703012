"""CIFAR-10 in a few seconds: a list of algorithms and three OptimSchedulers on the ordinary Trainer.

    DRIVETRAIN_DATA=folder python examples/cifar10_speedrun.py [--seeds 5] [--epochs 9] [--lookahead] [--split]

The network and its settings follow Jordan's airbench94 in its version with Muon (2024, arXiv 2404.00498). The folder
holds `cifar10-jpeg.tar.xz`; `--synthetic` needs no data and learns nothing of interest; on a CPU it
trains a small network on 512 pictures. Time is counted as there:
training and the evaluation with test-time flips, with the data on the device and the model compiled by a warm-up whose
weights are thrown away. One H200 took 1.69 s for 90.8 % on average (`benchmarks/results/cifar10_speedrun.json`).
"""

import argparse
import os
import statistics
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.algorithms import (
    AlternatingFlip,
    ChannelsLast,
    DeviceResidentData,
    KernelNorm,
    LabelSmoothing,
    Lookahead,
    RandomTranslation,
    TestTimeFlip,
    TorchCompile,
    Whitening,
)
from drivetrain.callbacks import ProgressBarCallback
from drivetrain.core.plugin import Callback
from drivetrain.data.image_archive import load_image_archive
from drivetrain.optim import LinearLr, OptimSet
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.seeds import set_seed

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Norm(nn.BatchNorm2d):
    """Batch norm with a bias and no gain, and statistics that follow quickly."""

    def __init__(self, channels: int):
        super().__init__(channels, eps=1e-12, momentum=0.4)
        self.weight.requires_grad_(False)


class Stage(nn.Module):
    """Two convolutions; the first one halves the image."""

    def __init__(self, before: int, channels: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, channels, 3, padding=1, bias=False), Norm(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), Norm(channels)
        self.pool, self.activation = nn.MaxPool2d(2), nn.GELU()

    def forward(self, x):
        x = self.activation(self.norm1(self.pool(self.conv1(x))))
        return self.activation(self.norm2(self.conv2(x)))


class SpeedNet(nn.Module):
    """A whitening convolution, three stages, and a linear head on the largest value of each channel."""

    def __init__(self, widths: tuple[int, ...] = (64, 256, 256), classes: int = 10):
        super().__init__()
        self.whitening, self.activation = nn.Conv2d(3, 24, 2), nn.GELU()
        self.whitening.weight.requires_grad_(False)
        self.stages = nn.Sequential(*(Stage(before, after) for before, after in zip((24, *widths), widths)))
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, x):
        x = self.stages(self.activation(self.whitening(x)))
        # Not amax: compiled, its gradient looks for the largest value among recomputed ones and may find none.
        x = nn.functional.max_pool2d(x, x.shape[2:]).flatten(1)
        return self.head(x) / self.head.in_features

    @torch.no_grad()
    def reset(self) -> None:
        """Reset in place, so that what is compiled stays valid: convolutions start as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
                module.reset_parameters()
            if isinstance(module, nn.Conv2d) and module is not self.whitening:
                nn.init.dirac_(module.weight[: module.in_channels])


def make_optimizer(model: SpeedNet, batch_size: int, epochs: int, on_gpu: bool = False) -> OptimSet:
    """Return three units: Muon turns the kernels, the whitening bias settles early, biases and head follow SGD with momentum."""
    # The rates of airbench are for summed losses; the Trainer's loss is a mean.
    bias_lr, head_lr, decay = 0.053 * batch_size, 0.67 * batch_size, 2e-6 * batch_size
    sgd = {"lr": bias_lr, "momentum": 0.85, "nesterov": True, "weight_decay": decay / bias_lr, "fused": on_gpu}
    muon = {"lr": 0.24, "momentum": 0.6, "ns_steps": 3, "adam_match": (), "cuda_graph": on_gpu}
    head = [{"match": "head.weight", "lr": head_lr, "weight_decay": decay / head_lr}]
    common = {"nonfinite": "ignore"}  # looking would make the host wait
    return OptimSet(
        kernels=LinearLr("MuonHybrid", muon, model, updated_modules=["stages.*.conv1", "stages.*.conv2"], **common),
        whitening=LinearLr(
            "SGD", sgd, model, updated_modules="whitening.bias", total_steps=f"{min(3, epochs)}ep", **common
        ),
        rest=LinearLr(
            "SGD",
            sgd,
            model,
            updated_modules=["stages.*.norm1.bias", "stages.*.norm2.bias", "head"],
            param_groups=head,
            **common,
        ),
    )


class Stopwatch(Callback):
    """Measures a run from the moment its model is final to its end; with `split`, also where the time goes.

    The split waits for the device at every border, which costs time itself: it is for runs that are not timed.
    """

    BORDERS = {
        "fit_start": "set-up", "before_dataloader": "framework", "after_dataloader": "data", "before_forward": "framework",
        "after_backward": "forward and backward", "after_train_batch": "framework", "batch_end": "optimizer",
        "eval_start": "framework", "eval_end": "evaluation", "fit_end": "framework",
    }  # fmt: skip
    """What has been going on when an event comes."""

    def __init__(self, split: bool = False):
        self.split, self.seconds, self.parts = split, 0.0, {}
        borders = self.BORDERS if split else ("fit_end",)
        for name in borders:
            setattr(self, name, lambda state, logger, name=name: self._border(state, name))

    def after_load(self, state, logger) -> None:
        self.parts = dict.fromkeys(self.BORDERS.values(), 0.0)
        self._start = self._last = self._now(state)

    def _border(self, state, name: str) -> None:
        now = self._now(state)
        self.parts[self.BORDERS[name]] += now - self._last
        self._last, self.seconds = now, now - self._start

    @staticmethod
    def _now(state) -> float:
        if state.device.type != "cpu":
            torch.get_device_module(state.device).synchronize()
        return time.perf_counter()


def load_data(
    synthetic: bool, size: int, device: torch.device, cache_dir: str | None
) -> tuple[TensorDataset, TensorDataset]:
    """Return normalised images and labels of both splits, on the device."""
    if synthetic:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 10, (size,), generator=generator)
        pattern = torch.rand(10, 3, 32, 32, generator=generator)[labels]
        images = ((pattern + torch.rand(size, 3, 32, 32, generator=generator)) * 127).byte()
        splits = {"train": (images, labels), "test": (images, labels)}
    else:
        folder = os.environ.get("DRIVETRAIN_DATA")
        if not folder:
            raise SystemExit("Set DRIVETRAIN_DATA to a folder with cifar10-jpeg.tar.xz, or try --synthetic.")
        splits = load_image_archive(os.path.join(folder, "cifar10-jpeg.tar.xz"), cache_dir)
    mean, deviation = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, DEVIATION))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def place(images, labels) -> TensorDataset:
        return TensorDataset(((images.to(device) / 255 - mean) / deviation).to(dtype), labels.to(device))

    return place(*splits["train"]), place(*splits["test"])


def main(
    seeds: int | None = None,
    epochs: int = 9,
    batch_size: int | None = None,
    synthetic: bool = False,
    size: int | None = None,
    widths: tuple[int, ...] | None = None,
    lookahead: bool = False,
    compile_mode: str = "reduce-overhead",
    split: bool = False,
    device: str = "auto",
    cache_dir: str | None = None,
) -> dict:
    """Train once per seed on one compiled model; print and return accuracies, seconds and, with `split`, where they go."""
    place = choose_device(device)
    on_gpu = place.type == "cuda"
    is_trial = synthetic and not on_gpu  # does it run? In half a minute on a CPU
    usual = (1, 64, 512, (16, 32, 32)) if is_trial else (5, 2000, 4000, (64, 256, 256))
    seeds, batch_size, size, widths = (a or b for a, b in zip((seeds, batch_size, size, widths), usual))
    train_set, test_set = load_data(synthetic, size, place, cache_dir)
    model, stopwatch = SpeedNet(widths), Stopwatch(split)
    algorithms = [
        DeviceResidentData(),
        RandomTranslation(2),
        AlternatingFlip(),
        ChannelsLast(),
        Whitening("whitening"),
        KernelNorm(["stages.*.conv1", "stages.*.conv2"]),
        LabelSmoothing(0.2),
        TestTimeFlip(shift=1),
        *([Lookahead(5, schedule="cubic")] if lookahead else []),
        *([TorchCompile(compile_mode, regional=False)] if on_gpu else []),
    ]
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        make_optimizer(model, batch_size, epochs, on_gpu),
        callbacks=[stopwatch] if on_gpu else [stopwatch, ProgressBarCallback()],
        algorithms=algorithms,
        precision="bf16" if on_gpu else None,
        device=place,
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
    )

    def run(seed: int, data: TensorDataset, num_epochs: int) -> float:
        set_seed(seed)
        model.reset()
        trainer.state.seed = seed
        trainer.state.generators.clear()
        trainer.optimizer = make_optimizer(model, batch_size, num_epochs, on_gpu)
        history = trainer.train(
            data,
            num_epochs,
            test_set,
            batch_size,
            eval_interval=f"{num_epochs}ep",
            train_dataloader_kwargs={"random_seed": seed, "drop_last": True, "pin_memory": False},
            eval_dataloader_kwargs={"pin_memory": False},
        )
        return history.get_metric_values("eval_accuracy_epoch")[-1]

    if on_gpu:
        run(
            0, TensorDataset(*(tensor[: 6 * batch_size] for tensor in train_set.tensors)), 1
        )  # compiles, and is forgotten
    accuracies, seconds = [], []
    for seed in range(seeds):
        accuracies.append(run(seed, train_set, epochs))
        seconds.append(stopwatch.seconds)
        print(f"seed {seed}: accuracy {accuracies[-1]:.4f} in {seconds[-1]:.2f} s")
    spread = statistics.stdev(accuracies) if seeds > 1 else 0.0
    print(
        f"accuracy {statistics.mean(accuracies):.4f} (s.d. {spread:.4f}, {seeds} runs) in {statistics.mean(seconds):.3f} s on {place}"
    )
    if split:
        print("where it goes:", ", ".join(f"{part} {took:.3f} s" for part, took in stopwatch.parts.items()))
    return {"accuracies": accuracies, "seconds": seconds, "parts": dict(stopwatch.parts)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train CIFAR-10 as fast as we can.")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--lookahead", action="store_true")
    parser.add_argument("--compile-mode", default="reduce-overhead")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-dir")
    main(**vars(parser.parse_args()))
