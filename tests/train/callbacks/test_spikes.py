"""Loss spikes are not trained on."""

import copy
import math

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError, NonFiniteError
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.optim import ConstantLr
from drivetrain.optim.optim_set import OptimSet
from drivetrain.train.callbacks import LossSpike
from tests.train.tasks import make_data, make_trainer, train, weights

SPIKE = 6  # the batch with the spike


def make_model():
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def spiking_data(rows=80, batches=(SPIKE,)):
    data = make_data(rows)
    for batch in batches:
        data.tensors[0][batch * 8 : batch * 8 + 8] *= 1e3
    return data


def of_units(model):
    rate = {"lr": 0.01, "momentum": 0.9}
    return OptimSet(main=ConstantLr("SGD", rate, model, grad_clip=None))


def run(data, spike, make_optimizer=lambda model: None, **kwargs):
    model = make_model()
    trainer = make_trainer(model, lr=0.01, optimizer=make_optimizer(model), callbacks=[spike], device="cpu")
    return trainer, train(trainer, data, **kwargs), weights(model)


def reference(data, leave_out, good=None, every=1):
    """Train without some batches; at the one in `good`, return first to the state after the last multiple of `every` updates."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = data.tensors
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for batch in range(len(x) // 8):
        if batch == good:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
        if batch not in leave_out:
            rows = slice(batch * 8, batch * 8 + 8)
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (batch + 1) % every == 0:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return weights(model)


@pytest.mark.parametrize("make_optimizer", [lambda model: None, of_units])
def test_a_spike_is_left_out_as_a_hand_written_loop_does_it_and_recorded(make_optimizer):
    data = spiking_data()
    _, history, ours = run(data, LossSpike(min_losses=4), make_optimizer)
    assert all(map(torch.equal, ours, reference(data, [SPIKE])))
    assert len(history.get_metric_values("loss_spike")) == 1 and history.get_metric_values("nonfinite_update") == []


def test_a_spike_works_where_nothing_else_is_tested():
    data = spiking_data()
    assert all(map(torch.equal, run(data, LossSpike(min_losses=4), nonfinite="ignore")[2], reference(data, [SPIKE])))


@pytest.mark.parametrize("every", [1, 4])
def test_rollback_passes_over_the_spike_and_the_batches_after_it(every):
    data = spiking_data()
    spike = LossSpike(min_losses=4, action="rollback", pass_over=2)
    trainer, _, ours = run(data, spike, nonfinite=NonFinitePolicy(every=every))
    expected = reference(data, [SPIKE, SPIKE + 1, SPIKE + 2], good=SPIKE, every=every)
    assert all(map(torch.equal, ours, expected))
    assert trainer.state.clock.batch == 10 and trainer.state.clock.sample == 80


def test_numbers_that_are_not_finite_are_only_skipped_where_spikes_roll_back():
    data = spiking_data(batches=())
    data.tensors[0][SPIKE * 8] = math.nan
    trainer, _, ours = run(data, LossSpike(min_losses=4, action="rollback", pass_over=0))
    assert trainer.run.good is not None and all(map(torch.equal, ours, reference(data, [SPIKE])))
    assert run(data, LossSpike(min_losses=4))[0].run.good is None  # nothing returns, so nothing is copied


def test_without_a_spike_nothing_changes():
    data = make_data(80)
    assert all(map(torch.equal, run(data, LossSpike(min_losses=4))[2], reference(data, [])))


def test_a_loss_that_stays_high_ends_the_run():
    with pytest.raises(NonFiniteError, match="rejected.*limit is 3"):
        run(spiking_data(batches=(5, 6, 7, 8)), LossSpike(min_losses=4), nonfinite=NonFinitePolicy(limit=3))


def test_statistics_and_batches_to_pass_over_are_resumed_bit_for_bit(tmp_path):
    data = spiking_data(batches=(6,))

    def part(folder, batches, **kwargs):
        spike = LossSpike(min_losses=4, action="rollback", pass_over=3)
        more = {
            "num_epochs": 9,
            "max_duration": f"{batches}ba",
            "checkpoint_every": "8ba",
            "checkpoint_dir": folder,
            **kwargs,
        }
        trainer, _, found = run(data, spike, **more)
        return found, list(spike.losses), trainer.run.stepper.guard.state_dict()

    whole = part(tmp_path / "a", 14)
    part(tmp_path / "b", 8)
    resumed = part(tmp_path / "b", 14, resume_from="auto")
    assert all(map(torch.equal, whole[0], resumed[0])) and whole[1:] == resumed[1:]
    assert whole[2] == {"in_a_row": 0, "total": 1, "to_pass_over": 0}


def test_the_limit_is_the_median_and_its_robust_deviation():
    spike = LossSpike(threshold=3.0, min_losses=5)
    spike.load_state_dict({"losses": [1.0, 2.0, 3.0, 4.0, 100.0]})
    assert spike._limit == pytest.approx(3 + 3 * 1 / 0.6745)
    spike.load_state_dict({"losses": [1.0, 2.0]})
    assert spike._limit == math.inf


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="rollback"):
        LossSpike(action="roll_back")
    with pytest.raises(ConfigError, match="threshold"):
        LossSpike(threshold=0)


def _run_on_a_rank():
    data = make_data(160)
    data.tensors[0][6 * 16 : 6 * 16 + 16 : 2] *= 1e3  # rows of one of the two ranks
    trainer, history, found = run(data, LossSpike(min_losses=4))
    return [w.tolist() for w in found], history.get_metric_values("loss_spike"), trainer.run.stepper.guard.total


def test_a_spike_on_one_of_two_ranks_is_left_out_on_both(world2):
    first, second = world2(_run_on_a_rank)
    assert first == second and len(first[1]) == 1 and first[2] == 1
