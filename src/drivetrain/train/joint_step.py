"""A model and its loss function as one compiled graph in training, where nothing acts between them.

The graph computes what `forward` and `compute_loss` would, so hooks, plugins and units that take part in that keep the two apart.
"""

from typing import TYPE_CHECKING

from drivetrain.core.event import Event
from drivetrain.module.compilation import JointStep, LossGraph
from drivetrain.train.batches import BatchForm, BatchOutput, CallByForm, LossByForm, OtherForm, batch_size_of

if TYPE_CHECKING:
    from drivetrain.train.hooks import TrainerHooks
    from drivetrain.train.loop import TrainerLoop


LOSS_HOOKS = ("calculate_train_batch_loss", "forward", "compute_loss")
_READING_EVENTS = (
    *(Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH),
    *(Event.BEFORE_STEP, Event.AFTER_STEP, Event.BATCH_END, Event.BATCH_CHECKPOINT),
)
"""Where plugins may read the outputs of a step."""
_STEP_HOOKS = (
    *("optimizer_step", "scheduler_step", "optimizer_zero_grad", "_clip_gradients", "_update_loss_tracker"),
    *("_perform_forward_and_backward_passes", "_run_train_epoch"),
)


def loss_graph_of(trainer: "TrainerLoop") -> LossGraph:
    """Return whether model and loss function may be one graph in training: nothing acts between them or differentiates the outputs.

    The graph returns no outputs where nothing reads them. A plugin that does not declare what it reads may read them.
    """
    engine, changing = trainer.engine, (Event.AFTER_LOSS, Event.STEP_OUTPUT, Event.BEFORE_BACKWARD)
    if (
        trainer.loss_func is None
        or trainer.run.units is not None
        or any(map(engine.listens, (Event.AFTER_FORWARD, Event.BEFORE_LOSS)))
        or any(map(engine.has_algorithm_for, changing))
        or any(map(trainer.overrides, (*LOSS_HOOKS, "backward_step")))
    ):
        return "apart"
    reads = [getattr(plugin, "reads", ()) for event in _READING_EVENTS for plugin in engine.listeners(event)]
    is_read = (
        engine.listens(Event.STEP_OUTPUT)  # it passes them
        or any("outputs" in own or not own for own in reads)
        or any(map(trainer.overrides, _STEP_HOOKS))
        or bool(trainer.run.measures.train_metrics)
    )
    return "outputs" if is_read else "loss"


class JointForm(OtherForm):
    """Another form whose model and loss function are one compiled graph in training."""

    def __init__(self, form: BatchForm, joint: JointStep, keep: bool):
        self.form, self.joint, self.keep = form, joint, keep
        self.arguments, self.targets, self.predictions = form.arguments, form.targets, form.predictions  # type: ignore[method-assign]
        self._call, self._loss = CallByForm(form), LossByForm(form, joint.loss_func).named

    def run(self, trainer: "TrainerHooks", batch: object) -> BatchOutput:
        """Compute what a loss hook returns. The outputs are detached, and None where nothing reads them."""
        step = trainer.run.loss
        if not step.before_loss:  # an evaluation
            return self.form.run(trainer, batch)
        loss, outputs = self.joint.run(trainer.model, self._call, self._loss, batch, self.keep)
        trainer.state.outputs = outputs
        step.saw_forward = step.saw_loss = True
        return {
            "loss": trainer._one_loss(loss),
            "model_outputs": outputs,
            "batch_size": batch_size_of(self.targets(batch), batch),
        }
