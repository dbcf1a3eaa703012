"""Lookahead in the Trainer, beside loops in float64."""

import pytest
import torch

from drivetrain.algorithms.gyro_dropout import GyroDropout
from drivetrain.algorithms.lookahead import Lookahead, cubic_decay
from tests.algorithms import tasks
from tests.train.tasks import make_data, make_model, make_trainer, train


def by_hand(steps, k, move, last):
    """Train with SGD, moving slow weights after every k-th step; `move(t)` is the share of the fast ones."""
    model, (x, y) = make_model(dtype=torch.float64), make_data(dtype=torch.float64).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = [p.detach().clone() for p in model.parameters()]
    for t in range(1, steps + 1):
        rows = slice(8 * ((t - 1) % 3), 8 * ((t - 1) % 3) + 8)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        with torch.no_grad():
            if t % k == 0:
                slow = [s + move(t) * (p - s) for s, p in zip(slow, model.parameters())]
            if t % k == 0 or (last and t == steps):
                for p, s in zip(model.parameters(), slow):
                    p.copy_(s)
    return list(model.parameters())


@pytest.mark.parametrize("schedule", [None, "cubic"])
def test_a_run_equals_a_loop_written_by_hand(schedule):
    trainer = make_trainer(make_model(dtype=torch.float64), algorithms=[Lookahead(4, 0.3, schedule)])
    train(trainer, make_data(dtype=torch.float64), num_epochs=3)
    move = (lambda t: 0.3) if schedule is None else (lambda t: 1 - 0.95**5 * (t / 9) ** 3)
    for ours, theirs in zip(trainer.model.parameters(), by_hand(9, 4, move, last=schedule is not None)):
        torch.testing.assert_close(ours, theirs)


def test_the_schedule_follows_at_once_at_first_and_holds_back_at_the_end():
    assert cubic_decay(0.0) == 0.0 and cubic_decay(1.0) == pytest.approx(0.95**5)


def test_a_second_run_starts_from_its_own_weights():
    algorithm = Lookahead(2)
    trainer = make_trainer(algorithms=[algorithm])
    train(trainer, num_epochs=1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    train(trainer, num_epochs=1)
    assert all(p.abs().max() < 1 for p in trainer.model.parameters()) and algorithm.state_dict()["steps"] == 3


def test_bad_settings_are_refused():
    for arguments in ({"k": 0}, {"alpha": 2}, {"schedule": "cubik"}):
        with pytest.raises(ValueError, match="Lookahead"):
            Lookahead(**arguments)


def test_it_resumes_next_to_layers_that_make_buffers_in_the_first_step(tmp_path):
    def trained(*callbacks, **kwargs):
        trainer = tasks.conv_trainer(Lookahead(3), GyroDropout(sigma=4, tau=2), callbacks=callbacks)
        tasks.train(trainer, tasks.image_data(), num_epochs=1, per_device_batch_size=4, **kwargs)
        return tasks.weights(trainer.model)

    whole = trained()
    keeping = {"checkpoint_dir": tmp_path, "checkpoint_every": "1ba", "async_checkpoint": False}
    with pytest.raises(RuntimeError, match="plug"):
        trained(tasks.PullPlug(2), **keeping)
    assert tasks.same(trained(resume_from="auto", **keeping), whole)
