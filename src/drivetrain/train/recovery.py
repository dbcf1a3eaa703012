"""What a run does about an update that its guard has left out: go on, stop, or return to the last good state.

The test and the counts are `drivetrain.module.finite`'s. A rollback restores everything but the position: weights, optimizer, schedules,
scaler, algorithms and random numbers go back, while clock, data and history stay. So the batches between the last good state and the
bad one are passed over, as large runs do by hand after a loss spike (Chowdhery et al., 2022, section 5.1).
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.context.state import State
from drivetrain.core.errors import NonFiniteError
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.finite import NONFINITE, REJECTED
from drivetrain.module.stepper import Stepper
from drivetrain.runtime.ranks import is_distributed
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.train.accelerator import map_tensors

if TYPE_CHECKING:
    from drivetrain.train.loop import TrainerLoop

_POSITION = frozenset(
    ["clock", "train_dataloader", "dataset_state", "history", "epoch_loss", "loggers", "gradients", "window_batches"]
    + ["custom_entries", "callbacks", "train_metrics", "eval_metrics", "max_duration"]
)
"""What a rollback leaves as it is."""


def prepare_tests(trainer: "TrainerLoop") -> None:
    """Decide once whether updates are tested, by whom, and whether there is a state to roll back to."""
    run, stepper = trainer.run, trainer.run.stepper
    guard = stepper.guard
    watches = [plugin for plugin in trainer.engine.plugins if getattr(plugin, "rejects_batches", False)]
    rolls_back = guard.policy.action == "rollback" or any(plugin.rolls_back for plugin in watches)
    run.good = LastGoodState(trainer.state, stepper) if rolls_back else None
    stepper.prepare(
        is_split=run.microbatch_size is not None,
        is_exchanged=is_distributed(),
        tests=guard.policy.action != "ignore" or bool(watches),
    )
    run.measures.tracker.leaves_out_nonfinite = guard.is_active
    for plugin in watches:
        plugin.guard = guard if guard.is_active else None


def act_on(trainer: "TrainerLoop", verdict: int) -> None:
    """Record an update that was left out, and stop or roll back where the policy says so; all ranks come here at the same step."""
    run, clock = trainer.run, trainer.state.clock
    guard, good = run.stepper.guard, run.good
    policy = guard.policy
    batch = clock.batch + 1
    if verdict & NONFINITE:
        trainer.run_history.update_metric("nonfinite_update", batch)
    reason = "a gradient or the loss is not finite" if verdict & NONFINITE else "the batch was rejected"
    what = f"batch {batch}: {reason}; the update was left out ({guard.in_a_row} in a row, {guard.total} in all)."
    is_scaled = run.stepper.scaler is not None  # float16 looks for its scale by overflowing
    if policy.action == "stop" and verdict & NONFINITE and not is_scaled:
        _stop(trainer, f"{what} nonfinite='skip' would go on.")
    if guard.in_a_row >= policy.limit:
        _stop(trainer, f"{what} That is the limit of {policy.limit} in a row.")
    wants = (policy.action == "rollback" and verdict & NONFINITE and not is_scaled) or (
        verdict & REJECTED and any(getattr(plugin, "rolls_back", False) for plugin in trainer.engine.plugins)
    )
    if wants and good is not None:
        good.restore()
        trainer.print(f"{what} Rolled back to the state after update {good.step}.")
    elif not is_scaled:
        trainer.print(what)


def _stop(trainer: "TrainerLoop", message: str) -> None:
    last = trainer.last_checkpoint
    trainer.run.agreement.is_reached = True  # the verdict is the same on all ranks
    raise NonFiniteError(
        f"{message} Usual causes: a learning rate that is too high, float16 without scaling, an empty or masked-out batch, a log or "
        f"division of zero.{'' if last is None else f' The last checkpoint is {last}.'}"
    )


class LastGoodState:
    """A copy in host memory of what an update changes, to return to.

    It is taken when a run begins, every so many updates, and with every checkpoint: so a resumed run returns to the same state.
    """

    def __init__(self, state: State, stepper: Stepper):
        self._session, self._stepper = weakref.ref(state), stepper  # the state may hold what holds this
        self._state: dict[str, Any] = {}
        self._rng: dict[str, Any] = {}
        self.step = 0
        """The number of updates made when the copy was taken."""

    def _live(self) -> State:
        state = self._session()
        assert state is not None, "the session is gone"
        return state

    def begin(self) -> None:
        """Take the first copy, once the run has its random numbers."""
        if not self._state:
            self.take()

    def at_boundary(self) -> None:
        """Take a copy if it is due."""
        clock = self._live().clock
        is_due = clock.step != self.step and clock.step % self._stepper.guard.policy.every == 0
        if is_due and self._stepper.window.count == 0:
            self.take()

    def take(self) -> None:
        """Copy the state; every rank must call this."""
        state = self._live()
        excluded, state._excluded = state._excluded, state._excluded | _POSITION
        try:
            self._state = map_tensors(_copy, state.state_dict())
        finally:
            state._excluded = excluded
        self._rng, self.step = capture_rng(), state.clock.step

    def restore(self) -> None:
        """Return to the copy, apart from the position in the data."""
        state = self._live()
        before, state._before_load = state._before_load, None
        mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0
        if mode:
            torch.cuda.set_sync_debug_mode(0)  # `Trainer(strict=True)` forbids waiting inside a step; this has to
        try:
            # An optimizer keeps the tensors it loads, so it is given a second copy.
            state.load_state_dict(map_tensors(torch.clone, self._state), strict=False)
        finally:
            state._before_load = before
            if mode:
                torch.cuda.set_sync_debug_mode(mode)
        restore_rng(self._rng)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if is_dtensor(tensor) else tensor.detach().to("cpu", copy=True)
