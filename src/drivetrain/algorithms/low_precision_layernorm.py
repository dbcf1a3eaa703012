"""Layer norms that stay in the low precision of autocast, instead of going to float32 and back.

Autocast computes norms in float32: exact, but each one reads and writes twice the memory. Where the model tolerates it, normalising
in bfloat16 or float16 saves that traffic; statistics are still accumulated in float32 inside the kernel.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.algorithms.surgery import LowPrecisionNorm, Optimizers, in_autocast_dtype, replace_norms, share_tensors
from drivetrain.module.precision import Precision


class LPLayerNorm(nn.LayerNorm):
    """A layer norm that computes in the precision of autocast where that is on, and as usual elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return in_autocast_dtype(
            lambda x, w, b: F.layer_norm(x, self.normalized_shape, w, b, self.eps), x, self.weight, self.bias
        )

    @staticmethod
    def from_layernorm(module: nn.LayerNorm, module_index: int = -1) -> "LPLayerNorm":
        """Return a layer that replaces a layer norm and uses its parameters."""
        new = LPLayerNorm(module.normalized_shape, module.eps, module.elementwise_affine, device="meta")
        return share_tensors(new, module)


def apply_low_precision_layernorm(
    model: nn.Module, precision: str | Precision | None = None, optimizers: Optimizers = None
) -> None:
    """Replace the layer norms of a model; `precision` None means that the caller's own autocast is not known here."""
    replace_norms(model, nn.LayerNorm, LPLayerNorm, LPLayerNorm.from_layernorm, precision, optimizers)


class LowPrecisionLayerNorm(LowPrecisionNorm):
    """Lets the layer norms of the model compute in the run's mixed precision."""

    replace = staticmethod(apply_low_precision_layernorm)
