"""Pipelines: the same losses and weights as the plain model, on 2 and 4 gloo processes."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

from drivetrain.context.context import Context
from drivetrain.core.errors import (
    BatchSizeError,
    ConfigError,
    ConflictError,
    MethodConfigError,
    StateError,
    StrategyError,
    UnsupportedMethodError,
)
from drivetrain.module.pipeline import split_model
from drivetrain.module.pipeline_schedule import PipelineOutput
from drivetrain.strategy.dry_run import try_plan
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.task import CallModel, TrainingTask
from drivetrain.strategy.value import Strategy
from drivetrain.train.auto import auto_accelerate
from tests.strategy import tasks

TWO = ("parallel_mode", [("pipe", 2)])
DATA = ("parallel_mode", [("pipe", 2), ("data", 2)])
ZERO = ("parallel_mode", [("pipe", 2), ("zero", 2)])
GRID = [("tensor", 2), ("pipe", 2)]


def start(plan, *, model=None, size=32, batch=8, **kwargs):
    """Apply a plan to a small transformer and return the result and the plan as applied."""
    status, result, plan = auto_accelerate(
        model or tasks.make_model(tied=False),
        torch.optim.AdamW,
        tasks.make_data(size),
        kwargs.pop("loss_func", tasks.loss_func),
        model_input_format="unpack_dict",
        optim_args=tasks.ADAM,
        dataloader_args={"batch_size": batch, "num_workers": 0},
        load_strategy=plan,
        **{"ignore_dryrun_on_load_strategy": True, **kwargs},
    )
    assert status, plan.failure
    return result, plan


def run(result, steps=100):
    """The loop that people write; return the losses."""
    losses = []
    for rows, _ in zip(result.dataloader, range(steps)):
        rows = result.prepare_input(rows, result.context.device)
        loss = result.loss_func(rows, result.model(**rows))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def train(plan, **kwargs):
    """Train by a plan; return losses and this rank's final parameters under the user's names."""
    result, _ = start(plan, **kwargs)
    losses = run(result)
    return losses, {name: whole(parameter) for name, parameter in result.model.named_parameters()}


def train_by(plans, **kwargs):
    return [train(plan, **kwargs) for plan in plans]


def check_same(results, expected, accumulation=1):
    """Compare every rank's losses and weights with the plain loop's; together the ranks hold every parameter."""
    losses, weights = expected
    results = [(own_losses, dict(own)) for own_losses, own in results]
    if "head.weight" not in weights:  # tied: the plain model has it once
        heads = [own.pop("head.weight") for _, own in results if "head.weight" in own]
        for head in heads:
            torch.testing.assert_close(head, weights["embedding.weight"], rtol=1e-3, atol=1e-4)
        assert heads
    seen = set()
    for own_losses, own in results:
        means = torch.tensor(own_losses).view(-1, accumulation).mean(1)
        torch.testing.assert_close(means, torch.tensor(losses), rtol=1e-5, atol=1e-6)
        assert len(own) < len(weights)
        seen |= set(own)
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)
    assert seen == set(weights)


PLANS_ON_TWO = [
    [TWO, "pipeline_parallel"],
    [TWO, ("pipeline_parallel", {"pipe_schedule": "gpipe", "chunks": 8})],
    [TWO, ("pipeline_parallel", {"nstages": 4, "chunks": 4})],
    [TWO, ("pipeline_parallel", {"schedule": "Interleaved1F1B", "microbatches": 2})],
    [TWO, "pipeline_parallel", "checkpoint", "fused_optimizer"],
    [TWO, ("pipeline_parallel", {"insert_before_modules": ["norm"]})],
    [TWO, "pipeline_parallel", ("native_dynamo", {"backend": "aot_eager"})],
]


@pytest.mark.parametrize(
    "plans", [PLANS_ON_TWO[1::2], pytest.param(PLANS_ON_TWO[::2], marks=pytest.mark.slow)], ids=["quick", "rest"]
)
def test_every_schedule_trains_like_the_plain_model(world2, plans):
    expected = tasks.plain_losses(tied=False)
    for results in zip(*world2(train_by, plans)):
        check_same(results, expected)


def test_a_short_last_batch_is_cut_into_fewer_micro_batches(world2):
    plans = [[TWO, "pipeline_parallel"], [TWO, ("pipeline_parallel", {"nstages": 4, "chunks": 4})]]
    for results in zip(*world2(train_by, plans, size=29)):
        check_same(results, tasks.plain_losses(size=29, tied=False))


PLANS_ON_FOUR = [
    [DATA, ("pipeline_parallel", {"chunks": 2})],
    [DATA, ("pipeline_parallel", {"nstages": 4, "chunks": 2})],
    [ZERO, ("pipeline_parallel", {"chunks": 2}), "fsdp"],
    [ZERO, ("pipeline_parallel", {"nstages": 4, "chunks": 2}), "fsdp"],
    [("parallel_mode", [("pipe", 4)]), ("pipeline_parallel", {"chunks": 4})],
    [("mixed_parallel", {"parallel_mode": GRID, "tensor_config": {**tasks.TENSOR_PLAN, "head": "colwise_gather"}})],
]


@pytest.mark.parametrize(
    "plans", [PLANS_ON_FOUR[1::2], pytest.param(PLANS_ON_FOUR[::2], marks=pytest.mark.slow)], ids=["quick", "rest"]
)
def test_pipelines_with_data_sharding_and_tensor_axes_train_like_the_plain_model(world4, plans):
    expected = tasks.plain_losses(tied=False)
    for results in zip(*world4(train_by, plans)):
        check_same(results, expected)


def test_accumulated_batches_of_a_pipeline_equal_whole_ones(world4):
    plans = [
        [DATA, ("pipeline_parallel", {"chunks": 2}), ("micro_batch", 2)],
        [ZERO, ("pipeline_parallel", {"chunks": 2}), "fsdp", ("micro_batch", 2)],
    ]
    for results in zip(*world4(train_by, plans)):
        check_same(results, tasks.plain_losses(tied=False), accumulation=2)


def train_with_short_windows():
    plan = [ZERO, ("pipeline_parallel", {"chunks": 2}), "fsdp", ("micro_batch", 2)]
    return train(plan, size=30)


def test_a_short_batch_inside_a_window_keeps_the_gradients_before_it(world4):
    results = world4(train_with_short_windows)
    _, weights = tasks.plain_losses(size=30, tied=False)
    for _, own in results:
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)


def sixteen_bits(plans):
    found = []
    for plan in plans:
        result, _ = start(plan)
        found.append((run(result, 3), {parameter.dtype for parameter in result.model.parameters()}))
    return found


def check_sixteen_bits(world, mesh):
    expected, _ = tasks.plain_losses(tied=False, steps=3)
    plans = [[mesh, ("pipeline_parallel", {"chunks": 2}), (name, "bf16")] for name in ("half", "amp_native")]
    for found in world(sixteen_bits, plans):
        assert [dtypes for _, dtypes in found] == [{torch.bfloat16}, {torch.float32}]
        assert all(losses == pytest.approx(expected, rel=1e-2) for losses, _ in found), found


def test_sixteen_bit_parameters_train_in_a_pipeline(world2):
    check_sixteen_bits(world2, TWO)


@pytest.mark.slow
def test_sixteen_bit_parameters_train_in_a_pipeline_with_replicas(world4):
    check_sixteen_bits(world4, DATA)


def from_nothing(axes, methods):
    """Train a model that begins on the meta device; return its losses and first parameters, gathered."""
    with torch.device("meta"):
        model = tasks.TinyGPT(tied=False)
    torch.manual_seed(0)
    result, _ = start([("parallel_mode", axes), *methods], model=model, device="cpu")
    first = {name: whole(parameter) for name, parameter in result.model.named_parameters()}
    return run(result, 3), first


def test_models_on_the_meta_device_are_initialised_stage_by_stage(world2):
    results = world2(from_nothing, [("pipe", 2)], ["pipeline_parallel"])
    plain = tasks.make_model(tied=False)
    state = {name: value for _, own in results for name, value in own.items()}
    plain.load_state_dict(state)  # whatever the stages drew is the model
    rows = tasks.make_data().tokens[:8]
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    loss = tasks.loss_func(batch, plain(**batch)).item()
    for losses, _ in results:
        assert losses[0] == pytest.approx(loss, rel=1e-5) and losses == results[0][0]


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 4, "vocab_size": tasks.VOCAB, "n_positions": 32}
    config = GPT2Config(**sizes, **rates, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


class Texts(tasks.Tokens):
    def __getitem__(self, index):
        return {"input_ids": self.tokens[index]}


def next_token_loss(batch, out):
    return nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def train_gpt2():
    _, result, _ = auto_accelerate(
        gpt2(), torch.optim.AdamW, Texts(24), next_token_loss, None, "unpack_dict", tasks.ADAM,
        dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=[TWO, "pipeline_parallel"],
        ignore_dryrun_on_load_strategy=True,
    )  # fmt: skip
    return run(result), [name for name, _ in result.model.named_parameters()]


@pytest.mark.slow
def test_a_model_of_transformers_is_cut_and_trains_like_the_whole_one(world2):
    pytest.importorskip("transformers")
    model, rows, expected = gpt2(), Texts(24).tokens, []
    optimizer = torch.optim.AdamW(model.parameters(), **tasks.ADAM)
    for batch in rows.split(8):
        loss = next_token_loss({"input_ids": batch}, model(input_ids=batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    (first, own), (second, others) = world2(train_gpt2, timeout=180)
    assert first == second == pytest.approx(expected, rel=1e-5)
    assert set(own) | set(others) == {name for name, _ in model.named_parameters()} and not set(own) & set(others)
    assert model.config.use_cache, "only while the model is followed it keeps no keys"


def context_of_ones_own():
    model = tasks.make_model(tied=False)
    names = set(model.state_dict())
    ctx = Context(model=model, loss_func=tasks.loss_func)
    ctx.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    Strategy([TWO, "pipeline_parallel"]).apply(ctx)
    own, whole = ctx.state_dict(), ctx.state_dict(full=True)
    ctx.load_state_dict(own)
    return names, set(own["model"]), set(whole.get("model", ()))


def test_a_context_of_ones_own_joins_the_stages_of_a_pipeline(world2):
    (names, first, whole), (_, second, nothing) = world2(context_of_ones_own)
    assert first | second == names == whole and not first & second and not nothing


def settings_without_effect():
    import warnings

    mode = ("parallel_mode", {"axes": [("pipe", 2), ("data", 2)], "bucket_cap_mb": 1, "static_graph": True})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, plan = start([mode, ("pipeline_parallel", {"chunks": 2})], find_unused_parameters=True)
    told = [str(item.message) for item in caught if "settings of DDP" in str(item.message)]
    return told, [note for note in plan.reasons if "settings of DDP" in note], plan.explain(200)


def test_settings_of_ddp_beside_a_pipeline_are_said_to_have_no_effect(world4):
    results = world4(settings_without_effect)
    assert [len(told) for told, _, _ in results] == [1, 0, 0, 0]
    for _, (note,), text in results:
        assert all(name in note for name in ("bucket_cap_mb", "static_graph", "find_unused_parameters"))
        assert "settings of DDP" in text


def dry_runs():
    """Try plans in this process, as a search or a loaded plan does."""
    rows = torch.utils.data.default_collate([tasks.make_data()[index] for index in range(8)])
    notes = []
    for extra in ([], [("micro_batch", 4)], [("amp_native", "bf16")]):
        model = tasks.make_model(tied=False)
        task = TrainingTask(
            model=model, call=CallModel("unpack_dict"), loss_func=tasks.loss_func, optim_func=torch.optim.AdamW,
            optim_args={"lr": 0.05}, samples=rows, global_batch_size=8,
        )  # fmt: skip
        outcome = try_plan(Strategy([TWO, "pipeline_parallel", *extra]), task, device=torch.device("cpu"))
        assert not any(parameter.is_meta for parameter in model.parameters())
        notes.append((outcome.failure, outcome.notes))
    return notes


def test_trials_compare_a_pipeline_with_the_plain_model(world2):
    for notes in world2(dry_runs):
        assert all(failure is None and "gradient norm" in text for failure, (text,) in notes), notes


def evaluate():
    """Evaluate, train one step, and evaluate again; the last stage's output is the model's."""
    result, _ = start([TWO, ("pipeline_parallel", {"chunks": 4})])
    rows = {name: value[None].expand(6, -1) for name, value in tasks.make_data()[0].items()}
    result.model.eval()
    before = result.model(**rows)
    loss = result.loss_func(rows, before)
    grads = [parameter.grad for parameter in result.model.parameters()]
    result.model.train()
    with torch.no_grad():
        again = result.model(**rows)
    return (
        before if isinstance(before, torch.Tensor) else repr(before),
        loss.item(),
        any(g is not None for g in grads),
        type(again).__name__,
    )


def test_evaluation_runs_forward_only_and_gives_the_output_on_the_last_stage(world2):
    model = tasks.make_model(tied=False)
    rows = {name: value[None].expand(6, -1) for name, value in tasks.make_data()[0].items()}
    expected = model(**rows)
    (first, first_loss, first_grads, first_again), (last, last_loss, last_grads, last_again) = world2(evaluate)
    assert "PipelineOutput" in first and (first_again, last_again) == ("PipelineOutput", "Tensor")
    torch.testing.assert_close(last, expected.detach())
    assert first_loss == last_loss == pytest.approx(tasks.loss_func(rows, expected).item(), rel=1e-6)
    assert not first_grads and not last_grads


def normalised():
    """A batch norm must see each micro-batch once, also in the first step, which finds out shapes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)))
    data = [torch.randn(8) for _ in range(16)]
    _, result, _ = auto_accelerate(
        model, torch.optim.SGD, data, lambda x, y: (y**2).mean(), optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=[TWO, ("pipeline_parallel", {"chunks": 2})],
        ignore_dryrun_on_load_strategy=True,
    )  # fmt: skip
    for rows in result.dataloader:
        result.loss_func(rows, result.model(rows)).backward()
    return {name: buffer.clone() for name, buffer in result.model.named_buffers()}


