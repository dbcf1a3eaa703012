# Written by `make stubs` from the lazy exports of this module.
from drivetrain.strategy.value import Strategy as Strategy
from drivetrain.strategy.value import Entry as Entry
from drivetrain.strategy.value import Failure as Failure
from drivetrain.strategy.registry import register_method as register_method
from drivetrain.strategy.registry import method_names as method_names
from drivetrain.strategy.registry import find_method as find_method
from drivetrain.strategy.method import Method as Method
from drivetrain.strategy.method import Stage as Stage
from drivetrain.strategy.method import Site as Site
from drivetrain.strategy.device_spec import DeviceSpec as DeviceSpec
from drivetrain.strategy.search.find import SearchConstraints as SearchConstraints
from drivetrain.strategy.search.find import find_plan as find_plan
from drivetrain.strategy.search.cost import Cost as Cost
from drivetrain.strategy.apply import Application as Application
from drivetrain.strategy.apply import shape as shape
from drivetrain.strategy.resolve import ResolvedPlan as ResolvedPlan
from drivetrain.strategy.resolve import resolve_plan as resolve_plan
from drivetrain.strategy.methods.module_replace import register_replace_pair as register_replace_pair
from drivetrain.module.tensor_parallel import register_tp_plan as register_tp_plan

__all__ = [
    "Strategy",
    "Entry",
    "Failure",
    "register_method",
    "method_names",
    "find_method",
    "Method",
    "Stage",
    "Site",
    "DeviceSpec",
    "SearchConstraints",
    "find_plan",
    "Cost",
    "Application",
    "shape",
    "ResolvedPlan",
    "resolve_plan",
    "register_replace_pair",
    "register_tp_plan",
]
