"""Split the positions of each sequence over the ranks of the `sequence` axis, which share samples.

There are three ways, tried in this order. A module with `set_sp(sp_size, sp_rank, sp_group)` splits its sequence itself. With
`batch_sp_processing_fn` the whole model runs on this rank's part of the batch. Otherwise the blocks run on parts of the sequence
and everything else on the whole sequence (`drivetrain.module.sequence_parallel`), which suits models that were written without
sequence parallelism.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from drivetrain.core.errors import (
    ConfigError,
    ConflictError,
    MethodConfigError,
    StrategyError,
    UnsupportedMethodError,
    unknown_name,
)
from drivetrain.strategy.mesh import gradient_group
from drivetrain.strategy.method import Method, Site, Stage, as_selectors, is_whole, selected
from drivetrain.strategy.profile.values import divides_heads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.space import SearchScope

_LARGEST = 16
"""The largest size of the axis that a search tries."""
_IMPLEMENTATIONS = ("ulysses", "ring")


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    sp_size: int | None = None
    """The expected size of the sequence axis; None: not checked."""
    impl: str = "ulysses"
    """`ulysses` exchanges positions for heads around attention; `ring` rotates keys and values between ranks, on CUDA only."""
    seq_dim: int = 1
    """The dimension of the sequence in what the blocks take."""
    module: Any = None
    """Classes or names of modules that split their sequence themselves; None: those that have the method."""
    set_sp_func_name: str = "set_sp"
    batch_sp_processing_fn: Any = None
    """`(batch, sp_size, sp_rank)` -> this rank's equal part of the model's input, positions included; None keeps the whole input."""


class SequenceParallel(Method):
    """Ulysses and ring sequence parallelism."""

    name, group, stage = "sequence_parallel", "parallel", Stage.SEQUENCE
    Config = SequenceParallelConfig
    needs_processes = True
    short = "sp_size"
    conflicts = {"pipeline_parallel": "A stage may not hold all blocks of a family. Use only one of the two axes."}
    axis: ClassVar[str] = "sequence"
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

    def label(self, config: SequenceParallelConfig) -> str:
        return ""  # the mesh says it

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("sp_size") is not None and not is_whole(values["sp_size"]):
            raise self.bad("sp_size", values["sp_size"], "a whole number of at least 1, or None")
        if values.get("impl", "ulysses") not in _IMPLEMENTATIONS:
            raise MethodConfigError(unknown_name("impl", values["impl"], _IMPLEMENTATIONS, where=self.name))
        if not is_whole(values.get("seq_dim", 1), least=0):
            raise self.bad("seq_dim", values["seq_dim"], "the number of a dimension: 1 for (batch, sequence, features)")
        if values.get("module") is not None:
            values["module"] = as_selectors(values["module"])
            if not isinstance(values["module"], str | tuple):
                raise self.bad("module", values["module"], "classes or names of modules, or None")
        name = values.get("set_sp_func_name", "set_sp")
        if not (isinstance(name, str) and name.isidentifier()):
            raise self.bad("set_sp_func_name", name, "the name of a method")
        function = values.get("batch_sp_processing_fn")
        if function is not None and not callable(function):
            raise MethodConfigError(
                f"{self.name}: batch_sp_processing_fn={function!r} is not a function. A plan file cannot store one; "
                f"pass the plan as a list."
            )
        return values

    def check(self, config: SequenceParallelConfig, site: Site) -> None:
        size = site.axis("sequence")
        if size == 1:
            wanted = config.sp_size or 2
            raise StrategyError(
                f"sequence_parallel: the mesh has no 'sequence' axis. Add ('parallel_mode', [('sequence', {wanted}), ('data', 1)])."
            )
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
        if site.axis("pipe") > 1:
            raise ConflictError("sequence_parallel and a 'pipe' axis cannot be used together. Use only one of them.")
        if site.model is not None:
            self._managers(config, site.model)
            if config.impl == "ulysses" and config.batch_sp_processing_fn is None:
                _check_visible_heads(site.model, size)

    def _managers(self, config: SequenceParallelConfig, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules that manage themselves, outer ones only."""
        if config.module is None:
            found = [(n, m) for n, m in model.named_modules() if callable(getattr(m, config.set_sp_func_name, None))]
        else:
            from drivetrain.module.blocks import select_modules

            try:
                found = select_modules(model, selected(model, config.module), where=self.name)
            except ConfigError as error:
                raise MethodConfigError(str(error)) from error
            for name, module in found:
                if not callable(getattr(module, config.set_sp_func_name, None)):
                    raise MethodConfigError(
                        f"sequence_parallel: {name} ({type(module).__name__}) has no method "
                        f"{config.set_sp_func_name!r}. Add one that takes "
                        "(sp_size, sp_rank, sp_group), or remove `module`."
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
            ctx.prepare_input = SplitInput(config.batch_sp_processing_fn, group, ctx.prepare_input)
            ctx.loss_changes.append(MeanOverSequence(group))
        elif not managers:
            mesh = ctx.mesh["sequence"] if ctx.mesh.ndim > 1 else ctx.mesh
            names = split_sequence(ctx.model, group, config.seq_dim, mesh=mesh, impl=config.impl)  # type: ignore[arg-type]
            ctx.note(f"sequence_parallel: {len(names)} blocks on parts of the sequence, {names[0]} to {names[-1]}")
        ctx.ddp_settings["process_group"] = gradient_group(ctx.mesh)


class SplitInput:
    """Prepares a model's input and takes this rank's part of it."""

    def __init__(
        self, function: Callable[..., Any], group: "ProcessGroup", inner: Callable[[Any, torch.device], Any] | None
    ):
        self.function, self.group, self.inner = function, group, inner

    def __call__(self, data: Any, device: torch.device) -> Any:
        from drivetrain.strategy.apply import prepared_input

        return self.function(prepared_input(data, device, self.inner), self.group.size(), self.group.rank())


class MeanOverSequence:
    """Makes a loss show its mean over the ranks of the sequence, while each rank keeps the gradient of its own part."""

    def __init__(self, group: "ProcessGroup"):
        self.group = group

    def __call__(self, loss_func: Callable[..., Any]) -> Callable[..., Any]:
        def loss_of_all(*args: object) -> object:
            result = loss_func(*args)
            if isinstance(result, list | tuple):
                return type(result)([self._shown(result[0]), *result[1:]])
            return self._shown(result)

        return loss_of_all

    def _shown(self, loss: Tensor) -> Tensor:
        import torch.distributed as dist

        own = loss.detach()
        mean = own.clone()
        dist.all_reduce(mean, group=self.group)
        return loss + (mean / self.group.size() - own)


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
