"""Keep little of each block's forward pass and compute it again for backward (Chen et al., 2016, arXiv 1604.06174)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, MethodConfigError, unknown_name
from drivetrain.module.blocks import select_modules
from drivetrain.module.checkpointing import checkpoint_blocks
from drivetrain.strategy.effects import Recompute
from drivetrain.strategy.method import Method, Option, Site, Stage, as_selectors, is_whole, selected

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.space import SearchScope

_MODES = ("full", "selective", "offload")
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
_MODE_ALIASES = {"selective_offload": "offload"}


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    wrap_class: Any = "auto"
    """Blocks: "auto" for the repeated ones, a class, a name, or several."""
    mode: str = "full"
    """`full` keeps a block's inputs, `selective` also matrix products and attention, `offload` keeps inputs in host memory."""
    every: int = 1
    max_checkpoint_module_num: int | None = None
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

    def parse(self, config: object = None) -> CheckpointConfig:
        if isinstance(config, type):
            config = {"wrap_class": config}
        return super().parse(config)

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if "wrap_class" in values:
            values["wrap_class"] = as_selectors(values["wrap_class"])
            what = values["wrap_class"]
            if not (isinstance(what, str) or (isinstance(what, tuple) and what)):
                raise self.bad("wrap_class", what, "'auto', a class, a name, or several of these")
        if "mode" in values:
            values["mode"] = _MODE_ALIASES.get(values["mode"], values["mode"])
            if values["mode"] not in _MODES:
                raise MethodConfigError(unknown_name("mode", values["mode"], _MODES, where=self.name))
        if not is_whole(values.get("every", 1)):
            raise self.bad("every", values["every"], "a whole number of at least 1")
        most = values.get("max_checkpoint_module_num")
        if most is not None and not is_whole(most):
            raise self.bad("max_checkpoint_module_num", most, "a whole number of at least 1, or None")
        if values.get("no_reentrant") is False and values.get("mode", "full") != "full":
            raise self.bad(
                "no_reentrant", False, "True with this mode: torch's reentrant checkpoints support only 'full'"
            )
        return values

    def check(self, config: CheckpointConfig, site: Site) -> None:
        if site.model is None or config.wrap_class == "auto":
            return
        try:
            select_modules(site.model, selected(site.model, config.wrap_class), where=self.name)
        except ConfigError as error:
            raise MethodConfigError(str(error)) from error

    def apply(self, ctx: "Application", config: CheckpointConfig) -> None:
        names = checkpoint_blocks(
            ctx.model,
            selected(ctx.model, config.wrap_class),
            config.mode,  # type: ignore[arg-type]
            config.every,
            config.max_checkpoint_module_num,
            reentrant=not config.no_reentrant,
        )
        if names:
            ctx.note(f"checkpoint: {len(names)} blocks, {names[0]} to {names[-1]}")
        else:
            ctx.note("checkpoint: the model has no blocks, so nothing is checkpointed")


def _word(config: CheckpointConfig) -> str:
    """Return a configuration as a search calls it."""
    return config.mode if config.mode != "full" else "full" if config.every == 1 else "second"
