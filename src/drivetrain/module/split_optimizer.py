"""An optimizer whose state is split over ranks (Rajbhandari et al., 2020, ZeRO stage 1) and saved as if it were not.

torch's ZeroRedundancyOptimizer must be asked to gather its state before it can be saved. Here `state_dict()` does it: every rank calls
it, as with every state that is split, and every rank gets the state that an optimizer on one process would have. Loading takes such a
state, from any number of ranks and from runs that did not split at all.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def split_optimizer(
    build: Callable[..., Optimizer], groups: Any, settings: Mapping[str, Any], process_group: Any
) -> Optimizer:
    """Return `build(groups, **settings)` with its state split over the ranks of a group."""
    made: Optimizer = _split_class()(list(groups), optimizer_class=build, process_group=process_group, **settings)
    return made


@cache
def _split_class() -> Any:
    """Return the class; it is made when it is first needed, because a run on one process does not load torch's."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class SplitOptimizer(ZeroRedundancyOptimizer):
        """Splits the state of an optimizer over ranks, and gathers it to be saved."""

        def state_dict(self) -> dict[str, object]:
            """Return the whole state, on the host; all ranks must call this together."""
            import torch.distributed as dist

            self._sync_param_groups(self.param_groups, self.optim.param_groups)  # type: ignore[attr-defined]
            own = _map_tensors(self.optim.state_dict(), lambda tensor: tensor.detach().cpu())
            parts: list[object] = [None] * self.world_size
            dist.all_gather_object(parts, own, group=self.process_group)
            self._all_state_dicts = parts
            try:
                return super().state_dict()
            finally:
                self._all_state_dicts = []

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Take this rank's part of a whole state."""
            whole = {**state_dict, "state": dict(state_dict["state"])}  # torch empties what is not this rank's
            super().load_state_dict(whole)
            self.state.clear()  # a second copy, which torch keeps and never updates
            for group in self.optim.param_groups:
                if group.get("fused") or group.get("capturable"):
                    for parameter in group["params"]:
                        _count_on_device(self.optim.state.get(parameter, {}), parameter)

    return SplitOptimizer


def _count_on_device(state: dict[str, Any], parameter: Tensor) -> None:
    """Put the step count where kernels that read it on the device look for it."""
    if isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].to(parameter.device)


def _map_tensors(value: object, change: Callable[[Tensor], Tensor]) -> object:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, change, value)
