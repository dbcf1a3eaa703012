"""`auto_accelerate`: the call, its arguments, what it returns and what it refuses."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler, TensorDataset

import drivetrain.auto
from drivetrain.core.errors import (
    BatchSizeError,
    ConfigError,
    ConflictError,
    MethodConfigError,
    NoEffectWarning,
    PlanInfeasible,
    StrategyFormatError,
    UnknownMethodError,
)
from drivetrain.strategy.method import Method, Stage
from drivetrain.strategy.registry import _methods, register_method
from drivetrain.strategy.value import Strategy
from drivetrain.train.auto import auto_accelerate
from drivetrain.train.trainer import Trainer
from tests.strategy.tasks import ADAM, Block, Tokens, loss_func, make_data, make_model, pairs_data, plain_losses


def mse(batch, output):
    return nn.functional.mse_loss(output, batch[1])


class First(nn.Module):
    """A linear model that takes the whole batch and uses its first part."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, batch):
        return self.linear(batch[0])


def call(plan=(), model=None, **kwargs):
    defaults = {
        "optim_func": torch.optim.SGD, "dataset": pairs_data(), "loss_func": mse, "optim_args": {"lr": 0.1},
        "dataloader_args": {"batch_size": 8}, "device": "cpu",
    }  # fmt: skip
    return auto_accelerate(First() if model is None else model, load_strategy=list(plan), **{**defaults, **kwargs})


def train(result, steps=100):
    losses = []
    for batch in result.dataloader:
        batch = result.prepare_input(batch, "cpu")
        loss = result.loss_func(batch, result.model(batch))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
        if result.lr_scheduler is not None:
            result.lr_scheduler.step()
        if len(losses) == steps:
            break
    return losses


def test_the_result_has_the_documented_shape_and_the_doorway_leads_here():
    status, result, plan = drivetrain.auto.auto_accelerate(
        First(), torch.optim.SGD, pairs_data(), mse, optim_args={"lr": 0.1}, dataloader_args={"batch_size": 8},
        load_strategy=["parallel_mode", ("amp_native", "bf16")], device="cpu",
    )  # fmt: skip
    assert status and isinstance(plan, Strategy) and isinstance(result, drivetrain.auto.AutoAccelerateResult)
    assert result._fields == ("model", "optim", "dataloader", "loss_func", "prepare_input", "lr_scheduler", "args")
    assert result.args["use_optim_backward"] is False
    assert result.args["requires_set_gradient_accumulation_boundary"] is False
    assert (result.args["micro_batch_size"], result.args["gradient_accumulation"]) == (8, 1)
    losses = train(result)
    assert losses[-1] < losses[0] and len(losses) == len(result.dataloader) == 8
    assert sorted(result.context.state_dict()) == sorted(["model", "optimizer", "loader", "lr_scheduler", "scaler"])


def test_everything_is_optional_but_the_model_and_the_plan():
    status, result, _ = auto_accelerate(nn.Linear(2, 2), load_strategy=["checkpoint"], device="cpu")
    assert status and result.optim is None and result.dataloader is None and result.loss_func is None


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"model": 3}, TypeError, "int"),
        ({"model": nn.DataParallel(nn.Linear(1, 1))}, TypeError, "DataParallel"),
        ({"model_input_format": "x"}, ValueError, "unpack_sequence"),
        ({"time_limt": 5}, TypeError, "Did you mean 'time_limit'"),
        ({"numerics": "fast"}, ConfigError, "exact"),
        ({"excluded": ["nope"]}, UnknownMethodError, "nope"),
        ({"included": ["checkpont"]}, UnknownMethodError, "Did you mean 'checkpoint'"),
        ({"included": ["half"], "excluded": ["half"]}, ConflictError, "both"),
        ({"excluded": ["checkpoint"], "load_strategy": ["checkpoint"]}, ConflictError, "load_strategy"),
        ({"included": ["zero"]}, ConfigError, "Name one"),
        ({"save_strategy_to_file": "plan.pkl"}, StrategyFormatError, "JSON"),
        ({"dataloader_args": {"batch_size": "8"}}, BatchSizeError, "whole number"),
        ({"sample_batch": torch.zeros(2)}, ConfigError, "batch_size"),
        ({"load_strategy": None, "finetune_strategy": True}, ValueError, "load_strategy"),
        ({"load_strategy": None, "optim_func": None}, ValueError, "needs optim_func"),
        ({"load_strategy": None, "dataset": None}, ValueError, "needs dataset"),
        ({"load_strategy": [("checkpoint", "Blok")], "model": nn.Sequential(Block())}, MethodConfigError, "Block"),
        ({"load_strategy": [("micro_batch", 3)]}, BatchSizeError, "6 and 9"),
    ],
)
def test_wrong_input_raises_before_anything_happens(kwargs, error, message):
    arguments = {
        "model": First(), "optim_func": torch.optim.SGD, "dataset": pairs_data(), "loss_func": mse, "optim_args": {"lr": 0.1},
        "dataloader_args": {"batch_size": 8}, "load_strategy": [], "device": "cpu",
    }  # fmt: skip
    with pytest.raises(error, match=message):
        auto_accelerate(**{**arguments, **kwargs})


