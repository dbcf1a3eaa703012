"""A bad step never becomes the newest checkpoint: updates that are not finite are left out, stop the run, or roll it back."""

import copy
import math

import pytest
import torch
from torch import nn

from drivetrain.checkpoint.store import load_checkpoint
from drivetrain.core.errors import DrivetrainWarning, NonFiniteError, NonFiniteStateError
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.optim import ConstantLr
from drivetrain.optim.optim_set import OptimSet
from drivetrain.optim.optimizers.decoupled import Lion
from drivetrain.optim.optimizers.wrapper import SAMOptimizer
from drivetrain.runtime.ranks import get_rank
from drivetrain.train.callbacks import TerminateOnNaNCallback, TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, make_trainer, train, weights

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "lion": lambda model: Lion(model.parameters(), lr=0.01),
    "set": lambda model: OptimSet(
        a=ConstantLr("Adam", {"lr": 0.01}, model, updated_modules="0"),
        b=ConstantLr("SGD", {"lr": 0.1}, model, updated_modules="3"),
    ),
}


class Poison(TrainerCallback):
    """Puts NaN into one entry of a gradient on one rank, at these batches of the run, from 0."""

    def __init__(self, *batches: int, rank: int = 0, before_averaging: bool = False):
        self.batches, self.rank, self.before_averaging = batches, rank, before_averaging

    def on_training_run_start(self, trainer, **kwargs):
        self.trainer = trainer
        if self.before_averaging:
            next(trainer.get_model().parameters()).register_hook(self._spoiled)

    def after_backward(self, state, logger):
        if not self.before_averaging and self._is_due():
            next(state.model.parameters()).grad.view(-1)[0] = math.nan

    def _is_due(self):
        return self.trainer.state.clock.batch in self.batches and get_rank() == self.rank

    def _spoiled(self, gradient):
        if not self._is_due():
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[0] = math.nan
        return gradient


def spoiled_data(*batches, rows=48, size=8, value=math.nan):
    """Return data whose batches of these numbers hold one value that is not finite."""
    data = make_data(rows)
    for batch in batches:
        data.tensors[0][batch * size + 1, 2] = value
    return data


