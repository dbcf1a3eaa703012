"""Muon for hidden matrices and AdamW for everything else, as one optimizer.

Muon (Jordan et al., 2024) replaces the momentum of a weight matrix by the nearest orthogonal matrix. It is meant for matrices that
map one hidden space to another; embeddings, output heads, gains and biases stay with AdamW. Both are groups of one optimizer, so
one schedule drives both rates and keeps their ratio.
"""

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from drivetrain.core.arguments import check_counts, check_flag, check_numbers
from drivetrain.core.errors import ConfigError, DrivetrainWarning, unknown_name
from drivetrain.module.distributed_tensors import is_dtensor, like_sharded, local_part
from drivetrain.module.params import muon_groups
from drivetrain.optim.optimizers.graphed import GraphedDirections
from drivetrain.optim.optimizers.newton_schulz import ADJUSTMENTS, adjusted_rate, orthogonalise
from drivetrain.optim.optimizers.stepping import (
    ParamGroup,
    check_betas,
    check_rates,
    evaluate,
    local_parts,
    shrink,
    state_of,
    with_gradients,
    zeros_of,
)

_ADAM_ONLY = ("adam_lr", "adam_betas", "adam_eps", "adam_weight_decay", "adam_match")
_MUON_ONLY = ("momentum", "nesterov", "ns_steps", "adjust_lr", "cuda_graph")


