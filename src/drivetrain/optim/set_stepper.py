"""An `OptimSet` in a loop that is written for one optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from drivetrain.core.time import Clock
from drivetrain.module.accumulation import AccumulationWindow, Count, widened
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.module.stepper import Stepper
from drivetrain.optim.optim_set import OptimSet


class SetStepper(Stepper):
    """Passes each call of the loop to the units, whose own steppers weigh, scale, clip and step.

    Its window counts batches for the loop; gradients inside a window are saved with the units.
    """

    optimizer: OptimSet

    def __init__(
        self, units: OptimSet, window: AccumulationWindow, clock: Clock, policy: NonFinitePolicy | None = None
    ):
        super().__init__(units, window, policy=policy)
        self._clock = clock
        self._weight: Count = 1.0  # of the batch in hand, relative to the first one of the run

    def prepare(self, *, is_split: bool = False, is_exchanged: bool = False, tests: bool = True) -> None:
        """Decide what can be decided once, when optimizer and model are final."""
        has_long_units = any(unit.accum_grad > 1 for unit in self.optimizer.values())
        super().prepare(is_split=is_split or has_long_units, is_exchanged=is_exchanged, tests=tests)
        self.is_simple = False

    @property
    def _judges(self) -> bool:
        return True  # each unit tests its own gradients

    @property
    def parameters(self) -> list[Tensor]:
        """What the next step updates."""
        return list(self.optimizer.due_parameters())

    def begin(self, last: bool) -> None:
        """Take the next batch into the windows of all units."""
        self.window.begin(last)
        plan = self.optimizer.begin_batch(self._clock.batch + 1, self._clock.epoch + 1, last=last)
        self.window.closes, self.synchronises = plan.closes, plan.ddp_sync

    def weigh(
        self,
        loss: Tensor,
        items: Count,
        everywhere: Count | None,
        *,
        reference: Count | None = None,
        is_last_part: bool = True,
        is_whole: bool = False,
    ) -> Tensor:
        """Keep what the batch counts for; each unit weighs its own loss."""
        if self.window.is_sum:
            self._weight = items
        else:
            self._refer_to(items if reference is None else reference)
            assert self.window.reference is not None
            self._weight = widened(items) / self.window.reference
        return loss

    def weigh_normalised(self, loss: Tensor) -> Tensor:
        """Undo the average over ranks; each unit divides by the length of its window."""
        self._weight = 1.0
        return loss * self.window.world

    def use_sums(self, is_sum: bool) -> None:
        """Add losses up instead of averaging them, or not; also in the windows of units."""
        for window in (self.window, *(unit.window for unit in self.optimizer.values())):
            window.is_sum = is_sum

    def backward(self, loss: Tensor, losses: Mapping[str, Tensor] | None = None, **kwargs: object) -> None:
        """Run the passes of all active units; `losses` are the losses by name."""
        self.optimizer.backward({**(losses or {}), "loss": loss}, weight=self._weight)

    def finish(self) -> None:
        """Complete the gradients of the units whose windows close."""
        self.optimizer.finish_gradients()

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Step the units whose windows close."""
        self.was_skipped = False
        self.optimizer.step(closure)

    def leave_out(self) -> None:
        """End the windows that close without updating anything."""
        self.was_skipped = True
        self.optimizer.leave_out()

    def left_out(self) -> Sequence[bool | Tensor]:
        """Return which units have left their last update out."""
        return self.optimizer.skipped

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window as it was; units restore their own."""
        super().load_state_dict(state)
        if state["window"].get("world", self.window.world) != self.window.world:
            self.window.is_plain = False  # what was collected elsewhere has weights, so what is added needs them too

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return []  # units save their own gradients
