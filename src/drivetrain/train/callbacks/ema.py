"""A moving average of the weights that is updated during training, evaluated with it, and saved if it is the best."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.context.state import State
from drivetrain.core.arguments import check_number
from drivetrain.core.errors import ConfigError
from drivetrain.core.plugin import Logger
from drivetrain.core.time import Interval, ensure_time
from drivetrain.core.types import StateDict
from drivetrain.module.wrapping import unwrap, wrapping_of
from drivetrain.train.callbacks.base import CallbackHandler
from drivetrain.train.callbacks.saving import SaveBestModelCallback

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class ModelEma(nn.Module):
    """A copy of a model whose weights are a moving average: `decay * average + (1 - decay) * new`.

    Floating parameters and buffers are averaged; the others (`num_batches_tracked`, masks of infinite numbers) are copied. Override
    `update_fn` for another rule. `module.average.AveragedWeights` is the shadow for sharded or half-precision models; this one is
    a module of its own, which can be called.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999):
        super().__init__()
        self.decay = _check_decay(decay)
        self.module = copy.deepcopy(unwrap(model)).requires_grad_(False).eval()
        self._has_mean = [
            (one.is_floating_point() or one.is_complex()) and not bool(one.isinf().any())
            for one in _tensors(self.module)
        ]

    def update_fn(self, ema_model_weights: Tensor, updated_model_weights: Tensor) -> Tensor:
        """Return the new average of one floating-point entry."""
        return self.decay * ema_model_weights + (1.0 - self.decay) * updated_model_weights

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average with the model's current weights."""
        averages, weights = self._copy_others(model)
        if type(self).update_fn is not ModelEma.update_fn:
            for average, weight in zip(averages, weights):
                average.copy_(self.update_fn(average, weight))
        elif averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    @torch.no_grad()
    def set(self, model: nn.Module) -> None:
        """Copy the model's current weights."""
        averages, weights = self._copy_others(model)
        if averages:
            torch._foreach_copy_(averages, weights)

    def _copy_others(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Copy entries that have no mean and return the pairs that have one."""
        averages, weights = [], []
        for has_mean, average, weight in zip(self._has_mean, _tensors(self.module), _tensors(unwrap(model))):
            if has_mean:
                averages.append(average)
                weights.append(weight if weight.device == average.device else weight.to(average.device))
            else:
                average.copy_(weight)
        return averages, weights


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _check_decay(decay: float) -> float:
    return check_number("decay", decay, at_least=0, at_most=1, hint="; values near 1, such as 0.999, change slowly")


_PREFIX = "ema_model_"


class ModelEmaCallback(SaveBestModelCallback):
    """Keeps an exponential moving average of the model, updated after every optimizer step.

    After each evaluation the average is evaluated too, its metrics recorded with the prefix `ema_model_`, and the best
    average saved; without `evaluate_during_training` it is saved after every epoch. The trainer's own model is not
    replaced at the end.

    Args:
        decay: share of the average that an update keeps.
        evaluate_during_training: evaluate the average after each evaluation.
        save_path: file of the best average.
        watch_metric: what decides which average is best.
        greater_is_better: whether that metric should grow.
        model_ema: the class that averages.
        callbacks: those that run in the extra evaluation.
        update_interval: when to update; `"1ep"` is once per epoch.

    >>> ModelEmaCallback(decay=0.999).decay
    0.999
    """

    reads = ("model", "timestamp")

    writes = ("model", "batch", "outputs", "loss", "algorithms", "callbacks")

    def __init__(
        self,
        decay: float = 0.99,
        evaluate_during_training: bool = True,
        save_path: str | Path = "ema_model.pt",
        watch_metric: str = "ema_model_eval_loss_epoch",
        greater_is_better: bool = False,
        model_ema: Callable[..., ModelEma] = ModelEma,
        callbacks: Iterable[object] = (),
        *,
        update_interval: str = "1st",
    ):
        super().__init__(
            save_path=save_path,
            watch_metric=watch_metric,
            greater_is_better=greater_is_better,
            reset_on_train=False,
            save_optimizer=False,
            save_scheduler=False,
            load_saved_checkpoint=False,
        )
        self.decay = _check_decay(decay)
        self.evaluate_during_training = evaluate_during_training
        self.model_ema_cls = model_ema
        self.callback_handler = CallbackHandler(callbacks)
        self.update_interval = ensure_time(update_interval, "st")
        self.ema_model: ModelEma | None = None
        self._interval = Interval(self.update_interval)
        self._restored: StateDict | None = None

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Copy the model, or continue with the average of a resumed run."""
        super().on_training_run_start(trainer)
        model = trainer.get_model(keep_torch_compile=False)
        if isinstance(model, nn.Module) and wrapping_of(model) == "fully_shard":
            raise ConfigError(
                "ModelEmaCallback copies the model, and a sharded model cannot be copied. Use the algorithm EMA instead: "
                "Trainer(..., algorithms=[EMA(...)])."
            )
        self.ema_model = self.model_ema_cls(model, decay=self.decay)
        if self._restored is not None:
            self.ema_model.load_state_dict(self._restored)
        self._restored = None
        if self.evaluate_during_training:
            self.ema_model.to(trainer.device)
        self._interval.reset(trainer.state.clock)
        self._trainer = trainer

    def batch_end(self, state: State, logger: Logger) -> None:
        """Update if the interval counts batches, steps, samples or tokens."""
        if not self._interval.is_per_epoch and self._interval.due(state.clock):
            assert self._trainer is not None
            self._average().update(self._trainer.get_model(keep_torch_compile=False))

    def on_train_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Update if the interval counts epochs."""
        if self._interval.is_per_epoch and self._interval.due(trainer.state.clock):
            self._average().update(trainer.get_model(keep_torch_compile=False))

    def on_eval_epoch_end(self, trainer: "Trainer", is_intermediate: bool = False, **kwargs: object) -> None:
        """Evaluate the average after an evaluation that belongs to a training epoch."""
        if self.evaluate_during_training and not is_intermediate and trainer.run.is_running:
            self._evaluate_average(trainer, trainer.state.dataloader)

    def on_intermediate_evaluation_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Do the same after an evaluation that `eval_interval` requires inside an epoch, and save the average if it is the best."""
        if not self.evaluate_during_training or not trainer.evaluates_inside_epochs:
            return
        self._evaluate_average(trainer, trainer.run.data.evaluation, is_intermediate=True)
        with self._swapped_into_model(trainer):
            super().on_intermediate_evaluation_end(trainer)

    def _evaluate_average(self, trainer: "Trainer", loader: Iterable[object], is_intermediate: bool = False) -> None:
        handler, prefix = trainer.callback_handler, trainer.run_history.metric_name_prefix
        attending = handler.callbacks
        trainer.print("Evaluating the average of the weights")
        with self._swapped_into_model(trainer):
            try:
                handler.callbacks = self.callback_handler.callbacks
                trainer.run_history.set_metric_name_prefix(_PREFIX)
                trainer.evaluate_during_training(loader, is_intermediate=is_intermediate)
            finally:
                handler.callbacks = attending
                trainer.run_history.set_metric_name_prefix(prefix)

    def on_training_run_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Save the average if it is the best, or if nothing is compared."""
        with self._swapped_into_model(trainer):
            if self.evaluate_during_training:
                super().on_training_run_epoch_end(trainer)
            else:
                trainer.save_checkpoint(save_path=self.save_path, save_optimizer=False, save_scheduler=False)

    def on_training_run_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Release the trainer. The trained model keeps its own weights."""
        self._trainer = None

    on_exception = on_training_run_end

    def state_dict(self) -> StateDict:
        average = None if self.ema_model is None else self.ema_model.state_dict()
        return {**super().state_dict(), "average": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both. The average is applied when the run starts."""
        super().load_state_dict(state)
        self._restored = state["average"]

    def _average(self) -> ModelEma:
        assert self.ema_model is not None, "no run has started"
        return self.ema_model

    @contextmanager
    def _swapped_into_model(self, trainer: "Trainer") -> Iterator[None]:
        model = trainer.model
        trainer.model = self._average().module
        try:
            yield
        finally:
            trainer.model = model
