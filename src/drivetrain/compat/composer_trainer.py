"""Composer's Trainer: our Trainer, made with Composer's arguments."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain.compat.composer_types import ComposerModel, DataSpec, Evaluator, ensure_evaluator, ensure_tuple
from drivetrain.context.state import State
from drivetrain.core import Callback, ConfigError, Event, Time, Timestamp
from drivetrain.core.binding import method_for
from drivetrain.core.errors import warn
from drivetrain.optim.optimizers import DecoupledSGDW
from drivetrain.optim.positions import compile_state_schedule
from drivetrain.train.batches import BatchOutput
from drivetrain.train.callbacks import MoveModulesToDeviceCallback, TerminateOnNaNCallback, get_default_callbacks
from drivetrain.train.signatures import FOREIGN_ARGUMENTS
from drivetrain.train.tracking import MetricSet
from drivetrain.train.trainer import Trainer as NativeTrainer

_FOR_TRAIN = {
    "save_folder": "checkpoint_dir",
    "save_interval": "checkpoint_every",
    "save_overwrite": "overwrite_checkpoints",
    "load_path": "resume_from",
    "device_train_microbatch_size": "microbatch_size",
    "train_subset_num_batches": "limit_train_batches",
    "eval_subset_num_batches": "limit_eval_batches",
    "save_num_checkpoints_to_keep": "keep_checkpoints",
}
"""Arguments of Composer's constructor that are arguments of our `train()`; -1 and None mean "not set"."""


class Count(int):
    """A counter of the clock that also has the `value` of Composer's Time: `state.timestamp.batch.value`."""

    @property
    def value(self) -> int:
        """The number itself."""
        return int(self)


class ComposerState(State):
    """A State whose timestamp is read as Composer's."""

    @property
    def timestamp(self) -> Timestamp:
        """The present moment; each counter also has a `value`."""
        now = super().timestamp
        counts = {field.name: getattr(now, field.name) for field in fields(now)}
        return replace(now, **{name: Count(count) for name, count in counts.items() if type(count) is int})


