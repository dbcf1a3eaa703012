"""Schedulers set a field of every parameter group."""

import pytest
import torch

from drivetrain.train.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase


def make_optimizer(*rates):
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates], lr=1.0)


class Halving(StatefulSchedulerBase):
    def get_updated_values(self, num_updates):
        return [base / 2**num_updates for base in self.base_lr_values]


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_base_values_are_stored_per_group():
    optimizer = make_optimizer(0.1, 0.2)
    scheduler = Halving(optimizer)
    assert scheduler.base_lr_values == [0.1, 0.2]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_a_missing_field_is_a_key_error_that_names_the_group():
    class Momentum(SchedulerBase):
        def get_updated_values(self, num_updates):
            return 0.5

    with pytest.raises(KeyError, match=r"warmth is missing from param_groups\[0\]"):
        Momentum(make_optimizer(0.1), param_group_field="warmth")


def test_any_field_can_be_scheduled_with_one_value_for_all_groups():
    class Momentum(SchedulerBase):
        def get_updated_values(self, num_updates):
            return 0.5 + num_updates

    optimizer = make_optimizer(0.1, 0.2)
    Momentum(optimizer, param_group_field="momentum").step_update(3)
    assert [group["momentum"] for group in optimizer.param_groups] == [3.5, 3.5]
    assert rates(optimizer) == [0.1, 0.2]


def test_none_leaves_the_groups_as_they_are():
    class Silent(SchedulerBase):
        def get_updated_values(self, num_updates):
            return None

    optimizer = make_optimizer(0.1)
    Silent(optimizer).step_update(5)
    assert rates(optimizer) == [0.1]


def test_a_wrong_number_of_values_is_an_error():
    class Short(SchedulerBase):
        def get_updated_values(self, num_updates):
            return [0.1]

    with pytest.raises(ValueError, match="1 values for 2 parameter groups"):
        Short(make_optimizer(0.1, 0.2)).step_update(1)


def test_the_first_step_evaluates_update_zero():
    optimizer = make_optimizer(0.8)
    scheduler = Halving(optimizer)
    seen = []
    for _ in range(4):
        seen.append(rates(optimizer)[0])  # what the update uses
        scheduler.step()
    assert seen == [0.8, 0.8, 0.4, 0.2]


def test_a_restored_scheduler_goes_on_where_it_was():
    optimizer = make_optimizer(0.8)
    scheduler = Halving(optimizer)
    for _ in range(3):
        scheduler.step()
    state = scheduler.state_dict()
    assert state["num_updates"] == 2
    assert "optimizer" not in state
    other = make_optimizer(0.8)
    restored = Halving(other)
    restored.load_state_dict(state)
    scheduler.step()
    restored.step()
    assert rates(other) == rates(optimizer) == [0.1]


def test_a_state_without_a_count_is_loaded_with_a_warning():
    scheduler = Halving(make_optimizer(0.8))
    with pytest.warns(UserWarning, match="has no count of updates"):
        scheduler.load_state_dict({"base_lr_values": [0.4]})
    assert scheduler.base_lr_values == [0.4]


def test_a_rate_that_is_a_tensor_is_filled_in_place():
    rate = torch.tensor(0.8)
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=rate)
    held = optimizer.param_groups[0]["lr"]
    scheduler = Halving(optimizer)
    scheduler.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.4)


def test_base_rates_are_those_of_the_groups():
    optimizer = make_optimizer(0.1)
    scheduler = Halving(optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["initial_lr"] = 0.4
    optimizer.load_state_dict(saved)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.8})
    scheduler.step_update(1)
    assert rates(optimizer) == [0.2, 0.4]