def hand_loop(model, optimizer, data, leave_out=(), epochs=1, size=8):
    x, y = data.tensors
    for _ in range(epochs):
        for batch in range(len(x) // size):
            if batch in leave_out:
                continue
            rows = slice(batch * size, (batch + 1) * size)
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()


def is_finite(tensors):
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_bad_gradient_entry_is_left_out_and_the_run_goes_on_and_resumes(name, tmp_path):
    model = make_model()
    trainer = make_trainer(model, optimizer=OPTIMIZERS[name](model), callbacks=[Poison(1)])
    history = train(trainer, num_epochs=2, checkpoint_dir=tmp_path, checkpoint_every="1ba")
    assert is_finite(weights(model)) and history.get_metric_values("nonfinite_update") == [2]
    for folder in tmp_path.glob("*ba*"):
        assert is_finite(load_checkpoint(folder)["model"].values())
    resumed = make_model()
    again = make_trainer(resumed, optimizer=OPTIMIZERS[name](resumed), callbacks=[Poison(1)])
    train(again, num_epochs=3, checkpoint_dir=tmp_path, resume_from="auto")
    assert again.state.clock.batch == 9 and is_finite(weights(resumed))
    assert again.run.stepper.guard.total == 1  # counted in the first run


def test_a_bad_batch_is_left_out_as_a_hand_written_loop_does_it_with_its_schedule_and_loss():
    data, model, reference = spoiled_data(2), make_model(), make_model()
    trainer = make_trainer(model)
    schedule = [torch.optim.lr_scheduler.ExponentialLR, 0.5]
    history = train(trainer, data, create_scheduler_fn=lambda optimizer: schedule[0](optimizer, schedule[1]))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedule[0](optimizer, schedule[1])
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    hand_loop(reference, optimizer, data, leave_out=[2])
    assert all(map(torch.equal, weights(model), weights(reference)))
    assert math.isfinite(history.get_latest_metric("train_loss_epoch"))


@pytest.mark.parametrize(
    "clipping", [{"gradient_clip_norm": 1.0}, {"gradient_accumulation_steps": 2}, {"microbatch_size": 4}]
)
def test_a_bad_batch_is_left_out_with_clipping_accumulation_and_parts(clipping):
    model = make_model()
    history = train(make_trainer(model), spoiled_data(2), **clipping)
    assert is_finite(weights(model)) and len(history.get_metric_values("nonfinite_update")) == 1


@pytest.mark.parametrize(
    ("settings", "left_out"), [({}, [1]), ({"gradient_accumulation_steps": 2}, [0, 1]), ({"microbatch_size": 4}, [0])]
)
def test_an_infinite_loss_with_finite_gradients_is_left_out(settings, left_out):
    class Offset(nn.Module):
        calls = 0

        def forward(self, outputs, targets):
            self.calls += 1
            return nn.functional.cross_entropy(outputs, targets) + (math.inf if self.calls == 2 else 0.0)

    model, reference, data = make_model(), make_model(), make_data()
    trainer = Trainer(
        model, Offset(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), count_items=lambda b: len(b[0])
    )
    train(trainer, data, **settings)
    hand_loop(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data, leave_out=left_out)
    for mine, theirs in zip(weights(model), weights(reference), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradients_that_are_not_finite_in_a_repeated_pass_are_left_out():
    model, reference, data = make_model(), make_model(), make_data()
    sam = lambda model: SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    factors = iter([1.0, 1.0, 1.0, math.nan, 1.0, 1.0])  # two backward passes for each update
    next(model.parameters()).register_hook(lambda gradient: gradient * next(factors))
    trainer = make_trainer(model, optimizer=sam(model))
    history = train(trainer, data)
    assert history.get_metric_values("nonfinite_update") == [2]
    rows = [*range(8), *range(16, 24)]
    train(make_trainer(reference, optimizer=sam(reference)), torch.utils.data.Subset(data, rows))
    for mine, theirs in zip(weights(model), weights(reference), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_running_statistics_forget_a_bad_batch():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    data, model, reference = spoiled_data(2), make(), make()
    train(make_trainer(model), data)
    hand_loop(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), data, leave_out=[2])
    assert torch.equal(model[1].running_mean, reference[1].running_mean)
    assert torch.equal(model[1].running_var, reference[1].running_var)


def test_so_many_bad_updates_in_a_row_stop_the_run_and_its_checkpoints_stay_finite(tmp_path):
    model = make_model()
    trainer = make_trainer(model, callbacks=[Poison(*range(4, 99))])
    with pytest.raises(NonFiniteError, match="limit is 3 in a row"):
        train(
            trainer, num_epochs=9, nonfinite=NonFinitePolicy(limit=3), checkpoint_dir=tmp_path, checkpoint_every="1ba"
        )
    assert trainer.run.stepper.guard.in_a_row == 3 and trainer.state.clock.step == 6
    assert is_finite(weights(model))
    assert is_finite(load_checkpoint(tmp_path)["model"].values())


def test_the_count_in_a_row_is_resumed(tmp_path):
    policy = NonFinitePolicy(limit=3)
    first = make_trainer(callbacks=[Poison(*range(1, 99))])
    train(first, max_num_train_steps=3, num_epochs=9, nonfinite=policy, checkpoint_dir=tmp_path)
    second = make_trainer(callbacks=[Poison(*range(1, 99))])
    with pytest.raises(NonFiniteError, match="3 in a row"):
        train(second, num_epochs=9, nonfinite=policy, checkpoint_dir=tmp_path, resume_from="auto")
    assert second.state.clock.step == 3


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_stop_ends_the_run_at_the_first_bad_update(action, tmp_path):
    model = make_model()
    trainer = make_trainer(model, callbacks=[Poison(1)])
    with pytest.raises(NonFiniteError, match="batch 2"):
        train(trainer, nonfinite=action, checkpoint_dir=tmp_path, checkpoint_every="1ba")
    assert trainer.state.clock.step == 1 and is_finite(weights(model))


def test_terminate_on_nan_still_stops_at_once_before_a_save(tmp_path):
    trainer = make_trainer(callbacks=[TerminateOnNaNCallback()])
    with pytest.raises(NonFiniteError):
        train(trainer, spoiled_data(2), checkpoint_dir=tmp_path, checkpoint_every="1ba")
    assert trainer.state.clock.batch == 2 and trainer.last_checkpoint.name.endswith("ba2")


class Reseed(TrainerCallback):
    def on_train_epoch_start(self, trainer, **kwargs):
        torch.manual_seed(7)


@pytest.mark.parametrize("every", [1, 2, 100])
def test_rollback_equals_a_hand_written_loop_bit_for_bit(every):
    data, model, reference = spoiled_data(3, 4), make_model(dropout=0.5), make_model(dropout=0.5)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, reference)]
    trainer = make_trainer(model, optimizer=optimizers[0], callbacks=[Reseed()])
    train(trainer, data, nonfinite=NonFinitePolicy(action="rollback", every=every))

    def kept():
        return copy.deepcopy((reference.state_dict(), optimizers[1].state_dict())), torch.get_rng_state()

    torch.manual_seed(7)
    (x, y), good = data.tensors, kept()
    for batch in range(6):
        if batch in (3, 4):
            states, rng = copy.deepcopy(good[0]), good[1]
            reference.load_state_dict(states[0])
            optimizers[1].load_state_dict(states[1])
            torch.set_rng_state(rng)
        else:
            rows = slice(batch * 8, batch * 8 + 8)
            nn.functional.cross_entropy(reference(x[rows]), y[rows]).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        if (batch + 1) % every == 0:
            good = kept()
    assert all(map(torch.equal, weights(model), weights(reference)))
    for ours, theirs in zip(optimizers[0].state.values(), optimizers[1].state.values()):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_rolled_back_run_resumes_bit_for_bit(tmp_path):
    policy = NonFinitePolicy(action="rollback", every=2)

    def run(folder, batches, **kwargs):
        model = make_model(dropout=0.5)
        trainer = make_trainer(model, callbacks=[Reseed()])
        train(
            trainer,
            spoiled_data(4),
            num_epochs=9,
            max_duration=f"{batches}ba",
            nonfinite=policy,
            checkpoint_dir=folder,
            **kwargs,
        )
        return weights(model)

    whole = run(tmp_path / "a", 11, checkpoint_every="3ba")
    run(tmp_path / "b", 3, checkpoint_every="3ba")
    parts = run(tmp_path / "b", 11, checkpoint_every="3ba", resume_from="auto")
    assert all(map(torch.equal, whole, parts))


