"""Callbacks that measure: speed, memory and learning rates of a run.

They read clocks and counters on the host, never the device, and send their numbers to the run's loggers.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.context.state import State
from drivetrain.core.arguments import check_count, check_number
from drivetrain.core.plugin import Logger
from drivetrain.core.time import Interval, ensure_time
from drivetrain.module.wrapping import wrapping_of
from drivetrain.runtime.limits import peak_process_bytes
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.strategy.device_spec import preset_named_like
from drivetrain.train.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from drivetrain.train.trainer import Trainer

GIB = 2**30

_COMPILED = ("OptimizedModule", "module.compile()")  # how `wrapping_of` calls the two ways to compile


class ThroughputMonitor(TrainerCallback):
    """Logs batches, samples and tokens per second, over all devices and per device, and the model FLOPs utilization (MFU).

    Numbers are means over `window_size` batches; evaluation does not count. MFU (Chowdhery et al., 2022) is the FLOPs
    of the training steps over what the devices could do at their dense bfloat16 peak. FLOPs are counted once, during
    the first batch, with `torch.utils.flop_counter`; give `flops_per_sample` for a compiled model, `peak_flops` for a
    device that is not known.
    """

    reads = ("timestamp",)

    def __init__(
        self, window_size: int = 100, flops_per_sample: float | str = "auto", peak_flops: float | str = "auto"
    ):
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            if value != "auto":
                check_number(name, value, above=0, hint=", or 'auto'")
        self.window_size = check_count("window_size", window_size)
        self.flops_per_sample, self.peak_flops = flops_per_sample, peak_flops
        self._flops: float | None = None
        self._peak: float | None = None
        self._counter: FlopCounterMode | None = None
        self._counts: tuple[int, int, int] = (0, 0, 0)
        self._seconds = self._since = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        self._counter, self._flops = None, None if isinstance(self.flops_per_sample, str) else self.flops_per_sample
        self._peak = None if isinstance(self.peak_flops, str) else self.peak_flops
        if self._peak is None and torch.device(state.device).type == "cuda":
            spec = preset_named_like(torch.cuda.get_device_name(state.device))
            self._peak = None if spec is None else spec.flops
        self._restart(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._since = time.perf_counter()

    eval_end = epoch_start

    def batch_start(self, state: State, logger: Logger) -> None:
        """Count the FLOPs of the first batch."""
        if self._flops is None and self._counter is None and self._peak is not None and _can_be_counted(state.model):
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def batch_end(self, state: State, logger: Logger) -> None:
        """End the FLOPs count, and log a full window."""
        if self._counter is not None and self._flops is None:
            self._counter.__exit__(None, None, None)
            samples = (state.clock.sample - self._counts[1]) / get_num_processes()
            self._flops = self._counter.get_total_flops() / samples if samples else 0.0
            self._restart(state)  # a counted batch is a slow one
        elif state.clock.batch - self._counts[0] >= self.window_size:
            self._log(state, logger)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._seconds += time.perf_counter() - self._since

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Log a run's first numbers if the epoch is shorter than a window. Then stop the clock."""
        if state.clock.batch > self._counts[0]:
            self._log(state, logger)

    def on_exception(self, trainer: "Trainer", **kwargs: object) -> None:
        """Remove the FLOPs counter if the first batch fails."""
        if self._counter is not None and self._flops is None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def _restart(self, state: State) -> None:
        clock = state.clock
        self._counts, self._seconds, self._since = (clock.batch, clock.sample, clock.token), 0.0, time.perf_counter()

    def _log(self, state: State, logger: Logger) -> None:
        seconds = self._seconds + time.perf_counter() - self._since
        now, devices = (state.clock.batch, state.clock.sample, state.clock.token), get_num_processes()
        batches, samples, tokens = ((new - old) / seconds for new, old in zip(now, self._counts))
        rates = {"batches_per_sec": batches, "samples_per_sec": samples}
        if tokens:
            rates["tokens_per_sec"] = tokens
        metrics = {f"throughput/{name}": rate for name, rate in rates.items()}
        metrics |= {f"throughput/device/{name}": rate / devices for name, rate in rates.items()}
        if self._flops:
            metrics["throughput/device/flops_per_sec"] = flops = self._flops * samples / devices
            if self._peak:
                metrics["throughput/device/mfu"] = flops / self._peak
        logger.log_metrics(metrics)
        self._restart(state)


SpeedMonitor = ThroughputMonitor


class _IntervalMonitor(TrainerCallback):
    """Logs what `measure` returns, every so often."""

    reads = ("optimizers", "timestamp")

    def __init__(self, interval: str | int = "50ba"):
        self.interval = ensure_time(interval, "ba")
        self._interval = Interval(self.interval)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Keep the rhythm of a resumed run."""
        self._interval.reset(state.clock)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._interval.due(state.clock):
            logger.log_metrics(self.measure(state))

    epoch_end = batch_end

    def measure(self, state: State) -> Mapping[str, float | Tensor]:
        """Return the numbers of this moment."""
        raise NotImplementedError


class MemoryMonitor(_IntervalMonitor):
    """Logs the peak and the reserved memory of the device in GiB, and the peak of the process itself on a CPU."""

    def measure(self, state: State) -> dict[str, float]:
        device = torch.device(state.device)
        if device.type != "cuda":
            return {"memory/peak_process_gib": peak_process_bytes() / GIB}
        return {
            "memory/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory/allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "memory/peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory/reserved_gib": torch.cuda.memory_reserved(device) / GIB,
        }


class LRMonitor(_IntervalMonitor):
    """Logs the learning rate of every parameter group, and of every unit of an `OptimSet`."""

    def measure(self, state: State) -> dict[str, float | Tensor]:
        return learning_rates(state.optimizers)


LearningRateMonitor = LRMonitor


def _can_be_counted(model: object) -> bool:
    """Return whether a counter sees the operations of a step; it does not see those of a compiled model."""
    return isinstance(model, nn.Module) and not any(wrapping_of(part) in _COMPILED for part in model.modules())


def learning_rates(optimizers: Sequence[Any] | None) -> dict[str, float | Tensor]:
    """Return the rate of every parameter group by name. A rate on a device is copied there."""
    rates: dict[str, float | Tensor] = {}
    for optimizer in optimizers or ():
        for index, group in enumerate(optimizer.param_groups):
            if "lr" not in group:
                continue
            name = group.get("unit", f"group{index}")
            name = name if f"lr/{name}" not in rates else f"{name}/group{index}"
            lr = group["lr"]
            rates[f"lr/{name}"] = lr.detach().clone() if isinstance(lr, Tensor) else lr
    return rates