def test_batch_norms_count_each_micro_batch_once(world2):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)))
    for rows in torch.stack([torch.randn(8) for _ in range(16)]).split(4):
        model(rows)
    found = [item for own in world2(normalised) for item in own.items()]
    assert [name for name, _ in found] == [name for name, _ in model.named_buffers()]
    for name, value in found:
        torch.testing.assert_close(value, model.get_buffer(name))


def save_and_load():
    """Train two steps, join the state, and go on under another strategy and in another pipeline."""
    result, _ = start([TWO, "pipeline_parallel"])
    first = run(result, 2)
    joined = result.context.state_dict(full=True)
    second = run_rest(result)
    box = [joined]
    torch.distributed.broadcast_object_list(box)
    other, _ = start(["parallel_mode"])
    other.context.exclude("loader")
    other.context.load_state_dict({name: value for name, value in box[0].items() if name != "loader"})
    others = run_rest(other)  # before another plan tells the loaders which ranks share samples
    again, _ = start([TWO, ("pipeline_parallel", {"nstages": 4, "chunks": 4})])
    again.context.exclude("loader")
    again.context.load_state_dict({name: value for name, value in box[0].items() if name != "loader"})
    with pytest.raises(StateError, match="surprise"):
        again.context.load_state_dict({**box[0], "model": {**box[0]["model"], "surprise": torch.ones(1)}})
    names = list(joined.get("model", ()))
    return first + second, others, run_rest(again), names


