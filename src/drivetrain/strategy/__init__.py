"""Plans: an ordered list of optimization methods with their settings, applied to a Context in one fixed order."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".value": ["Strategy", "Entry", "Failure"],
        ".registry": ["register_method", "method_names", "find_method"],
        ".method": ["Method", "Stage", "Site"],
        ".device_spec": ["DeviceSpec"],
        ".search.find": ["SearchConstraints", "find_plan"],
        ".search.cost": ["Cost"],
        ".apply": ["Application", "shape"],
        ".resolve": ["ResolvedPlan", "resolve_plan"],
        "drivetrain.strategy.methods.module_replace": ["register_replace_pair"],
        "drivetrain.module.tensor_parallel": ["register_tp_plan"],
    },
)
