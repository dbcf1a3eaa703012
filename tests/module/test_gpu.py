"""What only a CUDA device can show: no waiting for it, its memory, its process group."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain.module.average import AveragedWeights
from drivetrain.module.checkpointing import checkpoint_blocks
from drivetrain.module.convolutions import channels_last_input, to_channels_last
from drivetrain.module.ddp import wrap_ddp
from drivetrain.module.sharding import rebind_optimizer, shard_fully
from drivetrain.module.surgery import replace_module_classes
from drivetrain.module.wrapping import clean_state_dict
from tests.module import models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def group_of_one(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/group", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_waiting():
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this check is a prototype
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def networks():
    plain = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).cuda()
    return plain, nn.Linear(64, 64).cuda().bfloat16()


def test_averaging_and_swapping_never_wait_for_the_device(networks, no_waiting):
    for network in networks:
        average = AveragedWeights(network)
        for _ in range(3):
            average.update_lerp(network, 0.1)
            average.update_mean(network)
            average.swap(network)
            average.swap(network)


def test_a_shadow_follows_a_model_that_moves():
    model = nn.Linear(4, 4)
    average = AveragedWeights(model)
    average.update_lerp(model, 0.5)
    model.cuda()
    with torch.no_grad():
        model.weight.add_(1)
    start = dict(average.named_tensors())["weight"].clone()
    average.update_lerp(model, 0.5)  # the shadow stays on the host
    torch.testing.assert_close(dict(average.named_tensors())["weight"], (start + model.weight.detach().cpu()) / 2)
    average.to("cuda").update_lerp(model, 0.5)
    assert all(tensor.is_cuda for _, tensor in average.named_tensors())


def peak_and_grads(mode):
    torch.manual_seed(0)
    model = nn.ModuleList([models.Block(256) for _ in range(8)]).cuda()
    if mode:
        checkpoint_blocks(model, mode=mode)
    x = torch.randn(16, 512, 256, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = x
    for block in model:
        y = block(y)
    after_forward = torch.cuda.memory_allocated() - before
    y.square().mean().backward()
    return after_forward, [p.grad for p in model.parameters()]


def test_each_mode_of_checkpointing_keeps_less_and_gives_the_same_gradients():
    plain, expected = peak_and_grads(None)
    kept = {}
    for mode in ("selective", "full", "offload"):
        kept[mode], grads = peak_and_grads(mode)
        for grad, reference in zip(grads, expected):
            torch.testing.assert_close(grad, reference, rtol=1e-3, atol=1e-6)
    assert kept["offload"] < kept["full"] < kept["selective"] < plain, (plain, kept)


def test_channels_last_gives_the_same_output():
    torch.manual_seed(0)
    model, x = models.ResNet(depths=(1, 1)).cuda().eval(), torch.randn(2, 3, 16, 16, device="cuda")
    expected = model(x)
    to_channels_last(model)
    out = model(channels_last_input(x))
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


def test_replacements_go_to_the_device():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).cuda()
    replace_module_classes(model, {nn.ReLU: lambda m, i: nn.PReLU()})
    assert model[1].weight.is_cuda


def test_ddp_names_the_device(group_of_one):
    wrapped = wrap_ddp(models.GPT2(depth=2), device="cuda:0")
    assert wrapped.device_ids == [0]


def test_a_model_on_the_host_is_sharded_onto_the_device(group_of_one):
    torch.manual_seed(0)
    model, plain = models.ViT(depth=2), models.ViT(depth=2).cuda()
    plain.load_state_dict(model.state_dict())
    optimizer, names = torch.optim.AdamW(model.parameters(), lr=0.1), dict(model.named_parameters())
    shard_fully(model, mixed_precision=torch.bfloat16)
    rebind_optimizer(optimizer, names, model)
    x = torch.randn(2, 3, 8, 8, device="cuda")
    out = model(x)
    assert out.dtype == torch.float32 and all(p.is_cuda for p in model.parameters())
    torch.testing.assert_close(out, plain(x), rtol=0.1, atol=0.1)
    out.square().mean().backward()
    optimizer.step()
    average = AveragedWeights(model)
    average.update_lerp(model, 0.5)
    assert list(clean_state_dict(model)) == list(plain.state_dict())