def test_arguments_are_copied_and_two_calls_do_not_share_anything():
    args, optim_args = {"batch_size": 8, "num_workers": 0}, {"lr": 0.1}
    before = dict(args), dict(optim_args)
    first = call(["parallel_mode"], dataloader_args=args, optim_args=optim_args)[1]
    second = call([("micro_batch", 2)], dataloader_args=args, optim_args=optim_args)[1]
    assert (args, optim_args) == before
    assert (len(first.dataloader), len(second.dataloader)) == (8, 32)
    assert first.args["gradient_accumulation"] == 1


def test_included_methods_are_added_and_excluded_ones_pass_when_absent():
    _, _, plan = call([], included=["checkpoint", ("micro_batch", 4)], excluded=["half", "zero"])
    assert plan.opt_names() == ["checkpoint", "micro_batch"]
    assert call(["zero1"], included=["zero"], plan_only=True, world_size=2)[2].opt_names() == ["zero1"]


def test_plan_only_touches_nothing_and_plans_for_another_world():
    model = First()
    status, result, plan = call(["parallel_mode", "fsdp"], model, plan_only=True, world_size=4, device="h100")
    assert status and result is None and plan.mesh == (("data", 4),) and plan.batch.micro == 2
    assert type(model) is First
    with pytest.raises(BatchSizeError, match="8 and 12"):
        call([], plan_only=True, world_size=4, dataloader_args={"batch_size": 10})
    rounded = call([], plan_only=True, world_size=4, dataloader_args={"batch_size": 10}, allow_batch_rounding=True)[2]
    assert rounded.batch.global_size == 8


def test_input_formats_and_prepare_input():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x, y):
            return self.linear(x)

    assert call(["checkpoint"], Pair(), model_input_format="unpack_sequence")[0]
    as_dict = lambda data, device: {"x": data[0].to(device), "y": data[1].to(device)}
    status, result, _ = call(
        [], Pair(), model_input_format="unpack_dict", prepare_input=as_dict,
        loss_func=lambda batch, output: (nn.functional.mse_loss(output, batch["y"]), "more"),
    )  # fmt: skip
    batch = result.prepare_input(next(iter(result.dataloader)), torch.device("cpu"))
    loss, more = result.loss_func(batch, result.model(**batch))
    assert status and more == "more" and loss.ndim == 0


def test_parameter_groups_are_made_of_the_final_model():
    model = nn.Sequential(First())

    def groups(final):
        assert [name for name, _ in final.named_parameters()] == ["0.linear.weight", "0.linear.bias"]
        return [{"params": [final[0].linear.weight]}, {"params": [final[0].linear.bias], "lr": 1.0}]

    _, result, _ = call([], model, optim_param_func=groups)
    assert [group["lr"] for group in result.optim.param_groups] == [0.1, 1.0]