def run_rest(result):
    """Train on the second half of the data, which begins after two batches of eight."""
    losses = []
    for index, rows in enumerate(result.dataloader):
        if index < 2:
            continue
        loss = result.loss_func(rows, result.model(**rows))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_joined_state_goes_on_under_another_strategy(world2):
    expected, weights = tasks.plain_losses(tied=False)
    results = world2(save_and_load)
    assert sorted(results[0][3]) == sorted(weights) and results[1][3] == []
    for losses, _, again, _ in results:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert again == pytest.approx(expected[2:], rel=1e-4)
    both = torch.tensor([other for _, other, _, _ in results]).mean(0)
    torch.testing.assert_close(both, torch.tensor(expected[2:]), rtol=1e-4, atol=1e-5)


def own_groups():
    """Groups by name may be empty on a rank; modules of other stages are there, and empty."""

    def groups(model):
        return [
            {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
            {"params": list(model.head.parameters()), "lr": 0.1},
            {"params": [p for n, p in model.named_parameters() if n.startswith("embedding")]},
        ]

    plan = [TWO, "pipeline_parallel"]
    result, _ = start(plan, optim_param_func=groups)
    run(result, 2)
    only, _ = start(plan, optim_param_func=lambda model: list(model.head.parameters()))
    run(only, 1)
    return [len(group["params"]) for group in result.optim.param_groups], [
        len(g["params"]) for g in only.optim.param_groups
    ]


def test_groups_of_other_stages_are_empty(world2):
    assert world2(own_groups) == [([4, 0, 1], [0]), ([6, 1, 0], [1])]


def other_stages_are_released():
    model = tasks.make_model(tied=False)
    result, _ = start([TWO, "pipeline_parallel"], model=model)
    here = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    return here == set(dict(result.model.named_parameters()))


def test_parameters_of_other_stages_are_freed(world2):
    assert world2(other_stages_are_released) == [True, True]


TIED = {
    2: [
        [TWO, "pipeline_parallel"],
        [TWO, ("pipeline_parallel", {"chunks": 2}), ("micro_batch", 4)],
        [TWO, ("pipeline_parallel", {"nstages": 4, "chunks": 4})],
        [TWO, "pipeline_parallel", "cpu_offload"],
    ],
    4: [
        [DATA, "pipeline_parallel"],
        [ZERO, "pipeline_parallel", "fsdp"],
        [("parallel_mode", GRID), ("tensor_parallel", {"plan": tasks.TENSOR_PLAN}), "pipeline_parallel"],
    ],
}


def train_tied(plans):
    return [train(plan, model=tasks.make_model()) for plan in plans]


def test_a_head_that_is_tied_to_the_embedding_is_trained_as_one_parameter_on_two(world2):
    for plan, results in zip(TIED[2], zip(*world2(train_tied, TIED[2]))):
        check_same(results, tasks.plain_losses(), accumulation=2 if "micro_batch" in str(plan) else 1)


def test_a_head_that_is_tied_to_the_embedding_is_trained_as_one_parameter_on_four(world4):
    for results in zip(*world4(train_tied, TIED[4])):
        check_same(results, tasks.plain_losses())


def clipped_norm():
    result, _ = start([TWO, "pipeline_parallel"], model=tasks.make_model())
    batch = result.prepare_input(next(iter(result.dataloader)), result.context.device)
    result.loss_func(batch, result.model(**batch)).backward()
    return result.clip_grad_norm_(0.1).item()


def test_the_norm_counts_a_tied_parameter_once(world2):
    model, rows = tasks.make_model(), tasks.make_data(32).tokens[:8]
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    tasks.loss_func(batch, model(**batch)).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    assert world2(clipped_norm) == pytest.approx([expected, expected], rel=1e-5)


class Fails(tasks.TinyGPT):
    """Fails in its second stage, in training."""

    def __init__(self):
        super().__init__(tied=False)
        self.blocks[1].register_forward_hook(self.fail)

    def fail(self, module, inputs, output):
        if torch.is_tensor(output) and output.device.type == "cpu" and type(output) is torch.Tensor:
            raise ArithmeticError("the second block cannot do this")


class CannotGoBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("the second block cannot do this")


class FailsInBackward(Fails):
    def fail(self, module, inputs, output):
        return CannotGoBack.apply(output)


def failures(kind=Fails):
    model = kind()
    plan = [TWO, "pipeline_parallel"]
    try:
        result, _ = start(plan, model=model)
        if type(model) is tasks.TinyGPT and torch.distributed.get_rank() == 1:
            result.model.schedule = None  # as if torch could not make the schedule here
            mock.patch.object(pipelining, "ScheduleGPipe", side_effect=ArithmeticError("it cannot be made")).start()
        run(result)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        mock.patch.stopall()


@pytest.mark.parametrize("kind", [Fails, FailsInBackward])
def test_an_error_in_one_stage_ends_all_ranks_at_once(world2, kind):
    first, second = world2(failures, kind, timeout=60)
    assert second == ("ArithmeticError", "the second block cannot do this")
    assert first[0] == "DistributedError" and "rank 1 failed in stage 1" in first[1] and second[1] in first[1]


def test_a_schedule_that_one_rank_cannot_make_ends_all_ranks_at_once(world2):
    first, second = world2(failures, tasks.TinyGPT, timeout=60)
    assert second == ("ArithmeticError", "it cannot be made")
    assert first == (
        "DistributedError",
        "rank 1 failed in the schedule of the pipeline: ArithmeticError: it cannot be made",
    )


class DropsOut(tasks.TinyGPT):
    def forward(self, tokens, labels=None):
        x = nn.functional.dropout(self.embedding(tokens), 0.5, self.training)
        for block in self.blocks:
            x = block(x)
        shifted = torch.zeros_like(labels)
        shifted[:, 1:] = labels[:, :-1]
        shifted.masked_fill_(shifted == 3, 0)
        return self.head(self.norm(x)) + shifted.unsqueeze(-1)


def test_dropout_and_changes_in_place_between_blocks_are_followed():
    torch.manual_seed(0)
    model, rows = DropsOut(tied=False), tasks.make_data(4).tokens
    given = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    first, second = split_model(model, 2, given=given).parts
    for mode in (True, False):
        for module in (model, first, second):
            module.train(mode)
        torch.manual_seed(1)
        expected = model(**given)
        torch.manual_seed(1)
        found = second(*first(tokens=given["tokens"]), labels=given["labels"])
        assert torch.equal(found, expected)


class Odd(tasks.TinyGPT):
    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * 2 if self.training else self.norm(x))


