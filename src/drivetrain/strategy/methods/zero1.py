"""Each data rank keeps the optimizer state of its share of the parameters (Rajbhandari et al., 2020, arXiv 1910.02054)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from drivetrain.core.errors import ConflictError
from drivetrain.module.optimizers import split_optimizer
from drivetrain.runtime.ranks import data_group
from drivetrain.strategy.method import Method, NoConfig, Option, Site, Stage
from drivetrain.strategy.methods.fsdp import Fsdp, sharding_options

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.candidates import Candidate
    from drivetrain.strategy.search.space import SearchScope


class Zero1(Method):
    """DDP with the optimizer's state split over ranks."""

    name, group, stage = "zero1", "zero", Stage.OPTIMIZER
    needs_processes = is_alone_in_group = splits_optimizer = leaves_no_trace = True
    dimension = Fsdp.dimension
    ignored_keys = ("use_ds_zero", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm")
    why = "optimizer state is split over the data ranks"

    def options(self, scope: "SearchScope") -> list[Option]:
        return sharding_options(self, scope)

    def fits(self, config: NoConfig, candidate: "Candidate") -> str | None:
        is_plain = candidate.data > 1 and not candidate.divides_model
        return None if is_plain else "it needs data ranks that hold the whole model"

    def affect(self, effects: "Effects", config: NoConfig) -> None:
        effects.optimizer_shards = effects.data_ranks

    def amount(self, config: NoConfig) -> int:
        return 1

    def period(self, config: NoConfig) -> int | None:
        return None  # whole parameters are dealt to ranks, which does not continue by any rule

    def check(self, config: NoConfig, site: Site) -> None:
        if site.axis("tensor") > 1:
            raise ConflictError(
                "zero1 and tensor_parallel cannot be used together. Use fsdp or zero2 with tensor_parallel."
            )

    def apply(self, ctx: "Application", config: NoConfig) -> None:
        recipe = ctx.recipe
        if recipe is None:
            raise ConflictError(
                "zero1 splits the optimizer's state, but there is no optimizer. Pass optim_func, or remove zero1."
            )
        inner: Callable[..., Optimizer] = recipe.build

        def build(groups: object, **settings: object) -> Optimizer:
            return split_optimizer(inner, groups, settings, data_group())

        recipe.build, recipe.is_changed = build, True
