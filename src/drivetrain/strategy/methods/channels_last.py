"""Images with the channels of a pixel side by side, which convolution kernels prefer."""

from typing import TYPE_CHECKING

from torch import nn

from drivetrain.core.errors import ConflictError, UnsupportedMethodError
from drivetrain.module.convolutions import channels_last_input, to_channels_last
from drivetrain.strategy.method import Method, NoConfig, Option, Site, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.candidates import Candidate
    from drivetrain.strategy.search.space import SearchScope


class ChannelsLast(Method):
    """Channels-last kernels and inputs."""

    name, group, stage = "channels_last", "layout", Stage.MODULE
    leaves_no_trace = True
    conflicts = dict.fromkeys(
        ("fsdp", "zero2"), "Sharding needs parameters that are contiguous, and kernels of this layout are not."
    )
    why = "convolutions read the channels of a pixel in one go"

    def options(self, scope: "SearchScope") -> list[Option]:
        return self.flag_options(scope, scope.profile.has_convolution)

    def fits(self, config: NoConfig, candidate: "Candidate") -> str | None:
        compiler = candidate.configs.get("native_dynamo")
        is_cut = compiler is not None and compiler.scope == "block"
        if candidate.data > 1 and candidate.divides_model:
            return "sharding needs contiguous parameters"
        return "blocks that are compiled one by one have a layout of their own" if is_cut else None

    def affect(self, effects: "Effects", config: NoConfig) -> None:
        effects.is_channels_last = True

    def label(self, config: NoConfig) -> str:
        return "channels last"

    def check(self, config: NoConfig, site: Site) -> None:
        axis = next((name for name in ("tensor", "pipe") if site.axis(name) > 1), None)
        if axis is not None and site.axis("data") * site.axis("zero") > 1:
            raise ConflictError(
                f"channels_last and data ranks with a {axis!r} axis cannot be used together: gradients are averaged by sharding there, "
                "which needs parameters that are contiguous, and kernels of this layout are not. Leave channels_last out."
            )
        if site.model is None:
            return
        if not any(isinstance(module, nn.Conv2d | nn.Conv3d) for module in site.model.modules()):
            raise UnsupportedMethodError(
                f"channels_last: {type(site.model).__name__} has no Conv2d or Conv3d, so there is no layout to change. Remove it."
            )

    def apply(self, ctx: "Application", config: NoConfig) -> None:
        count = to_channels_last(ctx.model)
        ctx.input_changes.append(channels_last_input)
        ctx.note(f"channels_last: {count} convolution kernels")
