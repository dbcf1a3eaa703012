"""Find out where a block that is split over ranks can run on pieces of the sequence (Korthikanti et al., 2022, arXiv 2205.05198).

In a pre-norm block everything between two pairs of split layers treats positions one by one: norms, dropouts, residual sums. A norm passes
the whole sequence to the layers behind it, and the layer that closes a pair returns pieces. Which norms and layers these are is found by
running one block of each family on made-up weights, once for every rank with that rank's piece, while every tensor is marked as a piece or
as whole. The output must be the rank's piece of the whole result. A parameter that meets a piece outside a norm is rejected, because its
gradient would be that of a part.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain.core.errors import ConfigError, first_line
from drivetrain.module.blocks import find_blocks
from drivetrain.module.probing import LENGTH, floats_in, tensors_in
from drivetrain.module.tensor_parallel import is_splittable
from drivetrain.module.tensor_trials import BlockTrial, agree, inputs_of_blocks, isolated_trial, structure_of
from drivetrain.module.wrapping import user_class

_PIECE, _LABEL = "_is_piece", "_label"  # set on tensors: whether they are pieces; which module they come from


@dataclass(kw_only=True)
class PiecePlan:
    """Where the sequence is cut and made whole, by dotted names."""

    blocks: dict[str, bool] = field(default_factory=dict)
    """Blocks that run on pieces; whether each is the last of its family."""
    norms: list[str] = field(default_factory=list)
    """Norms that take pieces and return the whole sequence."""
    closers: list[str] = field(default_factory=list)
    """Modules that take the whole sequence and return pieces."""


def find_pieces(model: nn.Module, styles: Mapping[str, object], size: int) -> PiecePlan:
    """Return where the blocks of a model, split as `styles` says, can run on pieces; what cannot is rejected with the reason."""
    plan = PiecePlan()
    families = [family for family in find_blocks(model) if family.repeats]
    length = max(LENGTH, 2 * size)
    inputs = inputs_of_blocks(model, families, length)
    for family in families:
        known: dict[object, tuple[set[str], set[str]]] = {}
        for name, block in family.named:
            own = {layer.removeprefix(f"{name}."): s for layer, s in styles.items() if layer.startswith(f"{name}.")}
            if not own:
                continue
            key = (structure_of(block), str(sorted(own.items(), key=lambda item: item[0])))
            if key not in known:
                known[key] = _try_block(name, block, own, size, length, inputs.get(family.members[0]))
            norms, closers = known[key]
            plan.norms += [f"{name}.{norm}" for norm, _ in block.named_modules() if norm in norms]
            plan.closers += [f"{name}.{closer}" for closer, _ in block.named_modules() if closer in closers]
            plan.blocks[name] = block is family.members[-1]
    if not plan.blocks:
        raise ConfigError(
            f"tensor_parallel: sequence_parallel=True needs repeated blocks whose layers are split, and {type(model).__name__} has none. "
            f"Remove sequence_parallel=True."
        )
    return plan


def _try_block(
    name: str, block: nn.Module, styles: Mapping[str, object], size: int, length: int, given: object
) -> tuple[set[str], set[str]]:
    """Return the norms and closers of a block, by their names inside it."""
    reason = ""
    with isolated_trial(block):
        for by_layer in (True, False):
            trial = _PiecesTrial(block, given, length, styles, by_layer)
            try:
                trial.run(size)
            except _BlockNotSplittableError as error:
                reason = reason or str(error)
            else:
                return trial.norms, trial.closers
    raise ConfigError(
        f"tensor_parallel: sequence_parallel=True cannot run {name} ({user_class(block).__name__}) on pieces of the sequence: {reason}. "
        "It supports pre-norm blocks: norms before split layers, results added to the residual stream. Remove sequence_parallel=True, or "
        "use the method sequence_parallel, which has its own axis."
    )


class _BlockNotSplittableError(Exception):
    """Why a block does not compute the same on pieces."""


class _MixedOperandsError(Exception):
    """A whole tensor met a piece; the module it comes from should return pieces."""


class _PiecesTrial(BlockTrial):
    """One block: how it runs whole, and how it runs on each rank's piece."""

    def __init__(self, block: nn.Module, given: object, length: int, styles: Mapping[str, object], by_layer: bool):
        super().__init__(block, given, length)
        self.styles, self.by_layer = styles, by_layer
        self.closers = {name for name, style in styles.items() if style == "rowwise"}
        self.norms: set[str] = set()
        self.whole: dict[str, list[Tensor]] = {}
        """What each module returned, call by call, when nothing was cut."""
        self.names = self.parameters()
        self.rank, self.size, self.inside_norms = 0, 1, 0

    def run(self, size: int) -> None:
        """Try all ranks; a reason against it is raised."""
        for name, style in self.styles.items():
            if not isinstance(style, str) or style in ("sequence", "vocabulary"):
                raise _BlockNotSplittableError(
                    f"the plan gives {name} the style {style!r}, which already sets its layout"
                )
        self.size = size
        try:
            expected = self._run_whole()
        except Exception as error:  # the block needs other arguments
            raise _BlockNotSplittableError(
                f"it could not be tried ({type(error).__name__}: {first_line(error)})"
            ) from error
        for name, module in self.block.named_modules():
            parents = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
            has_own = name and next(module.parameters(recurse=False), None) is not None
            if has_own and not any(parent in self.whole for parent in parents):
                raise _BlockNotSplittableError(
                    f"{name} did not run when the block was tried, like attention to what an encoder returns"
                )
        while self.rank < size:
            try:
                found = self._run_piece()
            except _BlockNotSplittableError:
                raise
            except _MixedOperandsError as error:
                label = str(error)
                if label in self.closers or label in self.norms:
                    raise _BlockNotSplittableError(
                        f"the output of {label} is added to the residual stream unchanged"
                    ) from None
                self.closers.add(label)
                self.rank = 0
                continue
            except Exception as error:  # code that finds another length than it expects
                raise _BlockNotSplittableError(
                    f"its code depends on the length it sees ({first_line(error)})"
                ) from error
            if not found or not getattr(found[0], _PIECE, False):
                raise _BlockNotSplittableError("what it returns is not a piece of the sequence")
            if not agree([self._piece(expected[0]), *expected[1:]], found):
                raise _BlockNotSplittableError(
                    "its result on pieces is not the pieces of its result: something mixes positions"
                )
            self.rank += 1

    def _piece(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, 1)[self.rank].clone()

    def _run_whole(self) -> list[Tensor]:
        def after(module: nn.Module, args: object, out: object, name: str) -> None:
            self.whole.setdefault(name, []).extend(x.detach().clone() for x in floats_in(out)[:1])

        with ExitStack() as hooks:
            for name, module in list(self.block.named_modules())[1:]:
                hooks.enter_context(module.register_forward_hook(partial(after, name=name)))
            return self.call(self.state, self.args, self.kwargs)

    def _run_piece(self) -> list[Tensor]:
        self.inside_norms = 0
        values = [*self.args, *self.kwargs.values()]
        place = next((i for i, x in enumerate(values) if is_stream(x)), None)
        if place is None:
            raise _BlockNotSplittableError("it takes no tensor of (batch, sequence, features)")
        values[place] = _as_piece(self._piece(values[place]))
        args, rest = values[: len(self.args)], values[len(self.args) :]
        with ExitStack() as hooks:
            for name, module in list(self.block.named_modules())[1:]:
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name=name), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(self._leave, name=name)))
            hooks.enter_context(_PieceTracker(self))
            return self.call(self.state, tuple(args), dict(zip(self.kwargs, rest)))

    def _enter(self, module: nn.Module, args: object, kwargs: object, name: str) -> None:
        gets_piece = any(getattr(x, _PIECE, False) for x in tensors_in((args, kwargs)))
        if gets_piece and _is_norm(module) and not self.inside_norms:
            self._once(name)
            self.norms.add(name)
            self.inside_norms += 1
        elif gets_piece and name in self.styles and not self.inside_norms:
            raise _BlockNotSplittableError(f"no norm comes before {name}")

    def _leave(self, module: nn.Module, args: object, out: object, name: str) -> Any:
        first = floats_in(out)[:1]
        if name in self.norms and self.inside_norms:
            self.inside_norms -= 1
            if not agree([self._piece(self.whole[name][0])], first):
                raise _BlockNotSplittableError(f"{name} does not treat positions one by one")
            return _labelled(self.whole[name][0].clone(), name)
        if name in self.closers:
            self._once(name)
            if getattr(first[0], _PIECE, False):
                raise _BlockNotSplittableError(f"{name} gets a piece of the sequence")
            return with_first(out, _as_piece(self._piece(self.whole[name][0])))
        is_source = is_splittable(module) if self.by_layer else not isinstance(module, nn.modules.dropout._DropoutNd)
        if is_source and first and not getattr(first[0], _PIECE, False):
            _labelled(first[0], name)
        return out

    def _once(self, name: str) -> None:
        if len(self.whole.get(name, ())) != 1:
            raise _BlockNotSplittableError(f"{name} runs more than once")


