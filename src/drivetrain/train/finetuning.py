"""Freezing parts of a model for fine-tuning, by group of layers.

A group is a direct child of the model. A layer is a leaf module, or a module that owns parameters next to its children
(then only those parameters count, as with `nn.MultiheadAttention.in_proj_weight`). Parameters of the model itself
belong to no group. Modules frozen in eval mode carry a mark, because `model.train()` at the next epoch would undo it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.wrapping import unwrap

BN_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_KEPT_IN_EVAL = "_kept_in_eval"  # the mark of a module whose mode outlasts model.train()


class LayerGroup(NamedTuple):
    """A direct child of the model."""

    layer_group_idx: tuple[int, int]
    """The group's index from the front and from the back, for example (0, -3)."""
    module: nn.Module
    is_frozen: bool
    """Whether any of its parameters is frozen; for a layer without parameters, whether it is in eval mode."""


class Layer(LayerGroup):
    """A module that owns parameters, or a leaf; with the index of its group."""


class ModelFreezer:
    """Freezes and unfreezes groups of layers. All parameters are unfrozen first.

    Args:
        model: the model; its direct children are the groups.
        freeze_batch_norms: freeze batch norms as well.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> freezer = ModelFreezer(model)
    >>> freezer.freeze()
    >>> [group.is_frozen for group in freezer.get_layer_groups()]
    [True, False, False]
    """

    def __init__(self, model: nn.Module, freeze_batch_norms: bool = False):
        self.model = model
        self.freeze_bn = freeze_batch_norms
        for parameter in _trainable(model):
            parameter.requires_grad = True
        self._layer_groups = list(unwrap(model).children())
        self._layers = [(index, layer) for index, group in enumerate(self._layer_groups) for layer in _layers(group)]
        self.num_groups = len(self._layer_groups)

    def get_layer_groups(self) -> list[LayerGroup]:
        """Return the groups in the model's order."""
        return [
            LayerGroup((index, index - self.num_groups), group, any(not p.requires_grad for p in _trainable(group)))
            for index, group in enumerate(self._layer_groups)
        ]

    def get_layers(self) -> list[Layer]:
        """Return the layers of all groups, in order."""
        return [Layer((index, index - self.num_groups), layer, self._is_frozen(layer)) for index, layer in self._layers]

    def get_trainable_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def freeze(self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False) -> None:
        """Freeze these groups, both ends included; by default all but the last."""
        self._change(from_index, to_index, trainable=False, set_mode=set_modules_as_eval)

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        """Unfreeze these groups, by default all, and return what became trainable as `{group: {"params": [...]}}`."""
        return self._change(from_index, to_index, trainable=True, set_mode=set_modules_as_training)

    def _change(
        self, from_index: int, to_index: int, trainable: bool, set_mode: bool
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        first, last = self._convert_idxs(from_index, to_index)
        changed: dict[int, dict[str, list[nn.Parameter]]] = {}
        for index, layer in self._layers:
            if not first <= index <= last or self._is_left_alone(layer):
                continue
            for parameter in _trainable(layer, recurse=False):
                if parameter.requires_grad != trainable:
                    parameter.requires_grad = trainable
                    changed.setdefault(index, {"params": []})["params"].append(parameter)
        if set_mode:
            for group in self._layer_groups[first : last + 1]:
                for module in group.modules():
                    if not self._is_left_alone(module):
                        module.training = trainable
                        module.__dict__.pop(_KEPT_IN_EVAL, None)
                        if not trainable:
                            module.__dict__[_KEPT_IN_EVAL] = True
        return changed

    def _is_left_alone(self, module: nn.Module) -> bool:
        return _module_is_batch_norm(module) and not self.freeze_bn

    def _is_frozen(self, layer: nn.Module) -> bool:
        flags = {parameter.requires_grad for parameter in _trainable(layer, recurse=False)}
        if len(flags) > 1:
            name = next(name for name, module in self.model.named_modules() if module is layer)
            listed = ", ".join(f"{n}: {p.requires_grad}" for n, p in layer.named_parameters(recurse=False))
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) is partly frozen: requires_grad is {listed}. A layer is "
                "frozen as a whole; set its parameters to one value (a parameter shared with another group has that "
                "group's)."
            )
        return not flags.pop() if flags else not layer.training

    def _convert_idxs(self, from_idx: int, to_idx: int) -> tuple[int, int]:
        """Return the range as two indexes from the front, the smaller first."""
        for index in (from_idx, to_idx):
            if not -self.num_groups <= index < self.num_groups:
                names = ", ".join(name for name, _ in unwrap(self.model).named_children())
                raise ConfigError(
                    f"layer group {index} is out of range: {type(unwrap(self.model)).__name__} has {self.num_groups} "
                    f"groups ({names}). Use indexes from {-self.num_groups} to {self.num_groups - 1}."
                )
        first, last = sorted((from_idx % self.num_groups, to_idx % self.num_groups))
        return first, last


def restore_frozen_modes(model: nn.Module) -> None:
    """Restore eval mode of modules that were frozen in it. The Trainer calls this after `model.train()`."""
    for module in model.modules():
        if _KEPT_IN_EVAL in module.__dict__:
            module.training = False


def _trainable(module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
    """Return the parameters that can have a gradient. Quantized weights are integers and cannot."""
    return [p for p in module.parameters(recurse) if p.is_floating_point() or p.is_complex()]


def _module_is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BN_MODULES)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module if it is a layer, then the layers below it: the order of `module.parameters()`."""
    is_leaf = next(module.children(), None) is None
    if is_leaf or next(module.parameters(recurse=False), None) is not None:
        yield module
    for child in module.children():
        yield from _layers(child)