class Trainer(NativeTrainer):
    """Trains with Composer's arguments; one that has no counterpart and is not None or False is an error that says what to use."""

    def __init__(
        self,
        *,
        model: nn.Module,
        train_dataloader: object = None,
        eval_dataloader: object = None,
        algorithms: object = None,
        optimizers: object = None,
        schedulers: object = None,
        step_schedulers_every_batch: bool | None = None,
        callbacks: object = None,
        loggers: object = None,
        progress_bar: bool = True,
        eval_interval: int | str | Time | Callable[..., bool] = 1,
        deterministic_mode: bool = False,
        autoresume: bool = False,
        run_name: str | None = None,
        **others: Any,
    ):
        known = FOREIGN_ARGUMENTS.load().keys() | _FOR_TRAIN.keys()
        asked = {name: value for name, value in others.items() if value is not None and value is not False}
        others = asked | {name: value for name, value in others.items() if name not in known}
        given = {_FOR_TRAIN[name]: others.pop(name) for name in _FOR_TRAIN if name in others}
        self._for_train = {name: value for name, value in given.items() if value != -1}
        if autoresume:
            self._for_train["resume_from"] = "auto"
        if step_schedulers_every_batch is False:
            self._for_train["scheduler_interval"] = "epoch"
        self._schedulers = ensure_tuple(schedulers)
        if len(self._schedulers) > 1:
            raise ConfigError(
                f"schedulers: {len(self._schedulers)} were given, expected one. Combine them in one function "
                "def schedule(state, ssr=1.0) that returns the product."
            )
        if optimizers is None:
            warn(
                "Trainer(optimizers=None): DecoupledSGDW with a learning rate of 0.1 is used, as Composer does. Give an optimizer."
            )
            optimizers = DecoupledSGDW(model.parameters(), lr=0.1)
        shown = get_default_callbacks() if progress_bar else (MoveModulesToDeviceCallback, TerminateOnNaNCallback)
        loggers = ensure_tuple(loggers)
        super().__init__(
            model,
            callbacks=[*shown, *ensure_tuple(callbacks), *filter(_watches, loggers)],
            algorithms=ensure_tuple(algorithms),
            loggers=loggers,
            state=ComposerState(seed=others.get("seed"), run_name=run_name or ""),
            optimizers=optimizers,
            train_dataloader=_loader(train_dataloader),
            eval_dataloader=_evaluation(eval_dataloader),
            eval_interval=f"{eval_interval}ep" if type(eval_interval) is int else eval_interval,
            deterministic=deterministic_mode,
            **others,
        )
        if isinstance(model, ComposerModel):
            self._eval_metrics = _ModelMetrics(model, model.get_metrics(is_train=False))
            self._train_metrics = _ModelMetrics(model, model.get_metrics(is_train=True))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with the settings that the constructor was given; arguments here come first."""
        defaults = dict(self._for_train)
        for given in self._schedulers:
            made = isinstance(given, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau)
            defaults["create_scheduler_fn"] = given if made else partial(self._compiled, given)
        return super().train(*args, **{**defaults, **kwargs})

    def fit(self, *, train_dataloader: object = None, duration: object = None, **kwargs: object) -> Any:
        """Train for a duration, or for the `max_duration` of the constructor."""
        given = {"train_dataset": _loader(train_dataloader), "max_duration": duration}
        return self.train(**{name: value for name, value in given.items() if value is not None}, **kwargs)

    def eval(self, eval_dataloader: object = None, **kwargs: Any) -> Any:
        """Evaluate on the given data, or on that of the constructor."""
        given = self._options.eval_dataset if eval_dataloader is None else _evaluation(eval_dataloader)
        return self.evaluate(given, **kwargs)

    def get_metric_inputs(self, batch: object, batch_output: BatchOutput) -> tuple[object, object]:
        """Give the metrics of a ComposerModel the outputs and the whole batch."""
        model = self._accelerator.unwrap_model(self.model)
        if not isinstance(model, ComposerModel):
            return super().get_metric_inputs(batch, batch_output)
        return model.eval_forward(batch, batch_output["model_outputs"]), batch

    def _compiled(self, schedule: Any, optimizer: object) -> Any:
        return compile_state_schedule(schedule, self.state, self._schedule_ratio())


def _watches(logger: object) -> bool:
    """Return whether a logger is also a callback: it has a method for some event, or one that closes it."""
    if not isinstance(logger, Callback):
        return False
    return type(logger).close is not Callback.close or any(method_for(logger, event) for event in Event)


def _loader(data: object) -> object:
    return data.loader() if isinstance(data, DataSpec) else data


def _evaluation(data: object) -> object:
    """Return one loader, or several by name."""
    if not isinstance(data, Evaluator | DataSpec | list | tuple):
        return data
    sets = [ensure_evaluator(one) for one in (data if isinstance(data, list | tuple) else [data])]
    names = [one.label for one in sets]
    if len(set(names)) < len(names):
        raise ConfigError(f"eval_dataloader: the labels {', '.join(names)} are not all different. Name each Evaluator.")
    if names == ["eval"]:
        return sets[0].dataloader.loader()
    return {one.label: one.dataloader.loader() for one in sets}


class _ModelMetrics(MetricSet):
    """Metrics that the model updates itself."""

    def __init__(self, model: ComposerModel, metrics: object):
        super().__init__(metrics)
        self._stateful = {name: _Updated(model, metric) for name, metric in self._stateful.items()}


class _Updated:
    """A metric that receives batches through its model; everything else is the metric's."""

    def __init__(self, model: ComposerModel, metric: object):
        self._model, self._metric = model, metric

    def update(self, outputs: object, batch: object) -> None:
        """Let the model take a batch into the metric."""
        self._model.update_metric(batch, outputs, self._metric)

    def __getattr__(self, name: str) -> object:
        return getattr(self._metric, name)