def test_the_scheduler_moves_once_per_update():
    _, result, _ = call(
        [("micro_batch", 2)], lr_scheduler_cls=torch.optim.lr_scheduler.ExponentialLR, lr_scheduler_args={"gamma": 0.5}
    )
    train(result, steps=8)  # two updates of four micro-batches
    assert result.optim.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    assert result.lr_scheduler.get_last_lr() == pytest.approx([0.1 * 0.5**2])


def test_gradients_are_complete_before_the_step_so_that_clipping_sees_the_truth():
    data, plain = make_data(11), make_model()
    _, result, _ = auto_accelerate(
        make_model(), torch.optim.SGD, data, loss_func, None, "unpack_dict", {"lr": 0.0},
        dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=[("micro_batch", 2)], device="cpu",
    )  # fmt: skip
    seen = []
    for batch in result.dataloader:
        result.loss_func(batch, result.model(**batch)).backward()
        if result.optim.window_closed:
            seen.append([p.grad.clone() for p in result.model.parameters()])
        result.optim.step()
        result.optim.zero_grad()
    assert len(seen) == 2  # eight samples, then three
    for grads, rows in zip(seen, (data.tokens[:8], data.tokens[8:])):
        plain.zero_grad()
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        loss_func(batch, plain(**batch)).backward()
        for ours, parameter in zip(grads, plain.parameters()):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)


def test_without_a_loader_windows_are_counted_by_steps():
    model = nn.Linear(4, 1)
    _, result, _ = auto_accelerate(
        model, torch.optim.SGD, loss_func=lambda x, out: out.mean(), optim_args={"lr": 1.0}, device="cpu",
        load_strategy=[("micro_batch", {"accumulation": 2})],
    )  # fmt: skip
    before, changes = model.weight.clone(), []
    for _ in range(4):
        x = torch.ones(2, 4)
        result.loss_func(x, result.model(x)).backward()
        result.optim.step()
        result.optim.zero_grad()
        changes.append((before - model.weight).mean().item())
    assert changes == pytest.approx([0, 1, 1, 2])


def test_gradients_may_be_cleared_at_either_end_of_the_loop():
    def run(clears_first):
        torch.manual_seed(0)
        _, result, _ = call([("micro_batch", 2)])
        for batch in result.dataloader:
            if clears_first:
                result.optim.zero_grad()
            result.loss_func(batch, result.model(batch)).backward()
            result.optim.step()
            if not clears_first:
                result.optim.zero_grad()
        return result.model.linear.weight

    assert torch.equal(run(True), run(False))


class Counting(IterableDataset):
    def __iter__(self):
        for row in pairs_data().tensors[0]:
            yield row, row.sum().view(1)


class OwnSampler:
    """Looks like torch's DistributedSampler without being one."""

    def __init__(self, dataset, num_replicas, rank, shuffle, seed):
        self.indices = list(range(len(dataset)))[::-1][rank::num_replicas]

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)

    def set_epoch(self, epoch):
        pass


def test_samplers_batch_samplers_and_streams_work():
    data = TensorDataset(torch.arange(16.0).view(16, 1), torch.zeros(16, 1))

    def order(dataset=data, **kwargs):
        args = kwargs.pop("dataloader_args", {"batch_size": 4})
        _, result, _ = call(
            [("micro_batch", {"accumulation": 2})],
            dataset=dataset,
            dataloader_args=args,
            ignore_dryrun_on_load_strategy=True,
            **kwargs,
        )
        return [batch[0].flatten().tolist() for batch in result.dataloader]

    assert order()[:2] == [[0, 1], [2, 3]]
    assert order(dataloader_args={"batch_size": 4, "sampler": range(15, -1, -1)})[:2] == [[15, 14], [13, 12]]
    batches = BatchSampler(SequentialSampler(data), 4, drop_last=True)
    assert order(dataloader_args={"batch_sampler": batches}) == [[i, i + 1] for i in range(0, 16, 2)]
    assert order(distributed_sampler_cls=DistributedSampler)[0] == [0, 1]
    assert order(distributed_sampler_cls=OwnSampler)[0] == [15, 14]
    stream = call([], dataset=Counting(), dataloader_args={"batch_size": 16})[1]
    assert [len(batch[0]) for batch in stream.dataloader] == [16] * 4


