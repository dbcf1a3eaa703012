"""What a Trainer holds, and the hooks that users override: what happens at each place of the loop, one method each."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from drivetrain.context.state import State
from drivetrain.core.engine import Fire
from drivetrain.core.errors import StopTrainingError, TrainingStopped
from drivetrain.module.accumulation import AccumulationWindow
from drivetrain.module.loss_items import LossWatch
from drivetrain.module.wrapping import unwrap
from drivetrain.train import loaders
from drivetrain.train.accelerator import TrainerRuntime
from drivetrain.train.batches import BatchForm, WholeForm, batch_size_of, carried_loss, find_form, logits_of
from drivetrain.train.closures import WindowRepeat
from drivetrain.train.failures import check_loss_inputs
from drivetrain.train.finetuning import restore_frozen_modes
from drivetrain.train.generation import call_generate, generation_inputs
from drivetrain.train.gradients import Gradients
from drivetrain.train.items import uncompiled
from drivetrain.train.settings import TrainSettings
from drivetrain.train.tracking import LossTracker, RunHistory

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy


class TrainerHooks:
    """The parts of a Trainer that the loop calls and users replace."""

    state: State
    settings: TrainSettings | None
    run_history: RunHistory
    _accelerator: TrainerRuntime
    _gradients: Gradients
    _repeat: WindowRepeat
    _fire: Fire
    _units: Any
    callback_handler: Any
    _scheduler_is_ours: bool
    _stop: StopTrainingError | TrainingStopped | None
    _logged: dict[str, LossTracker]
    _form: BatchForm | None
    _form_type: type | None
    _after_forward: str
    _before_loss: bool
    _is_running = False
    _first_batch = False
    _in_region = False  # inside the default hook's own autocast region
    _saw_forward = _saw_loss = False
    _listens_before_loss = False
    _own_loss: Callable[..., Any] | None = None
    _generate: Mapping[str, Any] | None = None  # the arguments of the model's generate; None: nothing is generated
    _watch: LossWatch | None = None  # follows the loss function of a compiled model's first batch
    plan: "Strategy | None" = None  # as it was applied to the state
    _planned_model: Any = None  # the model as the plan left it, in its DDP shell
    _find_form = staticmethod(find_form)  # prediction has its own, which needs no targets

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
    def _window(self) -> AccumulationWindow:
        return self._gradients.window

    @property
    def device(self) -> Any:
        """Where the model and the batches live."""
        return self._accelerator.device

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
        """Return the user's model without what the trainer wrapped around it.

        After a run that sharded it, its `state_dict()` and `save_pretrained()` gather the whole weights: call them on all ranks.
        """
        return self._accelerator.unwrap_model(self.model, keep_torch_compile)

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
        return TrainerHooks.calculate_train_batch_loss(self, batch)  # the default, also when training has its own

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
        """Return what metrics compare: what was generated, or outputs (or their logits), and targets."""
        generated = batch_output.get("generated")
        outputs = logits_of(batch_output["model_outputs"]) if generated is None else generated
        return outputs, self._form_of(batch).targets(batch)

    def calculate_generation_batch(self, batch: Any) -> Any:
        """Return the sequences that the model generates for the inputs of a batch, where `generate=` asks for them."""
        args, kwargs = generation_inputs(self._form_of(batch), batch)
        return self.generate(*args, **kwargs)

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

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of the model inside its wrappers, with the arguments of `generate=`, in the run's precision."""
        with (
            self._accelerator.autocast(),
            uncompiled(),
        ):  # lengths change: compiled, each of them would be compiled again
            return call_generate(self.model, args, {**kwargs, **(self._generate or {})})

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
        if self._first_batch:
            check_loss_inputs(loss_func, outputs, targets)
        if loss_func is not None:
            if self._watch is None:
                loss = loss_func(outputs, targets)
            else:
                with self._watch:
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

    def _form_of(self, batch: Any) -> BatchForm:
        """Return how batches of this type meet the model; decided when the type changes."""
        if type(batch) is self._form_type and self._form is not None:
            return self._form
        self._form, self._form_type = self._find_form(batch, self.model, self.loss_func is not None), type(batch)
        own = getattr(unwrap(self.model), "loss", None) if isinstance(self.model, nn.Module) else None
        self._own_loss = own if isinstance(self._form, WholeForm) else None
        return self._form
