"""Muon for hidden matrices and AdamW for everything else, as one optimizer.

Muon (Jordan et al., 2024) replaces the momentum of a weight matrix by the nearest orthogonal matrix. It is meant for matrices that
map one hidden space to another; embeddings, output heads, gains and biases stay with AdamW. Both are groups of one optimizer, so
one schedule drives both rates and keeps their ratio.
"""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from drivetrain.core.arguments import check_choice, check_counts, check_flag, check_numbers
from drivetrain.core.errors import ConfigError, warn
from drivetrain.module.distributed_tensors import is_dtensor, like_sharded, local_part
from drivetrain.module.params import muon_groups
from drivetrain.optim.optimizers import stepping
from drivetrain.optim.optimizers.stepping import Closure, ParamGroup
from drivetrain.runtime.device import as_current

# ---------------------------------------------------------------------- orthogonalisation by Newton-Schulz iteration (Jordan et al., 2024)
#
# The quintic iteration drives all singular values towards one, roughly: its coefficients rise steeply at zero and do not converge. It runs
# in bfloat16 and only multiplies matrices. Small matrices of one shape are stacked, because many small products cost more to start than to
# compute.

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
_STACK_ELEMENTS = 1 << 24  # the largest stack made at once: 32 MiB in bfloat16
_CPU_ELEMENTS = 1 << 12  # on a CPU a product of larger matrices outweighs its start, and stacked products are slower

ADJUSTMENTS = ("original", "match_rms_adamw")
Member = Tensor | tuple[str, Tensor]
"""A parameter of a group, with its name where that is known."""


def orthogonalise(matrices: list[Tensor], steps: int = 5) -> list[Tensor]:
    """Return for each matrix one with the same row and column spaces and singular values near one, in bfloat16.

    >>> values = torch.linalg.svdvals(orthogonalise([torch.diag(torch.tensor([3.0, 1.0]))])[0].float())
    >>> bool((values > 0.6).all() and (values < 1.3).all())
    True
    """
    # Wide matrices have the smaller Gram matrix, so tall ones are transposed.
    wide = [matrix if _is_wide(matrix) else matrix.mT for matrix in matrices]
    done = list(wide)
    for places in _stacks(wide):
        stack = [wide[place].bfloat16() for place in places]
        results = [_iterate(stack[0], steps)] if len(stack) == 1 else _iterate(torch.stack(stack), steps)
        for place, result in zip(places, results):
            done[place] = result if _is_wide(matrices[place]) else result.mT
    return done


