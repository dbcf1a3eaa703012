"""The state of a Trainer, and the hooks that users override: one method for each position in the loop."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.context.state import State
from drivetrain.core.errors import StopTrainingError, TrainingStopped
from drivetrain.core.types import Settings
from drivetrain.module.compilation import copied
from drivetrain.optim.positions import compile_state_schedule, follows_state
from drivetrain.runtime.ranks import num_data_ranks
from drivetrain.train import loaders
from drivetrain.train.accelerator import TrainerRuntime
from drivetrain.train.batches import (
    BatchForm,
    BatchOutput,
    batch_size_of,
    call_generate,
    carried_loss,
    generation_inputs,
    logits_of,
    map_tensors,
    one_loss,
)
from drivetrain.train.failures import check_loss_inputs
from drivetrain.train.finetuning import restore_frozen_modes
from drivetrain.train.items import uncompiled
from drivetrain.train.logbook import Logbook
from drivetrain.train.run import Run
from drivetrain.train.settings import (
    AnyPath,
    TrainerOptions,
    TrainerRunConfig,
    TrainSettings,
    count_update_steps,
    replace_trainer_placeholder_values,
)
from drivetrain.train.tracking import LossTracker, MetricSet, RunHistory

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy
    from drivetrain.train.callbacks import CallbackHandler


_LOW = (torch.bfloat16, torch.float16)


def part(path: str, doc: str | None = None) -> Any:
    """Return a property that reads and writes a part of what the Trainer holds, such as a field of its run."""
    holder, _, name = path.rpartition(".")

    def assign(trainer: "TrainerHooks", value: object) -> None:
        setattr(attrgetter(holder)(trainer) if holder else trainer, name, value)

    return property(attrgetter(path), assign, doc=doc)


class TrainerHooks:
    """The parts of a Trainer that the loop calls and users replace."""

    run: Run
    state: State
    last_grad_norm: Tensor | None
    runtime: TrainerRuntime
    logbook: Logbook
    callback_handler: "CallbackHandler"
    train_dataset: object
    eval_dataset: object
    create_scheduler_fn: object
    scale_schedule_ratio: float
    _options: TrainerOptions
    overrides: Callable[[str], bool]  # a method of `Trainer`
    _perform_forward_and_backward_passes: Callable[[object, int], None]  # of `TrainerLoop`

    model: Any = part(
        "state.model", "The model. It is wrapped while several processes train it, else it is the user's own."
    )
    run_history: RunHistory = part("logbook.history", "The recorded values, by metric.")
    settings: TrainSettings | None = part("run.settings")
    run_config: TrainerRunConfig | None = part("run.config")
    # What subclasses written for pytorch-accelerated read or assign.
    _accelerator: TrainerRuntime = part("runtime")
    _train_dataloader: Any = part("run.data.train")
    _eval_dataloader: Any = part("run.data.evaluation")
    _train_dl_kwargs: Settings | None = part("run.data.train_kwargs")
    _eval_dl_kwargs: Settings | None = part("run.data.eval_kwargs")
    _loss_tracker: LossTracker = part("run.measures.tracker")
    _train_metrics: MetricSet = part("run.measures.train_metrics")
    _eval_metrics: MetricSet = part("run.measures.eval_metrics")
    _pad_uneven_eval_batches = False  # never needed: every sample is evaluated once

    plan: "Strategy | None" = None  # as it was applied to the state

    @property
    def loss_func(self) -> Any:
        """The loss function `(outputs, targets) -> loss`, or None if the model returns its loss."""
        return self.state.loss_fn

    @loss_func.setter
    def loss_func(self, loss_func: object) -> None:
        self.state.loss_fn = loss_func
        self.run.loss.form = None  # how a batch is passed to the model depends on it

    @property
    def optimizer(self) -> Any:
        """The optimizer exactly as given."""
        optimizers = self.state.optimizers
        return optimizers[0] if optimizers else None

    @optimizer.setter
    def optimizer(self, optimizer: object) -> None:
        self.state.optimizers = () if optimizer is None else (optimizer,)

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler of this run, or None."""
        schedulers = self.state.schedulers
        return schedulers[0] if schedulers else None

    @scheduler.setter
    def scheduler(self, scheduler: object) -> None:
        self.state.schedulers = () if scheduler is None else (scheduler,)
        self.run.shared.scheduler_is_ours = False

    @property
    def last_checkpoint(self) -> AnyPath | None:
        """The checkpoint that the run was resumed from, or the last one it wrote."""
        return None if self.run.checkpoints is None else self.run.checkpoints.last

    @property
    def writes_files(self) -> bool:
        """Whether this run may write files. A development run (`fast_dev_run`) does not."""
        settings = self.run.settings
        return not (self.run.is_running and settings is not None and settings.fast_dev_run)

    @property
    def device(self) -> torch.device:
        """The device of the model and the batches."""
        return self.runtime.device

    def request_stop(self, reason: str | Exception = "a stop was requested") -> None:
        """Request an orderly end at the next step boundary. All ranks stop together."""
        if not isinstance(reason, (StopTrainingError, TrainingStopped)):
            reason = StopTrainingError(str(reason))
        self.run.agreement.stop = self.run.agreement.stop or reason

    def log(self, name: str, value: float | Tensor, weight: float | None = None) -> None:
        """Record the weighted mean of a value, which stays on its device, as `train_<name>_epoch` or `eval_<name>_epoch`."""
        output = self.state.batch_output
        if weight is None:  # inside a loss hook its output is not there yet
            weight = output["batch_size"] if isinstance(output, Mapping) else batch_size_of(None, self.state.batch)
        tracker = self.run.measures.logged.setdefault(name, LossTracker())
        tracker.update(value.detach() if isinstance(value, Tensor) else value, weight)

    def gather(self, tensor: Any, padding_value: object = None) -> Any:
        """Concatenate tensors of all processes along the first dimension. Lengths may differ; nothing is padded."""
        return self.runtime.gather(tensor)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print once per node."""
        self.runtime.print(*args, **kwargs)

    def get_model(self, keep_torch_compile: bool = True) -> Any:
        """Return the user's model without the trainer's wrappers.

        After a run that sharded it, its `state_dict()` and `save_pretrained()` gather the whole weights: call them on all ranks.
        """
        return self.runtime.unwrap_model(self.model, keep_torch_compile)

    # ------------------------------------------------------------------ hooks: the run

    def training_run_start(self) -> None:
        """Run before the first epoch."""

    def train_epoch_start(self) -> None:
        """Put the model into training mode, except for modules that a `ModelFreezer` keeps in evaluation mode."""
        if isinstance(self.model, nn.Module):
            self.model.train()
            restore_frozen_modes(self.model)

    def calculate_train_batch_loss(self, batch: Any) -> BatchOutput:
        """Return `loss`, `model_outputs` and `batch_size` of one training batch, optionally `num_items`, `losses` and more."""
        step = self.run.loss
        form = step.form if type(batch) is step.form_type and step.form is not None else self._form_of(batch)
        if self.runtime.precision.autocast_dtype is None:
            return form.run(self, batch)
        step.in_region = True  # model and loss form one autocast region
        try:
            with self.runtime.autocast():
                return form.run(self, batch)
        finally:
            step.in_region = False

    def backward_step(self, loss: Tensor) -> None:
        """Back-propagate a loss that is already weighted for accumulation."""
        if self.run.units is None:
            self.runtime.backward(loss)
        else:
            output = self.state.batch_output or {}
            self.runtime.backward(loss, losses=output.get("losses") or self.state.losses)

    def optimizer_step(self) -> None:
        """Update the parameters."""
        if self.run.repeat.is_wanted:
            self.run.repeat.step(self)
        else:
            self.runtime.step(self.optimizer)

    def _clip_gradients(self) -> None:
        """Clip once per update, by norm or by value."""
        run, settings = self.run, self.run.require_settings()
        if settings.gradient_clip_norm is not None and run.units is None:  # units clip by norm themselves
            norm = settings.gradient_clip_norm
            self.last_grad_norm = self.runtime.clip_grad_norm_(run.stepper.parameters, norm)
        elif settings.gradient_clip_value is not None:
            self.runtime.clip_grad_value_(run.stepper.parameters, settings.gradient_clip_value)

    def scheduler_step(self) -> None:
        """Advance the learning rate, unless the update was skipped. An epoch counts, whatever became of its last update."""
        is_skipped = self.run.schedules_each_step and self.runtime.optimizer_step_was_skipped
        if self.state.schedulers and not is_skipped:
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

    def calculate_eval_batch_loss(self, batch: Any) -> BatchOutput:
        """Return `loss`, `model_outputs` and `batch_size` of one evaluation batch."""
        return TrainerHooks.calculate_train_batch_loss(self, batch)  # the default, also when training has its own

    def eval_epoch_end(self) -> None:
        """Run after the batches of an evaluation."""

    def training_run_epoch_end(self) -> None:
        """Run after training and evaluation of an epoch."""

    def training_run_end(self) -> None:
        """Unwrap the model."""
        self.model = self.get_model()

    def evaluation_run_start(self) -> None:
        """Run before an evaluation outside training."""

    def evaluation_run_end(self) -> None:
        """Unwrap the model."""
        self.model = self.get_model()

    def calculate_predict_batch(self, batch: Any) -> BatchOutput:
        """Return the `model_outputs` of one batch."""
        args, kwargs = self._form_of(batch).arguments(batch)
        return {"model_outputs": self.forward(*args, **kwargs)}

    def get_metric_inputs(self, batch: Any, batch_output: BatchOutput) -> tuple[Any, Any]:
        """Return what metrics compare: generated sequences or outputs (or their logits), and targets."""
        generated = batch_output.get("generated")
        outputs = logits_of(batch_output["model_outputs"]) if generated is None else generated
        return outputs, self._form_of(batch).targets(batch)

    def calculate_generation_batch(self, batch: Any) -> Any:
        """Return the sequences that the model generates for the inputs of a batch, if `generate=` requests them."""
        args, kwargs = generation_inputs(self._form_of(batch), batch)
        return self.generate(*args, **kwargs)

    # ------------------------------------------------------------------ hooks: loaders and scheduler

    def get_default_train_dl_kwargs(self, batch_size: int) -> Settings:
        """Return the default arguments of the training loader."""
        return {"shuffle": True, **loaders.default_kwargs(self.device, self.train_dataset, batch_size)}

    def get_default_eval_dl_kwargs(self, batch_size: int) -> Settings:
        """Return the default arguments of the evaluation loader."""
        return {"shuffle": False, **loaders.default_kwargs(self.device, self.eval_dataset, batch_size)}

    def create_scheduler(self) -> Any:
        """Return the scheduler that `create_scheduler_fn` makes for the optimizer, with its placeholders filled in."""
        if not callable(self.create_scheduler_fn):
            return self.create_scheduler_fn  # an instance; its optimizer has been checked
        if follows_state(self.create_scheduler_fn):
            return compile_state_schedule(self.create_scheduler_fn, self.state, self._schedule_ratio())
        return replace_trainer_placeholder_values(self, self.create_scheduler_fn)(self.optimizer)

    def _schedule_ratio(self) -> float:
        """Return by how much runs are scaled: the Trainer's argument, else what an algorithm requested."""
        ratio = self.scale_schedule_ratio
        return getattr(self.state, "scale_schedule_ratio", 1.0) if ratio == 1.0 else ratio

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int | None,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> TrainerRunConfig:
        """Collect the facts of a run. Counts are None if the loader has no length."""
        settings, runtime, data = self.run.settings, self.runtime, self.run.data
        shares, accumulation = num_data_ranks(), max(1, gradient_accumulation_steps)
        per_device, eval_per_device = map(loaders.batch_size_of_loader, (data.train, data.evaluation))
        batches = None if data.train is None else loaders.length(data.train)
        steps, local_steps = (None, None) if batches is None else count_update_steps(batches, shares, accumulation)
        if max_num_train_steps is None and num_epochs is not None and steps is not None:
            max_num_train_steps = num_epochs * steps + 1
        return TrainerRunConfig(
            num_epochs=num_epochs,
            train_per_device_batch_size=per_device,
            train_dl_kwargs=data.train_kwargs,
            eval_per_device_batch_size=eval_per_device,
            eval_dl_kwargs=data.eval_kwargs,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clip_value=gradient_clip_value,
            train_total_batch_size=None if per_device is None else per_device * shares * accumulation,
            eval_total_batch_size=None if eval_per_device is None else eval_per_device * shares,
            num_update_steps_per_epoch=steps,
            num_local_update_steps_per_epoch=local_steps,
            max_num_train_steps=max_num_train_steps,
            is_local_process_zero=runtime.is_local_main_process,
            is_world_process_zero=runtime.is_main_process,
            is_distributed=runtime.num_processes > 1,
            mixed_precision=runtime.mixed_precision,
            num_processes=runtime.num_processes,
            gradient_clip_norm=settings.gradient_clip_norm if settings else None,
            max_duration=str(settings.max_duration) if settings and settings.max_duration else None,
            microbatch_size=settings.microbatch_size if settings else None,
            precision=runtime.mixed_precision,
            seed=self.state.seed,
        )

    # ------------------------------------------------------------------ forward and loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in the run's precision and let algorithms process its outputs."""
        state, run = self.state, self.run
        if self.runtime.precision.autocast_dtype is None or run.loss.in_region:
            outputs = state.model(*args, **kwargs)
        else:
            with self.runtime.autocast():
                outputs = state.model(*args, **kwargs)
            # So that the user's loss is computed in float32.
            outputs = map_tensors(lambda tensor: tensor.float() if tensor.dtype in _LOW else tensor, outputs)
        state.outputs = outputs
        run.loss.saw_forward = True
        getattr(run.fire, run.loss.after_forward)()
        return state.outputs

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of the model inside its wrappers, with the arguments of `generate=`, in the run's precision."""
        with self.runtime.autocast(), uncompiled():  # each new length would be compiled again
            return call_generate(self.model, args, {**kwargs, **(self.run.generate or {})})

    def compute_loss(self, outputs: Any, targets: Any = None) -> Tensor:
        """Compute the loss of outputs and targets, after algorithms had the chance to change both."""
        state, step = self.state, self.run.loss
        if step.before_loss:
            step.saw_loss = True
            if step.listens_before_loss:
                form, before = self._form_of(state.batch), state.outputs
                is_ours = form.targets(state.batch) is targets
                self.run.fire.before_loss()
                targets = form.targets(state.batch) if is_ours else targets
                outputs = outputs if state.outputs is before else form.predictions(state.outputs)
        loss_func = state.loss_fn
        if step.is_first:
            check_loss_inputs(loss_func, outputs, targets)
        if loss_func is not None:
            if step.watch is None:
                loss = loss_func(outputs, targets)
            else:
                with step.watch:
                    loss = loss_func(outputs, targets)
        elif step.own_loss is not None:
            loss = step.own_loss(outputs, state.batch)
        else:
            loss = carried_loss(outputs)
        if step.copies:
            loss = copied(loss)
        return loss if type(loss) is Tensor else self._one_loss(loss)

    def _one_loss(self, loss: Any) -> Tensor:
        """Return the loss that is trained on, of several by name, and keep all of them for the units of an `OptimSet`."""
        if isinstance(loss, Mapping):
            self.state.losses = dict(loss)
        return one_loss(loss)

    def _form_of(self, batch: object) -> BatchForm:
        """Return how batches of this type are passed to the model."""
        return self.run.loss.form_of(batch, self.model, self.loss_func)
