"""ALiBi (Press et al., 2022, arXiv 2108.12409): position as a penalty on distance, so that models read longer than they learned."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".algorithm": ["Alibi", "AlibiBias", "PolicyRegistry", "alibi_slopes", "apply_alibi", "policy_registry"],
        "drivetrain.module.attention": ["register_attention"],
    },
)
