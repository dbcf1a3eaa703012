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
    with pytest.raises(ConfigError, match="none of which belongs to the model"):
        train(trainer)
