"""Moves between real devices, and that nothing in the loop waits for one."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.context import Context, State, ensure_targets_one_hot, move_to_device
from drivetrain.core.errors import DistributedError

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


@pytest.fixture
def group(tmp_path):
    """A process group of one, for both kinds of devices."""
    import torch.distributed as dist

    def start(backend):
        dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    yield start
    dist.destroy_process_group()


def session():
    torch.manual_seed(0)
    ctx = Context(
        model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), scale=torch.ones(1, requires_grad=True)
    )
    ctx.optimizer = torch.optim.Adam([*ctx.model.parameters(), ctx.scale], lr=0.01)
    ctx.noise, ctx.history = torch.Generator(device="cuda").manual_seed(4), {"best": [torch.zeros(2)]}
    return ctx


def step(ctx):
    x = torch.arange(12.0, device=ctx.device).view(3, 4)
    ctx.optimizer.zero_grad()
    ((ctx.model(x) * ctx.scale) ** 2).mean().backward()
    ctx.optimizer.step()


def test_a_session_goes_back_and_forth_in_the_middle_of_training():
    ctx, alone = session(), session()
    parameters = list(ctx.model.parameters())
    for turn in range(4):
        ctx.cuda() if turn % 2 else ctx.cpu()
        step(ctx)
        step(alone.cpu())
    assert ctx.cuda().device == torch.device("cuda", 0)
    assert all(one is two for one, two in zip(parameters, ctx.model.parameters()))
    assert ctx.scale.is_cuda and ctx.scale.is_leaf and ctx.history["best"][0].is_cuda
    assert all(state["exp_avg"].is_cuda and not state["step"].is_cuda for state in ctx.optimizer.state.values())
    for one, two in zip(ctx.model.parameters(), alone.model.parameters()):
        torch.testing.assert_close(one.cpu(), two)


def test_generators_of_a_device_are_made_anew_on_another_and_states_load_across_devices():
    ctx = session().cuda()
    drawn = torch.rand(3, generator=ctx.noise, device="cuda")
    assert drawn.is_cuda
    saved = ctx.state_dict()
    other = session().cuda()
    other.load_state_dict(torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, saved))
    assert torch.equal(
        torch.rand(3, generator=ctx.noise, device="cuda"), torch.rand(3, generator=other.noise, device="cuda")
    )
    ctx.cpu()
    assert ctx.noise.device.type == "cpu" and ctx.noise.initial_seed() == 4
    with pytest.warns(UserWarning, match="noise was saved on cpu and is on cuda:0 now"):
        other.load_state_dict(ctx.state_dict())
    ctx.host = torch.Generator()
    ctx.cuda()
    assert ctx.noise.device.type == "cuda" and ctx.host.device.type == "cpu"


def test_fused_optimizers_keep_their_step_count_on_the_device():
    ctx = session().cuda()
    ctx.optimizer = torch.optim.Adam(ctx.model.parameters(), fused=True)
    ctx.scale = torch.ones(1, device="cuda")
    step(ctx)
    ctx.cpu().cuda()
    step(ctx)
    assert all(state["step"].is_cuda for state in ctx.optimizer.state.values())
    fresh = session().cuda()
    fresh.optimizer = torch.optim.Adam(fresh.model.parameters(), fused=True)
    fresh.scale = torch.ones(1, device="cuda")
    fresh.load_state_dict(ctx.state_dict())
    step(fresh)
    step(ctx)
    assert all(map(torch.equal, fresh.model.parameters(), ctx.model.parameters()))


def test_ddp_is_built_anew_on_the_other_device(group):
    group("cpu:gloo,cuda:nccl")
    ctx = session().cuda()
    ctx.model.note = "kept"
    ctx.ddp(find_unused_parameters=True)
    step(ctx)
    first = ctx.model
    ctx.cpu()
    assert (
        ctx.model is not first and isinstance(ctx.model, DistributedDataParallel) and ctx.model.find_unused_parameters
    )
    assert ctx.model.note == "kept" and ctx.model.device_ids is None
    step(ctx)
    ctx.cuda()
    assert ctx.model.device_ids == [0]
    step(ctx)


def test_a_group_that_does_not_serve_the_cpu_refuses_the_move_before_it_begins(group):
    group("nccl")
    ctx = session().cuda().ddp()
    with pytest.raises(DistributedError, match="does not support cpu"):
        ctx.cpu()
    assert next(ctx.model.parameters()).is_cuda and ctx.scale.is_cuda and ctx.device.type == "cuda"


def test_the_loop_does_not_wait_for_the_device():
    state = State(rank_zero_seed=1, device="cuda")
    batch = (torch.ones(4, 3).pin_memory(), torch.arange(4).pin_memory())
    logits = torch.zeros(4, 5, device="cuda")
    state.rng("mixup", "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.batch = move_to_device(state.device, batch, non_blocking=True)
        dense = ensure_targets_one_hot(logits, state.batch_get_item(1))
        state.batch_set_item(1, dense)
        torch.rand(4, generator=state.rng("mixup", "cuda"), device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.batch[1].argmax(1).tolist() == [0, 1, 2, 3]


def test_generators_of_a_state_on_the_device_continue():
    state = State(rank_zero_seed=1)
    torch.rand(3, generator=state.rng("drop", "cuda"), device="cuda")
    live = State(rank_zero_seed=1)
    live.load_state_dict(state.state_dict())
    draws = [torch.rand(3, generator=one.rng("drop", "cuda"), device="cuda") for one in (state, live)]
    assert torch.equal(*draws)


def test_the_example_of_pystematic_runs_on_the_device_with_the_import_changed():
    import drivetrain as pystematic

    data = torch.utils.data.TensorDataset(torch.randn(6, 2), torch.rand(6, 1))
    ctx = pystematic.torch.TorchContext()
    ctx.model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid())
    # We use the smart dataloader so that batches are moved to the correct device
    ctx.dataloader = pystematic.torch.SmartDataLoader(dataset=data, batch_size=2)
    ctx.loss_function = torch.nn.BCELoss()
    ctx.cuda()  # Move everything to cuda
    # Remember to initialize the optimizer after moving
    ctx.optimzer = torch.optim.SGD(ctx.model.parameters(), lr=0.01)
    before = ctx.model[0].weight.clone()
    seen = 0
    for input, lbl in ctx.dataloader:
        assert input.is_cuda and lbl.is_cuda
        output = ctx.model(input)
        loss = ctx.loss_function(output, lbl)
        ctx.optimzer.zero_grad()
        loss.backward()
        ctx.optimzer.step()
        seen += len(input)
    assert seen == 6 and ctx.model[0].weight.is_cuda and not torch.equal(ctx.model[0].weight, before)
