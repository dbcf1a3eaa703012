"""A simulated step holds and sends what a real one does; few blocks tell the truth about many; nothing is left behind."""

import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from drivetrain.runtime.ranks import is_distributed, num_data_ranks
from drivetrain.strategy.batching import plan_batch
from drivetrain.strategy.profile.simulate import simulate, simulate_plans
from drivetrain.strategy.profile.step_memory import StepMemory, Update, by_category
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.task import CallModel, TrainingTask
from drivetrain.strategy.value import Strategy
from tests.strategy.tasks import LENGTH, TENSOR_PLAN, VOCAB, Block, TinyGPT, loss_func, make_model

TENSOR = ("tensor_parallel", TENSOR_PLAN)
PLANS = {
    2: {
        "ddp": ["parallel_mode"],
        "fsdp, bf16, two passes": [
            "parallel_mode",
            "fsdp",
            ("amp_native", "bf16"),
            ("micro_batch", {"accumulation": 2}),
        ],
    },
    4: {
        "tensor x fsdp": [("parallel_mode", [("tensor", 2), ("zero", 2)]), TENSOR, "fsdp"],
    },
}
MORE_PLANS = {
    2: {
        "tensor": [("parallel_mode", [("tensor", 2)]), TENSOR],
        "ddp, two passes": ["parallel_mode", ("micro_batch", {"accumulation": 2})],
        "fsdp": ["parallel_mode", "fsdp"],
        "zero1": ["parallel_mode", "zero1"],
        "zero2 with checkpoints": ["parallel_mode", "zero2", "checkpoint"],
    },
    4: {
        "tensor x data": [("parallel_mode", [("tensor", 2), ("data", 2)]), TENSOR],
        "hybrid": [("parallel_mode", [("zero", 2), ("data", 2)]), "fsdp"],
    },
}


def make_task(model=None, **changes):
    tokens = torch.arange(4 * LENGTH).view(4, LENGTH) % VOCAB
    settings = {
        "model": make_model() if model is None else model,
        "call": CallModel("unpack_dict"),
        "loss_func": loss_func,
        "optim_func": torch.optim.AdamW,
        "samples": {"tokens": tokens, "labels": tokens.clone()},
        "global_batch_size": 16,
    }
    return TrainingTask(**{**settings, **changes})


class ManyBlocks(TinyGPT):
    """The tiny transformer with as many blocks as wanted."""

    def __init__(self, count):
        super().__init__(tied=False)
        self.blocks = nn.ModuleList([Block() for _ in range(count)])


