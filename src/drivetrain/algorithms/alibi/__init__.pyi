# Written by `make stubs` from the lazy exports of this module.
from drivetrain.algorithms.alibi.algorithm import Alibi as Alibi
from drivetrain.algorithms.alibi.algorithm import AlibiBias as AlibiBias
from drivetrain.algorithms.alibi.algorithm import PolicyRegistry as PolicyRegistry
from drivetrain.algorithms.alibi.algorithm import alibi_slopes as alibi_slopes
from drivetrain.algorithms.alibi.algorithm import apply_alibi as apply_alibi
from drivetrain.algorithms.alibi.algorithm import policy_registry as policy_registry
from drivetrain.module.attention import register_attention as register_attention
from drivetrain.algorithms.alibi import algorithm as attention_surgery_functions
from drivetrain.compat import composer_types as gpt2_alibi

__all__ = [
    "Alibi",
    "AlibiBias",
    "PolicyRegistry",
    "alibi_slopes",
    "apply_alibi",
    "policy_registry",
    "register_attention",
]