class Thrice(tasks.TinyGPT):
    """One norm in the first, the third and the last of four stages."""

    def __init__(self):
        super().__init__(tied=False)
        self.blocks = nn.ModuleList([tasks.Block() for _ in range(4)])

    def forward(self, tokens, labels=None):
        x = self.norm(self.embedding(tokens))
        for block in self.blocks:
            x = self.norm(block(x))
        return self.head(x)


def head_by_itself(model):
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if name != "head.weight"]
    return (
        [{"params": first}, {"params": [named["head.weight"]], "lr": 0.5}]
        if "head.weight" in named
        else [{"params": first}]
    )


def refusals():
    """Return the message of every mistake, as all ranks see it."""
    tied, plain = tasks.make_model(), tasks.make_model(tied=False)
    before = {name: parameter.clone() for name, parameter in tied.named_parameters()}
    trials = {
        "tied": lambda: start([TWO, ("pipeline_parallel", {"nstages": 4})], model=Thrice()),
        "groups": lambda: start([TWO, "pipeline_parallel"], model=tasks.make_model(), optim_param_func=head_by_itself),
        "stages": lambda: start([TWO, ("pipeline_parallel", {"nstages": 3})]),
        "schedule": lambda: start([TWO, ("pipeline_parallel", {"nstages": 4, "schedule": "1F1B"})]),
        "few": lambda: start([TWO, ("pipeline_parallel", {"chunks": 1})]),
        "odd": lambda: start([TWO, ("pipeline_parallel", {"nstages": 4, "chunks": 3})]),
        "name": lambda: start([TWO, ("pipeline_parallel", ["blocks.7"])]),
        "count": lambda: start([TWO, ("pipeline_parallel", {"split": ["blocks.1", "norm"], "nstages": 2})]),
        "many": lambda: start([TWO, ("pipeline_parallel", {"nstages": 64, "chunks": 64})]),
        "loss": lambda: start([TWO, "pipeline_parallel"], loss_func=None),
        "mode": lambda: start([TWO, "pipeline_parallel"], model=Odd(tied=False)),
        "scaler": lambda: start([TWO, ("pipeline_parallel", {"nstages": 4}), ("amp_native", "fp16")]),
        "compile": lambda: start(
            [TWO, "pipeline_parallel", ("native_dynamo", {"backend": "aot_eager", "scope": "model"})]
        ),
        "open": lambda: start([TWO, ("pipeline_parallel", {"nstages": 4}), "checkpoint"]),
        "wrap": lambda: start([TWO, "pipeline_parallel", ("checkpoint", "Block")]),
        "rows": lambda: run(start([TWO, "pipeline_parallel"], model=plain, batch=6)[0]),
        "tuple": lambda: run(start([TWO, "pipeline_parallel"], loss_func=lambda x, y: (tasks.loss_func(x, y), 1))[0]),
        "call": lambda: start([TWO, "pipeline_parallel"])[0].model(torch.zeros(4, 8, dtype=torch.long), labels=None),
        "shape": lambda: start([TWO, "pipeline_parallel"])[0].model(
            tokens=torch.zeros(4, 8, dtype=torch.long), labels=torch.zeros(2, 8)
        ),
    }
    messages = {}
    for name, trial in trials.items():
        try:
            trial()
        except Exception as error:
            messages[name] = (type(error).__name__, str(error))
    unchanged = all(torch.equal(parameter, before[name]) for name, parameter in tied.named_parameters())
    return messages, unchanged


