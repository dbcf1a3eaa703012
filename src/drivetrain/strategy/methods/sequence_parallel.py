"""Split the positions of each sequence over the ranks of the `sequence` axis, which share samples.

There are three ways, tried in this order. A module with `set_sp(sp_size, sp_rank, sp_group)` splits its sequence itself. With
`batch_sp_processing_fn` the whole model runs on this rank's part of the batch. Otherwise the blocks run on parts of the sequence
and everything else on the whole sequence (`drivetrain.module.sequence_parallel`), which suits models that were written without
sequence parallelism.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from drivetrain.core.errors import MethodConfigError, UnsupportedMethodError
from drivetrain.core.types import Settings
from drivetrain.strategy.mesh import gradient_group
from drivetrain.strategy.method import Function, Method, Positive, Site, Stage, is_whole
from drivetrain.strategy.profile.values import divides_heads

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Effects, SearchScope

_LARGEST = 16
"""The largest size of the axis that a search tries."""


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    sp_size: Positive | None = None
    """The expected size of the sequence axis; None: not checked."""
    impl: Literal["ulysses", "ring"] = "ulysses"
    """`ulysses` exchanges positions for heads around attention; `ring` rotates keys and values between ranks, on CUDA only."""
    seq_dim: int = 1
    """The dimension of the sequence in what the blocks take."""
    module: Any = None
    """Classes or names of modules that split their sequence themselves; None: those that have the method."""
    set_sp_func_name: str = "set_sp"
    batch_sp_processing_fn: Function | None = None
    """`(batch, sp_size, sp_rank)` -> this rank's equal part of the model's input, positions included; None keeps the whole input."""


class SequenceParallel(Method):
    """Ulysses and ring sequence parallelism."""

    name, group, stage = "sequence_parallel", "parallel", Stage.SEQUENCE
    Config = SequenceParallelConfig
    needs_processes = True
    short = "sp_size"
    axis: ClassVar[str] = "sequence"
    short_label = ""  # the mesh names it
    why = "activations are split over the positions of a sequence"

    def axis_sizes(self, scope: "SearchScope") -> list[int]:
        length = scope.profile.sequence_length
        sizes = range(2, min(scope.world, _LARGEST) + 1)
        return [size for size in sizes if length and length % size == 0 and divides_heads(scope.profile, size)]

    def affect(self, effects: "Effects", config: SequenceParallelConfig) -> None:
        ranks = effects.axes.get("sequence", 1)
        effects.work_ranks *= ranks
        effects.token_ranks *= ranks
        # Queries, keys and values there, the result back; and the same in backward.
        effects.block_exchanges += ((self.axis, 8),)

    def read(self, values: Settings) -> Settings:
        if not is_whole(values.get("seq_dim", 1), least=0):
            raise self.bad("seq_dim", values["seq_dim"], "the number of a dimension: 1 for (batch, sequence, features)")
        if values.get("module") is not None:
            values["module"] = self.selectors("module", values["module"])
        name = values.get("set_sp_func_name", "set_sp")
        if not (isinstance(name, str) and name.isidentifier()):
            raise self.bad("set_sp_func_name", name, "the name of a method")
        return values

    def check(self, config: SequenceParallelConfig, site: Site) -> None:
        size = site.axis("sequence")
        self.require_axis(site, config.sp_size or 2)
        if config.sp_size not in (None, size):
            raise MethodConfigError(
                f"sequence_parallel: sp_size={config.sp_size}, but the mesh has a sequence axis of {size}. Use the same number, or remove "
                f"sp_size."
            )
        if config.impl == "ring" and site.device.type != "cuda":
            raise UnsupportedMethodError(
                f"sequence_parallel: impl='ring' needs CUDA, but the device is {site.device}: torch's ring attention supports only "
                f"CUDA. Use impl='ulysses'."
            )
        if site.model is not None:
            self._managers(config, site.model)
            if config.impl == "ulysses" and config.batch_sp_processing_fn is None:
                _check_visible_heads(site.model, size)

    def _managers(self, config: SequenceParallelConfig, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules that manage themselves, outer ones only."""
        found = [(n, m) for n, m in model.named_modules() if callable(getattr(m, config.set_sp_func_name, None))]
        if config.module is not None:
            able, found = dict(found), self.select(model, config.module)
            for name, module in found:
                if name not in able:
                    raise MethodConfigError(
                        f"sequence_parallel: {name} ({type(module).__name__}) has no method {config.set_sp_func_name!r}. Add one "
                        "that takes (sp_size, sp_rank, sp_group), or remove `module`."
                    )
        inside = {child for _, module in found for child in module.modules() if child is not module}
        return [(name, module) for name, module in found if module not in inside]

    def apply(self, ctx: "Application", config: SequenceParallelConfig) -> None:
        from drivetrain.module.sequence_parallel import split_sequence

        group = ctx.mesh.get_group("sequence")
        managers = self._managers(config, ctx.model)
        for _, module in managers:
            getattr(module, config.set_sp_func_name)(group.size(), group.rank(), group)
        if managers:
            ctx.note(
                f"sequence_parallel: {', '.join(name or 'the model' for name, _ in managers)} splits its sequence itself"
            )
        if config.batch_sp_processing_fn is not None:
            ctx.prepare_input = partial(split_input, config.batch_sp_processing_fn, group, ctx.prepare_input)
            ctx.loss_changes.append(partial(mean_over_sequence, group))
        elif not managers:
            names = split_sequence(ctx.model, group, config.seq_dim, mesh=ctx.axis_mesh("sequence"), impl=config.impl)
            ctx.note(f"sequence_parallel: {len(names)} blocks on parts of the sequence, {names[0]} to {names[-1]}")
        ctx.ddp_settings["process_group"] = gradient_group(ctx.mesh)


def split_input(split: Callable[..., Any], group: ProcessGroup, inner: Any, data: Any, device: Any) -> Any:
    """Prepare a model's input and return this rank's part of it."""
    from drivetrain.strategy.apply import prepared_input

    return split(prepared_input(data, device, inner), group.size(), group.rank())


def mean_over_sequence(group: ProcessGroup, loss_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss that shows its mean over the ranks of the sequence, while each rank keeps the gradient of its own part."""
    from drivetrain.strategy.stepping import with_first

    def shown(loss: Tensor) -> Tensor:
        own = loss.detach()
        mean = own.clone()
        torch.distributed.all_reduce(mean, group=group)
        return loss + (mean / group.size() - own)

    return lambda *args: with_first(loss_func(*args), shown)


def _check_visible_heads(model: nn.Module, size: int) -> None:
    """Reject a number of heads that does not divide, where the model says how many it has."""
    heads: dict[str, Any] = {n: m.num_heads for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    heads["config.num_attention_heads"] = getattr(getattr(model, "config", None), "num_attention_heads", None)
    for name, count in heads.items():
        if is_whole(count) and count % size:
            raise MethodConfigError(
                f"sequence_parallel: {name} is {count} heads, which do not divide over {size} ranks. Choose a size of the sequence axis "
                "that divides them."
            )
