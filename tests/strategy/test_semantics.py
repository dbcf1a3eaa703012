"""Every distributed method, alone and combined, starts from the plain model's loss and follows its loss curve.

The reference is a hand-written loop on one process over the same global batches. Tolerances are relative: 1e-5 for the first loss and
2e-4 for the curve in float32; 2e-2 for 16 bits.
"""

import copy
import warnings

import pytest
import torch

from drivetrain.module.wrapping import clean_state_dict, named_clean_parameters, unwrap
from drivetrain.runtime.ranks import clear_data_ranks, num_data_ranks
from drivetrain.train.auto import auto_accelerate
from tests.strategy.tasks import ADAM, TENSOR_PLAN, loss_func, make_data, make_model, plain_losses

ON_ANY_WORLD = {
    "parallel_mode": ["parallel_mode"],
    "auto_ddp": ["auto_ddp"],
    "zero1": ["parallel_mode", "zero1"],
    "zero2": ["parallel_mode", "zero2"],
    "fsdp": ["parallel_mode", "fsdp"],
    "fsdp with units by class, no reshard": [("fsdp", {"wrap": "Block", "reshard_after_forward": False})],
    "checkpoint": ["parallel_mode", "checkpoint"],
    "micro batches": ["parallel_mode", ("micro_batch", 1)],
    "zero1, fused, micro batches": ["zero1", "fused_optimizer", ("micro_batch", {"accumulation": 2})],
    "fsdp, checkpoint, micro batches": ["fsdp", ("checkpoint", {"mode": "selective"}), ("micro_batch", 1)],
    "fsdp, fused": ["fsdp", "fused_optimizer"],
    "ddp, compile": ["parallel_mode", ("compile", "eager")],
    "fsdp, compile, checkpoint": ["fsdp", ("compile", "eager"), "checkpoint"],
    "ddp with small buckets, checkpoint, fused": [
        ("parallel_mode", {"bucket_cap_mb": 1}),
        "checkpoint",
        "fused_optimizer",
    ],
}
TENSOR = ("tensor_parallel", {"plan": TENSOR_PLAN})
SEQUENCE = [("parallel_mode", [("sequence", 2)]), "sequence_parallel"]
PIECES = [("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"plan": TENSOR_PLAN, "sequence_parallel": True})]
ON_TWO = {
    "tensor": [("parallel_mode", [("tensor", 2)]), TENSOR],
    "tensor, checkpoint, micro batches": [
        ("parallel_mode", [("tensor", 2), ("data", 1)]),
        TENSOR,
        "checkpoint",
        ("micro_batch", 2),
    ],
    "pieces, fused, micro batches": [*PIECES, "fused_optimizer", ("micro_batch", {"accumulation": 2})],
}
ON_FOUR = {
    "hybrid fsdp": [("parallel_mode", [("zero", 2), ("data", 2)]), "fsdp"],
    "tensor x data": [("parallel_mode", [("tensor", 2), ("data", 2)]), TENSOR],
    "tensor x fsdp, checkpoint": [("parallel_mode", [("tensor", 2), ("zero", 2)]), TENSOR, "fsdp", "checkpoint"],
}
COMPILED = {
    "tensor, fused, compile": [("parallel_mode", [("tensor", 2)]), TENSOR, "fused_optimizer", ("compile", "aot_eager")],
    "pieces, compile": [*PIECES, ("compile", "aot_eager")],
    "sequence, fused, compile": [*SEQUENCE, "fused_optimizer", ("compile", "aot_eager")],
    "sequence, checkpoint, compile": [*SEQUENCE, "checkpoint", ("compile", "aot_eager"), ("micro_batch", 4)],
}
SIXTEEN_BITS = {
    "amp": ["parallel_mode", ("amp_native", "bf16")],
    "fsdp, amp": ["fsdp", ("amp_native", "bf16")],
    "half": ["parallel_mode", ("half", "bf16")],
    "zero1, half": ["zero1", ("half", "bf16")],
    "fsdp, half": ["fsdp", ("half", "bf16")],
    "tensor, amp, checkpoint": [("parallel_mode", [("tensor", 2)]), TENSOR, ("amp_native", "bf16"), "checkpoint"],
    "tensor, half, micro batches": [("parallel_mode", [("tensor", 2)]), TENSOR, ("half", "bf16"), ("micro_batch", 4)],
    "pieces, amp": [*PIECES, ("amp_native", "bf16")],
    "sequence, half": [*SEQUENCE, ("half", "bf16")],
}


QUICK = {
    "zero2", "fsdp with units by class, no reshard", "zero1, fused, micro batches", "fsdp, checkpoint, micro batches",
    "ddp with small buckets, checkpoint, fused", "tensor, checkpoint, micro batches",
    "pieces, fused, micro batches", "zero1, half", "tensor, amp, checkpoint", "sequence, half",
}  # fmt: skip
"""Each method once or twice, in company; `make test-slow` runs the rest."""


def in_parts(plans, quick):
    """Parametrize a test by the plans of the quick suite and by the others, which are slow."""
    first, rest = {n: p for n, p in plans.items() if n in quick}, {n: p for n, p in plans.items() if n not in quick}
    slow = pytest.param(rest, marks=pytest.mark.slow, id="rest")
    return pytest.mark.parametrize("plans", [pytest.param(first, id="quick"), slow])


def follow(plan, size=32, steps=4, **kwargs):
    """Train by a plan; return the losses of whole batches and the parameters, gathered."""
    kwargs = {"ignore_dryrun_on_load_strategy": True, **kwargs}
    model = make_model()
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    status, result, applied = auto_accelerate(
        model, torch.optim.AdamW, make_data(size), loss_func, None, "unpack_dict", ADAM,
        dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=plan, device="cpu", **kwargs,
    )  # fmt: skip
    assert status, applied.failure
    assert [name for name, _ in named_clean_parameters(result.model)] == names
    assert list(clean_state_dict(result.model)) == keys
    inner = unwrap(result.model)
    assert inner.head.weight is inner.embedding.weight, "tied parameters must stay tied"
    losses = []
    total = weight = 0.0
    for batch in result.dataloader:
        info = result.dataloader.batch_info
        batch = result.prepare_input(batch, result.context.device)
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        total, weight = total + loss.item() * info.size, weight + info.size
        closed = result.optim.window_closed
        result.optim.step()
        result.optim.zero_grad()
        if closed:
            losses.append((total, weight))
            total = weight = 0.0
        if len(losses) == steps:
            break
    parameters = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in named_clean_parameters(result.model)
    }
    return losses, parameters


def follow_all(plans, **kwargs):
    results = {}
    for name, plan in plans.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        results[name] = (*follow(plan, **kwargs), num_data_ranks())
        clear_data_ranks()
    return results


def mean_losses(per_rank):
    """Return the loss of each global batch from what the ranks saw; ranks that share samples count equally."""
    return [sum(t for t, _ in step) / sum(w for _, w in step) for step in zip(*per_rank)]


def check_against_plain(world_results, plans, curve=2e-4, first=1e-5, size=32, parameters=2e-3):
    expected, weights = plain_losses(size)
    for name in plans:
        losses = mean_losses([result[name][0] for result in world_results])
        assert len(losses) == len(expected), name
        assert losses[0] == pytest.approx(expected[0], rel=first), name
        assert losses == pytest.approx(expected, rel=curve), name
        if parameters is not None:
            for rank, result in enumerate(world_results):
                for key, value in result[name][1].items():
                    assert torch.allclose(value.float(), weights[key], atol=parameters), (name, rank, key)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at the loss's inputs
def test_plans_on_one_process_follow_the_plain_model():
    plans = {
        "nothing": [],
        "parallel_mode": ["parallel_mode"],
        "checkpoint, micro, fused": ["checkpoint", ("micro_batch", 2), "fused_optimizer"],
        "compile": [("compile", {"backend": "aot_eager"})],
        "offload": [("checkpoint", {"mode": "offload"})],
        "module_replace": ["module_replace"],
    }
    check_against_plain([follow_all(plans)], plans)


@in_parts({**ON_ANY_WORLD, **ON_TWO}, QUICK)
def test_distributed_methods_and_combinations_follow_the_plain_model_on_two(world2, plans):
    results = world2(follow_all, plans)
    check_against_plain(results, plans)
    ranks = {"tensor, checkpoint, micro batches": 1, "fsdp, checkpoint, micro batches": 2, "tensor": 1, "fsdp": 2}
    assert all(result[name][2] == ranks[name] for result in results for name in ranks if name in plans)


@in_parts({**ON_ANY_WORLD, **ON_FOUR}, {"hybrid fsdp", "tensor x fsdp, checkpoint"})
def test_distributed_methods_and_combinations_follow_the_plain_model_on_four(world4, plans):
    check_against_plain(world4(follow_all, plans), plans)


@in_parts(SIXTEEN_BITS, QUICK)
def test_sixteen_bits_stay_close_to_the_plain_model(world2, plans):
    check_against_plain(world2(follow_all, plans), plans, curve=2e-2, first=1e-2, parameters=None)


@pytest.mark.slow
def test_compiled_blocks_of_split_models_follow_the_plain_model(world2):
    check_against_plain(world2(follow_all, COMPILED, timeout=300), COMPILED)
    plans = {"sequence, amp, compile": [*SEQUENCE, ("amp_native", "bf16"), ("compile", "aot_eager")]}
    check_against_plain(world2(follow_all, plans, timeout=180), plans, curve=2e-2, first=1e-2, parameters=None)


def losses_of_lengths(plan, lengths=(8, 4, 6)):
    """Return the losses of batches of different lengths, the last of a model that was trained on the others."""
    torch._dynamo.reset()
    result = auto_accelerate(
        make_model(), torch.optim.SGD, make_data(), loss_func, None, "unpack_dict", {"lr": 0.05},
        dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=plan, device="cpu", ignore_dryrun_on_load_strategy=True,
    )[1]  # fmt: skip
    losses = []
    for length, batch in zip(lengths, result.dataloader):
        batch = {name: value[:, :length] for name, value in batch.items()}
        losses.append(result.loss_func(batch, result.model(**batch)))
        losses[-1].backward()
        result.optim.step()
        result.optim.zero_grad()
    clear_data_ranks()
    return [loss.item() for loss in losses]


@pytest.mark.slow
def test_compiled_split_layers_take_sequences_of_several_lengths(world2):
    """With symbolic sizes torch's compiler fails in the backward pass of distributed tensors."""
    plan = [("parallel_mode", [("tensor", 2)]), TENSOR, ("compile", "aot_eager")]
    for losses in world2(losses_of_lengths, plan, timeout=180):
        assert losses == pytest.approx(losses_of_lengths([]), rel=1e-5)


def test_a_short_last_batch_gives_the_gradient_of_its_own_mean(world2, world4):
    """Of its three samples one of four ranks gets none."""
    for world, names in (
        (world2, ("fsdp, checkpoint, micro batches", "zero1")),
        (world4, ("parallel_mode", "micro batches")),
    ):
        plans = {name: ON_ANY_WORLD[name] for name in names}
        check_against_plain(world(follow_all, plans, size=27), plans, size=27)


def dry_runs(plans):
    outcomes = {}
    for name, plan in plans.items():
        model = make_model()
        before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        status, _, applied = auto_accelerate(
            model, torch.optim.AdamW, make_data(), loss_func, None, "unpack_dict", ADAM,
            dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=plan, device="cpu",
        )  # fmt: skip
        assert torch.equal(torch.get_rng_state(), random), name
        state = {
            key: (v.full_tensor() if hasattr(v, "full_tensor") else v) for key, v in clean_state_dict(model).items()
        }
        assert all(torch.equal(state[key], value) for key, value in before.items()), name
        outcomes[name] = status, applied.explain(200)
        clear_data_ranks()
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp, checkpoint, micro batches", "zero1, fused, micro batches"])
def test_the_dry_run_confirms_right_plans_and_leaves_no_trace(world2, name):
    # Each plan starts a process on either rank: seconds on a quiet machine, minutes on a loaded one.
    for outcomes in world2(dry_runs, {name: ON_ANY_WORLD[name]}):
        for status, text in outcomes.values():
            assert status and "dry run: loss" in text


def test_distributed_methods_are_dropped_on_one_process_with_one_warning():
    with pytest.warns(UserWarning, match="zero1, because") as caught:
        losses, _ = follow(["parallel_mode", "zero1", ("micro_batch", 4)])
    assert len(caught) == 1
    assert [t / w for t, w in losses] == pytest.approx(plain_losses()[0], rel=1e-4)


def same_samples(sizes):
    """Return which samples each update uses, over all ranks."""
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, result, _ = auto_accelerate(
            make_model(), torch.optim.SGD, make_data(27), loss_func, None, "unpack_dict", {"lr": 0.1},
            dataloader_args={"batch_size": 8, "shuffle": True, "num_workers": 0}, sampler_seed=5, device="cpu",
            load_strategy=["parallel_mode", ("micro_batch", 2)], ignore_dryrun_on_load_strategy=True,
        )  # fmt: skip
    now = set()
    for _ in result.dataloader:
        info = result.dataloader.batch_info
        now |= set(result.dataloader.sample_index.tolist()) if info.size else set()
        if result.optim.window_closed:
            steps.append(now)
            now = set()
        result.optim.step()
    return steps, len(result.dataloader)


def test_every_world_size_uses_the_same_samples_in_each_update(world2, world4):
    (alone, _), two, four = same_samples(None), world2(same_samples, None), world4(same_samples, None)
    for world in (two, four):
        assert [set().union(*step) for step in zip(*(steps for steps, _ in world))] == alone
    assert sorted(set().union(*alone)) == list(range(27))
