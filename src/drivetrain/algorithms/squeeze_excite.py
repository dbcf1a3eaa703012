"""Squeeze-and-excitation (Hu et al., 2018, arXiv 1709.01507): weigh the channels of a layer by what the whole image shows."""

from typing import Any

from torch import Tensor, nn

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, inside, warn_no_effect
from drivetrain.core.arguments import check_counts, check_number
from drivetrain.core.errors import ConfigError
from drivetrain.module.surgery import replace_module_classes


class SqueezeExcite2d(nn.Module):
    """Multiplies each channel by a number between 0 and 1, computed from the mean of every channel.

    `latent_channels` is the width of the hidden layer: a count of at least 1, or a fraction of `num_features` below 1.
    """

    def __init__(self, num_features: int, latent_channels: float = 0.125):
        super().__init__()
        check_latent("SqueezeExcite2d", latent_channels)
        self.latent_channels = int(latent_channels if latent_channels >= 1 else latent_channels * num_features)
        if self.latent_channels < 1:
            raise ConfigError(
                f"SqueezeExcite2d(latent_channels={latent_channels}): {num_features} features leave no hidden channel. Use a "
                "larger fraction, or a count."
            )
        self.pool_and_mlp = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(num_features, self.latent_channels, bias=False),
            nn.ReLU(),
            nn.Linear(self.latent_channels, num_features, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input: Tensor) -> Tensor:
        return input * self.pool_and_mlp(input)[:, :, None, None]


class SqueezeExciteConv2d(nn.Module):
    """A convolution followed by squeeze-and-excitation of its output."""

    def __init__(self, *args: Any, latent_channels: float = 0.125, conv: nn.Conv2d | None = None, **kwargs: Any):
        super().__init__()
        self.conv = nn.Conv2d(*args, **kwargs) if conv is None else conv
        self.se = SqueezeExcite2d(self.conv.out_channels, latent_channels)

    def forward(self, input: Tensor) -> Tensor:
        return self.se(self.conv(input))

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, latent_channels: float = 0.125) -> "SqueezeExciteConv2d":
        """Return a layer that wraps a convolution."""
        return SqueezeExciteConv2d(conv=module, latent_channels=latent_channels)


def apply_squeeze_excite(
    model: nn.Module, latent_channels: float = 64, min_channels: int = 128, optimizers: Optimizers = None
) -> None:
    """Add squeeze-and-excitation after every convolution with at least `min_channels` inputs and outputs."""
    check_latent("apply_squeeze_excite", latent_channels)
    check_counts("apply_squeeze_excite", 0, min_channels=min_channels)
    done = inside(model, SqueezeExciteConv2d)

    def excite(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d)
        if module in done or min(module.in_channels, module.out_channels) < min_channels:
            return None
        return SqueezeExciteConv2d.from_conv2d(module, index, latent_channels)

    if not replace_module_classes(model, {nn.Conv2d: excite}, optimizers) and not done:
        warn_no_effect(
            f"SqueezeExcite found no Conv2d with at least {min_channels} input and output channels (min_channels) in "
            f"{type(model).__name__}."
        )


def check_latent(who: str, latent_channels: float) -> None:
    """Reject a hidden width that is not a positive number."""
    check_number("latent_channels", latent_channels, above=0, owner=who, hint=", a count, or a fraction below 1")


class SqueezeExcite(ModelSurgery):
    """Adds squeeze-and-excitation after the wide convolutions of the model."""

    function = staticmethod(apply_squeeze_excite)
    counts = {"squeeze_excite/num_squeeze_excite_layers": SqueezeExciteConv2d}

    def __init__(self, latent_channels: float = 64, min_channels: int = 128):
        check_latent("SqueezeExcite", latent_channels)
        check_counts("SqueezeExcite", 0, min_channels=min_channels)
        self.latent_channels, self.min_channels = latent_channels, min_channels