def test_drop_last_drops_the_last_global_batch():
    _, result, _ = call(
        [("micro_batch", 2)], dataset=pairs_data(14), dataloader_args={"batch_size": 4, "drop_last": True}
    )
    assert len(result.dataloader) == 6 and len(train(result)) == 6
    assert len(train(result)) == 6  # the next epoch begins anew


class Wrong(Method):
    """Changes what the model computes."""

    name, group, stage = "wrong", "mine", Stage.MODULE

    def apply(self, ctx, config):
        with torch.no_grad():
            ctx.model.linear.weight.mul_(2)


class Broken(Method):
    """Fails half-way."""

    name, group, stage = "broken", "mine", Stage.CHECKPOINT

    def apply(self, ctx, config):
        ctx.model.linear = nn.Identity()
        ctx.model.extra = nn.Parameter(torch.zeros(1))
        raise RuntimeError("half-way")


@pytest.fixture
def own_methods():
    for method in (Wrong, Broken):
        register_method(method)
    yield
    for method in (Wrong, Broken):
        del _methods[method.name]


@pytest.mark.parametrize(
    ("name", "kind", "message"), [("wrong", "wrong", "changes the loss"), ("broken", "error", "half-way")]
)
def test_a_plan_that_fails_its_trial_is_reported_and_the_model_is_untouched(own_methods, name, kind, message, tmp_path):
    model = First()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    status, result, plan = call([name], model, save_strategy_to_file=tmp_path / "plan.json")
    assert (status, result) == (False, None) and plan.failure.kind == kind and message in plan.failure.message
    assert "FAILED" in plan.explain() and not list(tmp_path.iterdir())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and set(model.state_dict()) == set(before)
    with pytest.raises(PlanInfeasible, match=message):
        call([name], model, strict=True)


def test_an_error_while_applying_puts_the_model_back(own_methods):
    model = First()
    before = copy.deepcopy(model.state_dict())
    model.seen = seen = []  # a hook may have it too
    with pytest.raises(RuntimeError, match="half-way"):
        call(["broken", ("half", "bf16"), "checkpoint"], model, ignore_dryrun_on_load_strategy=True)
    assert type(model) is First and type(model.linear) is nn.Linear and model.linear.weight.dtype == torch.float32
    assert model.seen is seen
    assert list(model.state_dict()) == list(before) and all(
        torch.equal(v, before[k]) for k, v in model.state_dict().items()
    )


def test_a_plan_is_saved_after_success_and_reused(tmp_path):
    file = tmp_path / "plan.json"
    _, _, plan = call(["parallel_mode", ("micro_batch", 2)], save_strategy_to_file=file)
    again = Strategy.load(file)
    assert again == plan and json.loads(file.read_text())["fingerprint"]["world"] == 1
    status, _, reused = auto_accelerate(First(), torch.optim.SGD, pairs_data(), mse, optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8}, load_strategy=file, device="cpu")  # fmt: skip
    assert status and reused == plan and "loaded plan" not in reused.explain()
    other = auto_accelerate(
        nn.Sequential(First()), load_strategy=file, plan_only=True, dataloader_args={"batch_size": 8}, device="cpu"
    )[2]
    assert "loaded plan: model was" in other.explain()


def save_here(path):
    _, _, plan = call(["parallel_mode", "zero1", ("micro_batch", 2)], save_strategy_to_file=path)
    return plan.to_json()


def load_here(path, **kwargs):
    status, result, plan = auto_accelerate(First(), torch.optim.SGD, pairs_data(), mse, optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8}, load_strategy=path, device="cpu", **kwargs)  # fmt: skip
    return status, plan.batch, train(result)[0]


