"""Layer freezing (Brock et al., 2017, arXiv 1706.04983): early layers converge first, so stop training them first.

A frozen layer's weights get no gradient any more, which saves their part of the backward pass. The last layer is never frozen.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from drivetrain.algorithms.surgery import model_of
from drivetrain.algorithms.utils.run import elapsed_fraction
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.core.arguments import check_fractions
from drivetrain.core.types import StateDict
from drivetrain.module.ddp import rewrap_ddp
from drivetrain.module.wrapping import is_fully_sharded, unwrap


def freeze_layers(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
) -> tuple[int, float]:
    """Freeze the layers that are due at a point of the run and take them out of the optimizers.

    Returns how many layers are frozen and which fraction of them.
    """
    layers = _layers(model)
    depth, fraction = _depth(len(layers), current_duration, freeze_start, freeze_level)
    frozen = _freeze(model, layers[:depth])
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        for group in optimizer.param_groups:
            if "param_names" in group:
                named = zip(group["param_names"], group["params"])
                group["param_names"] = [name for name, p in named if p not in frozen]
            group["params"] = [p for p in group["params"] if p not in frozen]
        for parameter in frozen:
            optimizer.state.pop(parameter, None)
    return depth, fraction


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules that have parameters, in the order of definition, without the last one.

    A layer whose weights are parametrized (WeightStandardization, weight norm) is a leaf with its parametrizations.
    """
    modules = list(unwrap(model).modules())
    parts = {part for m in modules if is_parametrized(m) for part in m.get_submodule("parametrizations").modules()}
    own = [m for m in modules if m not in parts and parts.issuperset(m.children())]
    return [m for m in own if next(m.parameters(), None) is not None][:-1]


def _depth(layers: int, elapsed: float, start: float, level: float) -> tuple[int, float]:
    fraction = level * (elapsed - start) / (1 - start) if elapsed > start else 0.0
    return int(round(fraction * layers, 9)), fraction


def _freeze(model: nn.Module, layers: list[nn.Module]) -> set[nn.Parameter]:
    """Freeze the parameters that no layer outside the given ones uses: a tied weight trains as long as its last layer."""
    others = set(unwrap(model).modules()).difference(*(layer.modules() for layer in layers))
    used = {parameter for module in others for parameter in module.parameters(recurse=False)}
    frozen = {parameter for layer in layers for parameter in layer.parameters()} - used
    for parameter in frozen:
        parameter.requires_grad = False
        parameter.grad = None
    return frozen


class LayerFreezing(Algorithm):
    """Freezes more and more layers from `freeze_start` on, up to `freeze_level` of them at the end.

    The optimizer keeps its groups, so that its state stays aligned and a resumed run continues exactly: it also acts after loading,
    to freeze what was frozen. A model in DDP is wrapped again, because DDP waits for all registered gradients.
    """

    allow_multiple = False
    events = frozenset({Event.AFTER_LOAD, Event.EPOCH_END})
    writes = ("model",)

    def __init__(self, freeze_start: float = 0.5, freeze_level: float = 1.0):
        check_fractions("LayerFreezing", freeze_start=freeze_start, freeze_level=freeze_level)
        if freeze_start == 1:
            raise ConfigError("LayerFreezing(freeze_start=1): nothing would ever be frozen. Give a fraction below 1.")
        self.freeze_start, self.freeze_level = freeze_start, freeze_level
        self._frozen = 0

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model = model_of(state, str(self))
        layers = _layers(model)
        if is_fully_sharded(unwrap(model)):
            raise ConfigError(
                "LayerFreezing cannot freeze parts of a sharded model. Train it without sharding, or freeze before."
            )
        depth = self._frozen
        if event is Event.EPOCH_END:
            elapsed = elapsed_fraction(state, str(self))
            depth, fraction = _depth(len(layers), elapsed, self.freeze_start, self.freeze_level)
            logger.log_metrics({"layer_freezing/layers_frozen": depth, "layer_freezing/percentage_frozen": fraction})
        _freeze(model, layers[:depth])
        if depth > self._frozen:
            self._frozen = depth
            state.model = rewrap_ddp(state.model)

    def state_dict(self) -> StateDict:
        return {"frozen": self._frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._frozen = state["frozen"]  # the layers are frozen once everything is loaded
