"""Channels-last memory: convolutions read each pixel's channels in one go, which tensor cores and CPU kernels prefer.

Values and shapes stay; only the order in memory changes. Inputs have to follow, so the model converts what it is given.
"""

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, warn_no_effect
from drivetrain.core.types import Settings
from drivetrain.module.convolutions import channels_last_input, to_channels_last
from drivetrain.module.surgery import check_unwrapped


def apply_channels_last(model: nn.Module, optimizers: Optimizers = None) -> None:
    """Lay out the convolutions of a model channels-last and let it convert its inputs.

    Parameters stay the same objects, so `optimizers`, which every function of this kind takes, need no change.
    """
    check_unwrapped(model, "apply_channels_last")
    if to_channels_last(model) == 0:
        warn_no_effect(f"ChannelsLast found no 2-D or 3-D convolution in {type(model).__name__}.")
        return
    if _convert_inputs not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_convert_inputs, with_kwargs=True)


def _convert_inputs(
    module: nn.Module, args: tuple[object, ...], kwargs: Settings
) -> tuple[tuple[object, ...], Settings]:
    return tree_map_only(Tensor, channels_last_input, (args, kwargs))


class ChannelsLast(ModelSurgery):
    """Changes the memory layout of the model's convolutions and of its inputs."""

    function = staticmethod(apply_channels_last)
    writes = ("model",)
    after = ("#surgery",)
    tags: frozenset[str] = frozenset()

    @staticmethod
    def required_on_load() -> bool:
        return False  # a layout is not part of what is saved
