"""The gradient and the update of each parameter in a step, in a form that is small enough to keep and send.

A global norm hides a lost embedding or a frozen layer, and full gradients would need the memory of the model again. A sketch of 64
signed sums gives the norm of a difference to about a tenth (the count sketch of Charikar et al., 2002). Sketches are linear, so the norm
of the difference of two sketches estimates that of the two gradients.
"""

import base64
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from drivetrain.module.distributed_tensors import whole_tensor
from drivetrain.module.wrapping import named_clean_parameters
from drivetrain.runtime.device import wide_dtype
from drivetrain.strategy.optimizer_recipe import OptimizerRecipe

_BUCKETS, _CHUNK = 64, 1 << 20
_NOISE = {"exact": 1e-3, "tf32": 1e-2, "mixed": 0.05, "low": 0.1}
"""By the loosest method of a plan: the relative noise in a gradient for which the optimizer's sensitivity is measured."""
_FLOOR = {"exact": 1e-5, "tf32": 1e-3, "mixed": 1e-2, "low": 1e-2}
"""Parameters whose gradient is smaller than this share of the largest one have an error relative to that share: below is rounding."""
_MOST = 0.5
"""Whatever plain autocast does, a gradient may not be further away than this: a lost one has the error 1."""
_ZERO = 1e-3
"""A gradient or a movement below this share of the plain one is none."""


@dataclass(frozen=True, kw_only=True)
class PerParameter:
    """Sketches by parameter name, as plain data."""

    gradients: dict[str, str] = field(default_factory=dict)
    movements: dict[str, str] = field(default_factory=dict)
    """How the optimizer's first step moved each parameter; empty where that is not known."""
    sensitivity: dict[str, dict[str, float]] = field(default_factory=dict)
    """For each level of noise: by how much, relatively, noise in the gradient changes a movement. The sign that Adam takes is sensitive."""
    rounding: dict[str, float] = field(default_factory=dict)
    """By how much plain autocast in bfloat16 changes each gradient, relatively; a plan in 16 bits may do about the same."""
    split: dict[str, float] = field(default_factory=dict)
    """By how much each gradient differs, relatively, when the plain batch is divided into halves: nothing for a mean over samples."""


def sketch(tensor: Tensor) -> str:
    """Return the norm of a tensor and signed sums of its elements. A sharded tensor is gathered first."""
    whole = whole_tensor(tensor.detach()).to_dense()
    flat = (torch.view_as_real(whole) if whole.is_complex() else whole).reshape(-1)
    kind = wide_dtype(flat.device)
    total = torch.zeros(_BUCKETS, dtype=kind, device=flat.device)
    square = torch.zeros((), dtype=kind, device=flat.device)
    signs = _signs(str(flat.device))
    for index, part in enumerate(flat.split(_CHUNK)):
        wide = part.to(kind)
        square += wide.square().sum()
        signed = wide * signs[: len(wide)]
        if index % 3 == 1:  # so that equal chunks do not add up alike
            signed = -signed
        total += nn.functional.pad(signed, (0, -len(signed) % _BUCKETS)).view(-1, _BUCKETS).sum(0)
    numbers = torch.cat([square.sqrt().view(1), total]).float().cpu()
    return base64.b64encode(numbers.numpy().tobytes()).decode()


@cache
def _signs(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8) * 2 - 1).to(device)


def _numbers(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).double()


def norm_of(sketches: Mapping[str, str]) -> float:
    """Return the norm of all parameters together."""
    return math.sqrt(sum(float(_numbers(text)[0]) ** 2 for text in sketches.values()))


def gradients_of(model: nn.Module, optimizer: object = None) -> dict[str, str]:
    """Return sketches of the gradients of a model's parameters, or of the copies that an optimizer trains instead."""
    copies = _copies(optimizer)
    found = {}
    for name, parameter in named_clean_parameters(model):
        grad = parameter.grad if parameter.grad is not None else getattr(copies.get(id(parameter)), "grad", None)
        if grad is not None:
            found[name] = sketch(grad)
    return found


def _copies(optimizer: object) -> dict[int, Tensor]:
    inner = getattr(optimizer, "inner", optimizer)
    return {id(parameter): master for parameter, master in getattr(inner, "_served", ())}


@contextmanager
def watch_movements(model: nn.Module, optimizer: object = None) -> Iterator[dict[str, str]]:
    """Yield a dict that afterwards holds sketches of the update of each trained parameter."""
    copies = _copies(optimizer)
    held = {name: copies.get(id(p), p) for name, p in named_clean_parameters(model) if p.requires_grad}
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    found: dict[str, str] = {}
    yield found
    for name, tensor in held.items():
        found[name] = sketch(tensor.detach() - before.pop(name))


