"""Images with the channels of a pixel side by side, which convolution kernels prefer."""

from typing import TYPE_CHECKING

from torch import nn

from drivetrain.core.errors import UnsupportedMethodError
from drivetrain.module.layout import channels_last_input, to_channels_last
from drivetrain.strategy.method import Method, NoConfig, Site, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext


class ChannelsLast(Method):
    """Channels-last kernels and inputs."""

    name, group, stage = "channels_last", "layout", Stage.MODULE
    why = "convolutions read the channels of a pixel in one go"

    def check(self, config: NoConfig, site: Site) -> None:
        if site.model is None:
            return
        if not any(isinstance(module, nn.Conv2d | nn.Conv3d) for module in site.model.modules()):
            raise UnsupportedMethodError(
                f"channels_last: {type(site.model).__name__} has no Conv2d or Conv3d, so there is no layout to change. Leave it out."
            )

    def apply(self, ctx: "PlanContext", config: NoConfig) -> None:
        count = to_channels_last(ctx.model)
        ctx.input_changes.append(channels_last_input)
        ctx.note(f"channels_last: {count} convolution kernels")