class _PieceTracker(TorchFunctionMode):
    """Marks what is computed from pieces, and stops where a piece meets a whole tensor or a parameter."""

    def __init__(self, trial: _PiecesTrial):
        super().__init__()
        self.trial = trial

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        tensors = tensors_in((args, kwargs))
        is_piece = any(getattr(x, _PIECE, False) for x in tensors)
        labels = [x.__dict__[_LABEL] for x in tensors if _LABEL in getattr(x, "__dict__", {})]
        if is_piece and not self.trial.inside_norms:
            for x in tensors:
                if id(x) in self.trial.names:
                    raise _BlockNotSplittableError(
                        f"{self.trial.names[id(x)]} is used on pieces outside a norm, so its gradient would be a part"
                    )
            if labels:
                raise _MixedOperandsError(labels[-1])
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            if is_piece:
                _as_piece(x)
            elif labels:
                _labelled(x, labels[-1])
        return out


def is_stream(value: object) -> bool:
    """Return whether a value can be the activations of a sequence: (batch, sequence, features)."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3


def with_first(out: Any, stream: Any) -> Any:
    """Return an output with another tensor in the place of its first floating-point one."""
    if isinstance(out, Tensor):
        return stream
    if isinstance(out, dict):
        place = next(key for key, value in out.items() if floats_in(value))
        return type(out)({**out, place: with_first(out[place], stream)})
    place = next(index for index, value in enumerate(out) if floats_in(value))
    items = [with_first(value, stream) if index == place else value for index, value in enumerate(out)]
    return type(out)(items)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over features, torch's or one of the same name."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    name = user_class(module).__name__
    return name.endswith(("LayerNorm", "RMSNorm")) and next(module.children(), None) is None


def _as_piece(x: Tensor) -> Tensor:
    setattr(x, _PIECE, True)
    return x


def _labelled(x: Tensor, label: str) -> Tensor:
    setattr(x, _LABEL, label)
    return x
