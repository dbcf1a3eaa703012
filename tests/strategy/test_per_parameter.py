"""A plan is verified by what each parameter gets: a lost gradient or a frozen weight is found, whatever the global norm says."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.runtime.ranks import data_rank
from drivetrain.strategy import plan_check
from drivetrain.strategy.dry_run import try_plan, verify_plan, with_counted_loss
from drivetrain.strategy.method import Method, Stage
from drivetrain.strategy.optimizer_recipe import OptimizerRecipe
from drivetrain.strategy.registry import register_method
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.task import CallModel, TrainingTask
from drivetrain.strategy.trial import checking, measuring
from drivetrain.strategy.trial.checking import Measured, compute_reference_results, share_of_plan, verdict
from drivetrain.strategy.trial.per_parameter import PerParameter, compare, norm_of, plain_numbers, sketch
from drivetrain.strategy.trial.report import ReferenceResults, Report
from drivetrain.strategy.value import Strategy
from tests.strategy.tasks import loss_func, make_data, make_model

CPU = torch.device("cpu")


def make_task(model=None, loss=loss_func, optimizer=torch.optim.AdamW, **settings):
    rows = torch.utils.data.default_collate([make_data()[index] for index in range(8)])
    return TrainingTask(
        model=make_model(tied=False) if model is None else model, call=CallModel("unpack_dict"), loss_func=loss,
        optim_func=optimizer, optim_args={"lr": 0.01, **settings}, samples=rows, global_batch_size=8,
    )  # fmt: skip


def test_sparse_and_complex_gradients_have_sketches():
    dense = torch.tensor([0.0, 3.0, 0.0, 4.0])
    assert sketch(dense.to_sparse()) == sketch(dense) and norm_of({"weight": sketch(dense)}) == 5.0
    assert norm_of({"weight": sketch(torch.tensor([3.0 + 4.0j]))}) == 5.0


def test_the_norm_of_a_difference_is_estimated_from_sketches():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 64, 5000, (1 << 20) + 5):
        first, noise = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        second = first + 0.01 * noise
        names = {"x": sketch(first)}
        assert norm_of(names) == pytest.approx(first.norm().item(), rel=1e-5)
        found = compare(PerParameter(gradients=names), PerParameter(gradients={"x": sketch(second)}), "exact", 0.0)
        expected = (0.01 * noise.norm() / first.norm()).item()
        assert found[0].error == pytest.approx(expected, rel=0.4 if size > 64 else 1e-2)


class Breaks(Method):
    """Loses the gradient of the embedding, halves that of a norm, or leaves a layer out of the optimizer."""

    name, group, stage = "breaks", "breaks", Stage.MODULE
    is_searched = False
    how = ""

    def apply(self, ctx, config):
        if self.how == "frozen":
            groups = ctx.recipe.groups
            ctx.recipe.groups = lambda model: [p for p in groups(model) if p is not model.norm.bias]
        elif self.how:
            parameter = ctx.model.embedding.weight if self.how == "lost" else ctx.model.norm.weight
            parameter.register_hook(lambda grad: grad * (0.0 if self.how == "lost" else 0.5))


@pytest.fixture
def breaks(monkeypatch):
    from drivetrain.strategy.registry import _aliases, _methods

    register_method(Breaks())
    yield
    del _methods["breaks"]
    assert "breaks" not in _aliases


@pytest.mark.parametrize("precision", [[], [("amp_native", "bf16")]])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("", None),
        ("lost", "embedding.weight: the gradient is zero"),
        ("halved", "norm.weight: another gradient"),
        ("frozen", "norm.bias: the movement is zero"),
    ],
)
def test_a_parameter_that_gets_something_else_is_named(breaks, monkeypatch, how, message, optimizer, precision):
    monkeypatch.setattr(Breaks, "how", how)
    outcome = verify_plan(Strategy(["breaks", *precision]), make_task(optimizer=optimizer), device=CPU)
    if message is None:
        assert outcome.failure is None and "parameters compared" in outcome.notes[-1], outcome
    else:
        assert outcome.failure.kind == "wrong" and message in outcome.failure.message, outcome


def test_a_lost_embedding_that_a_global_norm_hides_is_found():
    plan = resolve_plan(Strategy([("amp_native", "bf16")]), device=CPU)
    first, second = torch.randn(100), torch.randn(100)
    gradients = {"a": sketch(first / first.norm()), "embedding": sketch(0.3 * second / second.norm())}
    expected = ReferenceResults(loss=1.0, gradient_norm=norm_of(gradients), each=PerParameter(gradients=gradients))
    found = {**gradients, "embedding": sketch(torch.zeros(100))}
    kind, text = verdict(Measured(loss=1.0, norm=1.0, each=PerParameter(gradients=found)), expected, plan)
    assert kind == "wrong" and "embedding: the gradient is zero" in text
    del found["embedding"]
    kind, text = verdict(Measured(loss=1.0, norm=1.0, each=PerParameter(gradients=found)), expected, plan)
    assert kind == "wrong" and "embedding: no gradient" in text


def summed_loss(batch, logits):
    return loss_func(batch, logits) * len(logits)


def test_a_loss_that_is_not_a_mean_over_samples_is_reported_with_its_error():
    outcome = verify_plan(Strategy([("micro_batch", 4)]), make_task(loss=summed_loss), device=CPU)
    assert outcome.failure is None and "not a mean over samples" in outcome.notes[-1]
    outcome = verify_plan(Strategy([("micro_batch", 4)]), make_task(), device=CPU)
    assert outcome.failure is None and "not a mean" not in outcome.notes[-1]


def test_losses_of_parts_with_different_numbers_of_labels_are_joined_by_them():
    """The two halves of the batch are the same, so that only its smaller parts show that the loss is no mean over samples."""
    task = make_task(
        loss=lambda batch, logits: nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    )
    for name, values in task.samples.items():
        values[4:] = values[:4]
        if name == "labels":
            values[[0, 4], 1:] = -100
    followed = with_counted_loss(task)
    assert followed.items.kind == "labels"
    outcome = verify_plan(Strategy([("micro_batch", 1)]), followed, device=CPU)
    assert outcome.failure is None, outcome.failure


def test_samples_are_split_as_the_plan_splits_them():
    plan = Strategy(["parallel_mode", ("micro_batch", 2)])
    resolved = resolve_plan(plan, device=CPU, world=4)
    share = share_of_plan(resolved, resolved.batch_of(plan, 16))
    assert (share.samples, share.rows, share.parts) == (8, 1, 8)
    assert sorted(row for part in range(8) for row in share.rows_of(part)) == list(range(8))
    many = resolve_plan(Strategy(["parallel_mode"]), device=CPU, world=96)
    share = share_of_plan(many, many.batch_of(Strategy(["parallel_mode"]), 192))
    assert share.samples == 32
    rows = [row for part in range(96) for row in share.rows_of(part)]
    assert all(rows.count(row) == 3 for row in range(32))


def deep_model():
    model = make_model(tied=False)
    model.blocks.extend(copy.deepcopy(model.blocks[0]) for _ in range(4))
    return model


def test_a_model_on_the_meta_device_is_verified_by_a_smaller_one(breaks, monkeypatch):
    with torch.device("meta"):
        model = deep_model()
    outcome = verify_plan(Strategy(["checkpoint"]), make_task(model), device=CPU)
    assert outcome.failure is None and "one with 2 blocks and random weights was compared" in outcome.notes[0]
    assert "parameters compared" in outcome.notes[-1]
    assert len(model.blocks) == 6 and model.norm.weight.is_meta
    monkeypatch.setattr(Breaks, "how", "lost")
    outcome = verify_plan(Strategy(["breaks"]), make_task(model), device=CPU)
    assert "embedding.weight: the gradient is zero" in outcome.failure.message
    with torch.device("meta"):
        large = nn.Linear(1 << 20, 1 << 20)
    assert "1,099,512,676,352 elements" in verify_plan(Strategy([]), make_task(large), device=CPU).notes[0]


def compare_pipeline():
    model = deep_model().to("meta")
    plan = Strategy([("parallel_mode", [("pipe", 4)]), ("pipeline_parallel", {"microbatches": 4})])
    return plan_check.compare_with_fewer_blocks(plan, make_task(model), model, CPU)


@pytest.mark.slow
def test_a_smaller_model_has_blocks_for_every_stage_of_a_pipeline(world4):
    kinds, texts = zip(*world4(compare_pipeline))
    assert set(kinds) == {"ok"} and "one with 6 blocks" in texts[0], texts


@pytest.fixture
def small_device(monkeypatch):
    """A device on which a plain model of more than two blocks runs out of memory."""

    def fits(model, *args, **kwargs):
        if len(model.blocks) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return compute_reference_results(model, *args, **kwargs)

    monkeypatch.setattr(checking, "compute_reference_results", fits)


def test_a_plan_whose_plain_model_does_not_fit_is_verified_by_a_smaller_one(breaks, small_device, monkeypatch):
    task = make_task(deep_model())
    outcome = verify_plan(Strategy(["checkpoint"]), task, device=CPU)
    assert outcome.failure is None, outcome
    assert "does not fit, so a smaller one with 2 blocks and its own weights was compared" in outcome.notes[0]
    monkeypatch.setattr(Breaks, "how", "lost")
    outcome = verify_plan(Strategy(["breaks"]), task, device=CPU)
    assert outcome.failure.kind == "wrong" and "embedding.weight: the gradient is zero" in outcome.failure.message


@pytest.mark.parametrize("is_meta", [False, True])
def test_a_trial_whose_plain_model_does_not_fit_or_has_no_weights_is_verified(
    breaks, small_device, is_meta, monkeypatch
):
    task = make_task(deep_model().to("meta") if is_meta else deep_model())

    def tried(plan):
        report = Report()
        order = measuring.Order(plan=Strategy(plan), steps=1)
        measuring.measure(
            order, task, CPU, lambda event, **values: report.take({"event": event, **values}), may_reset=False
        )
        return report

    report = tried(["checkpoint"])
    assert report.is_verified and len(report.seconds) == 1
    assert any("2 blocks and " + ("random" if is_meta else "its own") in note for note in report.notes), report.notes
    monkeypatch.setattr(Breaks, "how", "lost")
    with pytest.raises(measuring.TrialFailed, match="embedding.weight: the gradient is zero"):
        tried(["breaks"])


def test_a_plan_in_16_bits_may_round_as_plain_autocast_does_but_loses_nothing():
    plain, noise = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    noise *= 0.3 * plain.norm() / noise.norm()
    expected = PerParameter(gradients={"x": sketch(plain)})
    rounds = PerParameter(gradients=expected.gradients, rounding={"x": 0.2})
    noisy, lost = (PerParameter(gradients={"x": sketch(grad)}) for grad in (plain + noise, torch.zeros(64)))
    assert compare(expected, noisy, "mixed", 0.15) and not compare(rounds, noisy, "mixed", 0.15)
    assert compare(rounds, noisy, "exact", 2e-3) and compare(rounds, lost, "mixed", 0.15)
    most = PerParameter(gradients=expected.gradients, rounding={"x": 5.0})
    assert compare(most, lost, "mixed", 0.15)


def test_the_rounding_of_plain_autocast_is_measured_where_it_is_large():
    class Cancels(nn.Module):
        """One of its gradients is a small difference of large numbers, of which 16 bits leave little."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 1, bias=False), nn.Linear(4, 1)

        def forward(self, tokens, labels):
            x, signs = tokens[:, :4].float(), torch.tensor([1.0, -1.0] * (len(tokens) // 2))[:, None]
            return signs * self.first(x + 1000.0) + self.second(x)

    torch.manual_seed(0)
    task = make_task(Cancels(), loss=lambda batch, output: output.float().mean())
    found = compute_reference_results(task.model, task, CPU, 8).each.rounding
    assert found["first.weight"] > 0.05 and "second.bias" not in found


@pytest.mark.parametrize(("size", "differs"), [(1e-10, False), (1e-2, True)])
def test_an_update_by_rounding_alone_may_differ(size, differs):
    """The gradient of a bias of attention keys is zero but for rounding, which Adam makes as large as every other update."""
    recipe, found = OptimizerRecipe(build=torch.optim.Adam, settings={"lr": 1e-2}), []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(8, 64)
        model.weight.grad = torch.randn(64, 8)
        model.bias.grad = size * torch.randn(64, generator=torch.Generator().manual_seed(seed))
        found.append(plain_numbers(model, recipe))
    gradients = PerParameter(gradients=found[0].gradients, movements=found[1].movements)
    findings = compare(found[0], gradients, "exact", 2e-3)
    assert [finding.name for finding in findings] == ["bias"] * differs


def unseeded(plan):
    torch.manual_seed(data_rank() + 1)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    task = TrainingTask(
        model=model, call=CallModel(), loss_func=lambda batch, out: out.square().mean(), optim_func=torch.optim.SGD,
        optim_args={"lr": 0.1}, samples=torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), global_batch_size=8,
    )  # fmt: skip
    return try_plan(Strategy(plan), task, device=CPU).failure


@pytest.mark.parametrize("plan", [["parallel_mode"], ["fsdp"]], ids=str)
def test_ranks_that_built_models_of_their_own_compare_that_of_the_first(world2, plan):
    assert world2(unseeded, plan) == [None, None]