class MuonHybrid(Optimizer):
    """Updates hidden matrices with Muon and everything else with AdamW.

    `params` is best a model, whose layers say what is hidden (`drivetrain.module.params.muon_groups`), or its `named_parameters()`,
    where `adam_match` names what is not. Groups may say so themselves: `{"params": ..., "muon": False}`. Convolution kernels are
    seen as (out, rest). `fused` is AdamW's; None leaves the choice to torch. `cuda_graph` records Muon's products once and starts them
    together, which pays where a network is small and the host is what takes the time.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> optimizer = MuonHybrid(model, lr=0.02, adam_lr=1e-3)
    >>> [(group["muon"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [(True, 0.02, 2), (False, 0.001, 4)]
    """

    takes_names = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.0,
        adam_lr: float = 3e-4,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam_weight_decay: float = 0.0,
        adam_match: Iterable[str] | str = ("*embed*", "*head*"),
        *,
        adjust_lr: Literal["original", "match_rms_adamw"] = "original",
        fused: bool | None = None,
        cuda_graph: bool = False,
    ):
        check_numbers("MuonHybrid", weight_decay=weight_decay, adam_eps=adam_eps, adam_weight_decay=adam_weight_decay)
        check_rates("MuonHybrid", lr=lr, adam_lr=adam_lr)
        for name, flag in {"nesterov": nesterov, "cuda_graph": cuda_graph}.items():
            check_flag(name, flag, owner="MuonHybrid")
        check_numbers("MuonHybrid", 0.0, 1.0, momentum=momentum)
        check_counts("MuonHybrid", 1, ns_steps=ns_steps)
        if adjust_lr not in ADJUSTMENTS:
            raise ConfigError(unknown_name("adjust_lr", adjust_lr, ADJUSTMENTS, where="MuonHybrid"))
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "weight_decay": weight_decay,
            "adjust_lr": adjust_lr,
            "adam_lr": adam_lr,
            "adam_betas": check_betas("MuonHybrid", adam_betas=adam_betas),
            "adam_eps": adam_eps,
            "adam_weight_decay": adam_weight_decay,
            "adam_match": (adam_match,) if isinstance(adam_match, str) else tuple(adam_match),
            "fused": fused,
            "cuda_graph": cuda_graph,
        }
        self._graphs: dict[int, GraphedDirections] = {}
        super().__init__(_split_model(params) if isinstance(params, nn.Module) else params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Take in a group, split into what Muon updates and what AdamW updates unless it says which with `muon`."""
        options = {name: value for name, value in param_group.items() if name not in ("params", "muon")}
        params = param_group["params"]
        members: list[object] = [params] if isinstance(params, Tensor) else list(params)
        for is_muon, own in self._sides(members, param_group.get("muon"), options):
            if own:
                super().add_param_group({"params": own, "muon": is_muon, **options})
                _keep_own_settings(self.param_groups[-1])

    def _sides(self, members: list[Any], muon: bool | None, options: Mapping[str, Any]) -> list[tuple[bool, list[Any]]]:
        if muon is not None:
            vectors = [_shown(one) for one in members if muon and _tensor(one).ndim < 2]
            if vectors:
                raise ConfigError(
                    f"MuonHybrid: a group with muon=True has parameters that are no matrices ({', '.join(vectors[:5])}). "
                    "Leave 'muon' out and they are put aside."
                )
            return [(bool(muon), members)]
        patterns = options.get("adam_match", self.defaults["adam_match"])
        if patterns and any(isinstance(one, Tensor) and one.ndim >= 2 for one in members):
            warnings.warn(
                "MuonHybrid was given parameters without names, so it cannot tell embeddings and heads from hidden layers: all matrices "
                "go to Muon. Give it the model or model.named_parameters(), or set adam_match=() if that is meant.",
                DrivetrainWarning,
                stacklevel=5,
            )
        hidden = [_tensor(one).ndim >= 2 and not _is_named(one, patterns) for one in members]
        return [(side, [one for one, is_hidden in zip(members, hidden) if is_hidden is side]) for side in (True, False)]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = evaluate(closure)
        for group in self.param_groups:
            parameters = with_gradients(group, "MuonHybrid")
            if parameters:
                (self._step_muon if group["muon"] else self._step_adam)(group, parameters)
        return loss

    def _step_muon(self, group: ParamGroup, parameters: list[Tensor]) -> None:
        momenta = state_of(self, parameters, "momentum_buffer", zeros_of)
        own, gradients = local_parts(momenta), local_parts(p.grad for p in parameters if p.grad is not None)
        torch._foreach_lerp_(own, gradients, 1 - group["momentum"])
        ahead = list(torch._foreach_lerp(gradients, own, group["momentum"])) if group["nesterov"] else own
        if group.get("cuda_graph"):
            self._step_recorded(group, parameters, ahead)
            return
        matrices = [_whole_matrix(update, momentum) for update, momentum in zip(ahead, momenta)]
        updates = orthogonalise(matrices, group["ns_steps"])
        lr, weights = group["lr"], local_parts(parameters)
        shrink(weights, lr * group["weight_decay"])
        for weight, update, matrix, parameter in zip(weights, updates, matrices, parameters):
            rate = adjusted_rate(lr, (matrix.shape[0], matrix.shape[1]), group["adjust_lr"])
            part = _own_part(update, parameter)
            if isinstance(rate, Tensor):
                weight.sub_(part * rate)
            else:
                weight.add_(part, alpha=-rate)

    def _step_recorded(self, group: ParamGroup, parameters: list[Tensor], ahead: list[Tensor]) -> None:
        """Do the rest of a step with one recorded graph."""
        if any(is_dtensor(parameter) or not parameter.is_cuda for parameter in parameters):
            raise ConfigError("MuonHybrid(cuda_graph=True) needs whole parameters on a CUDA device; leave it out here.")
        graphs = self.__dict__.setdefault("_graphs", {})  # a copied optimizer records its own
        key = id(parameters[0])  # groups are replaced when a state is loaded, parameters are not
        graph, settings = graphs.get(key), (group["ns_steps"], group["adjust_lr"])
        if graph is None or not graph.fits(ahead, *settings):
            graph = graphs[key] = GraphedDirections(ahead, parameters, *settings)
        directions, lr = graph(ahead), group["lr"]
        shrink(parameters, lr * group["weight_decay"])
        if isinstance(lr, Tensor):
            torch._foreach_sub_(parameters, torch._foreach_mul(directions, lr))
        else:
            torch._foreach_add_(parameters, directions, alpha=-lr)

    def _step_adam(self, group: ParamGroup, parameters: list[Tensor]) -> None:
        fused = group["fused"]
        counts = state_of(self, parameters, "step", lambda p: torch.zeros((), device=p.device if fused else "cpu"))
        beta1, beta2 = group["betas"]
        adamw(
            local_parts(parameters),
            local_parts(p.grad for p in parameters if p.grad is not None),
            local_parts(state_of(self, parameters, "exp_avg", zeros_of)),
            local_parts(state_of(self, parameters, "exp_avg_sq", zeros_of)),
            [],
            counts,
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _split_model(model: nn.Module) -> list[ParamGroup]:
    """Return the two groups of a model, with the names of its parameters."""
    split = muon_groups(model)
    sides = ((True, split.muon), (False, split.other))
    return [{"params": list(named), "muon": is_muon} for is_muon, named in sides if named]


def _keep_own_settings(group: ParamGroup) -> None:
    """Leave in a group what its side reads, under the names that schedulers and torch know."""
    if group["muon"]:
        del group["fused"]
    else:
        group["lr"], group["weight_decay"] = group["adam_lr"], group["adam_weight_decay"]
        group["betas"], group["eps"] = group["adam_betas"], group["adam_eps"]
        for name in _MUON_ONLY:
            del group[name]
    for name in _ADAM_ONLY:
        del group[name]


def _whole_matrix(update: Tensor, like: Tensor) -> Tensor:
    """Return an update as a matrix (out, rest); of a sharded one all ranks gather the whole."""
    if is_dtensor(like):
        from torch.distributed.tensor import DTensor

        mesh, places = like.device_mesh, like.placements  # type: ignore[attr-defined]
        whole = DTensor.from_local(update, mesh, places, run_check=False, shape=like.shape, stride=like.stride())
        update = whole.full_tensor()
    return update.flatten(1)


def _own_part(update: Tensor, parameter: Tensor) -> Tensor:
    """Return an update in its parameter's shape, of a sharded one this rank's part."""
    whole = update.reshape(parameter.shape)
    return local_part(like_sharded(whole, parameter)) if is_dtensor(parameter) else whole


def _tensor(member: Any) -> Tensor:
    return member[1] if isinstance(member, tuple) else member


def _shown(member: Any) -> str:
    return member[0] if isinstance(member, tuple) else str(tuple(member.shape))


def _is_named(member: object, patterns: Iterable[str]) -> bool:
    return isinstance(member, tuple) and any(fnmatch.fnmatchcase(member[0], pattern) for pattern in patterns)