class CollectivesOnCopies(TorchDispatchMode):
    """Run collectives of tensors that the step frees on copies, and wait for them.

    A thread of gloo releases the tensors of a collective some time after it is done. How long they live would depend on
    the load of the machine, and with it the largest moment of the step. DDP's buckets (c10d::allreduce_) live on anyway.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            output, source, *rest = args
            copy = output.clone()
            _, work = func(copy, source.clone(), *rest, **(kwargs or {}))
            dist.Work.unbox(work).wait()
            output.copy_(copy)
            done = torch.futures.Future()
            done.set_result(None)
            return output, _create_work_from_future(done).boxed()
        if func.namespace == "_c10d_functional" and not name.endswith("wait_tensor"):
            result = func(*tree_map_only(torch.Tensor, torch.clone, args), **(kwargs or {}))
            return torch.ops._c10d_functional.wait_tensor(result).clone()
        return func(*args, **(kwargs or {}))


def follow_for_real(methods):
    """Follow the third real step of a plan on this rank; return its largest moment by category, and its collectives."""
    task, plan = make_task(), Strategy(methods)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resolved = resolve_plan(plan, model=task.model, device="cpu")
    config = resolved.config("micro_batch")
    batch = plan_batch(16, resolved.data_ranks, accumulation=None if config is None else config.accumulation)
    ctx = task.shaped(task.build(), resolved, batch)
    update, tracker = Update(task, ctx, batch), StepMemory()
    update.run(None)
    update.run(None)
    with CollectivesOnCopies():
        update.run(tracker)
    record = tracker.record()
    collectives = {}
    for entries in record.collectives.values():
        for name, (count, size) in entries.items():
            before = collectives.get(name, (0, 0.0))
            collectives[name] = (before[0] + count, before[1] + size)
    return by_category(max(record.segments.values(), key=lambda amounts: sum(amounts.values()))), collectives


def follow_all(plans):
    """Follow every plan on one rank of a real world, and leave no mesh behind."""
    from drivetrain.runtime.ranks import clear_data_ranks

    try:
        return {name: follow_for_real(methods) for name, methods in plans.items()}
    finally:
        clear_data_ranks()


def check_against_truth(run, world, plans):
    real = run(follow_all, plans)[0]
    for name, methods in plans.items():
        simulated = simulate(make_task(), Strategy(methods), world=world)
        assert simulated.failure is None, (name, simulated.failure)
        memory, collectives = real[name]
        assert dict(simulated.memory) == memory, name
        assert dict(simulated.collectives) == collectives, name


def test_a_simulated_step_equals_a_real_one_on_two_processes(world2):
    check_against_truth(world2, 2, PLANS[2])


@pytest.mark.slow
def test_a_simulated_step_equals_a_real_one_on_four_processes(world4):
    check_against_truth(world4, 4, PLANS[4])


@pytest.mark.slow
def test_a_simulated_step_equals_a_real_one_in_more_plans(world2, world4):
    check_against_truth(world2, 2, MORE_PLANS[2])
    check_against_truth(world4, 4, MORE_PLANS[4])


CUT_PLANS = {
    "ddp": (["parallel_mode"], "cpu"),
}
MORE_CUT_PLANS = {
    "fsdp, bf16, checkpoints": (["parallel_mode", "fsdp", ("amp_native", "bf16"), "checkpoint"], "cuda"),
    "fsdp": (["parallel_mode", "fsdp"], "cuda"),
    "tensor x fsdp": ([("parallel_mode", [("tensor", 2), ("zero", 2)]), TENSOR, "fsdp"], "cpu"),
    "every second block checkpointed": (["parallel_mode", "zero2", ("checkpoint", {"every": 2})], "cuda"),
    "four passes": (["parallel_mode", "fsdp", ("micro_batch", {"accumulation": 4})], "cpu"),
    "tensor x data": ([("parallel_mode", [("tensor", 2), ("data", 2)]), TENSOR], "cpu"),
}


def check_few_blocks(methods, kind, monkeypatch, count, world):
    task, plan = make_task(ManyBlocks(count)), Strategy(methods)
    few = simulate(task, plan, world=world, device_kind=kind)
    assert few.failure is None
    assert any(f"continued to {count} blocks of blocks" in note for note in few.notes)
    monkeypatch.setattr("drivetrain.strategy.profile.few_blocks.choose_counts", lambda *_: [])
    whole = simulate(task, plan, world=world, device_kind=kind)
    assert whole.failure is None and not any("continued" in note for note in whole.notes)
    assert dict(few.memory) == dict(whole.memory)
    assert dict(few.collectives) == dict(whole.collectives)


@pytest.mark.parametrize("name", CUT_PLANS)
def test_few_blocks_continued_equal_the_whole_model(name, monkeypatch):
    check_few_blocks(*CUT_PLANS[name], monkeypatch, count=8, world=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CUT_PLANS)
def test_few_blocks_continued_equal_the_whole_model_in_more_plans(name, monkeypatch):
    check_few_blocks(*MORE_CUT_PLANS[name], monkeypatch, count=12, world=4)


class CountsItsBlocks(ManyBlocks):
    """Runs its blocks by number, so that none may be missing."""

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for index in range(8):
            x = self.blocks[index](x)
        return self.head(self.norm(x))


def test_a_model_that_needs_all_of_its_blocks_is_simulated_whole():
    task = make_task(CountsItsBlocks(8))
    found = simulate(task, Strategy([]), world=1)
    assert found.failure is None
    assert any("simulated in full" in note for note in found.notes)
    size = 4 * sum(parameter.numel() for parameter in task.model.parameters())
    assert found.memory["params"] == size and found.collectives == {}


class Pair(nn.Module):
    """A block whose sizes divide by any world that is asked for."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(12))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_that_a_function_makes_is_simulated_as_the_model_itself():
    """It is made without memory and copied; a copied parameter must not keep the mode of fake tensors of its original."""
    plan = Strategy([("amp_native", "bf16")])
    task = make_task(model=ManyBlocks(3))
    made = TrainingTask(**{**vars(task), "model": None, "model_fn": partial(ManyBlocks, 3)})
    given, found = (simulate(one, plan, world=1, device_kind="cuda") for one in (task, made))
    assert given.failure is None and found.memory == given.memory


def mean_square(x, y):
    return y.square().mean()


