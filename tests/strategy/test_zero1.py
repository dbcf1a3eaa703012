"""Optimizer state that is split over ranks is saved whole: it goes on elsewhere as if it had never been split."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.train.trainer import Trainer
from tests.strategy.tasks import ADAM, pairs_data
from tests.strategy.test_offload import accelerated, epoch, weights

ZERO = ["zero1", "fused_optimizer"]


def saved_and_continued(plan):
    """Train an epoch, save, train another; return the saved state and where it ended, once by itself and once resumed."""
    whole = accelerated(plan)
    epoch(whole)
    state = copy.deepcopy(whole.context.state_dict())
    epoch(whole)
    expected = weights(whole)
    clear_data_ranks()
    resumed = accelerated(plan)
    resumed.context.load_state_dict(copy.deepcopy(state))
    epoch(resumed)
    found = weights(resumed)
    split = len(resumed.optim.inner.optim.state), len(found)
    clear_data_ranks()
    kept = {"model": state["model"], "optimizer": state["optimizer"]}
    return kept, expected, found, split


def continued(plan, state):
    result = accelerated(plan)
    result.context.load_state_dict(state, strict=False)
    epoch(result)
    found = weights(result)
    clear_data_ranks()
    return [getattr(p, "full_tensor", lambda p=p: p)() for p in found]


@pytest.mark.parametrize("plan", [ZERO, ["zero1", ("half", "bf16")]], ids=["zero1", "zero1, half"])
def test_a_split_state_is_saved_whole_and_resumed(world2, plan):
    results = world2(saved_and_continued, plan, timeout=120)
    for kept, expected, found, (mine, all_of_them) in results:
        assert all(map(torch.equal, found, expected)) and 0 < mine < all_of_them
        assert len(kept["optimizer"]["state"]) == all_of_them
    state = results[0][0]
    one = plan[1:]
    alone = continued(one, copy.deepcopy(state))  # on one process, without the split
    for ours, theirs in zip(alone, results[0][1]):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-2 if "half" in str(plan) else 1e-4, atol=1e-2 if "half" in str(plan) else 1e-5
        )


def trained(folder, strategy, steps, resume=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=(), strategy=strategy, seed=1)
    trainer.train(
        pairs_data(),
        num_epochs=2,
        global_batch_size=8,
        checkpoint_dir=folder,
        resume_from=resume,
        max_num_train_steps=steps,
    )
    found = [p.detach().clone() for p in trainer.get_model().parameters()]
    clear_data_ranks()
    return found


def test_the_trainer_resumes_a_split_state_on_one_process_and_under_another_plan(world2, tmp_path):
    expected = trained(None, None, None)
    first = tmp_path / "two"
    world2(trained, str(first), ["zero1"], 8, timeout=120)
    for strategy in (["fused_optimizer"], None):
        for ours, theirs in zip(trained(None, strategy, None, resume=first), expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for found in world2(trained, None, ["zero1"], None, str(first), timeout=120):
        for ours, theirs in zip(found, expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def emptied():
    """Load a state from before the first update after an epoch; return how much of the epoch's state is left."""
    result = accelerated(ZERO)
    epoch(result)
    split = result.optim.inner
    before = len(split.optim.state)
    split.load_state_dict({"state": {}, "param_groups": copy.deepcopy(split.state_dict()["param_groups"])})
    clear_data_ranks()
    return before, len(split.optim.state)


def test_a_state_from_before_the_first_update_leaves_nothing_of_later_ones(world2):
    for before, after in world2(emptied, timeout=120):
        assert before and not after
