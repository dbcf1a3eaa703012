"""Units over two processes: DDP with its reducer or without it, fully_shard, weights, buffers, unequal gradients.

Each function runs on both ranks with its own data and returns what the test compares with one process that sees all data.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from drivetrain.core.errors import ConfigError
from drivetrain.optim import ConstantLr, OptimSet
from tests.optim.models import EncoderDecoder, batches, losses_of


def build(model, shared_loss=False, **conf):
    conf = {"optim_type": "SGD", "optim_conf": {"lr": 0.2, "momentum": 0.9}, "model": model, "grad_clip": None, **conf}
    first, second = ("loss", "loss") if shared_loss else ("encoder_loss", "decoder_loss")
    return OptimSet(
        encoder=ConstantLr(**conf, updated_modules="encoder", optim_loss=first, step_per_update=2),
        decoder=ConstantLr(**conf, updated_modules="decoder", optim_loss=second),
    )


def one_unit(model, **conf):
    return OptimSet(main=ConstantLr("SGD", {"lr": 0.2}, model, **{"grad_clip": None, **conf}))


def train(optim, model, data, weights=None, epoch=4):
    """Turn the loop over this rank's batches as the Trainer does."""
    gradients = []
    for number, x in enumerate(data, start=1):
        plan = optim.begin_batch(number, (number - 1) // epoch + 1, last=number % epoch == 0)
        with optim.sync_context(plan):
            optim.backward(losses_of(model, x), weight=None if weights is None else weights[number - 1])
        if plan.closes:
            optim.finish_gradients()
            gradients.append({n: full(p.grad) for u in optim.due for n, p in zip(u.param_names, u.params)})
            optim.step()
            optim.zero_grad()
    return gradients


def full(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def parameters_of(model):
    return {name: full(p) for name, p in model.named_parameters()}


def wrapped(kind, seed=0):
    model = EncoderDecoder(seed)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "sharded":
        for part in (model.encoder, model.decoder, model):
            fully_shard(part)
    return model


def data_of(rank, count):
    return batches(count, seed=10 + rank)


def train_on_rank(kind, shape, count):
    rank = torch.distributed.get_rank()
    model = wrapped(kind)
    options = {"distributed": True} if kind == "bare" else {}
    optim = {
        "two losses": lambda: build(model, **options),
        "one loss": lambda: build(model, shared_loss=True, **options),
        "windows": lambda: build(model, accum_grad=3, **options),
        "alone": lambda: one_unit(model, accum_grad=3, **options),
    }[shape]()
    gradients = train(optim, model, data_of(rank, count))
    names = {name.removeprefix("module."): value for name, value in parameters_of(model).items()}
    return gradients, names


def reference(shape, count):
    """The same on one process: each batch is both ranks' batches together, which are of equal size."""
    model = EncoderDecoder()
    optim = {
        "two losses": lambda: build(model),
        "one loss": lambda: build(model, shared_loss=True),
        "windows": lambda: build(model, accum_grad=3),
        "alone": lambda: one_unit(model, accum_grad=3),
    }[shape]()
    data = [torch.cat(pair) for pair in zip(data_of(0, count), data_of(1, count))]
    return train(optim, model, data), parameters_of(model)


def assert_close(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.allclose(first[name], second[name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("shape", ["two losses", "one loss", "windows", "alone"])
@pytest.mark.parametrize("kind", ["ddp", "sharded", "bare"])
def test_two_processes_train_like_one(world2, kind, shape):
    count = 8
    expected_gradients, expected = reference(shape, count)
    results = world2(train_on_rank, kind, shape, count)
    for gradients, parameters in results:
        assert len(gradients) == len(expected_gradients)
        for ours, theirs in zip(gradients, expected_gradients):
            assert_close(ours, theirs)
        assert_close(parameters, expected)
    for name in expected:
        assert torch.equal(results[0][1][name], results[1][1][name])


def train_weighted(kind):
    rank = torch.distributed.get_rank()
    model = wrapped(kind)
    optim = one_unit(model, accum_grad=2, **({"distributed": True} if kind == "bare" else {}))
    rows = [[1, 3], [4, 2]][rank]
    data = [x[:n] for x, n in zip(data_of(rank, 2), rows)]
    train(optim, model, data, weights=[float(n) for n in rows])
    return {name.removeprefix("module."): value for name, value in parameters_of(model).items()}


@pytest.mark.parametrize("kind", ["ddp", "sharded", "bare"])
def test_weights_make_the_mean_over_all_items_of_all_ranks(world2, kind):
    model = EncoderDecoder()
    whole = torch.cat([x[:n] for rank in (0, 1) for x, n in zip(data_of(rank, 2), [[1, 3], [4, 2]][rank])])
    train(one_unit(model), model, [whole])
    for parameters in world2(train_weighted, kind):
        assert_close(parameters, parameters_of(model))


def count_messages():
    """How many bytes DDP sends before and at the close of a window of three batches."""
    model = wrapped("ddp")
    sent = []

    def hook(state, bucket):
        sent.append(bucket.buffer().numel())
        future = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    optim = one_unit(model, accum_grad=3)
    at_batch = []
    for number, x in enumerate(data_of(torch.distributed.get_rank(), 6), start=1):
        before = len(sent)
        plan = optim.begin_batch(number, 1)
        with optim.sync_context(plan):
            optim.backward(losses_of(model, x))
        at_batch.append((plan.ddp_sync, len(sent) > before))
        if plan.closes:
            optim.step()
            optim.zero_grad()
    return at_batch


def test_accumulation_sends_nothing_before_the_window_closes(world2):
    for at_batch in world2(count_messages):
        assert at_batch == [(False, False), (False, False), (True, True)] * 2


class WithNorm(EncoderDecoder):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x):
        return super().forward(self.norm(x))


def train_with_buffers():
    model = DistributedDataParallel(WithNorm())
    optim = OptimSet(
        a=ConstantLr("SGD", {"lr": 0.1}, model, updated_modules="encoder", optim_loss="encoder_loss"),
        b=ConstantLr("SGD", {"lr": 0.1}, model, updated_modules="_rest_", optim_loss="decoder_loss"),
    )
    train(optim, model, data_of(torch.distributed.get_rank(), 3))
    return [b.clone() for b in model.buffers()], [p.detach().clone() for p in model.parameters()]


def test_ranks_stay_identical_buffers_included(world2):
    first, second = world2(train_with_buffers)
    for ours, theirs in zip(first[0] + first[1], second[0] + second[1]):
        assert torch.equal(ours, theirs)


def reduce_unequal():
    """Rank 0 uses the encoder only, rank 1 both parts: a missing gradient is zero unless it is missing everywhere."""
    rank = torch.distributed.get_rank()
    model = nn.ModuleDict({k: nn.Linear(1, 1, bias=False) for k in "abc"})
    optim = OptimSet(main=ConstantLr("SGD", {"lr": 1.0}, model, distributed=True, grad_clip=None))
    loss = model["a"](torch.ones(1, 1)) + (model["b"](torch.ones(1, 1)) * 3 if rank else 0)
    optim.backward(loss.sum())
    optim.finish_gradients()
    return {name: None if p.grad is None else p.grad.item() for name, p in model.named_parameters()}


def test_a_gradient_missing_on_one_rank_counts_as_zero(world2):
    for grads in world2(reduce_unequal):
        assert grads == {"a.weight": 1.0, "b.weight": 1.5, "c.weight": None}


def skip_on_one_rank(kind):
    """An inf in one rank's gradient skips the unit on both."""
    rank = torch.distributed.get_rank()
    model = wrapped(kind)
    optim = build(model, **({"distributed": True} if kind == "bare" else {}))
    before = parameters_of(model)
    for number, x in enumerate(data_of(rank, 2), start=1):
        plan = optim.begin_batch(number, 1)
        with optim.sync_context(plan):
            losses = losses_of(model, x)
            if rank == 1:
                losses["decoder_loss"] = losses["decoder_loss"] * float("inf")
            optim.backward(losses)
        optim.step()
        optim.zero_grad()
    moved = {name: not torch.equal(before[name], p) for name, p in parameters_of(model).items()}
    return {name: (u.update_count, u.skipped_steps) for name, u in optim.items()}, sorted(
        n for n, m in moved.items() if m
    )


@pytest.mark.parametrize("kind", ["ddp", "sharded", "bare"])
def test_all_ranks_agree_about_a_skipped_update(world2, kind):
    for counts, moved in world2(skip_on_one_rank, kind):
        assert counts == {"encoder": (1, 0), "decoder": (0, 2)}
        assert [name.removeprefix("module.") for name in moved] == ["encoder.bias", "encoder.weight"]


def step_a_manual_unit():
    """A GAN under DDP: the discriminator is stepped by hand on parts of the bare model."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(EncoderDecoder())
    bare = model.module
    optim = OptimSet(
        decoder=ConstantLr(
            "SGD", {"lr": 0.1}, model, updated_modules="decoder", optim_loss="d", manual=True, grad_clip=None
        ),
        encoder=ConstantLr("SGD", {"lr": 0.1}, model, updated_modules="encoder", optim_loss="g", grad_clip=None),
    )
    for number, x in enumerate(data_of(rank, 2), start=1):
        plan = optim.begin_batch(number, 1)
        assert not plan.ddp_sync
        with optim.sync_context(plan):
            hidden = torch.tanh(bare.encoder(x))
            optim.step_now("decoder", {"d": bare.decoder(hidden.detach()).pow(2).mean()})
            optim.backward({"g": bare.decoder(hidden).mean()})
        assert all(p.grad is None for p in bare.decoder.parameters())
        optim.step()
        optim.zero_grad()
    return parameters_of(bare)


def test_a_manual_unit_is_averaged_over_ranks(world2):
    model = EncoderDecoder()
    for x in [torch.cat(pair) for pair in zip(data_of(0, 2), data_of(1, 2))]:
        with torch.no_grad():
            hidden = torch.tanh(model.encoder(x))
        grads = torch.autograd.grad(model.decoder(hidden).pow(2).mean(), list(model.decoder.parameters()))
        with torch.no_grad():
            for p, grad in zip(model.decoder.parameters(), grads):
                p -= 0.1 * grad
        grads = torch.autograd.grad(
            model.decoder(torch.tanh(model.encoder(x))).mean(), list(model.encoder.parameters())
        )
        with torch.no_grad():
            for p, grad in zip(model.encoder.parameters(), grads):
                p -= 0.1 * grad
    for parameters in world2(step_a_manual_unit):
        assert_close(parameters, parameters_of(model))


def forget_no_sync():
    model = DistributedDataParallel(EncoderDecoder())
    optim = build(model)
    optim.begin_batch(1, 1)
    with pytest.raises(RuntimeError, match="sync_context"):
        optim.backward(losses_of(model, data_of(0, 1)[0]))
    return True


def test_a_forward_outside_of_no_sync_is_refused_before_ranks_wait_for_each_other(world2):
    assert world2(forget_no_sync) == [True, True]


def wrap_after_building():
    rank = torch.distributed.get_rank()
    model = EncoderDecoder()
    optim = build(model)
    ddp = DistributedDataParallel(model)
    optim.rebind(ddp)
    kept = optim["encoder"].optimizer
    train(optim, ddp, data_of(rank, 4))
    assert optim["encoder"].optimizer is kept
    sharded = EncoderDecoder()
    late = build(sharded)
    for part in (sharded.encoder, sharded.decoder, sharded):
        fully_shard(part)
    late.rebind(sharded)
    train(late, sharded, data_of(rank, 4))
    return parameters_of(model), parameters_of(sharded)


def test_units_built_before_wrapping_are_rebound(world2):
    _, expected = reference("two losses", 4)
    for ddp, sharded in world2(wrap_after_building):
        assert_close(ddp, expected)
        assert_close(sharded, expected)


def clip_sharded():
    rank = torch.distributed.get_rank()
    model = wrapped("sharded")
    optim = one_unit(model, grad_clip=0.01)
    train(optim, model, data_of(rank, 1))
    return optim["main"].last_grad_norm.item(), parameters_of(model)


def test_norms_are_taken_over_full_tensors(world2):
    model = EncoderDecoder()
    optim = one_unit(model, grad_clip=0.01)
    train(optim, model, [torch.cat([data_of(0, 1)[0], data_of(1, 1)[0]])])
    for norm, parameters in world2(clip_sharded):
        assert norm == pytest.approx(optim["main"].last_grad_norm.item(), abs=1e-12)
        assert_close(parameters, parameters_of(model))


def resume_inside_a_window(kind):
    rank = torch.distributed.get_rank()
    data = data_of(rank, 9)
    model = wrapped("ddp" if kind == "wrapped late" else kind)
    optim = build(model, accum_grad=4)
    for number in range(1, 8):
        step(optim, model, number, data)
    state, saved = copy.deepcopy(optim.state_dict()), copy.deepcopy(model.state_dict())
    for number in range(8, 10):
        step(optim, model, number, data)
    other = wrapped("bare" if kind == "wrapped late" else kind, seed=5)
    other.load_state_dict(
        {name.removeprefix("module."): value for name, value in saved.items()} if kind == "wrapped late" else saved
    )
    resumed = build(other, accum_grad=4)
    resumed.load_state_dict(state)
    if kind == "wrapped late":
        other = DistributedDataParallel(other)
        resumed.rebind(other)
    for number in range(8, 10):
        step(resumed, other, number, data)
    return all(torch.equal(a, b) for a, b in zip(parameters_of(model).values(), parameters_of(other).values()))


def step(optim, model, number, data):
    plan = optim.begin_batch(number, 1)
    with optim.sync_context(plan):
        optim.backward(losses_of(model, data[number - 1]))
    if plan.closes:
        optim.step()
        optim.zero_grad()


@pytest.mark.parametrize("kind", ["ddp", "wrapped late", "sharded"])
def test_a_window_saved_on_two_ranks_continues_bit_for_bit(world2, kind):
    assert world2(resume_inside_a_window, kind) == [True, True]


def refuse_another_wrapper():
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Shell(FullyShardedDataParallel):
        """Looks like the older FSDP without needing a device for it."""

        def __init__(self, module):
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = module

        def __getattr__(self, name):
            return nn.Module.__getattr__(self, name)

        def forward(self, x):
            return self._fsdp_wrapped_module(x)

        def named_parameters(self, *args, **kwargs):
            return nn.Module.named_parameters(self, *args, **kwargs)

    optim = build(Shell(EncoderDecoder()))
    with pytest.raises(ConfigError, match="Shell"):
        optim.begin_batch(2, 1)
    return True


def test_any_other_wrapper_with_several_passes_is_refused_by_name(world2):
    assert world2(refuse_another_wrapper) == [True, True]