def adjusted_rate(lr: float | Tensor, shape: tuple[int, int], adjust_lr: str) -> float | Tensor:
    """Return the rate that gives updates of any shape the same effect: by aspect ratio, or with the size of AdamW's steps."""
    rows, columns = shape
    if adjust_lr == "match_rms_adamw":  # Liu et al., 2025, arXiv 2502.16982
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def _stacks(matrices: list[Tensor]) -> list[list[int]]:
    """Group the positions of matrices of one shape, in stacks of limited size."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        groups.setdefault(tuple(matrix.shape), []).append(place)
    stacks = []
    for (rows, columns), places in groups.items():
        is_large = matrices[places[0]].device.type == "cpu" and rows * columns > _CPU_ELEMENTS
        size = 1 if is_large else max(1, _STACK_ELEMENTS // (rows * columns))
        stacks += [places[start : start + size] for start in range(0, len(places), size)]
    return stacks


def _iterate(x: Tensor, steps: int) -> Tensor:
    """Run the iteration on a matrix, or on a stack of them."""
    a, b, c = COEFFICIENTS
    multiply = torch.addmm if x.ndim == 2 else torch.baddbmm
    norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


_WARM_UPS = 3


class GraphedDirections:
    """Turns updates of fixed shapes into directions for a rate of one, as one recorded CUDA graph; the next call overwrites the results.

    An update of a small network is many small products, and starting a kernel costs the host more than the kernel costs the device.
    """

    def __init__(self, updates: Sequence[Tensor], weights: Sequence[Tensor], steps: int, adjust_lr: str):
        self._inputs = [torch.empty_like(update).copy_(update) for update in updates]
        self._outputs = [torch.empty_like(weight) for weight in weights]
        self._steps, self._adjust_lr = steps, adjust_lr
        with as_current(weights[0].device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries choose kernels and take workspaces now, not while recording
                for _ in range(_WARM_UPS):
                    self._compute()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads, such as the one that pins batches, may call CUDA while this one records.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._compute()

    def __call__(self, updates: Sequence[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self._inputs, list(updates))
        self._graph.replay()
        return self._outputs

    def fits(self, updates: Sequence[Tensor], steps: int, adjust_lr: str) -> bool:
        """Return whether these updates are of the recorded kind, to be turned in the recorded way."""
        kinds = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in (self._inputs, updates)]
        return (steps, adjust_lr) == (self._steps, self._adjust_lr) and kinds[0] == kinds[1]

    def _compute(self) -> None:
        matrices = [update.flatten(1) for update in self._inputs]
        for output, matrix, direction in zip(self._outputs, matrices, orthogonalise(matrices, self._steps)):
            factor = adjusted_rate(1.0, (matrix.shape[0], matrix.shape[1]), self._adjust_lr)
            output.copy_(direction.float().mul_(factor).view(output.shape))


_ADAM_NAMES = ("lr", "betas", "eps", "weight_decay")
_ADAM_ONLY = (*(f"adam_{name}" for name in _ADAM_NAMES), "adam_match")
_MUON_ONLY = ("momentum", "nesterov", "ns_steps", "adjust_lr", "cuda_graph")


class MuonHybrid(Optimizer):
    """Updates hidden matrices with Muon and everything else with AdamW.

    `params` is best a model, whose layers show what is hidden (`drivetrain.module.params.muon_groups`), or its `named_parameters()`,
    where `adam_match` names what is not. Groups may set it themselves: `{"params": ..., "muon": False}`. In a group of both kinds `lr`
    and `weight_decay` are Muon's, `adam_lr` and `adam_weight_decay` are AdamW's. Convolution kernels are seen as (out, rest).

    `fused` is AdamW's; None leaves the choice to torch. `cuda_graph` records Muon's products once and starts them together, which pays
    where a network is small and the host is what takes the time.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> optimizer = MuonHybrid(model, lr=0.02, adam_lr=1e-3)
    >>> [(group["muon"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [(True, 0.02, 2), (False, 0.001, 4)]
    """

    takes_names = True

    def __init__(
        self,
        params: nn.Module | ParamsT,
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
        stepping.check_rates("MuonHybrid", lr=lr, adam_lr=adam_lr)
        for name, flag in {"nesterov": nesterov, "cuda_graph": cuda_graph}.items():
            check_flag(name, flag, owner="MuonHybrid")
        check_numbers("MuonHybrid", 0.0, 1.0, momentum=momentum)
        check_counts("MuonHybrid", 1, ns_steps=ns_steps)
        check_choice("adjust_lr", adjust_lr, ADJUSTMENTS, owner="MuonHybrid")
        adam_betas = stepping.check_betas("MuonHybrid", adam_betas, "adam_betas")
        adam_match = (adam_match,) if isinstance(adam_match, str) else tuple(adam_match)
        given = locals()
        defaults = {name: given[name] for name in ("lr", "weight_decay", "fused", *_MUON_ONLY, *_ADAM_ONLY)}
        self._graphs: dict[int, GraphedDirections] = {}
        if isinstance(params, nn.Module):
            split = muon_groups(params)
            sides = ((True, split.muon), (False, split.other))
            params = [{"params": list(named), "muon": is_muon} for is_muon, named in sides if named]
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, split into what Muon updates and what AdamW updates unless `muon` in it decides."""
        options = {name: value for name, value in param_group.items() if name not in ("params", "muon")}
        params = param_group["params"]
        members: list[Member] = [params] if isinstance(params, Tensor) else list(params)
        sides = [(is_muon, own) for is_muon, own in self._sides(members, param_group.get("muon"), options) if own]
        if not any(is_muon for is_muon, _ in sides):  # its `lr` can only be meant for AdamW
            options = {**{f"adam_{name}": options[name] for name in _ADAM_NAMES if name in options}, **options}
        for is_muon, own in sides:
            super().add_param_group({"params": own, "muon": is_muon, **options})
            # Keep what this side reads, under the names that schedulers and torch know.
            group = self.param_groups[-1]
            if not is_muon:
                group |= {name: group[f"adam_{name}"] for name in _ADAM_NAMES}
            for name in (*_ADAM_ONLY, *(("fused",) if is_muon else _MUON_ONLY)):
                del group[name]

    def _sides(self, members: list[Member], muon: bool | None, options: ParamGroup) -> list[tuple[bool, list[Member]]]:
        if muon is not None:
            others = [_shown(one) for one in members if muon and not _is_matrix(one)]
            if others:
                raise ConfigError(
                    f"MuonHybrid: a group with muon=True has parameters that are not matrices of real numbers ({', '.join(others[:5])}). "
                    "Remove 'muon', and AdamW updates them."
                )
            return [(bool(muon), members)]
        patterns = options.get("adam_match", self.defaults["adam_match"])
        if patterns and any(isinstance(one, Tensor) and one.ndim >= 2 for one in members):
            warn(
                "MuonHybrid was given parameters without names, so embeddings and heads cannot be found among them: all matrices "
                "go to Muon. Give it the model or model.named_parameters(), or set adam_match=() if this is intended."
            )
        hidden = [_is_matrix(one) and not _is_named(one, patterns) for one in members]
        return [(side, [one for one, is_hidden in zip(members, hidden) if is_hidden is side]) for side in (True, False)]

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = stepping.evaluate(closure)
        for group in self.param_groups:
            parameters = [p for p in stepping.with_gradients(group, "MuonHybrid") if p.numel()]
            if parameters:
                (self._step_muon if group["muon"] else self._step_adam)(group, parameters)
        return loss

    def _step_muon(self, group: ParamGroup, parameters: list[Tensor]) -> None:
        momenta = stepping.state_of(self, parameters, "momentum_buffer", stepping.zeros_of)
        own, gradients = stepping.local_parts(momenta), stepping.gradients_of(parameters)
        torch._foreach_lerp_(own, gradients, 1 - group["momentum"])
        ahead = list(torch._foreach_lerp(gradients, own, group["momentum"])) if group["nesterov"] else own
        if group.get("cuda_graph"):
            self._step_recorded(group, parameters, ahead)
            return
        matrices = [_whole_matrix(update, momentum) for update, momentum in zip(ahead, momenta)]
        updates = orthogonalise(matrices, group["ns_steps"])
        lr, weights = group["lr"], stepping.local_parts(parameters)
        stepping.shrink(weights, lr * group["weight_decay"])
        for weight, update, matrix, parameter in zip(weights, updates, matrices, parameters):
            rate = adjusted_rate(lr, (matrix.shape[0], matrix.shape[1]), group["adjust_lr"])
            stepping.subtract([weight], [_own_part(update, parameter)], rate)

    def _step_recorded(self, group: ParamGroup, parameters: list[Tensor], ahead: list[Tensor]) -> None:
        """Do the rest of a step with one recorded graph."""
        if any(is_dtensor(parameter) or not parameter.is_cuda for parameter in parameters):
            raise ConfigError("MuonHybrid(cuda_graph=True) needs unsharded parameters on a CUDA device. Remove it.")
        graphs = self.__dict__.setdefault("_graphs", {})  # a copied optimizer records its own
        key = id(parameters[0])  # groups are replaced when a state is loaded, parameters are not
        graph, settings = graphs.get(key), (group["ns_steps"], group["adjust_lr"])
        if graph is None or not graph.fits(ahead, *settings):
            graph = graphs[key] = GraphedDirections(ahead, parameters, *settings)
        directions, lr = graph(ahead), group["lr"]
        stepping.shrink(parameters, lr * group["weight_decay"])
        stepping.subtract(parameters, directions, lr)

    def _step_adam(self, group: ParamGroup, parameters: list[Tensor]) -> None:
        fused = group["fused"]
        counts = stepping.state_of(
            self, parameters, "step", lambda p: torch.zeros((), device=p.device if fused else "cpu")
        )
        beta1, beta2 = group["betas"]
        adamw(
            stepping.local_parts(parameters),
            stepping.gradients_of(parameters),
            stepping.local_parts(stepping.state_of(self, parameters, "exp_avg", stepping.zeros_of)),
            stepping.local_parts(stepping.state_of(self, parameters, "exp_avg_sq", stepping.zeros_of)),
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


def _is_matrix(member: Member) -> bool:
    tensor = member[1] if isinstance(member, tuple) else member
    return tensor.ndim >= 2 and not tensor.is_complex()


def _shown(member: Member) -> str:
    return member[0] if isinstance(member, tuple) else str(tuple(member.shape))


def _is_named(member: object, patterns: Iterable[str]) -> bool:
    return isinstance(member, tuple) and any(fnmatch.fnmatchcase(member[0], pattern) for pattern in patterns)
