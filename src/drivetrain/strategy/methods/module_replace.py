"""Hand-written layers give way to torch's fused ones, each after it was shown to compute the same."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, MethodConfigError, unknown_name
from drivetrain.module.replacements import fuse_attention, pair_names, replace_pairs
from drivetrain.strategy.method import Method, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application

_ATTENTION = "sdpa"


@dataclass(frozen=True, kw_only=True)
class ModuleReplaceConfig:
    pairs: tuple[tuple[str, Any], ...] | None = None
    """Pairs to use, each with its keywords; None for all that apply."""


class ModuleReplace(Method):
    """Verified replacement of modules."""

    name, group, stage = "module_replace", "module_replace", Stage.MODULE
    Config = ModuleReplaceConfig
    why = "hand-written layers become fused ones"
    is_searched, leaves_no_trace = False, True
    not_simulated = "replaced modules are compared by their values, and fake tensors have none"

    def parse(self, config: object = None) -> ModuleReplaceConfig:
        """Read also `{pair: keywords}` and a list of pairs."""
        if isinstance(config, str):
            config = (config,)
        if isinstance(config, list | tuple):
            config = {"pairs": dict.fromkeys(config)}
        elif isinstance(config, dict) and "pairs" not in config:
            config = {"pairs": config} if config else None
        return super().parse(config)

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        valid = [_ATTENTION, *pair_names()]
        pairs = values.get("pairs")
        if pairs is None:
            return values
        for name, _ in pairs:
            if name not in valid:
                raise MethodConfigError(unknown_name("pair", name, valid, where=self.name))
        values["pairs"] = tuple((name, kwargs or ()) for name, kwargs in pairs)
        return values

    def apply(self, ctx: "Application", config: ModuleReplaceConfig) -> None:
        wanted = None if config.pairs is None else {name: dict(kwargs) for name, kwargs in config.pairs}
        attention: tuple[list[str], list[str]] = ([], [])
        if wanted is None or wanted.pop(_ATTENTION, None) is not None:
            attention = fuse_attention(ctx.model, ctx.sample)
        try:
            replaced, remarks = replace_pairs(ctx.model, wanted)
        except ConfigError as error:
            raise MethodConfigError(str(error)) from error
        names = [*attention[0], *replaced]
        ctx.note(f"module_replace: {len(names)} replaced" + (f" ({', '.join(names[:4])}…)" if names else ""))
        for remark in (*attention[1], *remarks):
            ctx.note(f"module_replace: {remark}")
