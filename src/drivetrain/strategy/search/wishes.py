"""The earlier name of `SearchConstraints`."""

from drivetrain.strategy.search.constraints import SearchConstraints as Wishes

__all__ = ["Wishes"]
