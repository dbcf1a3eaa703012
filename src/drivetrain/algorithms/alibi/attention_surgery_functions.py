"""Where Composer keeps the registry of replacements for attention layers."""

from drivetrain.algorithms.alibi.policies import policy_registry

__all__ = ["policy_registry"]
