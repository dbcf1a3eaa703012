"""Tensor-parallel plans: found, expanded, refused. Their arithmetic is tested with whole plans in tests/strategy."""

import pytest
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module import tensor_parallel
from drivetrain.module.tensor_parallel import expand_tp_plan, find_tp_plan, register_tp_plan


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)


def test_registered_plans_are_found_wherever_their_class_stands():
    register_tp_plan(Mlp, {"up": "colwise", "down": "rowwise"})
    try:
        model = nn.ModuleDict({"first": Mlp(), "rest": nn.ModuleList([Mlp()])})
        plan = find_tp_plan(model)
        assert plan == {
            "first.up": "colwise",
            "first.down": "rowwise",
            "rest.0.up": "colwise",
            "rest.0.down": "rowwise",
        }
        assert find_tp_plan(Mlp()) == {"up": "colwise", "down": "rowwise"}
    finally:
        del tensor_parallel._registered[Mlp]
    model = Mlp()
    assert find_tp_plan(model) == {}
    model._tp_plan = {"up": "colwise"}
    assert find_tp_plan(model) == {"up": "colwise"}
    other = Mlp()
    other._tp_plan = {"up": "of another library"}
    outer = nn.ModuleDict({"wrapped": model, "other": other})
    assert find_tp_plan(outer) == {"wrapped.up": "colwise"}
    outer._tp_plan = {"wrapped.down": "rowwise"}
    assert find_tp_plan(outer) == {"wrapped.down": "rowwise"}  # the plan of the whole is also that of its parts


def test_patterns_expand_and_wrong_plans_are_refused():
    model = nn.ModuleList([Mlp(), Mlp()])
    assert expand_tp_plan(model, {"*.up": "colwise", "1.up": "replicate"}, 2) == {"0.up": "colwise"}
    with pytest.raises(ConfigError, match=r"0\.up"):
        expand_tp_plan(model, {"0.upp": "colwise"}, 2)
    with pytest.raises(ConfigError, match="12 features"):
        expand_tp_plan(model, {"0.up": "colwise"}, 5)
    with pytest.raises(ConfigError, match="Mlp"):
        expand_tp_plan(model, {"0": "rowwise"}, 2)
    with pytest.raises(ConfigError, match="Did you mean 'colwise'"):
        register_tp_plan(Mlp, {"up": "colwize"})
    with pytest.raises(ConfigError, match="class of modules"):
        register_tp_plan(3, {})
