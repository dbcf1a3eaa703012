"""The Trainer: one readable loop around a plain model, a loss function and an optimizer.

Every part that users change is a method to override (`hooks.py`). Every part that only observes is a callback. Everything that
changes the training itself is an algorithm. All of them use one list of events (`drivetrain.core.event.Event`, whose docstring
draws the loop; `loop.py` runs it). This file has what users call: the constructor, the public methods, and what they prepare.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import torch
from torch import Tensor

from drivetrain.context.context import Context
from drivetrain.core.arguments import check_count, check_flag, check_number, naming
from drivetrain.core.containers import with_attributes
from drivetrain.core.engine import Engine
from drivetrain.core.errors import ConfigError
from drivetrain.core.plugin import Plugin
from drivetrain.core.time import Time
from drivetrain.core.types import Settings, StateDict
from drivetrain.data.loader import SmartDataLoader
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.module.precision import Precision
from drivetrain.runtime.device import as_current
from drivetrain.runtime.seeds import set_deterministic, set_seed
from drivetrain.runtime.signals import StopSignals
from drivetrain.train import arguments, checkpoints, loaders, resuming, setup
from drivetrain.train.accelerator import TrainerRuntime, as_runtime
from drivetrain.train.agreement import Agreement
from drivetrain.train.batches import Generate, check_generates, generate_arguments, padding_token
from drivetrain.train.callbacks import DEFAULT_CALLBACKS, CallbackHandler, with_limit_from_environment
from drivetrain.train.callbacks.control import StrictSteps, warnings_as_errors
from drivetrain.train.closures import WindowRepeat
from drivetrain.train.evaluation import outside_run, run_prediction
from drivetrain.train.items import CountItems, check_count_items
from drivetrain.train.logbook import Logbook, watched_ranks
from drivetrain.train.loop import TrainerLoop
from drivetrain.train.resuming import make_optimizer
from drivetrain.train.run import Run, SharedParts
from drivetrain.train.settings import (
    AnyPath,
    EvalInterval,
    TrainerOptions,
    TrainerPlaceholderValues,
    TrainSettings,
    check_limit,
    replace_trainer_placeholder_values,
)
from drivetrain.train.signatures import missing_attribute, public
from drivetrain.train.tracking import InMemoryRunHistory, MetricSet, RunHistory

if TYPE_CHECKING:
    from drivetrain.train.lr_finder import LrFindResult

DataLoader = SmartDataLoader  # the name users patch; a torch DataLoader that knows its exact place in the data

__all__ = [
    "DEFAULT_CALLBACKS",
    "DataLoader",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "replace_trainer_placeholder_values",
]


class Trainer(TrainerLoop):
    """Trains, evaluates and predicts with a plain `nn.Module`.

    Args:
        model: any module; it is trained in place.
        loss_func: a function of outputs and targets; None for a model that returns its loss.
        optimizer: a torch optimizer, an `OptimScheduler`, a mapping of them, an `OptimSet`, or the path of its YAML.
        callbacks: plugins that observe the run; the default prints progress and metrics and stops at NaN.
        run_history: where metrics are stored; a new one in memory by default.
        algorithms: plugins that change the training.
        loggers: plugins that record it, such as a `Recorder`.
        strategy: a plan (a `Strategy`, a list of methods, a file), or `"auto"` to search for one.
        strategy_time_limit: seconds for that search; 120 by default.
        precision: `"no"`, `"bf16"`, `"fp16"`, `"bf16-true"` or `"fp64"`.
        metrics: metrics of evaluations, by name: functions of outputs and targets, or objects of torchmetrics.
        train_metrics: the same for training batches.
        count_items: what the loss is a mean over, where that cannot be found out: a function of the batch, or `"labels"`.
        generate: True, or arguments of the model's `generate`, to compute metrics of generated sequences.
        device: where to train; the accelerator of this process, or the CPU, by default.
        seed: seed of Python, numpy and torch.
        deterministic: True or `"strict"` allows repeatable kernels only; `"warn"` names the others.
        strict: makes warnings, unused parameters and waits for the device inside a step errors.
        find_unused_parameters: DDP: the loss of a step may not depend on all parameters.
        static_graph: DDP: every step uses the same parameters.
        state: a `Context` to train. Its model, loss and optimizer are used where none is passed: `Trainer(None, state=ctx)`.
        scale_schedule_ratio: multiplies the length of the run and of its schedules.
        optimizers: another name for `optimizer`.
        train_dataloader: the default for `train(train_dataset=...)`.
        eval_dataloader: the default for `train(eval_dataset=...)`.
        max_duration: the default for `train(max_duration=...)`.
        eval_interval: the default for `train(eval_interval=...)`.

    Raises:
        ConfigError: an argument is unknown or of the wrong type, or two exclude each other.

    >>> import torch
    >>> from torch import nn, optim
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    >>> model = nn.Linear(4, 2)
    >>> trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), callbacks=())
    >>> history = trainer.train(data, num_epochs=2, per_device_batch_size=16)
    >>> len(history.get_metric_values("train_loss_epoch"))
    2
    """

    @public
    def __init__(
        self,
        model: object,
        loss_func: Callable[..., object] | None = None,
        optimizer: object = None,
        callbacks: Iterable[object] = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
        *,
        algorithms: Iterable[Any] = (),
        loggers: Iterable[object] = (),
        strategy: object = None,
        strategy_time_limit: float | None = None,
        precision: str | Precision | None = None,
        metrics: object = None,
        train_metrics: object = None,
        count_items: CountItems | None = None,
        generate: Generate = False,
        device: torch.device | str | None = None,
        seed: int | None = None,
        deterministic: bool | Literal["off", "warn", "strict"] = False,
        strict: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        state: Context | None = None,
        scale_schedule_ratio: float = 1.0,
        optimizers: object = None,
        train_dataloader: object = None,
        eval_dataloader: object = None,
        max_duration: int | str | Time | None = None,
        eval_interval: EvalInterval | None = None,
    ):
        given = locals()
        arguments.check_constructor(given)
        options = self._options = TrainerOptions(
            device=device,
            precision=precision,
            ddp={name: True for name in ("find_unused_parameters", "static_graph") if given[name]},
            count_items=check_count_items(count_items),
            generate=generate_arguments(generate),
            train_dataset=train_dataloader,
            eval_dataset=eval_dataloader,
            max_duration=max_duration,
            eval_interval=eval_interval,
        )
        self.strategy, self.strict, self.scale_schedule_ratio = strategy, strict, scale_schedule_ratio
        self.strategy_time_limit = strategy_time_limit
        if deterministic:
            set_deterministic("strict" if deterministic is True else deterministic)
        if seed is not None:
            set_seed(seed)
        self.runtime = as_runtime(self._create_accelerator(), precision)
        optimizer = optimizer if optimizers is None else optimizers
        self.state = resuming.make_state(state, model, loss_func, optimizer, self.device, seed)
        self.state.precision = self.runtime.mixed_precision
        self.state.make_optimizer = make_optimizer
        history = InMemoryRunHistory() if run_history is None else run_history
        self.logbook = Logbook(history, self.state.clock, tuple(loggers))
        self.run = Run(agreement=Agreement(self.state), shared=SharedParts(options=options), generate=options.generate)
        self.collate_fn: Callable[..., object] | None = None
        self.create_scheduler_fn = self.train_dataset = self.eval_dataset = None
        self.last_grad_norm: Tensor | None = None
        self._eval_metrics = MetricSet(metrics)
        self._train_metrics = MetricSet(train_metrics, argument="train_metrics", other=self._eval_metrics)
        self.run.stepper = self.runtime.stepper
        self.run.repeat = self.state.window_batches = WindowRepeat(self.device)
        self._resume_next: AnyPath | None = None
        self._callbacks = tuple(callbacks)
        self._algorithms = tuple(algorithms)
        self._strict_steps = (StrictSteps(),) if strict else ()
        self.callback_handler = self._create_callback_handler()
        self.engine = Engine(self.state, self.logbook, self._plugins(), strict=strict, host=self)
        self.run.fire = self.engine.on
        with warnings_as_errors(strict):
            self.run.fire.init()

    if not TYPE_CHECKING:  # a checker reports what is missing

        def __getattr__(self, name: str) -> None:
            if hasattr(type(self), name):
                object.__getattribute__(self, name)  # a property of that name: its own error
            raise missing_attribute(self, name)

    def __deepcopy__(self, memo: dict[int, object]) -> "Trainer":
        return setup.copy_trainer(self, memo)

    def overrides(self, name: str) -> bool:
        """Return whether a subclass, a function assigned to the instance, or a patch of the class replaces a method."""
        return name in vars(self) or getattr(type(self), name) is not _OWN[name]

    @property
    def callback_handler(self) -> Any:
        """The callbacks. Another handler may replace it."""
        return self._callback_handler

    @callback_handler.setter
    def callback_handler(self, handler: Any) -> None:
        self._callback_handler = handler
        if isinstance(handler, CallbackHandler):
            handler.watch(self.update_plugins)
        self.update_plugins()

    # ------------------------------------------------------------------ the public methods

    @public
    def train(
        self,
        train_dataset: object = None,
        num_epochs: int | None = None,
        eval_dataset: object = None,
        per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: object = None,
        train_dataloader_kwargs: Settings | None = None,
        eval_dataloader_kwargs: Settings | None = None,
        reset_run_history: bool = True,
        collate_fn: Callable[..., object] | None = None,
        resume_from: AnyPath | None = None,
        *,
        max_duration: int | str | Time | None = None,
        global_batch_size: int | None = None,
        gradient_clip_norm: float | None = None,
        microbatch_size: int | str | None = None,
        eval_interval: EvalInterval | None = None,
        scheduler_interval: str = "step",
        scheduler_metric: str = "eval_loss_epoch",
        checkpoint_dir: AnyPath | None = None,
        checkpoint_every: str | int | None = "1ep",
        keep_checkpoints: int | None = 3,
        async_checkpoint: bool = True,
        limit_train_batches: int | float | None = None,
        limit_eval_batches: int | float | None = None,
        sanity_eval_batches: int = 0,
        overfit_batches: int = 0,
        fast_dev_run: bool | int = False,
        max_grad_norm: float | None = None,
        overwrite_checkpoints: bool = False,
        log_every: int | str | Time | None = 50,
        nonfinite: str | NonFinitePolicy = "skip",
        hang_timeout: int | float | str | Time | None = None,
    ) -> RunHistory:
        """Train until the first of `num_epochs`, `max_num_train_steps` and `max_duration` is reached. Return a copy of the history.

        Args:
            train_dataset: a dataset, or a loader that is used as it is.
            num_epochs: passes over the data.
            eval_dataset: a dataset, a loader, or several by name.
            per_device_batch_size: samples of a batch in each process.
            max_num_train_steps: optimizer updates after which the run ends.
            gradient_accumulation_steps: batches for one update.
            gradient_clip_value: clamp each entry of the gradient.
            create_scheduler_fn: a function of the optimizer that returns its scheduler.
            train_dataloader_kwargs: arguments of the training loader, such as `num_workers`.
            eval_dataloader_kwargs: arguments of the evaluation loader.
            reset_run_history: begin with an empty history.
            collate_fn: makes a batch of samples.
            resume_from: `"auto"` for the newest valid checkpoint of `checkpoint_dir`, or a path.
            max_duration: a time such as `"10ep"`, `"500ba"`, `"1e9tok"` or `"2h"`.
            global_batch_size: samples of a batch over all processes, instead of `per_device_batch_size`.
            gradient_clip_norm: largest norm of the whole gradient.
            microbatch_size: rows of a forward pass, or `"auto"`; a batch is split and its gradients are accumulated.
            eval_interval: when to evaluate: epochs, a time such as `"500ba"`, or a function of state and event.
            scheduler_interval: `"step"` or `"epoch"`: when the scheduler is stepped.
            scheduler_metric: what `ReduceLROnPlateau` watches.
            checkpoint_dir: folder of the checkpoints; None saves none.
            checkpoint_every: when to save, as a time; None only on request, such as a signal.
            keep_checkpoints: how many of the newest to keep; None keeps all.
            async_checkpoint: write in the background.
            limit_train_batches: batches of an epoch, as a number or a fraction.
            limit_eval_batches: batches of an evaluation, as a number or a fraction.
            sanity_eval_batches: evaluation batches to try before training.
            overfit_batches: train and evaluate on this many batches only.
            fast_dev_run: run one batch (or so many) of everything, and save nothing.
            max_grad_norm: another name for `gradient_clip_norm`.
            overwrite_checkpoints: use a folder that holds checkpoints of another run.
            log_every: how often loggers get the loss: updates, a time, or None.
            nonfinite: what happens to an update that is not finite: `"skip"`, `"stop"`, `"rollback"`, `"ignore"`, or a policy.
            hang_timeout: seconds, or a text such as `"30m"`, without progress after which every rank prints where it is and ends. None: 30
                minutes on several processes, else never. 0: never.

        Raises:
            ConfigError: an argument is wrong, before the first step.
            ResumeError: the checkpoint does not fit this run.
            NonFiniteError: updates were not finite and the policy ends the run.
        """
        given, options = locals(), self._options
        arguments.check_idle(self.run)
        arguments.check_loader_arguments(
            collate_fn, train_dataloader_kwargs=train_dataloader_kwargs, eval_dataloader_kwargs=eval_dataloader_kwargs
        )
        check_flag("reset_run_history", reset_run_history)
        given["resume_from"] = self._resume_next if resume_from is None else resume_from
        settings = TrainSettings.from_arguments(given, options).scaled(self._schedule_ratio(), self.print)
        settings = settings.for_development() if fast_dev_run else resuming.follow_current_run(settings)
        run = self.run = self.run.followed_by(Agreement(self.state), settings)
        self._resume_next = None
        self.train_dataset = options.train_dataset if train_dataset is None else train_dataset
        self.eval_dataset = options.eval_dataset if eval_dataset is None else eval_dataset
        if settings.overfit_batches:
            self.eval_dataset = self.train_dataset
        self.create_scheduler_fn, self.collate_fn = create_scheduler_fn, collate_fn
        is_resumed = settings.resume_from is not None
        if reset_run_history and not is_resumed:
            self.run_history.reset()
        self.run_history._follow(self.state.clock, starts_over=not is_resumed)
        with warnings_as_errors(self.strict), as_current(self.device), ExitStack() as until_end:
            setup.prepare_run(self, train_dataloader_kwargs, eval_dataloader_kwargs, until_end)
            watch = watched_ranks(run, self.state.clock, self.device, self.update_plugins)
            with StopSignals() as run.agreement.signals, watch:
                self._run_to_end()
        return self.run_history.snapshot()

    def fit(self, *args: Any, **kwargs: Any) -> RunHistory:
        """Another name for `train`."""
        return self.train(*args, **kwargs)

    @public
    def evaluate(
        self,
        dataset: object = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Settings | None = None,
        collate_fn: Callable[..., object] | None = None,
        *,
        reset_run_history: bool = True,
        limit_batches: int | float | None = None,
        generate: Generate | None = None,
    ) -> dict[str, float]:
        """Evaluate once on a dataset, by default the last evaluation dataset, and return its metrics by name.

        Args:
            dataset: a dataset, a loader, or several by name.
            per_device_batch_size: samples of a batch in each process.
            dataloader_kwargs: arguments of the loader.
            collate_fn: makes a batch of samples.
            reset_run_history: begin with an empty history. In a callback of a training run the history is always kept.
            limit_batches: batches to evaluate, as a number or a fraction.
            generate: compute metrics of generated sequences; None uses the constructor's setting.
        """
        check_count("per_device_batch_size", per_device_batch_size)
        arguments.check_loader_arguments(collate_fn, dataloader_kwargs=dataloader_kwargs)
        check_flag("reset_run_history", reset_run_history)
        check_limit("limit_batches", limit_batches)
        arguments.check_model(self.model, self.loss_func)
        arguments.check_loss_func(self.loss_func, self.optimizer)
        chosen = self._options.generate if generate is None else generate_arguments(generate, self._options.generate)
        check_generates(self, chosen)
        dataset = self.eval_dataset if dataset is None else dataset
        if dataset is None:
            raise ConfigError("evaluate() has no dataset: pass one, or give eval_dataset= to train() first.")
        history, in_run = self.run_history, self.run.is_running
        history._follow(self.state.clock)
        if reset_run_history and not in_run:
            history.reset()
        with outside_run(self), as_current(self.device), with_attributes(self.run, generate=chosen):
            self.eval_dataset = dataset
            self.collate_fn = collate_fn if collate_fn is not None else self.collate_fn
            setup.prepare_evaluation(self, per_device_batch_size, dataloader_kwargs, limit_batches)
            before = history._counts()
            with nullcontext() if in_run else self._reporting_errors():
                self._run_evaluation()
        new = [name for name, count in history._counts().items() if count > before.get(name, 0)]
        return {name: history.get_latest_metric(name) for name in new}

    @public
    def predict(
        self,
        dataset: object,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Settings | None = None,
        collate_fn: Callable[..., object] | None = None,
        *,
        limit_batches: int | float | None = None,
        to_cpu: bool = True,
        padding_value: float | None = None,
        generate: Generate = False,
    ) -> Any:
        """Return the model's outputs for a dataset, in its order, each sample once on any number of processes.

        Outputs whose rows differ in shape are a list with one tensor for each sample.

        Args:
            dataset: a dataset or a loader.
            per_device_batch_size: samples of a batch in each process.
            dataloader_kwargs: arguments of the loader.
            collate_fn: makes a batch of samples.
            limit_batches: batches to predict, as a number or a fraction.
            to_cpu: move outputs to the host.
            padding_value: pad rows of different shapes with it instead of returning a list.
            generate: return generated sequences, padded with the model's padding token where its configuration names one.
        """
        check_count("per_device_batch_size", per_device_batch_size)
        arguments.check_loader_arguments(collate_fn, dataloader_kwargs=dataloader_kwargs)
        check_flag("to_cpu", to_cpu)
        if padding_value is not None:
            check_number("padding_value", padding_value, infinite=True)
        check_limit("limit_batches", limit_batches)
        arguments.check_model(self.model, self.loss_func)
        chosen = generate_arguments(generate, self._options.generate)
        check_generates(self, chosen)
        if chosen is not None and padding_value is None:
            padding_value = padding_token(self.model)
        loaders.use_data_ranks(self.run.shared)
        arguments.check_dataset("dataset", dataset)
        if loaders.is_ready_loader(dataset):
            arguments.reject_unused("dataset", dataset, "dataloader_kwargs", dataloader_kwargs, collate_fn)
        else:
            defaults = {"shuffle": False, **loaders.default_kwargs(self.device, dataset, per_device_batch_size)}
            with naming("dataloader_kwargs", dataloader_kwargs):
                kwargs = loaders.merge_kwargs(dataset, defaults, dataloader_kwargs)
                dataset = SmartDataLoader(dataset, **{"collate_fn": collate_fn, **kwargs})
        self.model = loaders.move_model(self.runtime, self.model)
        loader = loaders.prepare(self.device, dataset, limit_batches)
        reporting = nullcontext() if self.run.is_running else self._reporting_errors()
        with reporting, as_current(self.device), with_attributes(self.run, generate=chosen):
            return run_prediction(self, loader, to_cpu, padding_value, generates=chosen is not None)

    def lr_find(
        self,
        train_dataset: object,
        *,
        min_lr: float = 1e-7,
        max_lr: float = 1.0,
        num_steps: int = 100,
        per_device_batch_size: int = 8,
        smoothing: float = 0.98,
        diverge_ratio: float = 4.0,
        **train_kwargs: Any,
    ) -> "LrFindResult":
        """Sweep the learning rate exponentially over a few steps, restore everything, and suggest one."""
        from drivetrain.train.lr_finder import find_lr

        return find_lr(
            self, train_dataset, min_lr, max_lr, num_steps, smoothing, diverge_ratio,
            {"per_device_batch_size": per_device_batch_size, **train_kwargs},
        )  # fmt: skip

    def explain(self, file: TextIO | None = None) -> str:
        """Print and return the loop with every plugin, in order."""
        text = self.engine.explain()
        print(text, file=file or sys.stdout)
        return text

    def save_checkpoint(
        self,
        save_path: AnyPath,
        checkpoint_kwargs: Mapping[str, object] | None = None,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        save_per_node: bool = True,
    ) -> None:
        """Write model, optimizer and scheduler to one `.pt` file that loads with `weights_only=True`."""
        checkpoints.save_checkpoint(
            self.state, self.runtime, save_path, checkpoint_kwargs, optimizer=save_optimizer, scheduler=save_scheduler,
            per_node=save_per_node, writes=self.writes_files,
        )  # fmt: skip

    def load_checkpoint(
        self, checkpoint_path: AnyPath, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> StateDict:
        """Load a file written by `save_checkpoint` or by pytorch-accelerated, and return its contents."""
        return checkpoints.load_checkpoint(
            self.state, self.runtime, checkpoint_path, optimizer=load_optimizer, scheduler=load_scheduler
        )

    def save_training_state(self, output_dir: AnyPath, checkpoint_kwargs: Mapping[str, object] | None = None) -> None:
        """Save everything a run needs to continue; inside a step, when the step's update is done."""
        checkpoints.check_entries(checkpoint_kwargs)
        if not self.writes_files:
            return
        save = partial(checkpoints.save_state, self.state, output_dir, dict(checkpoint_kwargs or {}))
        if self.run.inside_step and self.run.checkpoints is not None:
            self.run.checkpoints.save_at_boundary(save)
            self.run.has_boundary_work = True
        else:
            save()

    def load_training_state(self, input_dir: AnyPath) -> StateDict:
        """Restore what `save_training_state` saved. Return its `current_epoch` and custom entries."""
        entries = checkpoints.load_state(self.state, input_dir)
        self._resume_next = Path(input_dir)
        self.run_history._set_epoch(self.state.clock.epoch + 1)
        return entries

    # ------------------------------------------------------------------ hooks: loaders and scheduler

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Settings | None = None) -> Iterable[object]:
        """Return the loader of the training data."""
        if self.train_dataset is None:
            raise ConfigError("train() has no data: pass train_dataset, a dataset or a loader.")
        return self._make_loader("train", self.get_default_train_dl_kwargs, batch_size, train_dl_kwargs)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Settings | None = None) -> Iterable[object]:
        """Return the loader of the evaluation data."""
        return self._make_loader("eval", self.get_default_eval_dl_kwargs, batch_size, eval_dl_kwargs)

    def _make_loader(
        self, phase: str, defaults: Callable[[int], Settings], batch_size: int, given: Settings | None
    ) -> Iterable[object]:
        data, name, kwargs_name = getattr(self, f"{phase}_dataset"), f"{phase}_dataset", f"{phase}_dataloader_kwargs"
        arguments.check_dataset(name, data)
        if loaders.is_ready_loader(data):
            arguments.reject_unused(name, data, kwargs_name, given, self.collate_fn if phase == "train" else None)
            if phase == "train" and (self.eval_dataset is None or loaders.is_ready_loader(self.eval_dataset)):
                arguments.warn_of_batch_size(data, batch_size)
            return data
        kwargs = loaders.merge_kwargs(data, defaults(batch_size), given)
        setattr(self.run.data, f"{phase}_kwargs", kwargs)
        with naming(*(kwargs_name, given) if given else (name, data)):
            return DataLoader(dataset=data, **{"collate_fn": self.collate_fn, **kwargs})

    # ------------------------------------------------------------------ getting ready

    def _create_accelerator(self) -> TrainerRuntime:
        return TrainerRuntime(self._options.device, self._options.precision)

    def _create_callback_handler(self) -> CallbackHandler:
        return CallbackHandler(with_limit_from_environment(self._callbacks))

    def update_plugins(self, *changed: object) -> None:
        """Pass the current plugins to the engine."""
        if hasattr(self, "engine"):
            self.engine.set_plugins(self._plugins())

    def _plugins(self) -> list[object]:
        """Return every plugin in order; the state holds them too, so that theirs is saved with it."""
        self.state.algorithms, self.state.callbacks = list(self._algorithms), list(self.callback_handler)
        measures = self.run.measures
        own = [plugin for plugin in (measures.step_losses, measures.step_times) if plugin is not None]
        return [*self._algorithms, *self.callback_handler, *own, *self._strict_steps]

    def add_algorithms(self, algorithms: Iterable[Plugin]) -> None:
        """Add algorithms that a checkpoint cannot be loaded without."""
        self._algorithms = (*self._algorithms, *algorithms)
        self.update_plugins()

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Place model, loss and optimizer; make loaders deliver to the device; wrapping waits until weights are loaded."""
        data, settings = self.run.data, self.run.require_settings()
        self.model = loaders.move_model(self.runtime, self.model, self.loss_func)
        setup.prepare_precision(self)
        setup.resolve_optimizer(self)
        overfit = settings.overfit_batches or None
        loader = loaders.prepare(self.device, data.train, None)
        loaders.check_training_loader(loader, self.train_dataset, settings)
        data.train = loaders.limit(loader, overfit or settings.limit_train_batches)
        if data.evaluation is not None:
            loaders.map_loaders(partial(loaders.warn_if_read_once, "evaluation", settings), data.evaluation)
            data.evaluation = loaders.prepare(self.device, data.evaluation, overfit or settings.limit_eval_batches)
        self.engine.call("on_loaders_made")

    def _check_eval_batch_size(self) -> None:
        loaders.map_loaders(setup.check_eval_loader, self.run.data.evaluation)


_OWN = {name: getattr(Trainer, name) for name in dir(Trainer)}


class TrainerWithTimmScheduler(Trainer):
    """A trainer for timm's schedulers, which take the number of updates and of finished epochs."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.num_updates: int | None = None

    def training_run_start(self) -> None:
        """Count updates from the clock, which a resumed run restores."""
        super().training_run_start()
        self.num_updates = self.state.clock.step

    def scheduler_step(self) -> None:
        """Pass the number of updates to the scheduler."""
        if self.scheduler is not None and not self._accelerator.optimizer_step_was_skipped:
            self.num_updates = (self.num_updates or 0) + 1
            self.scheduler.step_update(num_updates=self.num_updates)

    def training_run_epoch_end(self) -> None:
        """Pass the finished epoch to the scheduler once."""
        super().training_run_epoch_end()
        if self.scheduler is not None:
            self.scheduler.step(self.run_history.current_epoch)