def plain_numbers(model: nn.Module, recipe: OptimizerRecipe | None) -> PerParameter:
    """Return gradients and updates of a plain model whose gradients have been computed. Its parameters are unchanged afterwards."""
    gradients = gradients_of(model)
    if recipe is None:
        return PerParameter(gradients=gradients)
    held = {name: p for name, p in model.named_parameters() if p.grad is not None}
    kept = {name: parameter.detach().clone() for name, parameter in held.items()}
    plain = {name: parameter.grad for name, parameter in held.items() if parameter.grad is not None}
    generator = torch.Generator().manual_seed(0)
    norms = {name: float(grad.norm()) for name, grad in plain.items()}
    largest = max(norms.values(), default=0.0)
    found: dict[str, dict[str, str]] = {}
    try:
        for level, noise in {"": 0.0, **_NOISE}.items():
            for name, parameter in held.items():
                grad = plain[name]
                norm = max(norms[name], _FLOOR.get(level, 0.0) * largest)  # a bias of attention keys has rounding alone
                size = noise * norm / math.sqrt(max(1, grad.numel()))
                drawn = torch.randn(grad.shape, generator=generator).to(grad) if noise else 0.0
                parameter.grad = grad + size * drawn
            optimizer = recipe.make(model)
            with watch_movements(model) as found[level]:
                optimizer.step()
            for name, parameter in held.items():
                parameter.data.copy_(kept[name])
    except Exception:  # an optimizer that needs a closure, or has no memory: gradients are compared alone
        return PerParameter(gradients=gradients)
    finally:
        for name, parameter in held.items():
            parameter.data.copy_(kept[name])
            parameter.grad = plain[name]
    base = found.pop("")
    sensitivity = {
        level: {name: _difference(base[name], other[name]) for name in base} for level, other in found.items()
    }
    return PerParameter(gradients=gradients, movements=base, sensitivity=sensitivity)


def relative_errors(
    exact: Mapping[str, str], other: Mapping[str, str], level: str, least: float | None = None
) -> dict[str, float]:
    """Return the relative differences of gradients that are above `least`; None: the noise of the level. See `_compared` for tiny ones."""
    floor = _FLOOR[level] * max((float(_numbers(text)[0]) for text in exact.values()), default=0.0)
    found = {name: _difference(text, other[name], floor) for name, text in exact.items() if name in other}
    return {name: error for name, error in found.items() if error > (_NOISE[level] if least is None else least)}


def _difference(expected: str, other: str, floor: float = 0.0) -> float:
    """Return the norm of the difference of two sketched tensors, relative to the first."""
    first, second = _numbers(expected), _numbers(other)
    size = max(float(first[0]), floor)
    return float((first - second)[1:].norm()) / size if size > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A parameter whose gradient or update differs."""

    name: str
    what: str
    error: float
    allowed: float
    is_lost: bool = False
    """Whether the parameter gets nothing at all."""

    @property
    def is_movement(self) -> bool:
        """Whether the optimizer's update differs, and not the gradient."""
        return "movement" in self.what

    def __str__(self) -> str:
        return f"{self.name}: {self.what} (relative error {self.error:.3g}, allowed {self.allowed:.3g})"


def compare(expected: PerParameter, found: PerParameter, level: str, tolerance: float) -> list[Finding]:
    """Return the parameters whose gradient or update differs from the plain model's: gradients first, the largest difference first."""
    rounding = expected.rounding if level in ("mixed", "low") else {}
    usual = {name: min(_MOST, 2 * error) for name, error in rounding.items()}
    findings = _compared("gradient", expected.gradients, found.gradients, level, tolerance, usual)
    if expected.movements and found.movements:
        trained = {name: text for name, text in expected.movements.items() if name in expected.gradients}
        more = {name: max(1.0, error / _NOISE[level]) for name, error in rounding.items()}
        allowance = {
            name: max(usual.get(name, 0.0), 3 * more.get(name, 1.0) * error)
            for name, error in expected.sensitivity.get(level, {}).items()
        }
        findings += _compared("movement", trained, found.movements, level, tolerance, allowance)
    return findings


def _compared(
    what: str,
    expected: Mapping[str, str],
    found: Mapping[str, str],
    level: str,
    tolerance: float,
    allowance: Mapping[str, float],
) -> list[Finding]:
    norms = {name: float(_numbers(text)[0]) for name, text in expected.items()}
    floor = _FLOOR[level] * max(norms.values(), default=0.0)
    findings = []
    for name, text in expected.items():
        if norms[name] <= 1e-3 * floor:
            continue  # rounding alone
        allowed = max(tolerance, allowance.get(name, 0.0))
        lost = None if name in found else f"no {what}"
        if lost is None and float(_numbers(found[name])[0]) <= _ZERO * norms[name] and norms[name] > floor:
            lost = f"the {what} is zero"
        error = 1.0 if lost else _difference(text, found[name], floor)
        if lost or not error <= allowed:
            shown = lost or f"another {what}"
            findings.append(Finding(name=name, what=shown, error=error, allowed=allowed, is_lost=bool(lost)))
    return sorted(findings, key=lambda finding: -finding.error if math.isfinite(finding.error) else -math.inf)
