"""Gradients and optimizer state split over ranks; parameters stay gathered between forward and backward."""

from dataclasses import dataclass

from drivetrain.strategy.methods.fsdp import Fsdp, FsdpConfig


@dataclass(frozen=True, kw_only=True)
class Zero2Config(FsdpConfig):
    reshard_after_forward: bool | int = False


class Zero2(Fsdp):
    """`fully_shard` without resharding after forward."""

    name = "zero2"
    aliases = ()
    gathers = 1
    Config = Zero2Config
    ignored_keys = (*Fsdp.ignored_keys, "not_use_fsdp", "use_ds_zero")
    why = "gradients and optimizer state are split over ranks"