@pytest.mark.slow
def test_a_plan_saved_on_two_processes_loads_on_one_and_four(world2, world4, tmp_path):
    path = str(tmp_path / "plan.json")
    texts = world2(save_here, path)
    assert texts[0] == texts[1] and Strategy.load(path).batch.data_ranks == 2
    with pytest.warns(UserWarning, match="zero1"):
        status, batch, _ = load_here(path)
    assert status and batch.micro * batch.accumulation == 8
    # The dry run was on two processes: each rank starts one of its own for it.
    for status, batch, _ in world4(load_here, path, ignore_dryrun_on_load_strategy=True):
        assert status and (batch.global_size, batch.data_ranks, batch.micro) == (8, 4, 2)


def refuse_here():
    messages = []
    for kwargs in ({"excluded": ["nope"]}, {"dataloader_args": {"batch_size": 7}}, {"plan": ["zero1", "fsdp"]}):
        try:
            call(kwargs.pop("plan", []), **kwargs)
        except ConfigError as error:
            messages.append(str(error))
    try:
        call(["fsdp"], find_unused_parameters=True)
    except ConflictError as error:
        messages.append(str(error))
    return messages


def test_all_ranks_refuse_together(world2):
    first, second = world2(refuse_here)
    assert first == second and len(first) == 4
    assert "6 and 8" in first[1] and "find_unused_parameters" in first[3]


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, batch):
        return self.used(batch[0])


def unused_here():
    _, result, _ = call(["parallel_mode"], Partly(), find_unused_parameters=True, ignore_dryrun_on_load_strategy=True)
    return train(result, 3)


def test_unused_parameters_are_allowed_when_asked_for(world2):
    assert all(len(losses) == 3 for losses in world2(unused_here))


def test_apply_shapes_a_context_of_ones_own():
    from drivetrain import Context, SmartDataLoader

    model, data = make_model(), make_data()
    ctx = Context(model=model, loss_func=loss_func)
    ctx.optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    ctx.loader = SmartDataLoader(data, global_batch_size=8, loading_bar=False)
    Strategy(["checkpoint", ("micro_batch", 4), "fused_optimizer"]).apply(ctx)
    assert ctx.optimizer.param_groups[0]["fused"]
    losses = []
    for batch in ctx.loader:
        loss = ctx.loss_func(batch, ctx.model(**batch))
        loss.backward()
        ctx.optimizer.step()
        ctx.optimizer.zero_grad()
        losses.append(loss.item())
    pairs = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2])]
    assert pairs == pytest.approx(plain_losses()[0], rel=1e-4)


def test_a_batch_that_cannot_be_split_leaves_ones_own_context_as_it_was():
    from drivetrain import Context, SmartDataLoader

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    plan = Strategy([("micro_batch", 3), "fused_optimizer", ("half", "bf16")])
    for arguments, message in (
        ({"global_batch_size": 8}, "does not divide"),
        ({"batch_size": 8}, "global_batch_size="),
    ):
        loader = SmartDataLoader(make_data(), loading_bar=False, **arguments)
        ctx = Context(model=model, optimizer=optimizer, loader=loader, loss_func=loss_func)
        with pytest.raises(ConfigError, match=message):
            plan.apply(ctx)
        assert ctx.optimizer is optimizer and ctx.loader is loader and ctx.loss_func is loss_func
        assert {parameter.dtype for parameter in ctx.model.parameters()} == {torch.float32}


def test_a_plan_changes_what_the_model_of_ones_own_context_is_called_with():
    from drivetrain import Context

    ctx = Context(model=nn.Linear(4, 2), loss_func=lambda x, y: y.float().square().mean())
    ctx.optimizer = torch.optim.SGD(ctx.model.parameters(), lr=0.1)
    Strategy([("half", "bf16")]).apply(ctx)
    x, before = torch.randn(3, 4), ctx.model.weight.detach().clone()
    outputs = ctx.model(x)  # in float32, as a loader yields it
    ctx.loss_func(x, outputs).backward()
    ctx.optimizer.step()
    assert outputs.dtype is torch.bfloat16 and not torch.equal(ctx.model.weight, before)


def test_a_state_is_shaped_by_the_same_code_as_a_context():
    from drivetrain.context.state import State

    model, function = nn.Linear(4, 2), nn.MSELoss()
    state = State(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    state.loss_fn = function
    assert Strategy(["fused_optimizer"]).apply(state) is state
    (optimizer,) = state.optimizers
    assert optimizer.param_groups[0]["fused"] and state.loss_fn is not function
    state.loss_fn(model(torch.ones(1, 4)), torch.zeros(1, 2)).backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before) and "loss_func" not in dict(state.items())