def test_a_sharded_model_on_1024_ranks_has_the_sizes_that_arithmetic_gives():
    with torch.device("meta"):
        model = Wide()
    size = sum(parameter.numel() for parameter in model.parameters())
    task = make_task(
        model, call=CallModel(), loss_func=mean_square, samples=torch.zeros(1, 1024), global_batch_size=1024
    )
    found = simulate(task, Strategy(["parallel_mode", "fsdp"]), world=1024)
    assert found.failure is None
    steps = 4 * 2 * 2 * 12  # Adam counts its steps, in one float for each parameter
    assert found.memory["params"] == 4 * size / 1024
    assert found.memory["optimizer"] == 8 * size / 1024 + steps
    # Each block is gathered before its forward and its backward pass; the root holds no parameters of its own.
    assert found.collectives == {"all_gather": (24, 8.0 * size), "reduce_scatter": (12, 4.0 * size)}
    assert found.peak_bytes == sum(found.memory.values())
    # Two whole blocks, the flat buffer of a third, and the gradient of one before it is reduced.
    assert found.memory["gathered"] + found.memory["temporary"] < 5 * 4 * size / 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(["parallel_mode", ("micro_batch", {"accumulation": 2})], id="ddp"),
        pytest.param([("parallel_mode", [("zero", 2), ("data", 4)]), "fsdp"], id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_replicas_that_are_left_out_change_nothing(methods, monkeypatch):
    task, world = make_task(global_batch_size=32), 8
    few = simulate(task, Strategy(methods), world=world)
    assert any("replicas" in note for note in few.notes)
    monkeypatch.setattr("drivetrain.strategy.profile.simulate._REPLICAS", world)
    all_ranks = simulate(task, Strategy(methods), world=world)
    assert few.failure is all_ranks.failure is None and not any("replicas" in note for note in all_ranks.notes)
    assert few.memory == all_ranks.memory and few.collectives == all_ranks.collectives


@pytest.mark.parametrize("method", ["fsdp", pytest.param("zero1", marks=pytest.mark.slow)])
def test_ranks_that_hold_different_shards_are_all_there(method):
    plan = Strategy(["parallel_mode", method])
    assert not any("replicas" in note for note in simulate(make_task(), plan, world=4).notes)


@pytest.mark.parametrize("methods", [["parallel_mode"], [("micro_batch", {"accumulation": 2})]])
def test_a_loss_over_tokens_is_simulated_like_any_other(methods):
    from drivetrain.strategy.dry_run import with_counted_loss

    followed = with_counted_loss(make_task())
    assert followed.items.kind == "labels"
    plan = Strategy(methods)
    world = 2 if "parallel_mode" in methods else 1
    simulated, other = (simulate(task, plan, world=world) for task in (followed, make_task()))
    assert simulated.failure is None and simulated.memory == other.memory


@pytest.mark.slow
def test_accumulation_multiplies_what_is_sent_in_open_passes():
    task = make_task(global_batch_size=32)
    one = simulate(task, Strategy(["parallel_mode", "fsdp"]), world=2)
    four = simulate(task, Strategy(["parallel_mode", "fsdp", ("micro_batch", 4)]), world=2)
    assert four.collectives["all_gather"][0] == 4 * one.collectives["all_gather"][0]
    assert four.collectives["reduce_scatter"] == one.collectives["reduce_scatter"]
    assert four.memory["activations"] < one.memory["activations"]
    whole = 4 * sum(parameter.numel() for parameter in task.model.parameters())
    assert four.memory["grads"] > 0.5 * whole  # while a window is open, gradients are not reduced and therefore whole


def test_what_is_kept_on_the_host_is_not_counted_but_whole_gradients_are():
    offload = ("fsdp", {"cpu_offload": True})
    task = make_task(global_batch_size=32)
    found = simulate(task, Strategy(["parallel_mode", offload, ("micro_batch", 4)]), world=2)
    assert found.failure is None and any("host memory" in note for note in found.notes)
    assert found.memory["params"] == found.memory["optimizer"] == 0
    assert found.memory["grads"] > 0


def test_nothing_is_left_behind():
    model = make_model()
    before = pickle.dumps({name: tensor.tolist() for name, tensor in model.state_dict().items()})
    kept = nn.Module._apply, torch.chunk, torch.UntypedStorage.resize_
    state = torch.get_rng_state()
    plans = [Strategy(["parallel_mode", "fsdp"]), Strategy([("parallel_mode", [("tensor", 3)]), TENSOR])]
    found = simulate_plans(make_task(model), plans, world=3)
    assert "BatchSizeError" in found[0].failure  # 16 samples over three ranks
    assert found[1].failure is not None  # widths that do not divide by three
    assert not is_distributed() and num_data_ranks() == 1
    assert (nn.Module._apply, torch.chunk, torch.UntypedStorage.resize_) == kept
    assert torch.equal(torch.get_rng_state(), state)
    assert pickle.dumps({name: tensor.tolist() for name, tensor in model.state_dict().items()}) == before


def test_a_hook_that_holds_the_original_leaves_no_fake_tensor_in_it():
    model = make_model()
    model.seen, model.calls = {"outputs": []}, 0

    def remember(module, args, output):
        model.seen["outputs"].append(output)
        model.calls += 1

    model.head.register_forward_hook(remember)
    held = model.seen["outputs"]
    for _ in range(2):
        assert simulate(make_task(model), Strategy(["parallel_mode", "zero2"]), world=2).failure is None
    assert held == [] and model.seen["outputs"] is held and model.calls == 0
    held.append(torch.ones(2, requires_grad=True) * 2)  # what cannot be copied is not needed either
    assert simulate(make_task(model), Strategy([]), world=1).failure is None


class JoinsNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad + torch._chunk_cat([grad.new_empty(0, 3)], 0, 2).sum()  # torch cannot do that


class HoldsNothing(TinyGPT):
    def forward(self, tokens, labels=None):
        return JoinsNothing.apply(super().forward(tokens))


def test_what_fails_in_a_simulation_is_its_result_and_not_on_the_terminal(capfd):
    found = simulate(make_task(HoldsNothing()), Strategy(["parallel_mode", "zero2"]), world=2)
    assert "non-empty" in found.failure and capfd.readouterr().err == ""


class ReadsValues(TinyGPT):
    def forward(self, tokens, labels=None):
        if float(super().forward(tokens).mean()) > 0:
            return super().forward(tokens)
        return super().forward(tokens) * 2


def test_a_model_that_reads_values_fails_with_the_reason():
    found = simulate(make_task(ReadsValues()), Strategy(["parallel_mode", "fsdp"]), world=4)
    assert found.failure is not None and "DataDependent" in found.failure
    assert found.memory == {} and found.peak_bytes == 0


def test_a_pipeline_is_refused_at_once_with_the_reason():
    plan = Strategy([("parallel_mode", [("pipe", 2), ("data", 2)]), "pipeline_parallel"])
    found = simulate(make_task(), plan, world=4)
    assert found.failure.startswith("pipeline stages exchange") and not found.memory


@pytest.mark.slow
def test_sharding_without_a_data_rank_to_share_with_is_left_out():
    for axes in ([("tensor", 2)], [("tensor", 2), ("zero", 1)]):
        plan = Strategy([("parallel_mode", axes), TENSOR, "fsdp"])
        with pytest.warns(UserWarning, match="nothing to shard"):
            resolved = resolve_plan(plan, model=make_model(), device="cpu", world=2)
        assert resolved.config("fsdp") is None and dict(resolved.dropped).keys() == {"fsdp"}
    assert simulate(make_task(), plan, world=2).failure is None


def test_what_is_left_out_is_said():
    found = simulate(make_task(), Strategy(["parallel_mode", "compile", ("amp_native", "fp16")]), world=2)
    assert found.failure is None
    assert any(note.startswith("native_dynamo: not simulated") for note in found.notes)


def test_the_time_limit_ends_a_simulation():
    found = simulate(make_task(), Strategy(["parallel_mode"]), world=2, time_limit=0)
    assert "time limit" in found.failure


def test_a_training_without_loss_and_optimizer_is_simulated_too():
    found = simulate(make_task(loss_func=None, optim_func=None), Strategy(["parallel_mode"]), world=2)
    assert found.failure is None
    assert found.memory["optimizer"] == 0 and found.memory["activations"] > 0


def simulate_beside_a_group(rank_to_do_it):
    from drivetrain.runtime.ranks import get_rank

    if get_rank() != rank_to_do_it:
        return None
    return simulate(make_task(), Strategy(["parallel_mode", "fsdp"]), world=8)


@pytest.mark.slow
def test_beside_a_process_group_a_child_simulates_the_same(world2):
    beside = world2(simulate_beside_a_group, 0)[0]
    here = simulate(make_task(), Strategy(["parallel_mode", "fsdp"]), world=8)
    assert beside.failure is None
    assert (beside.memory, beside.collectives) == (here.memory, here.collectives)


def test_how_a_model_can_be_split_is_found_out_once(monkeypatch):
    from drivetrain.module import tensor_inference
    from drivetrain.strategy.profile.simulate import cache_tensor_plans

    asked = []
    infer = tensor_inference.infer_tp_plan

    def counting(model, size):
        asked.append(size)
        return infer(model, size)

    monkeypatch.setattr(tensor_inference, "infer_tp_plan", counting)
    model, other = ManyBlocks(4), ManyBlocks(2)
    with cache_tensor_plans(), cache_tensor_plans():
        first = tensor_inference.infer_tp_plan(model, 2)
        first.styles.clear()  # an answer is the asker's own
        again, few = tensor_inference.infer_tp_plan(model, 2), tensor_inference.infer_tp_plan(other, 2)
        tensor_inference.infer_tp_plan(model, 4)
    assert asked == [2, 4]  # fewer of the same blocks are known as well
    assert again.styles == infer(model, 2).styles and few.styles == infer(other, 2).styles and few.styles
    assert tensor_inference.infer_tp_plan is counting
