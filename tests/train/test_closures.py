"""Optimizers that evaluate the loss themselves: LBFGS in the Trainer equals LBFGS in a loop."""

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError, ResumeError
from drivetrain.train.closures import WindowRepeat, requires_closure
from drivetrain.train.resuming import make_optimizer
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model


def lbfgs_trainer(dropout: float = 0.0):
    model = make_model(dtype=torch.float64, dropout=dropout)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, (), seed=1)


def test_lbfgs_equals_a_loop_written_by_hand():
    trainer = lbfgs_trainer()
    data = make_data(dtype=torch.float64)
    trainer.train(
        data,
        num_epochs=2,
        per_device_batch_size=8,
        train_dataloader_kwargs={"shuffle": False},
        gradient_accumulation_steps=3,
    )
    model, (x, y) = make_model(dtype=torch.float64), data.tensors
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    for ours, theirs in zip(trainer.model.parameters(), model.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_every_evaluation_draws_the_same_random_numbers():
    trainer = lbfgs_trainer(dropout=0.5)
    masks = []
    trainer.model[2].register_forward_hook(lambda m, args, out: masks.append((out == 0).clone()))
    trainer.train(make_data(8, dtype=torch.float64), num_epochs=1, per_device_batch_size=8)
    assert len(masks) > 3 and all(torch.equal(mask, masks[0]) for mask in masks)


def test_float16_is_refused_before_the_first_step():
    trainer = lbfgs_trainer()
    trainer._accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss itself"):
        trainer.train(make_data(8, dtype=torch.float64), num_epochs=1)


def test_other_optimizers_cost_nothing_and_remember_nothing():
    model = make_model()
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), ())
    trainer.train(make_data(), num_epochs=1)
    assert not trainer.run.repeat.is_wanted and trainer.run.repeat._memories == []
    assert not requires_closure(trainer.optimizer) and requires_closure(torch.optim.LBFGS(model.parameters()))


def test_a_closure_outside_a_step_says_so():
    with pytest.raises(ConfigError, match="no batch to evaluate"):
        WindowRepeat("cpu").evaluate(lbfgs_trainer())


def test_the_factory_makes_optimizers_by_name_and_names_what_is_wrong():
    weight = nn.Parameter(torch.ones(2, 2))
    assert type(make_optimizer("Lion", [weight], lr=0.1)).__name__ == "Lion"
    inside = make_optimizer("AdamW", [{"params": [weight], "lr": 0.5}])
    assert make_optimizer("SAM", inside, rho=0.2).base_optimizer is inside
    with pytest.raises(ConfigError, match="Did you mean 'Lion'"):
        make_optimizer("Lionn", [weight])
    with pytest.raises(ConfigError, match="rejects its settings"):
        make_optimizer("Lion", [weight], momentum=1)


def test_restored_batches_are_placed_like_new_ones():
    buffer = torch.randn(9)
    saved = {
        "batch": (buffer[1:], buffer[2:]),
        "step": 0,
        "synchronises": True,
        "sizes": None,
        "rng": {},
        "generators": {},
    }
    repeat = WindowRepeat(torch.device("cpu"))
    repeat.load_state_dict({"memories": [saved]})
    restored = repeat._memories[0].batch
    assert all(tensor.data_ptr() % 64 == 0 for tensor in restored)  # rounding depends on where a tensor begins
    assert all(map(torch.equal, restored, saved["batch"]))


def sam_in_uneven_windows() -> list[torch.Tensor]:
    """Global batches of 4, 4, 4 and 1 samples in windows of two: on two ranks, one has no sample in the last."""
    model = make_model(dtype=torch.float64)
    optimizer = make_optimizer("SAM", torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, ())
    trainer.train(
        make_data(13, dtype=torch.float64), num_epochs=2, global_batch_size=4, gradient_accumulation_steps=2,
        train_dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    return [p.detach() for p in model.parameters()]


def test_windows_are_repeated_with_the_same_weights_on_two_processes(world2):
    alone = sam_in_uneven_windows()
    for ours in world2(sam_in_uneven_windows):
        for mine, expected in zip(ours, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_each_rank_repeats_its_own_batches_of_a_window_that_was_resumed(world2, tmp_path):
    whole, resumed = zip(*world2(sam_resumed_inside_a_window, str(tmp_path)), strict=True)
    for mine, expected in zip(resumed[1], whole[1], strict=True):
        assert torch.equal(mine, expected)
    with pytest.raises(ResumeError, match="2 ranks evaluate again"):
        train_sam(resume_from=tmp_path / "checkpoint-ep0-ba3")


def sam_resumed_inside_a_window(folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    whole = train_sam(checkpoint_dir=folder, checkpoint_every="3ba")
    return whole, train_sam(resume_from=f"{folder}/checkpoint-ep0-ba3")


def train_sam(**settings: object) -> list[torch.Tensor]:
    model = make_model(dtype=torch.float64)
    optimizer = make_optimizer("SAM", torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    Trainer(model, nn.CrossEntropyLoss(), optimizer, ()).train(
        make_data(16, dtype=torch.float64), max_duration="4ba", global_batch_size=4,
        gradient_accumulation_steps=2, **settings,
    )  # fmt: skip
    return [p.detach() for p in model.parameters()]