EXPECTED = {
    "tied": (MethodConfigError, "share a parameter .*two of them are on one rank"),
    "groups": (ConfigError, "embedding.weight and head.weight are one parameter .*'lr': '0.5'"),
    "stages": (MethodConfigError, "3 stages do not divide"),
    "schedule": (MethodConfigError, "Interleaved1F1B for 4 stages on 2 ranks"),
    "few": (MethodConfigError, "at least as many as stages"),
    "odd": (MethodConfigError, "a multiple of the pipe axis"),
    "name": (MethodConfigError, "blocks.7"),
    "count": (MethodConfigError, "makes 3 stages, but stages=2"),
    "many": (MethodConfigError, "too few for 64 stages"),
    "loss": (ConfigError, "needs loss_func"),
    "mode": (MethodConfigError, "differently in training and evaluation"),
    "scaler": (UnsupportedMethodError, "bf16"),
    "compile": (ConflictError, "scope 'model'"),
    "open": (ConflictError, "stages begin inside blocks"),
    "wrap": (ConflictError, "'auto'"),
    "rows": (BatchSizeError, "6 samples cannot be cut into 4 .*4 or 8"),
    "tuple": (ConfigError, "the loss alone"),
    "call": (ConfigError, "not mixed"),
    "shape": (ConfigError, r"lengths are \[2, 4\]"),
}