class Waves(nn.Module):
    """A model with a complex parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)), nn.Linear(4, 2)

    def forward(self, x):
        return self.out((x.to(torch.complex64) @ self.weight).abs().to(self.out.weight.dtype))


def test_half_leaves_complex_parameters_as_they_are():
    model = Waves()
    before = model.weight.detach().clone()
    _, result, _ = auto_accelerate(model, load_strategy=[("half", "bf16")])
    assert torch.equal(result.model.weight, before) and result.model.out.weight.dtype is torch.bfloat16


def test_half_keeps_float32_copies_that_are_saved_and_restored():
    def make():
        return auto_accelerate(
            make_model(), torch.optim.AdamW, Tokens(32), loss_func, None, "unpack_dict", {"lr": 0.05}, sampler_seed=1,
            dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=[("half", "bf16")], device="cpu",
            ignore_dryrun_on_load_strategy=True,
        )[1]  # fmt: skip

    def run(result, steps):
        for _ in range(steps):
            for batch in result.dataloader:
                result.loss_func(batch, result.model(**batch)).backward()
                result.optim.step()
                result.optim.zero_grad()
        return [p.clone() for p in result.model.parameters()]

    whole = make()
    run(whole, 1)
    state = copy.deepcopy(whole.context.state_dict())
    expected = run(whole, 1)
    resumed = make()
    resumed.context.load_state_dict(state)
    assert all(p.dtype == torch.bfloat16 for p in resumed.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(run(resumed, 1), expected))


def test_a_model_on_the_meta_device_is_materialised():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    status, result, _ = auto_accelerate(model, load_strategy=["checkpoint"], device="cpu")
    assert status and result.model(torch.ones(2, 4)).shape == (2, 1)


def test_images_become_channels_last():
    class Images(nn.Sequential):
        def forward(self, batch):
            return super().forward(batch[0])

    data = TensorDataset(torch.randn(16, 3, 8, 8), torch.randn(16, 1))
    model = Images(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
    with pytest.warns(UserWarning, match="tf32"):
        status, result, plan = call(["channels_last", "tf32"], model, dataset=data)
    batch = result.prepare_input(next(iter(result.dataloader)), "cpu")
    assert status and batch[0].is_contiguous(memory_format=torch.channels_last)
    assert result.model[0].weight.is_contiguous(memory_format=torch.channels_last) and plan.dropped[0][0] == "tf32"


def meta_here():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
    plan = ["fsdp", ("amp_native", "bf16")]
    _, result, _ = auto_accelerate(model, torch.optim.SGD, load_strategy=plan, optim_args={"lr": 0.1}, device="cpu")
    out = result.model(torch.ones(2, 4))
    out.sum().backward()
    parameter = next(result.model.parameters())
    policy = result.model._get_fsdp_state()._mp_policy
    return out.dtype, parameter.dtype, parameter.grad.dtype, policy.param_dtype, policy.reduce_dtype


def test_sharding_materialises_and_reduces_in_float32_under_mixed_precision(world2):
    full, low = torch.float32, torch.bfloat16
    assert world2(meta_here) == [(full, full, full, low, full)] * 2


def groups_here():
    import torch.distributed as dist

    from drivetrain.runtime.ranks import clear_data_ranks, data_rank, num_data_ranks
    from drivetrain.strategy.mesh import build_mesh

    found = []
    for axes, order in (
        ((("tensor", 2), ("data", 2)), None),
        ((("data", 2), ("tensor", 2)), None),
        ((("tensor", 2), ("data", 2)), (0, 2, 1, 3)),
        ((("tensor", 2), ("zero", 2), ("data", 1)), None),
    ):
        mesh = build_mesh(axes, order, "cpu")
        place = (dist.get_process_group_ranks(mesh.get_group("tensor")), data_rank(), num_data_ranks())
        found.append(place)
        clear_data_ranks()
    return found


def test_the_first_axis_varies_fastest_and_ranks_along_tensor_share_samples(world4):
    ranks = world4(groups_here)
    assert [place[0] for place in ranks] == [([0, 1], 0, 2), ([0, 1], 0, 2), ([2, 3], 1, 2), ([2, 3], 1, 2)]
    assert [place[1] for place in ranks] == [([0, 2], 0, 2), ([1, 3], 1, 2), ([0, 2], 0, 2), ([1, 3], 1, 2)]
    assert [place[2] for place in ranks] == [([0, 2], 0, 2), ([1, 3], 1, 2), ([0, 2], 0, 2), ([1, 3], 1, 2)]
    assert [place[3] for place in ranks] == [([0, 1], 0, 2), ([0, 1], 0, 2), ([2, 3], 1, 2), ([2, 3], 1, 2)]


def groups_of_equal_plans():
    import torch.distributed as dist

    from drivetrain.runtime.ranks import clear_data_ranks
    from drivetrain.strategy.mesh import build_mesh

    counts = []
    for _ in range(3):
        build_mesh((("tensor", 2), ("zero", 2), ("data", 1)), (0, 1, 2, 3), "cpu")
        clear_data_ranks()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_equal_meshes_share_their_process_groups(world4):
    for first, *others in world4(groups_of_equal_plans):
        assert others == [first, first]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # as errors, the compiler's own warnings would fail the dry run
def test_float16_scales_and_skips_and_graphs_compile_on_cuda():
    status, result, _ = call([("amp_native", "fp16"), "tf32", "fused_optimizer"], device="cuda")
    assert status and result.context.scaler is not None
    means = []
    for _ in range(6):  # the first updates may be left out while the scale is too large
        losses = []
        for batch in result.dataloader:
            batch = result.prepare_input(batch, result.context.device)
            loss = result.loss_func(batch, result.model(batch))
            loss.backward()
            result.optim.unscale_()
            result.optim.step()
            result.optim.zero_grad()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    assert means[-1] < means[0]
    status, _, plan = call(["compile", "cuda_graphs", ("amp_native", "bf16")], device="cuda")
    assert status, plan.failure


class Wide(nn.Linear):
    def forward(self, x, y):
        return super().forward(x)


def test_texts_that_only_a_sampler_puts_together_are_planned_for():
    rows = [{"x": torch.randn(2 + index % 2, 8), "y": torch.randn(2 + index % 2, 8)} for index in range(8)]
    for plan in ([], None):
        status, _, applied = auto_accelerate(
            Wide(8, 8), torch.optim.SGD, rows, lambda batch, out: (out - batch["y"]).square().mean(), None, "unpack_dict",
            {"lr": 0.1}, load_strategy=plan, device="cpu", **({"time_limit": 0} if plan is None else {}),
            dataloader_args={"batch_sampler": BatchSampler([0, 2, 4, 6, 1, 3, 5, 7], 4, False), "num_workers": 0},
        )  # fmt: skip
        assert status, applied.failure


def test_settings_of_a_search_next_to_a_given_plan_have_no_effect_and_say_so():
    settings = {"prepare_input": lambda batch, device: batch[0], "dataloader_args": {"batch_size": 8}}
    data = TensorDataset(torch.randn(16, 8))
    given = (nn.Linear(8, 8), torch.optim.SGD, data, lambda batch, out: out.square().mean())
    with pytest.warns(NoEffectWarning, match="time_limit, numerics has no effect"):
        auto_accelerate(*given, **settings, optim_args={"lr": 0.1}, load_strategy=[], time_limit=3, numerics="exact")
    with pytest.raises(ConfigError, match="without lr_scheduler_cls"):
        auto_accelerate(*given, **settings, load_strategy=[], lr_scheduler_args={"step_size": 3})
    for plan in (None, ["amp_native"]):
        with pytest.warns(NoEffectWarning, match="strategy_time_limit"):
            Trainer(nn.Linear(8, 8), nn.MSELoss(), None, callbacks=(), strategy=plan, strategy_time_limit=5)
