"""SOAP (Vyas et al., 2024, arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

For a matrix gradient G two averages are kept, of G G^T and of G^T G. Their eigenvectors are the axes along which Adam's second
moment is taken; they change slowly, so they are refreshed by one QR step every few updates. Vectors, and sides longer than
`max_dim`, keep their own axes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from drivetrain.core.arguments import check_counts, check_numbers
from drivetrain.core.errors import ConfigError
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.optim.optimizers.stepping import Closure, ParamGroup, check_betas, check_rates, evaluate, with_gradients

_SIDES = ("left", "right")


class SOAP(Optimizer):
    """Adam in a rotated basis; the first step only initialises the basis and changes no weight."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_dim: int = 10000,
    ):
        check_rates("SOAP", lr=lr)
        check_numbers("SOAP", eps=eps, weight_decay=weight_decay)
        check_counts("SOAP", 1, precondition_frequency=precondition_frequency, max_dim=max_dim)
        adam = {"lr": lr, "betas": check_betas("SOAP", betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**adam, "precondition_frequency": precondition_frequency, "max_dim": max_dim})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = evaluate(closure)
        for group in self.param_groups:
            for parameter in with_gradients(group, "SOAP"):
                if is_dtensor(parameter) or parameter.is_complex():
                    raise ConfigError(
                        "SOAP rotates whole real matrices; sharded and complex parameters are not supported. Use AdamW."
                    )
                self._update(group, parameter)
        return loss

    def _update(self, group: ParamGroup, parameter: Tensor) -> None:
        state = self.state[parameter]
        assert parameter.grad is not None
        gradient = parameter.grad.flatten(1) if parameter.ndim > 2 else parameter.grad
        # In a bucket of DDP it is aligned differently in each run, and its products are then rounded differently.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        (beta1, beta2), lr = group["betas"], group["lr"]
        if not state:
            self._begin(state, gradient, group)
            return
        state["updates"] += 1
        count = state["updates"]
        momentum = state["exp_avg"].lerp_(gradient, 1 - beta1)
        rotated = _rotate(gradient, state)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        scale = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        update = _rotate(_rotate(momentum, state).div_(scale), state, back=True)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.sub_(update.view_as(parameter) * (lr / (1 - beta1**count)))
        _average(state, gradient, beta2)
        if count % group["precondition_frequency"] == 0:
            _refresh(state)

    def _begin(self, state: StateDict, gradient: Tensor, group: ParamGroup) -> None:
        state["updates"] = 0
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        if gradient.ndim == 2:
            for side, size in zip(_SIDES, gradient.shape):
                if size <= group["max_dim"]:
                    state[side] = gradient.new_zeros(size, size)
        _average(state, gradient, group["betas"][1])
        for side in _SIDES:
            if side in state:
                state[f"{side}_basis"] = _laid_out(_eigenvectors(state[side]), gradient)


def _average(state: StateDict, gradient: Tensor, beta: float) -> None:
    if "left" in state:
        state["left"].lerp_(gradient @ gradient.mT, 1 - beta)
    if "right" in state:
        state["right"].lerp_(gradient.mT @ gradient, 1 - beta)


def _rotate(matrix: Tensor, state: StateDict, back: bool = False) -> Tensor:
    """Return a matrix in the eigenbases, or from there back; a side without a basis stays."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is not None:
        matrix = (left if back else left.mT) @ matrix
    if right is not None:
        matrix = matrix @ (right.mT if back else right)
    return matrix.clone() if matrix is state["exp_avg"] else matrix


def _wide(matrix: Tensor) -> Tensor:
    """Return a matrix in a type that torch can decompose."""
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Return the eigenvectors as columns, the largest eigenvalue first; a matrix that float32 cannot solve is solved in float64."""
    try:
        return torch.linalg.eigh(_wide(matrix))[1].flip(1)
    except torch.linalg.LinAlgError:  # nearly equal eigenvalues, as the rare rows of an embedding give
        return torch.linalg.eigh(matrix.double())[1].flip(1)


def _laid_out(basis: Tensor, like: Tensor) -> Tensor:
    """Return a basis row by row, as it comes back from a file: the order in memory decides how products round."""
    return basis.to(like).contiguous()


def _refresh(state: StateDict) -> None:
    """Bring the bases up to date by one step of orthogonal iteration, and the second moment into their order."""
    for dim, side in enumerate(_SIDES):
        if side not in state:
            continue
        average, basis = _wide(state[side]), _wide(state[f"{side}_basis"])
        order = torch.einsum("ij,ik,kj->j", basis, average, basis).argsort(descending=True)
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(dim, order)
        state[f"{side}_basis"] = _laid_out(torch.linalg.qr(average @ basis[:, order])[0], state[side])
