"""The same run on one, two and four processes."""

import pytest
import torch

from drivetrain.core.errors import DistributedError, PlanInfeasible, StopTrainingError
from drivetrain.train.agreement import STOP, StopVote
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import Losses, make_data, make_model, make_trainer, train, weights


class Seen(TrainerCallback):
    """Keeps which rows this rank saw, by a feature that identifies them."""

    def __init__(self):
        self.rows = []

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        self.rows.append(batch[0][:, 0].tolist())


def run_global(rows=35, accumulation=1, shuffle=True, clip=None):
    """Train at a constant global batch and return what must not depend on the number of processes."""
    double = torch.float64
    data, losses = make_data(rows, dtype=double), Losses()
    trainer = make_trainer(make_model(dtype=double), callbacks=[losses], seed=3, metrics={"accuracy": accuracy})
    history = train(
        trainer,
        data,
        num_epochs=3,
        eval_dataset=make_data(11, dtype=double),
        global_batch_size=8,
        gradient_accumulation_steps=accumulation,
        gradient_clip_norm=clip,
        train_dataloader_kwargs={"shuffle": shuffle},
    )
    metrics = {name: list(history.get_metric_values(name)) for name in history.get_metric_names()}
    outputs = trainer.predict(make_data(11, dtype=double), per_device_batch_size=2)
    return weights(trainer.model), metrics, outputs, type(trainer.model).__name__


def accuracy(outputs, targets):
    return (outputs.argmax(-1) == targets).double().mean()


@pytest.fixture(scope="module")
def alone():
    return {accumulation: run_global(accumulation=accumulation) for accumulation in (1, 3)}


