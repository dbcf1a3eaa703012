"""The Trainer with a plan: the same losses by another way of running."""

import pytest
import torch

from drivetrain.core.errors import ConfigError, UnknownMethodError
from drivetrain.strategy import Strategy
from drivetrain.train.trainer import Trainer
from tests.train.tasks import Losses, make_data, make_model, make_trainer, train, weights


def run(strategy=None, precision=None):
    losses = Losses()
    model = make_model()
    trainer = Trainer(
        model, torch.nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), callbacks=[losses], strategy=strategy,
        precision=precision, seed=1,
    )  # fmt: skip
    trainer.train(make_data(40), num_epochs=2, global_batch_size=8, train_dataloader_kwargs={"shuffle": False})
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.get_model().parameters()]
    return losses.values, [p.detach().clone() for p in full], list(trainer.get_model().state_dict())


PLANS = [["parallel_mode"], ["fused_optimizer"], [("checkpoint", {"wrap_class": "Linear"})], [("micro_batch", 4)]]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.filterwarnings("ignore:.*dropped|.*one process")
def test_a_plan_gives_the_losses_of_the_plain_run(plan):
    expected, theirs, keys = run()
    losses, ours, our_keys = run(Strategy(plan))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert our_keys == keys
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_amp_is_the_precision_argument_by_another_name():
    assert run([("amp_native", "bf16")])[0] == run(precision="bf16")[0]


def distributed_plans():
    return [run(plan)[1:] for plan in (["parallel_mode"], ["parallel_mode", "fsdp"], ["parallel_mode", "zero2"])]


def test_distributed_plans_end_with_the_weights_of_one_process(world2):
    _, theirs, keys = run()
    for results in world2(distributed_plans, timeout=120):
        for ours, our_keys in results:
            assert our_keys == keys
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_unknown_methods_and_contradictions_are_named():
    with pytest.raises(UnknownMethodError, match="parallel_mode"):
        train(make_trainer(strategy=["paralle_mode"]))
    with pytest.raises(ConfigError, match="precision"):
        train(make_trainer(strategy=[("amp_native", "bf16")], precision="fp16"))


def test_a_failed_plan_leaves_the_model_alone():
    trainer = make_trainer(strategy=[("checkpoint", {"wrap_class": "NoSuchBlock"})])
    before = weights(trainer.model)
    with pytest.raises(ConfigError, match="NoSuchBlock"):
        train(trainer)
    assert all(map(torch.equal, weights(trainer.model), before))


@pytest.mark.parametrize("plan", [[("half", "bf16")], ["cpu_offload"], ["fused_optimizer"]])
def test_a_second_run_goes_on_with_the_planned_optimizer(plan):
    trainer = make_trainer(strategy=plan)
    train(trainer)
    optimizer, before = trainer.optimizer, [p.detach().clone() for p in trainer.get_model().parameters()]
    train(trainer)
    assert trainer.optimizer is optimizer
    assert not all(torch.equal(p, q) for p, q in zip(before, trainer.get_model().parameters()))
    stranger = make_model()
    trainer.optimizer = torch.optim.SGD(stranger.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="but no parameter of the model"):
        train(trainer)


class Pooled(torch.nn.Sequential):
    """A batch norm behind a global pooling: one sample has one value per channel, on which it cannot train."""

    def __init__(self):
        super().__init__(
            torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
            torch.nn.Linear(4, 3),
        )  # fmt: skip


def test_a_model_that_cannot_train_on_one_sample_is_verified_and_trains():
    data = torch.utils.data.TensorDataset(torch.randn(8, 3, 5, 5), torch.randint(0, 3, (8,)))
    found = {}
    for plan in (None, ["fused_optimizer"]):
        torch.manual_seed(0)
        model = Pooled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, torch.nn.CrossEntropyLoss(), optimizer, callbacks=(), strategy=plan)
        trainer.train(data, num_epochs=1, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False})
        found[bool(plan)] = [parameter.detach().clone() for parameter in model.parameters()]
    assert any("dry run" in reason for reason in trainer.plan.reasons)
    for plain, planned in zip(found[False], found[True]):
        torch.testing.assert_close(planned, plain, rtol=1e-5, atol=1e-6)


def test_a_plan_is_verified_on_several_samples_so_that_a_loss_over_other_things_is_seen(monkeypatch):
    seen = []
    from drivetrain.strategy.trial import checking

    original = checking.compute_reference_results
    monkeypatch.setattr(
        checking, "compute_reference_results", lambda *args, **kw: seen.append(args[3]) or original(*args, **kw)
    )
    train(make_trainer(strategy=["fused_optimizer"]), num_epochs=1, per_device_batch_size=6)
    assert seen == [6]