def test_mistakes_are_refused_on_all_ranks_with_what_to_do(world2):
    import re

    first, second = world2(refusals)
    assert first == second
    messages, unchanged = first
    assert unchanged and set(messages) == set(EXPECTED)
    for name, (kind, pattern) in EXPECTED.items():
        assert messages[name][0] == kind.__name__, (name, messages[name])
        assert re.search(pattern, messages[name][1], re.S), (name, messages[name])


@pytest.mark.parametrize(
    ("plan", "kind", "pattern"),
    [
        ([TWO], StrategyError, "no pipeline_parallel"),
        (["pipeline_parallel"], StrategyError, "no 'pipe' axis"),
        ([TWO, ("pipeline_parallel", {"schedule": "2F2B"})], MethodConfigError, "2F2B"),
        ([TWO, ("pipeline_parallel", {"schedule": 1})], MethodConfigError, "GPipe"),
        ([TWO, ("pipeline_parallel", {"chunk": 4})], MethodConfigError, "chunks"),
        ([TWO, ("pipeline_parallel", {"microbatches": 0})], MethodConfigError, "at least 1"),
        ([TWO, ("pipeline_parallel", {"split": [1]})], MethodConfigError, "names of the modules"),
        ([TWO, "pipeline_parallel", "zero1"], ConflictError, "fsdp or zero2"),
        ([("mixed_parallel", None)], MethodConfigError, "parallel_mode is missing"),
        ([("ds_3d_parallel", {"parallel_mode": [("pipe", 2)], "tensor_config": {"up": "colwise"}})], MethodConfigError, "no 'tensor' axis"),
        ([("mixed_parallel", {"parallel_mode": [("pipe", 2)]}), "pipeline_parallel"], ConflictError, "pipe_config"),
        ([("mixed_parallel", {"parallel_mode": [("pipe", 2)]}), "parallel_mode"], ConflictError, "includes"),
    ],
)  # fmt: skip
def test_plans_with_pipelines_that_cannot_work_are_refused(plan, kind, pattern):
    with pytest.raises(kind, match=pattern):
        resolve_plan(Strategy(plan), model=tasks.make_model(tied=False), device="cpu", world=2)


def test_mixed_parallel_stands_for_the_methods_its_axes_need():
    config = {
        "parallel_mode": [("tensor", 2), ("pipeline", 2), ("zero", 2)],
        "tensor_config": tasks.TENSOR_PLAN,
        "pipe_config": {"chunks": 6},
    }
    plan = Strategy([("deepspeed_3d_parallel", config)])
    assert plan.opt_names() == ["mixed_parallel"] and Strategy.from_json(plan.to_json()) == plan
    resolved = resolve_plan(plan, model=tasks.make_model(tied=False), device="cpu", world=8)
    assert [method.name for _, method, _ in resolved.steps] == [
        "parallel_mode",
        "pipeline_parallel",
        "tensor_parallel",
        "fsdp",
    ]
    assert resolved.data_ranks == 2 and resolved.config("pipeline_parallel").microbatches == 6


def test_the_output_of_an_evaluation_elsewhere_has_no_loss():
    with pytest.raises(ConfigError, match="last stage"):
        _ = PipelineOutput().loss
