"""Another way to `drivetrain.module.params`, where the functions live."""

from drivetrain.module.params import MuonGroups, muon_groups, named_trainable, select_parameters

__all__ = ["MuonGroups", "muon_groups", "named_trainable", "select_parameters"]
