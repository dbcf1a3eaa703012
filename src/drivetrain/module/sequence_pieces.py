"""Run what is between the split layers of a block on pieces of the sequence, along the axis over which the layers are split.

This divides the activations of norms, dropouts and residual sums by the number of ranks (Korthikanti et al., 2022, arXiv 2205.05198). The
reduction after a row-wise layer leaves pieces, and the norm before a column-wise layer gathers them: together that is the same traffic.
The stream is cut where it enters a family of blocks and made whole where it leaves; between blocks it is a distributed tensor of the
whole shape. Attention sees the whole sequence. `sequence_pieces_check` finds where to do what. Sequences that do not divide, which
generation has, run whole.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from drivetrain.core.errors import ConfigError
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.probing import floats_in
from drivetrain.module.sequence_pieces_check import PiecePlan, is_stream, with_first
from drivetrain.module.wrapping import GeneratedClass, add_mixin, is_fully_sharded

_KEY = "_pieces"
_LAYOUTS: dict[bool, list[Placement]] = {False: [Replicate()], True: [Shard(1)]}  # of the whole and of pieces


class Pieces:
    """What the modules of one model share: the ranks, and whether the current block runs on pieces."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.is_cut = False

    def __deepcopy__(self, memo: object) -> "Pieces":
        return Pieces(self.mesh)  # process groups cannot be copied, and need not be

    def changed(self, x: Tensor, is_piece: bool, to_piece: bool) -> Tensor:
        """Return a tensor cut or made whole; its gradient goes the other way."""
        tensor = self.distributed(x, is_piece)
        return (tensor if is_piece == to_piece else tensor.redistribute(placements=_LAYOUTS[to_piece])).to_local()

    def distributed(self, x: Tensor, is_piece: bool) -> Any:
        """Return the distributed tensor that a rank's piece, or the whole, belongs to."""
        return DTensor.from_local(x, self.mesh, _LAYOUTS[is_piece], run_check=False)


def run_on_pieces(
    model: nn.Module, mesh: DeviceMesh, plan: PiecePlan, *, gather_after_each_block: bool = False
) -> None:
    """Let the blocks of a model whose layers are split run on pieces, in place.

    Row-wise layers among the closers must return sums that are not added up yet. `gather_after_each_block` makes the stream whole
    after every block, for code between blocks that must see ordinary tensors.
    """
    pieces = Pieces(mesh)
    modules = dict(model.named_modules())
    for name in plan.norms:
        norm = modules[name]
        norm.__dict__[_KEY] = pieces
        _replicate(norm, mesh)
        norm.register_forward_pre_hook(_enter_norm)
        norm.register_forward_hook(_leave_norm)
    for name in plan.closers:
        modules[name].__dict__[_KEY] = pieces
        modules[name].register_forward_hook(_close)
    for name, is_last in plan.blocks.items():
        add_mixin(modules[name], PieceBlock, _pieces=pieces, _joins=is_last or gather_after_each_block)


class PieceBlock(GeneratedClass):
    """Makes a block run on this rank's piece of the sequence."""

    _pieces: Pieces
    _joins: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cut what comes in whole, and make whole what leaves the family."""
        run, pieces = super().forward, self._pieces  # type: ignore[misc]
        values = [*args, *kwargs.values()]
        place = next((index for index, value in enumerate(values) if is_stream(value)), None)
        if place is None:
            raise ConfigError("tensor_parallel: a block was called without a tensor of (batch, sequence, features).")
        stream = values[place]
        size = pieces.mesh.size()
        if is_dtensor(stream):
            pieces.is_cut, values[place] = True, stream.to_local()
        elif stream.shape[1] % size == 0:
            pieces.is_cut, values[place] = True, pieces.changed(stream, False, True)
        elif torch.is_grad_enabled():
            length = stream.shape[1]
            raise ConfigError(
                f"tensor_parallel: with sequence_parallel=True a sequence of {length} positions must divide over {size} ranks. Pad it to "
                f"{length + size - length % size}, or cut it to {length - length % size}."
            )
        else:
            pieces.is_cut = False
        is_cut = pieces.is_cut
        out = run(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))
        if not is_cut:
            return out
        own = floats_in(out)[0]
        leaves = pieces.changed(own, True, False) if self._joins else pieces.distributed(own, True)
        if is_fully_sharded(self):  # type: ignore[arg-type]
            leaves = leaves.clone()  # whose hooks are lost if a view is changed in place
        return with_first(out, leaves)


def _replicate(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Make the parameters of a norm distributed tensors that are whole everywhere, with gradients that are added up."""
    for name, parameter in list(norm.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        if made.requires_grad:
            made.register_hook(_added_up)
        norm.register_parameter(name, made)


def _added_up(grad: Any) -> Any:
    is_part = is_dtensor(grad) and any(placement.is_partial() for placement in grad.placements)
    return grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim) if is_part else None


def _enter_norm(norm: nn.Module, args: Any) -> Any:
    pieces: Pieces = norm.__dict__[_KEY]
    return (pieces.distributed(args[0], pieces.is_cut), *args[1:])


def _leave_norm(norm: nn.Module, args: Any, out: Any) -> Any:
    return out.redistribute(placements=_LAYOUTS[False]).to_local()


def _close(module: nn.Module, args: object, out: object) -> Any:
    """Return pieces: of sums that are not added up yet, or of what every rank has whole."""
    pieces: Pieces = module.__dict__[_KEY]
    first = floats_in(out)[0]
    if is_dtensor(first):
        return with_first(out, first.redistribute(placements=_LAYOUTS[pieces.is_cut]).to_local())  # type: ignore[attr-defined]
    return with_first(out, pieces.changed(first, False, pieces.is_cut))