@pytest.mark.parametrize(("size", "accumulation"), [(2, 1), (2, 3), (4, 3), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_weights_metrics_and_predictions_do_not_depend_on_the_number_of_processes(
    world2, world4, alone, size, accumulation
):
    expected_weights, expected_metrics, expected_outputs, _ = alone[accumulation]
    for rank_weights, metrics, outputs, model_type in {2: world2, 4: world4}[size](
        run_global, accumulation=accumulation
    ):
        for ours, theirs in zip(rank_weights, expected_weights):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        assert metrics.keys() == expected_metrics.keys()
        for name, values in metrics.items():
            assert values == pytest.approx(expected_metrics[name], abs=1e-10)
        torch.testing.assert_close(outputs, expected_outputs, rtol=0, atol=1e-10)
        assert model_type == "Sequential"


def run_and_see():
    seen = Seen()
    trainer = make_trainer(callbacks=[seen], seed=5)
    train(trainer, make_data(26), num_epochs=2, global_batch_size=8, train_dataloader_kwargs={})
    return seen.rows


def test_two_processes_see_the_single_process_order(world2):
    single = run_and_see()
    first, second = world2(run_and_see)
    joined = [a + b for a, b in zip(first, second)]
    assert [sorted(rows) for rows in joined] == [sorted(rows) for rows in single]
    assert joined == single


def stop_on_one_rank():
    import torch.distributed as dist

    class Stopper(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
            if dist.get_rank() == 1 and step == 1:
                raise StopTrainingError("this rank has had enough")

    trainer = make_trainer(callbacks=[Stopper()], seed=1)
    train(trainer, make_data(64), num_epochs=4, per_device_batch_size=4)
    return trainer.state.clock.batch, weights(trainer.model)


def test_a_stop_on_one_rank_ends_all_ranks_at_the_same_step(world2):
    (first, a), (second, b) = world2(stop_on_one_rank)
    assert first == second <= 4
    assert all(map(torch.equal, a, b))


def early_stop_at_epoch_end():
    import torch.distributed as dist

    class Stopper(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            if dist.get_rank() == 0:
                raise StopTrainingError("rank 0 only")

    trainer = make_trainer(callbacks=[Stopper()], seed=1)
    train(trainer, make_data(16), num_epochs=4, per_device_batch_size=4)
    return trainer.state.clock.batch


def test_a_stop_of_one_rank_at_an_epochs_end_ends_all(world2):
    assert world2(early_stop_at_epoch_end) == [2, 2]


def stop_in_a_hook(name):
    import torch.distributed as dist

    def raises(self):
        getattr(Trainer, name)(self)
        if dist.get_rank() == 1:
            raise StopTrainingError("rank 1 only")

    trainer = make_trainer(cls=type("Stopping", (Trainer,), {name: raises}), callbacks=(), seed=1)
    train(trainer, make_data(16), num_epochs=4, per_device_batch_size=4, eval_dataset=make_data(8))
    return trainer.state.clock.batch


def test_a_stop_of_one_rank_in_a_hook_between_steps_ends_all(world2):
    names = ("train_epoch_start", "train_epoch_end", "eval_epoch_start", "eval_epoch_end", "training_run_epoch_end")
    for name in names:
        first, second = world2(stop_in_a_hook, name)
        assert first == second <= 2, name


def stop_in_a_step(name):
    def raises(self, *args):
        if self.state.clock.step == 1:
            raise StopTrainingError("all at once")
        return getattr(Trainer, name)(self, *args)

    trainer = make_trainer(cls=type("Stopping", (Trainer,), {name: raises}), callbacks=(), seed=1)
    train(trainer, make_data(16), num_epochs=4, per_device_batch_size=4)
    return trainer.state.clock.step


def test_a_hook_that_stops_inside_a_step_on_all_ranks_ends_the_run_in_good_order(world2):
    for name in ("calculate_train_batch_loss", "optimizer_step"):
        assert world2(stop_in_a_step, name) == [1, 1]


def leave_alone():
    """One rank leaves inside a step; the other comes to its boundary."""
    import torch.distributed as dist

    vote = StopVote()
    vote.open(0)
    trainer = make_trainer(callbacks=())
    if dist.get_rank() == 0:
        vote.close()
        vote.open(0)
        return vote.close() == STOP
    trainer.run.agreement.vote = vote
    with pytest.raises(DistributedError, match=r"rank 1: .*request_stop\(reason\)") as caught:
        trainer.run.agreement.check_all_ranks_stop(StopTrainingError("enough"), "Trainer")
    return "enough" in str(caught.value)


def test_a_rank_that_leaves_a_step_alone_is_told_what_to_call(world2):
    assert world2(leave_alone) == [True, True]


def token_weighted():
    """Unequal token counts per rank; only a reduction knows the total."""
    double = torch.float64
    data = make_data(16, dtype=double)

    def count(batch):
        return (batch[1] > 0).sum()

    class Masked(torch.nn.Module):
        def forward(self, outputs, targets):
            keep = targets > 0
            return (
                torch.nn.functional.cross_entropy(outputs, targets, reduction="none") * keep
            ).sum() / keep.sum().clamp(min=1)

    model = make_model(dtype=double)
    trainer = make_trainer(model, callbacks=(), count_items=count, seed=1)
    trainer.loss_func = Masked()
    train(trainer, data, global_batch_size=8, gradient_accumulation_steps=2)
    return weights(model)


def test_token_counts_weigh_over_ranks_as_on_one_process(world2):
    expected = token_weighted()
    for rank_weights in world2(token_weighted):
        for ours, theirs in zip(rank_weights, expected):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def dropout_masks():
    torch.manual_seed(0)
    trainer = make_trainer(make_model(dropout=0.5))
    drawn = []

    class Draw(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            drawn.append(torch.rand(1).item())

    trainer.callback_handler.add_callback(Draw())
    train(trainer, make_data(16))
    return drawn


def test_ranks_do_not_share_random_numbers(world2):
    first, second = world2(dropout_masks)
    assert not set(first) & set(second)


class Partly(torch.nn.Module):
    """Uses one of its layers only."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


def train_partly(**settings):
    torch.manual_seed(0)
    trainer = make_trainer(Partly(), seed=1, **settings)
    if not settings:
        with pytest.raises(
            DistributedError, match=r"unused.weight, unused.bias did not contribute to the loss"
        ) as caught:
            train(trainer, make_data(16), per_device_batch_size=4)
        assert all(
            name in str(caught.value) for name in ("Trainer(...)", "find_unused_parameters=True", "parallel_mode")
        )
        return None
    train(trainer, make_data(16), per_device_batch_size=4)
    return weights(trainer.model)


def train_partly_for_one_step(strategy):
    trainer = make_trainer(Partly(), seed=1, strategy=strategy)
    before = [weight.clone() for weight in weights(trainer.model)]
    with pytest.raises((DistributedError, PlanInfeasible), match=r"unused.weight, unused.bias did not contribute"):
        train(trainer, make_data(8), per_device_batch_size=4)
    return all(map(torch.equal, before, weights(trainer.get_model())))


@pytest.mark.parametrize("strategy", [None, ["parallel_mode"]])
def test_gradients_that_ddp_did_not_average_update_nothing_even_in_the_only_step(world2, strategy):
    assert world2(train_partly_for_one_step, strategy) == [True, True]


def test_parameters_without_a_gradient_are_named_with_the_switch_that_allows_them(world2):
    world2(train_partly)
    expected = weights(make_trainer(Partly(), seed=1).model)
    strategy = [("parallel_mode", {"find_unused_parameters": True})]
    for settings in ({"find_unused_parameters": True}, {"static_graph": True}, {"strategy": strategy}):
        first, second = world2(train_partly, **settings)
        assert all(map(torch.equal, first, second)) and not torch.equal(first[0], expected[0])
