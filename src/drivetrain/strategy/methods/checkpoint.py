"""Keep little of each block's forward pass and compute it again for backward (Chen et al., 2016, arXiv 1604.06174)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.types import Settings
from drivetrain.module.checkpointing import Mode, checkpoint_blocks
from drivetrain.strategy.effects import Recompute
from drivetrain.strategy.method import Method, Option, Positive, Site, Stage, selected

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Effects, SearchScope

_SEARCHED: dict[str, dict[str, Any]] = {
    "selective": {"mode": "selective", "every": 1},
    "second": {"mode": "full", "every": 2},
    "full": {"mode": "full", "every": 1},
    "offload": {"mode": "offload", "every": 1},
}
"""From little to much: what remains in memory shrinks from one to the next."""
_EFFECTS = {
    "selective": Recompute(keeps="products", share=0.3),
    "second": Recompute(keeps="inputs", every=2, share=0.5),
    "full": Recompute(keeps="inputs", share=1.0),
    "offload": Recompute(keeps="inputs", on_device=2, share=1.0),  # one in use, one on its way
}


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    wrap_class: Any = "auto"
    """Blocks: "auto" for the repeated ones, a class, a name, or several."""
    mode: Mode = "full"
    """`full` keeps a block's inputs, `selective` also matrix products and attention, `offload` keeps inputs in host memory."""
    every: Positive = 1
    max_checkpoint_module_num: Positive | None = None
    no_reentrant: bool = True


class Checkpoint(Method):
    """Activation checkpointing of blocks."""

    name, group, stage = "checkpoint", "checkpoint", Stage.CHECKPOINT
    Config = CheckpointConfig
    short = "wrap_class"
    leaves_no_trace = True
    why = "activations of blocks are computed again instead of kept"

    def options(self, scope: "SearchScope") -> list[Option]:
        if not scope.has_blocks and not scope.must(self.name):
            return []
        configs = scope.kept(self.name) or [
            scope.config(self, **settings)
            for word, settings in _SEARCHED.items()
            if not (scope.is_cpu and word == "offload")
        ]
        return [((self.name, config),) for config in configs]

    def affect(self, effects: "Effects", config: CheckpointConfig) -> None:
        effects.recompute = _EFFECTS[_word(config)]

    def amount(self, config: CheckpointConfig) -> int:
        return 1 + list(_SEARCHED).index(_word(config))

    def label(self, config: CheckpointConfig) -> str:
        return f"{self.name} {_word(config)}"

    def period(self, config: CheckpointConfig) -> int | None:
        return config.every if config.max_checkpoint_module_num is None else None

    def pinned(
        self, config: CheckpointConfig, names: Iterable[str], units: tuple[str, ...], repeated: tuple[str, ...]
    ) -> Option:
        blocks = repeated or units
        is_open = config.wrap_class == "auto" and blocks
        return ((self.name, replace(config, wrap_class=blocks) if is_open else config),)

    def read(self, values: Settings) -> Settings:
        if "wrap_class" in values:
            expected = "'auto', a class, a name, or several of these"
            values["wrap_class"] = self.selectors("wrap_class", values["wrap_class"], expected)
        if values.get("mode") == "selective_offload":
            values["mode"] = "offload"
        if values.get("no_reentrant") is False and values.get("mode", "full") != "full":
            raise self.bad(
                "no_reentrant", False, "True with this mode: torch's reentrant checkpoints support only 'full'"
            )
        return values

    def clash(self, config: CheckpointConfig, others: Mapping[str, object], device: torch.device) -> str | None:
        # torch 2.13 saves the mesh of a split layer for backward as if it were a tensor, and fails in the first step.
        if config.mode != "full" or not {"tensor_parallel", "native_dynamo"} <= others.keys():
            return None
        return (
            "checkpoint with mode='full', tensor_parallel and native_dynamo cannot be used together: the compiler cannot compute split "
            "layers of a whole block again. Use mode='selective' or 'offload', or leave one of them out."
        )

    def check(self, config: CheckpointConfig, site: Site) -> None:
        if site.model is not None and config.wrap_class != "auto":
            self.select(site.model, config.wrap_class)

    def apply(self, ctx: "Application", config: CheckpointConfig) -> None:
        names = checkpoint_blocks(
            ctx.model,
            selected(ctx.model, config.wrap_class),
            config.mode,
            config.every,
            config.max_checkpoint_module_num,
            reentrant=not config.no_reentrant,
        )
        nothing = "the model has no blocks, so nothing is checkpointed"
        ctx.note(f"checkpoint: {len(names)} blocks, {names[0]} to {names[-1]}" if names else f"checkpoint: {nothing}")


def _word(config: CheckpointConfig) -> str:
    """Return a configuration as a search calls it."""
    return "second" if config.mode == "full" and config.every > 1 else config.mode
