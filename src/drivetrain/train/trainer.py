"""The Trainer: one readable loop around a plain model, a loss function and an optimizer.

Every part that users change is a method to override; every part that only watches is a callback; whatever changes the
training itself is an algorithm. All of them speak to one list of events (`drivetrain.core.event.Event`, whose docstring draws the
loop). What can be decided once is decided before the first step, so the loop below says what happens, in order, and
nothing else.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NoReturn, TextIO

import torch
from torch import Tensor, nn

from drivetrain.context.context import Context
from drivetrain.core.engine import Engine, Fire
from drivetrain.core.errors import ConfigError, DistributedError, StopTrainingError, TrainingStopped, nearest_name
from drivetrain.core.event import Event
from drivetrain.core.time import Time, TimeUnit
from drivetrain.data.loader import SmartDataLoader
from drivetrain.module.accumulation import AccumulationWindow
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.seeds import set_deterministic, set_seed
from drivetrain.runtime.signals import StopSignals
from drivetrain.train import loaders, resuming, saving, setup
from drivetrain.train.accelerator import TrainerRuntime
from drivetrain.train.batches import (
    BatchForm,
    WholeForm,
    batch_size_of,
    carried_loss,
    find_form,
    join_outputs,
    logits_of,
    split_batch,
)
from drivetrain.train.callbacks import DEFAULT_CALLBACKS, CallbackHandler, with_limit_from_environment
from drivetrain.train.callbacks.strictness import StrictSteps, warnings_as_errors
from drivetrain.train.callbacks.watching import MetricWatch
from drivetrain.train.checks import check_batch_output, check_loss, warn_of_sample_weights
from drivetrain.train.closures import WindowRepeat
from drivetrain.train.evaluation import errors_told, evaluation_mode, kept_history
from drivetrain.train.finetuning import restore_frozen_modes
from drivetrain.train.gradients import Gradients
from drivetrain.train.logbook import Logbook
from drivetrain.train.metrics import MetricSet
from drivetrain.train.optimizer_factory import make_optimizer
from drivetrain.train.placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values
from drivetrain.train.plain_hooks import PlainHooks, find_plain_hooks
from drivetrain.train.run_config import TrainerRunConfig
from drivetrain.train.settings import EvalInterval, RunLimits, TrainSettings, parse_time
from drivetrain.train.stopping import STOP, StopVote
from drivetrain.train.tracking import InMemoryRunHistory, LossTracker, RunHistory, reduce_means

DataLoader = SmartDataLoader  # the name users patch; a torch DataLoader that knows its exact place in the data

__all__ = [
    "DEFAULT_CALLBACKS",
    "DataLoader",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "replace_trainer_placeholder_values",
]


class Trainer:
    """Trains, evaluates and predicts with a plain `nn.Module`.

    >>> from torch import nn, optim
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> model = nn.Linear(4, 2)
    >>> trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), callbacks=())
    >>> history = trainer.train(data, num_epochs=2, per_device_batch_size=16)
    >>> len(history.get_metric_values("train_loss_epoch"))
    2
    """

    def __init__(
        self,
        model: Any,
        loss_func: Callable[..., Any] | None = None,
        optimizer: Any = None,
        callbacks: Iterable[Any] = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
        *,
        algorithms: Iterable[Any] = (),
        loggers: Iterable[Any] = (),
        strategy: Any = None,
        strategy_time_limit: float | None = None,
        precision: Any = None,
        metrics: Any = None,
        train_metrics: Any = None,
        count_items: Any = None,
        device: Any = None,
        seed: int | None = None,
        deterministic: bool | Literal["off", "warn", "strict"] = False,
        strict: bool = False,
        state: Context | None = None,
        scale_schedule_ratio: float = 1.0,
        optimizers: Any = None,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        max_duration: int | str | Time | None = None,
        eval_interval: EvalInterval | None = None,
        **unknown: Any,
    ):
        _refuse_unknown(Trainer.__init__, unknown)
        self._requested_device, self._requested_precision = device, precision
        self.strategy, self.strict, self.scale_schedule_ratio = strategy, strict, scale_schedule_ratio
        self.strategy_time_limit = strategy_time_limit
        self._train_defaults = {
            "train_dataset": train_dataloader,
            "eval_dataset": eval_dataloader,
            "max_duration": max_duration,
            "eval_interval": eval_interval,
        }
        if deterministic:
            set_deterministic("strict" if deterministic is True else deterministic)
        if seed is not None:
            set_seed(seed)
        self.runtime = self._accelerator = self._create_accelerator()
        optimizer = optimizer if optimizers is None else optimizers
        self.state = resuming.make_state(state, model, loss_func, optimizer, self.device, seed)
        self.state.precision = self._accelerator.mixed_precision
        self.run_history: RunHistory = InMemoryRunHistory() if run_history is None else run_history
        self.run_config: TrainerRunConfig | None = None
        self.create_scheduler_fn: Any = None
        self.collate_fn: Any = None
        self.train_dataset: Any = None
        self.eval_dataset: Any = None
        self.last_grad_norm: Tensor | None = None
        self.last_checkpoint: Any = None
        self.evaluating = False
        self.settings: TrainSettings | None = None
        self._train_dataloader: Any = None
        self._eval_dataloader: Any = None
        self._train_dl_kwargs: dict[str, Any] | None = None
        self._eval_dl_kwargs: dict[str, Any] | None = None
        self._loss_tracker = LossTracker()
        self._eval_metrics, self._train_metrics = MetricSet(metrics), MetricSet(train_metrics)
        self._has_train_metrics = bool(self._train_metrics)
        self._count_items = loaders.item_counter(count_items)
        self._form: BatchForm | None = None
        self._form_type: type | None = None
        self._gradients = Gradients(self)
        self._repeat = self.state.window_batches = WindowRepeat(self)
        self.state.make_optimizer = make_optimizer
        self._units: Any = None
        self._keeper: Any = None
        self._stop: StopTrainingError | TrainingStopped | None = None
        self._vote: StopVote | None = None
        self._scheduler_is_ours = False
        self._after_forward, self._before_loss = Event.AFTER_FORWARD.value, True
        self._logged: dict[str, LossTracker] = {}
        self._callbacks = tuple(callbacks)
        self._algorithms, loggers = tuple(algorithms), tuple(loggers)
        self.logbook = Logbook(self, loggers)
        self._strict_steps = (StrictSteps(),) if strict else ()
        self.callback_handler = self._create_callback_handler(self._callbacks)
        self.engine = Engine(self.state, self.logbook, self._plugins(), strict=strict, host=self)
        self._fire = self.engine.on
        with warnings_as_errors(strict):
            self._fire.init()

    # ------------------------------------------------------------------ what the trainer holds

    @property
    def model(self) -> Any:
        """The model; wrapped while several processes train it, the user's own before and after."""
        return self.state.model

    @model.setter
    def model(self, model: Any) -> None:
        self.state.model = model

    @property
    def loss_func(self) -> Any:
        """The loss function `(outputs, targets) -> loss`, or None when the model carries its loss."""
        return self.state.loss_fn

    @loss_func.setter
    def loss_func(self, loss_func: Any) -> None:
        self.state.loss_fn = loss_func
        self._form = None  # how a batch meets the model depends on it

    @property
    def optimizer(self) -> Any:
        """The optimizer, exactly as it was given."""
        optimizers = self.state.optimizers
        return optimizers[0] if optimizers else None

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.state.optimizers = () if optimizer is None else (optimizer,)

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler of this run, or None."""
        schedulers = self.state.schedulers
        return schedulers[0] if schedulers else None

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self.state.schedulers = () if scheduler is None else (scheduler,)
        self._scheduler_is_ours = False

    @property
    def writes_files(self) -> bool:
        """Whether this run may write: a development run leaves nothing behind."""
        return not (self._is_running and self.settings is not None and self.settings.fast_dev_run)

    @property
    def callback_handler(self) -> Any:
        """The callbacks; another handler may be put in its place."""
        return self._callback_handler

    @callback_handler.setter
    def callback_handler(self, handler: Any) -> None:
        self._callback_handler = handler
        if isinstance(handler, CallbackHandler):
            handler.on_change = self._callbacks_changed
        self._callbacks_changed(list(handler))

    @property
    def _window(self) -> AccumulationWindow:
        return self._gradients.window

    @property
    def device(self) -> Any:
        """Where the model and the batches live."""
        return self._accelerator.device

    # ------------------------------------------------------------------ the public verbs

    def train(
        self,
        train_dataset: Any = None,
        num_epochs: int | None = None,
        eval_dataset: Any = None,
        per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: Any = None,
        train_dataloader_kwargs: dict[str, Any] | None = None,
        eval_dataloader_kwargs: dict[str, Any] | None = None,
        reset_run_history: bool = True,
        collate_fn: Any = None,
        resume_from: Any = None,
        *,
        max_duration: int | str | Time | None = None,
        global_batch_size: int | None = None,
        gradient_clip_norm: float | None = None,
        microbatch_size: int | str | None = None,
        eval_interval: EvalInterval | None = None,
        scheduler_interval: str = "step",
        scheduler_metric: str = "eval_loss_epoch",
        checkpoint_dir: Any = None,
        checkpoint_every: str | int | None = "1ep",
        keep_checkpoints: int = 3,
        async_checkpoint: bool = True,
        limit_train_batches: int | float | None = None,
        limit_eval_batches: int | float | None = None,
        sanity_eval_batches: int = 0,
        overfit_batches: int = 0,
        fast_dev_run: bool | int = False,
        max_grad_norm: float | None = None,
        **unknown: Any,
    ) -> RunHistory:
        """Train until the first of `num_epochs`, `max_num_train_steps` and `max_duration` is reached; return the history.

        `train_dataset` and `eval_dataset` are datasets, or loaders that are used as they are. `per_device_batch_size` is per
        process, `global_batch_size` (instead) is over all of them. The documentation's Trainer page explains every argument.
        """
        _refuse_unknown(Trainer.train, unknown)
        defaults = self._train_defaults
        duration = (
            max_duration if max_duration is not None else defaults["max_duration"] if num_epochs is None else None
        )
        interval = eval_interval if eval_interval is not None else defaults["eval_interval"]
        settings = TrainSettings(
            num_epochs=num_epochs,
            max_num_train_steps=max_num_train_steps,
            max_duration=None if duration is None else parse_time("max_duration", duration),
            per_device_batch_size=per_device_batch_size,
            global_batch_size=global_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clip_value=gradient_clip_value,
            gradient_clip_norm=gradient_clip_norm if gradient_clip_norm is not None else max_grad_norm,
            microbatch_size=microbatch_size,
            eval_interval="1ep" if interval is None else interval,
            scheduler_interval=scheduler_interval,
            scheduler_metric=scheduler_metric,
            resume_from=resume_from if resume_from is not None else self._resume_next,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            async_checkpoint=async_checkpoint,
            limit_train_batches=limit_train_batches,
            limit_eval_batches=limit_eval_batches,
            sanity_eval_batches=sanity_eval_batches,
            overfit_batches=overfit_batches,
            fast_dev_run=fast_dev_run,
        )
        settings = setup.scale_length(self, settings)
        self.settings = settings.for_development() if fast_dev_run else resuming.follow_current_run(settings)
        self._resume_next = None
        self.train_dataset = defaults["train_dataset"] if train_dataset is None else train_dataset
        self.eval_dataset = defaults["eval_dataset"] if eval_dataset is None else eval_dataset
        if self.settings.overfit_batches:
            self.eval_dataset = self.train_dataset
        self.create_scheduler_fn, self.collate_fn = create_scheduler_fn, collate_fn
        if reset_run_history and self.settings.resume_from is None:
            self.run_history.reset()
        with warnings_as_errors(self.strict):
            setup.prepare_training(self, train_dataloader_kwargs, eval_dataloader_kwargs)
            with StopSignals() as self._signals:
                self._run_training()
        return self.run_history

    def fit(self, *args: Any, **kwargs: Any) -> RunHistory:
        """Train; another name for `train`."""
        return self.train(*args, **kwargs)

    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Any = None,
        *,
        reset_run_history: bool = True,
        limit_batches: int | float | None = None,
    ) -> dict[str, float]:
        """Evaluate once over a dataset, by default the last evaluation dataset, and return its numbers by name."""
        if dataset is not None:
            self.eval_dataset = dataset
        if self.eval_dataset is None:
            raise ConfigError("evaluate() has no dataset: pass one, or give eval_dataset= to train() first.")
        self.collate_fn = collate_fn if collate_fn is not None else self.collate_fn
        if reset_run_history:
            self.run_history.reset()
        self._eval_dataloader = self.create_eval_dataloader(per_device_batch_size, dataloader_kwargs)
        self._eval_dataloader = loaders.prepare(self, self._eval_dataloader, limit_batches)
        self.model = loaders.move_model(self, self.model)
        self._eval_metrics.to(self.device)
        self.run_config = self._create_run_config(
            per_device_batch_size=per_device_batch_size,
            num_epochs=1,
            gradient_accumulation_steps=1,
            max_num_train_steps=None,
            gradient_clip_value=None,
        )
        before = set(self.run_history.get_metric_names())
        with errors_told(self):
            self._run_evaluation()
        names = [
            name for name in self.run_history.get_metric_names() if name.startswith("evaluation_") or name not in before
        ]
        return {name: self.run_history.get_latest_metric(name) for name in names}

    def predict(
        self,
        dataset: Any,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Any = None,
        *,
        limit_batches: int | float | None = None,
        to_cpu: bool = True,
    ) -> Any:
        """Return the model's outputs for a dataset, in its order, each sample once on any number of processes."""
        from drivetrain.train.prediction import run_prediction

        loader = loaders.make_prediction_loader(self, dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
        self.model = loaders.move_model(self, self.model)
        with errors_told(self):
            return run_prediction(self, loaders.prepare(self, loader, limit_batches), to_cpu)

    def lr_find(
        self,
        train_dataset: Any,
        *,
        min_lr: float = 1e-7,
        max_lr: float = 1.0,
        num_steps: int = 100,
        per_device_batch_size: int = 8,
        smoothing: float = 0.98,
        diverge_ratio: float = 4.0,
        **train_kwargs: Any,
    ) -> Any:
        """Sweep the learning rate exponentially over a few steps, put everything back, and suggest one."""
        from drivetrain.train.lr_finder import find_lr

        return find_lr(
            self, train_dataset, min_lr, max_lr, num_steps, smoothing, diverge_ratio,
            {"per_device_batch_size": per_device_batch_size, **train_kwargs},
        )  # fmt: skip

    def explain(self, file: TextIO | None = None) -> str:
        """Print and return the loop with every guest in place, in order."""
        text = self.engine.explain()
        print(text, file=file or sys.stdout)
        return text

    def request_stop(self, reason: str | Exception = "a stop was requested") -> None:
        """Ask for an orderly end at the next step boundary; all ranks will agree."""
        if not isinstance(reason, (StopTrainingError, TrainingStopped)):
            reason = StopTrainingError(str(reason))
        self._stop = self._stop or reason

    def log(self, name: str, value: Any, weight: float | None = None) -> None:
        """Keep a value on the device and record its weighted mean over the epoch as `train_<name>_epoch` or `eval_<name>_epoch`."""
        output = self.state.batch_output
        if weight is None:  # inside a loss hook its output is not there yet
            weight = output["batch_size"] if isinstance(output, Mapping) else batch_size_of(None, self.state.batch)
        tracker = self._logged.setdefault(name, LossTracker())
        tracker.update(value.detach() if isinstance(value, Tensor) else value, weight)

    def gather(self, tensor: Any, padding_value: Any = None) -> Any:
        """Join tensors of all processes along the first dimension; unequal lengths are exchanged, so nothing is padding."""
        return self._accelerator.gather(tensor)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node."""
        self._accelerator.print(*args, **kwargs)

    def get_model(self, keep_torch_compile: bool = True) -> Any:
        """Return the user's model without what the trainer wrapped around it."""
        return self._accelerator.unwrap_model(self.model, keep_torch_compile)

    def save_checkpoint(
        self,
        save_path: Any,
        checkpoint_kwargs: dict[str, Any] | None = None,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        save_per_node: bool = True,
    ) -> None:
        """Write model, optimizer and scheduler to one `.pt` file that loads with `weights_only=True`."""
        saving.save_checkpoint(self, save_path, checkpoint_kwargs, save_optimizer, save_scheduler, save_per_node)

    def load_checkpoint(
        self, checkpoint_path: Any, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Load a file written by `save_checkpoint`, or by pytorch-accelerated; return its contents."""
        return saving.load_checkpoint(self, checkpoint_path, load_optimizer, load_scheduler)

    def save_training_state(self, output_dir: Any, checkpoint_kwargs: dict[str, Any] | None = None) -> None:
        """Save everything a run needs to go on; inside a step, as soon as the step's update is done."""
        saving.save_training_state(self, output_dir, checkpoint_kwargs)

    def load_training_state(self, input_dir: Any) -> dict[str, Any]:
        """Restore what `save_training_state` saved; return its `current_epoch` and custom entries."""
        return saving.load_training_state(self, input_dir)

    # ------------------------------------------------------------------ hooks: loaders and scheduler

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: dict[str, Any] | None = None) -> Iterable[Any]:
        """Return the loader of the training data."""
        if loaders.is_ready_loader(self.train_dataset):
            return self.train_dataset
        if self.train_dataset is None:
            raise ConfigError("train() has no data: pass train_dataset, a dataset or a loader.")
        defaults = self.get_default_train_dl_kwargs(batch_size)
        self._train_dl_kwargs = loaders.merge_kwargs(self.train_dataset, defaults, train_dl_kwargs)
        return DataLoader(dataset=self.train_dataset, collate_fn=self.collate_fn, **self._train_dl_kwargs)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: dict[str, Any] | None = None) -> Iterable[Any]:
        """Return the loader of the evaluation data."""
        if loaders.is_ready_loader(self.eval_dataset):
            return self.eval_dataset
        defaults = self.get_default_eval_dl_kwargs(batch_size)
        self._eval_dl_kwargs = loaders.merge_kwargs(self.eval_dataset, defaults, eval_dl_kwargs)
        return DataLoader(dataset=self.eval_dataset, collate_fn=self.collate_fn, **self._eval_dl_kwargs)

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return what the training loader gets where the user says nothing."""
        return {"shuffle": True, **loaders.default_kwargs(self, self.train_dataset, batch_size)}

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return what the evaluation loader gets where the user says nothing."""
        return {"shuffle": False, **loaders.default_kwargs(self, self.eval_dataset, batch_size)}

    def create_scheduler(self) -> Any:
        """Return the scheduler that `create_scheduler_fn` makes for the optimizer, its placeholders filled in."""
        if not callable(self.create_scheduler_fn):
            return self.create_scheduler_fn  # an instance; its optimizer has been checked
        if type(self.create_scheduler_fn).__module__ == "drivetrain.optim.composer_schedulers":
            return setup.compile_scheduler(self)
        return replace_trainer_placeholder_values(self, self.create_scheduler_fn)(self.optimizer)

    # ------------------------------------------------------------------ hooks: the run

    def training_run_start(self) -> None:
        """Run before the first epoch."""

    def train_epoch_start(self) -> None:
        """Put the model into training mode, apart from what a `ModelFreezer` keeps in evaluation mode."""
        if isinstance(self.model, nn.Module):
            self.model.train()
            restore_frozen_modes(self.model)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return `loss`, `model_outputs` and `batch_size` of one training batch; may hold `num_items`, `losses` and more."""
        form = self._form if type(batch) is self._form_type and self._form is not None else self._form_of(batch)
        if self._accelerator.precision.autocast_dtype is None:
            return form.run(self, batch)
        self._in_region = True  # model and loss form one autocast region
        try:
            with self._accelerator.autocast():
                return form.run(self, batch)
        finally:
            self._in_region = False

    def backward_step(self, loss: Tensor) -> None:
        """Back-propagate a loss that is already weighted for accumulation."""
        if self._units is None:
            self._accelerator.backward(loss)
        else:
            self._units.backward(self._gradients.named_losses(loss), weight=self._gradients.unit_weight)

    def optimizer_step(self) -> None:
        """Update the parameters."""
        if self._repeat.is_wanted:
            self._repeat.step()
        else:
            self._accelerator.step(self.optimizer)

    def scheduler_step(self) -> None:
        """Move the learning rate on, unless the update was skipped."""
        if self.state.schedulers and not self._accelerator.optimizer_step_was_skipped:
            self.scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def train_epoch_end(self) -> None:
        """Run after the batches of a training epoch."""

    def eval_epoch_start(self) -> None:
        """Put the model into evaluation mode."""
        if isinstance(self.model, nn.Module):
            self.model.eval()

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Return `loss`, `model_outputs` and `batch_size` of one evaluation batch."""
        return Trainer.calculate_train_batch_loss(self, batch)  # the default, also when training has its own

    def eval_epoch_end(self) -> None:
        """Run after the batches of an evaluation."""

    def training_run_epoch_end(self) -> None:
        """Run after training and evaluation of an epoch."""

    def training_run_end(self) -> None:
        """Unwrap the model."""
        self.model = self.get_model()

    def evaluation_run_start(self) -> None:
        """Run before a stand-alone evaluation."""

    def evaluation_run_end(self) -> None:
        """Unwrap the model."""
        self.model = self.get_model()

    def calculate_predict_batch(self, batch: Any) -> dict[str, Any]:
        """Return the `model_outputs` of one batch."""
        args, kwargs = self._form_of(batch).arguments(batch)
        return {"model_outputs": self.forward(*args, **kwargs)}

    def get_metric_inputs(self, batch: Any, batch_output: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return what metrics compare: outputs (or their logits) and targets."""
        return logits_of(batch_output["model_outputs"]), self._form_of(batch).targets(batch)

    # ------------------------------------------------------------------ forward and loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in the run's precision and let algorithms see its outputs."""
        state = self.state
        if self._accelerator.precision.autocast_dtype is None or self._in_region:
            outputs = state.model(*args, **kwargs)
        else:
            with self._accelerator.autocast():
                outputs = state.model(*args, **kwargs)
            outputs = loaders.to_float32(outputs)
        state.outputs = outputs
        self._saw_forward = True
        getattr(self._fire, self._after_forward)()
        return state.outputs

    def compute_loss(self, outputs: Any, targets: Any = None) -> Tensor:
        """Compute the loss of outputs and targets, after algorithms had their say about both."""
        state = self.state
        if self._before_loss:
            self._saw_loss = True
            if self._listens_before_loss:
                form, before = self._form_of(state.batch), state.outputs
                is_ours = form.targets(state.batch) is targets
                self._fire.before_loss()
                targets = form.targets(state.batch) if is_ours else targets
                outputs = outputs if state.outputs is before else form.predictions(state.outputs)
        loss_func = state.loss_fn
        if loss_func is not None:
            loss = loss_func(outputs, targets)
        elif self._own_loss is not None:
            loss = self._own_loss(outputs, state.batch)
        else:
            loss = carried_loss(outputs)
        return loss if type(loss) is Tensor else self._one_loss(loss)

    def _one_loss(self, loss: Any) -> Tensor:
        """Return the loss that is trained on, of several by name, and keep all of them for the units of an `OptimSet`."""
        if not isinstance(loss, Mapping):
            return loss
        self.state.losses = dict(loss)
        return loss["loss"] if "loss" in loss else sum(loss.values())  # type: ignore[return-value]

    _in_region = False  # inside the default hook's own autocast region
    _saw_forward = _saw_loss = False
    _listens_before_loss = False
    _own_loss: Callable[..., Any] | None = None
    _find_form = staticmethod(find_form)  # prediction has its own, which needs no targets

    def _form_of(self, batch: Any) -> BatchForm:
        """Return how batches of this type meet the model; decided when the type changes."""
        if type(batch) is self._form_type and self._form is not None:
            return self._form
        self._form, self._form_type = self._find_form(batch, self.model, self.loss_func is not None), type(batch)
        own = getattr(unwrap(self.model), "loss", None) if isinstance(self.model, nn.Module) else None
        self._own_loss = own if isinstance(self._form, WholeForm) else None
        return self._form

    # ------------------------------------------------------------------ the training run

    def _run_training(self) -> None:
        """Turn epochs until a limit, a stop or an error; always end in good order."""
        state, fire = self.state, self._fire
        try:
            self._is_running = True
            try:
                self.training_run_start()
                fire.fit_start()
                setup.prepare_loop(self)
                if self.settings and self.settings.sanity_eval_batches and self._eval_dataloader is not None:
                    self._run_sanity_evaluation()
                self._agree_to_stop()
                while not self._limits.reached(state.clock):
                    if self._run_epoch():
                        break
            except (StopTrainingError, TrainingStopped) as stop:
                self._refuse_to_leave_alone(stop)
                self._stop = stop
            self._inside_step = False
            if self._stop is not None:
                self.print(f"Training stopped: {self._stop}")
                fire.stop()
            self.training_run_end()
            fire.fit_end()
            resuming.finish(self)
        except BaseException as error:
            self._inside_step = False
            self._close_after(error)
            raise
        finally:
            self._is_running = False
        if isinstance(self._stop, TrainingStopped):
            raise self._stop

    def _run_epoch(self) -> bool:
        """Train over the data once, evaluate when due; True means that the run has reached an end inside the epoch."""
        clock, fire = self.state.clock, self._fire
        if clock.batch_in_epoch == 0:
            self._loss_tracker.reset()
            self._train_metrics.reset()
            loaders.set_epoch(self._train_dataloader, clock.epoch)
        self._between_steps(self.train_epoch_start)
        fire.epoch_start()
        resuming.apply_restored_rng(self)
        ended = self._run_train_epoch(self._train_dataloader)
        if not ended or clock.batch_in_epoch == self._batches_per_epoch:
            clock.next_epoch()
        self._between_steps(self.train_epoch_end)
        self._add_epoch_loss_to_run_history("train_loss_epoch")
        self._record_epoch_metrics("train")
        fire.epoch_end()
        self._record_means("train")
        ended = ended or self._agree_to_stop()
        if self._eval_dataloader is not None and self._evaluation_is_due(at_end=ended or self._limits.reached(clock)):
            self._run_eval_epoch(self._eval_dataloader)
        if self.settings and self.settings.scheduler_interval == "epoch":
            self._step_epoch_scheduler()
        self._between_steps(self.training_run_epoch_end)
        fire.epoch_checkpoint()
        self.run_history._increment_epoch()
        if self._keeper is not None:
            self._keeper.at_epoch_end(ended or self._limits.reached(clock))
        return self._agree_to_stop() or ended

    def _run_train_epoch(self, train_dl: Any) -> bool:
        """Turn the loop once over the data; True means that a limit or a stop ended the run."""
        state, clock, gradients, fire = self.state, self.state.clock, self._gradients, self._fire
        source, signals, limits, world = self._sample_source, self._signals, self._limits, gradients.window.world
        for state.batch, last in self._batches(train_dl):  # on the device already, one batch ahead
            self._inside_step = True
            fire.after_dataloader()
            fire.batch_start()
            if not gradients.is_simple:
                gradients.open(last)
            if gradients.window.opens:
                fire.before_train_batch()
            if self._plain.passes:
                self._backward(self._forward_and_loss())
            else:
                self._perform_forward_and_backward_passes(state.batch, state.step)
            closes = gradients.window.closes
            if closes:
                self._update()
            info = None if source is None else source.batch_info
            samples = state.batch_output["batch_size"] * world if info is None else info.global_size
            clock.next_batch(samples, 0 if self._count_tokens is None else self._tokens(state.batch), closes)
            fire.batch_end()
            self._inside_step = False
            fire.batch_checkpoint()
            # A guest may have shortened the run, or asked to stop.
            is_asked = signals.requested or self._stop is not None or state._max_duration is not limits.planned
            if (is_asked or self._boundary_work) and self._at_boundary():
                return True
        return False

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        """Compute the loss of a batch and its gradients; gradients synchronise only where the window closes."""
        if self._repeat.is_wanted:
            self._repeat.remember(batch)
        if self._microbatch_size is not None:
            self._perform_micro_batches(batch)
        elif self._ddp and not self._gradients.synchronises:
            with self.model.no_sync():  # around the forward too: DDP decides there
                self._backward(self._forward_and_loss())
        else:
            self._backward(self._forward_and_loss())

    def _forward_and_loss(self, announce: bool = True) -> dict[str, Any]:
        """Run the loss hook on `state.batch` with the events around it, and track the loss."""
        state, fire = self.state, self._fire
        state.losses = state.batch_output = None
        fire.before_forward()
        output = self.calculate_train_batch_loss(state.batch)
        if self._first_batch:
            check_batch_output(output, self)
            self._count_tokens = loaders.token_counter(state.batch)
        state.batch_output, state.loss = output, output["loss"]
        fire.after_loss()
        if state.loss is not output["loss"]:
            state.batch_output = output = {**output, "loss": state.loss}
        size = 0 if self._may_pad and self._is_padding() else output["batch_size"]
        track = self._update_loss_tracker if self._tracks_its_own_way else self._loss_tracker.update
        track(state.loss, size)
        if self._has_train_metrics and size:
            self._train_metrics.update(*self.get_metric_inputs(state.batch, output), size)
        if announce:
            fire.step_output()
        return output

    def _backward(self, output: Mapping[str, Any]) -> None:
        self._fire.before_backward()
        loss = self.state.loss
        if self._first_batch:
            check_loss(loss, self)
            warn_of_sample_weights(self, output)
        gradients = self._gradients
        if self._plain.backward:
            loss.backward()
        else:
            self.backward_step(loss if gradients.is_simple else gradients.weigh(loss, output))
        self._fire.after_backward()
        self._first_batch = False

    def _update(self) -> None:
        """Gradients are complete: correct, clip, step, schedule, clear."""
        fire, state, plain = self._fire, self.state, self._plain
        if not self._gradients.is_simple:
            self._gradients.finish()
        if self._clips:
            self._clip_gradients()
        fire.after_train_batch()
        fire.before_step()
        if plain.step:
            state.optimizers[0].step()
        else:
            self.optimizer_step()
        fire.after_step()
        if self._schedules_each_step and (state.schedulers or not plain.schedule):
            self.scheduler_step()
        if plain.clear:
            for group in state.optimizers[0].param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.optimizer_zero_grad()
        if not self._gradients.is_simple:
            self._gradients.close()

    def _batches(self, loader: Any) -> Iterator[tuple[Any, bool]]:
        """Yield each batch with whether it is the epoch's last; loaders without a length are read one batch ahead."""
        state, clock, fire, limit = self.state, self.state.clock, self._fire, self._batches_per_epoch
        move = loaders.mover(self, loader)
        fire.before_dataloader()
        if limit is None:
            for batch, last in loaders.look_ahead(loader):
                state.step = clock.batch_in_epoch
                yield (batch if move is None else move(batch)), last
                fire.before_dataloader()
            return
        if clock.batch_in_epoch >= limit:
            return
        for batch in loader:
            state.step = step = clock.batch_in_epoch
            if self._wants_index:
                state.sample_index = self._sample_source.sample_index
            last = step + 1 >= limit
            yield (batch if move is None else move(batch)), last
            if last:
                return
            fire.before_dataloader()

    def _at_boundary(self) -> bool:
        """Between two steps: save, evaluate, obey signals and limits; True ends the run."""
        clock = self.state.clock
        wish = self._signals.requested or (STOP if self._stop is not None else 0)
        if self._vote is not None:
            earlier = self._vote.close()  # what anyone wished at the start of this step
            self._vote.open(wish)
            wish = earlier
        ended = self._limits.reached_inside_epoch(clock, self.state.max_duration)
        if self._keeper is not None:
            self._keeper.at_batch_end(ended)
        if wish:
            self._obey(wish)
        if self._eval_every is not None and not ended and self._eval_every(clock):
            if clock.batch_in_epoch == self._batches_per_epoch:
                self._eval_after_epoch = True  # the epoch is done: its own evaluation comes next
            else:
                self._run_eval_epoch(self._eval_dataloader, is_intermediate=True)
        return ended

    # ------------------------------------------------------------------ accumulation

    _first_batch = False
    _is_running = _inside_step = False
    _resume_next: Any = None  # a training state loaded by hand, from which the next train() goes on
    _restored_rng: Any = None
    _ddp = False
    _microbatch_size: int | None = None
    _batches_per_epoch: int | None = None
    _schedules_each_step = True
    _signals: StopSignals
    _limits: RunLimits
    _eval_every: Callable[[Any], bool] | None = None
    _eval_after_epoch = False
    _clips = _tracks_its_own_way = (
        True  # whether these seams do anything; a subclass that overrides one is always called
    )
    _boundary_work = True  # whether anything but a signal or a stop can need the host between two batches
    _plain = PlainHooks()  # none, until a run has been looked at

    def _clip_gradients(self) -> None:
        """Clip once per update, by norm or by value."""
        settings = self.settings
        if settings is None:
            return
        if settings.gradient_clip_norm is not None and self._units is None:  # units clip by norm themselves
            self.last_grad_norm = self._accelerator.clip_grad_norm_(self._parameters(), settings.gradient_clip_norm)
        elif settings.gradient_clip_value is not None:
            self._accelerator.clip_grad_value_(self._parameters(), settings.gradient_clip_value)

    def _parameters(self) -> list[Tensor]:
        if self._units is not None:
            return self._units.due_parameters()
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _perform_micro_batches(self, batch: Any) -> None:
        """Split one batch, accumulate its gradients, and show guests the whole batch once, before the last backward."""
        state, synchronises = self.state, self._gradients.synchronises
        parts, outputs, whole = split_batch(batch, self._microbatch_size or 1), [], None
        self._gradients.refer_to(batch_size_of(None, batch))
        for index, part in enumerate(parts):
            state.batch, is_last = part, index == len(parts) - 1
            with ExitStack() as stack:
                if self._ddp and not (synchronises and is_last):
                    stack.enter_context(self.model.no_sync())
                output = self._forward_and_loss(announce=False)
                outputs.append(output)
                if is_last:
                    state.batch, state.batch_output = batch, (whole := self._join(outputs))
                    self._fire.step_output()
                    state.batch, state.batch_output = part, output  # its weight is that of its own items
                self._backward(output)
        state.batch, state.batch_output = batch, whole

    def _join(self, outputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the outputs of the micro-batches as those of the whole batch; joined only if somebody listens."""
        sizes = [output["batch_size"] for output in outputs]
        loss = sum(output["loss"].detach() * size for output, size in zip(outputs, sizes)) / max(1, sum(sizes))
        whole = {"loss": loss, "model_outputs": None, "batch_size": sum(sizes)}
        if self.engine.listens(Event.STEP_OUTPUT):
            names = [name for name in outputs[0] if name not in ("loss", "batch_size")]
            whole.update((name, join_outputs([output[name] for output in outputs])) for name in names)
        return whole

    # ------------------------------------------------------------------ evaluation

    def _run_evaluation(self) -> None:
        """Evaluate outside a training run."""
        self.evaluation_run_start()
        self._fire.eval_standalone_start()
        self._run_eval_epoch(self._eval_dataloader, is_training=False)
        self.evaluation_run_end()
        self._fire.eval_standalone_end()

    def _run_eval_epoch(self, dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate once over the data, every sample counted once; what training needs is put back afterwards."""
        state, fire = self.state, self._fire
        name = "intermediate_eval_loss" if is_intermediate else "eval_loss_epoch" if is_training else "evaluation_loss"
        prefix = "eval" if is_training else "evaluation"
        with evaluation_mode(self, is_intermediate):
            fire.eval_before_all()
            self._between_steps(self.eval_epoch_start)
            fire.eval_start()
            move = loaders.mover(self, dl)
            with torch.no_grad():
                for batch in dl:
                    state.batch, state.batch_output = batch if move is None else move(batch), None
                    fire.eval_batch_start()
                    fire.eval_before_forward()
                    output = self.calculate_eval_batch_loss(state.batch)
                    check_batch_output(output, self)
                    state.batch_output = output
                    size = 0 if loaders.is_padding(dl) else output["batch_size"]
                    self._update_loss_tracker(output["loss"].detach(), size)
                    if self._eval_metrics and size:
                        self._eval_metrics.update(*self.get_metric_inputs(state.batch, output), size)
                    fire.eval_batch_end()
            self._add_epoch_loss_to_run_history(name)
            recorded = self._record_epoch_metrics(prefix, is_intermediate)
            self._between_steps(self.eval_epoch_end)
            fire.eval_end()
            fire.eval_after_all()
            recorded += self._record_means(prefix, is_intermediate)
            if is_intermediate:  # shown and sent to the loggers, but an epoch's history has one entry per epoch
                for metric in (name, *recorded):
                    self.run_history.delete_metric(f"{self.run_history.metric_name_prefix}{metric}")

    def _run_sanity_evaluation(self) -> None:
        """Evaluate a few batches before training, so that a mistake there shows in seconds; nothing is kept."""
        assert self.settings is not None
        with kept_history(self):
            limited = loaders.limit(self._eval_dataloader, self.settings.sanity_eval_batches)
            self._run_eval_epoch(limited, is_intermediate=True)

    def _evaluation_is_due(self, at_end: bool) -> bool:
        """Whether to evaluate after this epoch: when its interval says so, and at the end of the run."""
        assert self.settings is not None
        every, due = self.settings.eval_time, self._eval_after_epoch
        self._eval_after_epoch = False
        if due:
            return True
        if every is None:
            return bool(self.settings.eval_interval(self.state, Event.EPOCH_END))  # type: ignore[operator]
        if every.value <= 0:
            return False
        return at_end or (every.unit is TimeUnit.EPOCH and self.state.clock.epoch % int(every.value) == 0)

    # ------------------------------------------------------------------ keeping account

    def _update_loss_tracker(self, loss: Tensor, batch_size: int) -> None:
        self._loss_tracker.update(loss, batch_size)

    def _add_epoch_loss_to_run_history(self, name: str) -> None:
        """Record the mean loss over all samples of all processes; reading it is where the host waits."""
        self.logbook.record(name, self._loss_tracker.average_over_ranks())

    def _record_epoch_metrics(self, prefix: str, is_intermediate: bool = False) -> list[str]:
        """Record the epoch's metrics and what `log()` collected; return their names."""
        metrics = self._train_metrics if prefix == "train" else self._eval_metrics
        recorded = self._record_means(prefix, is_intermediate, metrics.compute() if metrics else None)
        if self._units is not None and prefix == "train":
            for name, value in self._units.metrics().items():
                self.logbook.record(name, float(value))
        return recorded

    def _record_means(
        self, prefix: str, is_intermediate: bool = False, metrics: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Record metrics and what `log()` has collected since the last time; return their names.

        Guests may call `log()` when an epoch ends, after its means were recorded: that belongs to the same epoch.
        """
        ending = "" if prefix == "evaluation" else "_epoch"
        stem = "intermediate_eval" if is_intermediate else prefix
        values = {**(metrics or {}), **reduce_means(self._logged)}
        self._logged.clear()
        names = {f"{stem}_{name}{'' if is_intermediate else ending}": value for name, value in values.items()}
        for name, value in names.items():
            self.logbook.record(name, value)
        return list(names)

    def _is_padding(self) -> bool:
        """Whether the batch in hand only keeps this rank in step with others that still have samples."""
        return self._sample_source.batch_info.size == 0

    def _tokens(self, batch: Any) -> int:
        """Return how many tokens of all processes the batch holds."""
        assert self._count_tokens is not None
        return self._count_tokens(batch) * self._gradients.window.world

    _plateau_watch: MetricWatch
    _count_tokens: Callable[[Any], int] | None = None
    _sample_source: Any = None
    _wants_index = _may_pad = False

    def _step_epoch_scheduler(self) -> None:
        """Step a scheduler that counts epochs; one that watches a metric gets it."""
        assert self.settings is not None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            value = self._plateau_watch.new_value(self)
            if value is not None:  # an epoch without an evaluation tells it nothing
                self.scheduler.step(value)
        elif self.scheduler is not None:
            self.scheduler_step()

    # ------------------------------------------------------------------ stopping

    def _obey(self, wish: int) -> None:
        """Stop because a rank asked for it, or act on a signal any rank received."""
        if wish == STOP:
            self._stop_together()
        resuming.obey_signal(self, wish)

    def _stop_together(self) -> NoReturn:
        """Raise what ends the run, on all ranks at the same place."""
        self._has_agreed = True
        raise self._stop or StopTrainingError("another process asked to stop")

    _has_agreed = False

    def _refuse_to_leave_alone(self, stop: Exception) -> None:
        """Turn a stop that not all ranks raise into an error, which ends the others too instead of leaving them to wait."""
        if self._vote is not None and not self._has_agreed and not self._vote.everyone_leaves():
            raise DistributedError(
                f"rank {get_rank()}: a hook of {type(self).__name__} raised {type(stop).__name__} ({stop}) inside a step or an evaluation "
                "of several processes, which the others cannot leave with it. Call trainer.request_stop(reason) there instead: all "
                "ranks then stop after the step. A callback may raise it."
            ) from stop

    def _between_steps(self, hook: Callable[[], Any]) -> None:
        """Call a hook outside the steps; on several processes a stop that it raises waits until all ranks meet."""
        if self._vote is None:
            hook()
        else:
            self._together(hook)

    def _agree_to_stop(self) -> bool:
        """Outside a step: raise on all ranks if any of them wants to stop."""
        wants = self._stop is not None
        if self._vote is not None:
            wants = self._vote.now(STOP if wants else 0) == STOP
        if wants:
            self._stop_together()
        return False

    def _fire_of_all_ranks(self) -> Fire:
        """Return the events for a run on several processes, where no rank may leave alone."""
        if self._guarded_fire is None:
            self._guarded_fire = self.engine.guarded(self._together)
        return self._guarded_fire

    _guarded_fire: Fire | None = None

    def _together(self, run: Callable[[], Any]) -> None:
        """Run the guests of an event on one of several processes: a stop is noted, and acted on where all ranks meet."""
        try:
            run()
        except (StopTrainingError, TrainingStopped) as stop:
            self._stop = self._stop or stop

    def _close_after(self, error: BaseException) -> None:
        """Tell every guest about an error and let it close what it holds; the error itself goes on unchanged."""
        self._vote, self._fire, self.model = None, self.engine.on, self.get_model()
        self.callback_handler.call_event("on_exception", self, exception=error)
        self.engine.close_plugins()
        if self._keeper is not None:
            self._keeper.wait()

    # ------------------------------------------------------------------ getting ready

    def _create_accelerator(self) -> TrainerRuntime:
        return TrainerRuntime(self._requested_device, self._requested_precision)

    def _create_callback_handler(self, callbacks: Sequence[Any]) -> CallbackHandler:
        return CallbackHandler(with_limit_from_environment(callbacks), on_change=self._callbacks_changed)

    def _callbacks_changed(self, callbacks: Sequence[Any]) -> None:
        if hasattr(self, "engine"):
            self.engine.set_plugins(self._plugins())
            if self._plain != PlainHooks():  # a guest may listen now where nobody did
                self._plain = find_plain_hooks(self)

    def _plugins(self) -> list[Any]:
        """Return every guest in order; the state holds them too, so that theirs is saved with it."""
        self.state.algorithms, self.state.callbacks = list(self._algorithms), list(self.callback_handler)
        return [*self._algorithms, *self.callback_handler, *self._strict_steps]

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Place model, loss and optimizer; make loaders deliver to the device; wrapping waits until weights are loaded."""
        settings = self.settings
        assert settings is not None
        self.model = loaders.move_model(self, self.model)
        setup.prepare_precision(self)
        setup.resolve_optimizer(self)
        overfit = settings.overfit_batches or None
        self._train_dataloader = loaders.prepare(
            self, self._train_dataloader, overfit or settings.limit_train_batches, training=True
        )
        if self._eval_dataloader is not None:
            self._eval_dataloader = loaders.prepare(self, self._eval_dataloader, overfit or settings.limit_eval_batches)
            self._check_eval_batch_size()
        self.engine.call("on_loaders_made")

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int | None,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> TrainerRunConfig:
        return setup.make_run_config(
            self, num_epochs, gradient_accumulation_steps, max_num_train_steps, gradient_clip_value
        )

    def _check_eval_batch_size(self) -> None:
        setup.check_eval_batch_size(self)


class TrainerWithTimmScheduler(Trainer):
    """A trainer for timm's schedulers, which are told the number of updates and of finished epochs."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.num_updates: int | None = None

    def training_run_start(self) -> None:
        """Count updates from the clock, which a resumed run brings along."""
        super().training_run_start()
        self.num_updates = self.state.clock.step

    def scheduler_step(self) -> None:
        """Tell the scheduler how many updates have been made."""
        if self.scheduler is not None and not self._accelerator.optimizer_step_was_skipped:
            self.num_updates = (self.num_updates or 0) + 1
            self.scheduler.step_update(num_updates=self.num_updates)

    def training_run_epoch_end(self) -> None:
        """Tell the scheduler which epoch has ended, once."""
        super().training_run_epoch_end()
        if self.scheduler is not None:
            self.scheduler.step(self.run_history.current_epoch)


def _refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Name the nearest argument when a keyword is misspelt."""
    if not unknown:
        return
    valid = [name for name in inspect.signature(function).parameters if name not in ("self", "unknown")]
    name = next(iter(unknown))
    near = nearest_name(name, valid)
    hint = f" Did you mean {near!r}?" if near else f" Arguments: {', '.join(valid)}."
    raise TypeError(f"Trainer.{function.__name__}() got an unexpected keyword argument {name!r}.{hint}")
