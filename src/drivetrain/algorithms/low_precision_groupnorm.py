"""Group norms that stay in the low precision of autocast; see `low_precision_layernorm` for the reasoning."""

import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.algorithms.surgery import LowPrecisionNorm, Optimizers, in_autocast_dtype, replace_norms, share_tensors
from drivetrain.module.precision import Precision


class LPGroupNorm(nn.GroupNorm):
    """A group norm that computes in the precision of autocast where that is on, and as usual elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return in_autocast_dtype(
            lambda x, w, b: F.group_norm(x, self.num_groups, w, b, self.eps), x, self.weight, self.bias
        )

    @staticmethod
    def from_groupnorm(module: nn.GroupNorm, module_index: int = -1) -> "LPGroupNorm":
        """Return a layer that replaces a group norm and uses its parameters."""
        new = LPGroupNorm(module.num_groups, module.num_channels, module.eps, module.affine, device="meta")
        return share_tensors(new, module)


def apply_low_precision_groupnorm(
    model: nn.Module, precision: str | Precision | None = None, optimizers: Optimizers = None
) -> None:
    """Replace the group norms of a model; `precision` None means that the caller's own autocast is not known here."""
    replace_norms(model, nn.GroupNorm, LPGroupNorm, LPGroupNorm.from_groupnorm, precision, optimizers)


class LowPrecisionGroupNorm(LowPrecisionNorm):
    """Lets the group norms of the model compute in the run's mixed precision."""

    replace = staticmethod(apply_low_precision_groupnorm)