def spoil_weights(trainer):
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[0] = math.nan


class SpoilWeights(TrainerCallback):
    """Makes a weight NaN behind the guard's back."""

    writes = ("model",)

    def batch_end(self, state, logger):
        if state.clock.batch == 2:
            with torch.no_grad():
                next(state.model.parameters()).view(-1)[0] = math.nan


def test_a_state_that_is_not_finite_is_never_the_newest_checkpoint(tmp_path):
    trainer = make_trainer(callbacks=[SpoilWeights()])
    with pytest.raises(NonFiniteStateError, match=r"model\.0\.weight"):
        train(trainer, checkpoint_dir=tmp_path, checkpoint_every="1ba")
    assert is_finite(load_checkpoint(tmp_path)["model"].values())
    resumed = make_model()
    train(make_trainer(resumed), checkpoint_dir=tmp_path, resume_from="auto")
    assert is_finite(weights(resumed))


def test_rollback_also_repairs_a_state_that_is_not_finite(tmp_path):
    model = make_model()
    train(
        make_trainer(model, callbacks=[SpoilWeights()]),
        checkpoint_dir=tmp_path,
        checkpoint_every="1ba",
        nonfinite="rollback",
    )
    assert is_finite(weights(model))


def test_saving_by_hand_keeps_the_file_that_is_there(tmp_path):
    trainer, path = make_trainer(), tmp_path / "best.pt"
    trainer.save_checkpoint(path)
    before = path.read_bytes()
    spoil_weights(trainer)
    with pytest.warns(DrivetrainWarning, match="not written"):
        trainer.save_checkpoint(path)
    with pytest.warns(DrivetrainWarning, match="not written"):
        trainer.save_training_state(tmp_path / "state")
    assert path.read_bytes() == before


def test_ignore_tests_nothing():
    model = make_model()
    train(make_trainer(model, callbacks=[Poison(1)]), nonfinite="ignore")
    assert not is_finite(weights(model))


def test_float16_without_a_scaler_warns():
    with pytest.warns(DrivetrainWarning, match="no gradient scaler"):
        train(make_trainer(precision="fp16", device="cpu"))
    with pytest.warns(DrivetrainWarning, match="trainable float16 weights"):
        train(make_trainer(make_model(dtype=torch.float16)), make_data(dtype=torch.float16))


def _run_on_a_rank(name, folder, before_averaging, rank):
    model = make_model()
    poison = Poison(1, rank=rank, before_averaging=before_averaging)
    trainer = make_trainer(model, optimizer=OPTIMIZERS[name](model), callbacks=[poison], device="cpu")
    train(trainer, make_data(48), num_epochs=1, checkpoint_dir=folder, checkpoint_every="1ba")
    newest = load_checkpoint(folder)["model"]
    resumed = make_model()
    again = make_trainer(resumed, optimizer=OPTIMIZERS[name](resumed), callbacks=[poison], device="cpu")
    train(again, make_data(48), num_epochs=2, checkpoint_dir=folder, resume_from="auto")
    return (
        [w.tolist() for w in weights(model)],
        is_finite(newest.values()),
        again.run.stepper.guard.total,
        is_finite(weights(resumed)),
    )


@pytest.mark.parametrize("before_averaging", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_bad_entry_on_one_of_two_ranks_is_left_out_on_both(world2, name, before_averaging, tmp_path):
    first, second = world2(_run_on_a_rank, name, str(tmp_path), before_averaging, 1)
    assert first[0] == second[0]  # bit for bit the same weights
    assert first[1:] == second[1:] == (True, 1, True)


def _stop_on_all_ranks(action):
    model = make_model()
    trainer = make_trainer(model, callbacks=[Poison(1, rank=1)], device="cpu")
    try:
        train(trainer, make_data(48), nonfinite=action)
    except NonFiniteError:
        return "stopped", trainer.state.clock.batch
    return "went on", [w.tolist() for w in weights(model)]


def test_all_ranks_stop_or_roll_back_together(world2):
    assert world2(_stop_on_all_ranks, "stop") == [("stopped", 1)] * 2
    first, second = world2(_stop_on_all_ranks, "rollback")
    assert first == second and first[0] == "went on"
