"""Units on a GPU: float16 scaling, verdicts on the device, nothing that makes the host wait, compiled graphs."""

import copy
import math

import pytest
import torch
from torch import nn

from drivetrain.module.precision import computes_in_float16
from drivetrain.optim import ConstantLr, CosineLr, OptimSet
from tests.optim.models import EncoderDecoder, batches, losses_of, same, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def model_and_data(count=4, seed=0):
    model = EncoderDecoder(seed=seed, dtype=torch.float32).cuda()
    return model, [x.cuda() for x in batches(count, dtype=torch.float32)]


def pair(model, optim_type="Adam", optim_conf=None, **conf):
    conf = {"optim_type": optim_type, "optim_conf": optim_conf or {"lr": 0.01}, "model": model, **conf}
    return OptimSet(
        encoder=ConstantLr(**conf, updated_modules="encoder"), decoder=ConstantLr(**conf, updated_modules="decoder")
    )


def train(optim, model, data, dtype):
    for x in data:
        with torch.autocast("cuda", dtype=dtype):
            losses = losses_of(model, x)
        optim.backward(losses)  # autocast is left before the backward, as it should be
        optim.step()
        optim.zero_grad()


def test_float16_has_one_scaler_that_units_on_one_loss_share():
    model, data = model_and_data(30)
    optim = pair(model)
    before = losses_of(model, data[0])["loss"].item()
    train(optim, model, data * 5, torch.float16)
    scaler = optim["encoder"].scaler
    assert scaler is not None and scaler is optim["decoder"].scaler and optim.passes() == [("encoder", "decoder")]
    assert losses_of(model, data[0])["loss"].item() < before


def test_bfloat16_and_float32_have_none():
    for dtype in (torch.bfloat16, torch.float32):
        model, data = model_and_data()
        optim = pair(model)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            losses = losses_of(model, data[0])
        optim.backward(losses)
        assert optim["encoder"].scaler is None


def test_whoever_knows_the_precision_wins():
    model, data = model_and_data()
    optim = pair(model)
    optim.bind(autocast_dtype=torch.float16)
    optim.backward(losses_of(model, data[0]))
    assert optim["encoder"].scaler is not None


def test_an_overflow_lowers_the_scale_once_and_skips_the_unit():
    model, data = model_and_data()
    optim = pair(model)
    train(optim, model, data[:1], torch.float16)
    scale, before = optim["encoder"].scaler.get_scale(), weights(model)
    with torch.autocast("cuda", dtype=torch.float16):
        losses = losses_of(model, data[1])
    optim.backward({"loss": losses["loss"] * math.inf})
    assert optim.step() is False
    assert optim["encoder"].scaler.get_scale() == scale / 2 and same(before, weights(model))
    assert {unit.skipped_steps for unit in optim.values()} == {1}


def test_a_saved_scale_waits_for_the_first_backward():
    model, data = model_and_data(6)
    optim = pair(model, accum_grad=2)
    train(optim, model, data[:3], torch.float16)
    state, parameters = copy.deepcopy(optim.state_dict()), copy.deepcopy(model.state_dict())
    train(optim, model, data[3:], torch.float16)
    other, _ = model_and_data(seed=3)
    other.load_state_dict(parameters)
    resumed = pair(other, accum_grad=2)
    resumed.load_state_dict(state)
    train(resumed, other, data[3:], torch.float16)
    assert same(weights(model), weights(other))
    assert optim["encoder"].scaler.state_dict() == resumed["encoder"].scaler.state_dict()


def test_the_graph_tells_whether_it_computes_in_float16():
    model, data = model_and_data()
    for dtype, expected in ((torch.float16, True), (torch.bfloat16, False)):
        with torch.autocast("cuda", dtype=dtype):
            loss = losses_of(model, data[0])["loss"].float()
        assert computes_in_float16(loss) is expected


@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
def test_a_fused_optimizer_never_makes_the_host_wait(nonfinite):
    model, data = model_and_data()
    optim = OptimSet(
        main=CosineLr(
            "AdamW",
            {"lr": 0.01, "fused": True},
            model,
            total_steps=100,
            accum_grad=2,
            nonfinite=nonfinite,
            grad_clip=0.5,
        )
    )
    train(optim, model, data, torch.bfloat16)
    weight = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, x in enumerate(data, start=5):
            plan = optim.begin_batch(number, 1)
            optim.backward(losses_of(model, x), weight=weight)
            if plan.closes:
                optim.finish_gradients()
                optim.step()
                optim.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optim["main"].update_count == 4


def test_a_fused_optimizer_skips_on_the_device():
    model, data = model_and_data()
    optim = OptimSet(main=ConstantLr("AdamW", {"lr": 0.01, "fused": True}, model))
    train(optim, model, data[:1], torch.float32)
    before = weights(model)
    steps = [state["step"].item() for state in optim.state.values()]
    optim.backward({"loss": losses_of(model, data[1])["loss"] * math.nan})
    optim.step()
    optim.zero_grad()
    assert same(before, weights(model)) and (optim["main"].update_count, optim["main"].skipped_steps) == (1, 1)
    assert [state["step"].item() for state in optim.state.values()] == steps


class Deep(EncoderDecoder):
    def forward(self, x):
        hidden = torch.sin(torch.nn.functional.gelu(self.encoder(x))).exp()
        return hidden, self.decoder(torch.nn.functional.gelu(hidden))


def test_a_compiled_graph_serves_two_losses():
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        inner = Deep(dtype=torch.float32).cuda()
        model = torch.compile(inner) if compiles else inner
        conf = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "model": model}
        optim = OptimSet(
            encoder=ConstantLr(**conf, updated_modules="encoder", optim_loss="encoder_loss", step_per_update=2),
            decoder=ConstantLr(**conf, updated_modules="decoder", optim_loss="decoder_loss"),
        )
        for number, x in enumerate(batches(4, dtype=torch.float32), start=1):
            optim.begin_batch(number, 1)  # the first batch needs one pass only, the second two
            optim.backward(losses_of(model, x.cuda()))
            optim.step()
            optim.zero_grad()
        results.append(weights(inner))
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_state_moves_with_the_model():
    model = nn.Linear(2, 2)
    optim = OptimSet(main=ConstantLr("Adam", {"lr": 0.1}, model))
    optim.backward(model(torch.ones(1, 2)).sum())
    optim.step()
    optim.zero_grad()
    model.cuda()
    optim.to("cuda")
    optim.backward(model(torch.ones(1, 2, device="cuda")).sum())
    assert optim.step() is True


def test_recorded_muon_follows_the_plain_one():
    from drivetrain.optim import MuonHybrid

    def run(cuda_graph):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        ).cuda()
        model = model.to(memory_format=torch.channels_last)
        optimizer = MuonHybrid(model, lr=0.02, adam_lr=1e-3, weight_decay=0.1, cuda_graph=cuda_graph)
        x, y = torch.randn(64, 3, 8, 8, device="cuda"), torch.randint(0, 4, (64,), device="cuda")
        losses = []
        for step in range(12):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 20)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, optimizer

    plain, _ = run(False)
    recorded, optimizer = run(True)
    assert recorded[-1] < recorded[0]
    torch.testing.assert_close(torch.tensor(recorded), torch.tensor(plain), rtol=2e-3, atol=2e-3)
    assert "cuda_graph" in optimizer.state_dict()["param_groups"][0]


def test_muon_is_recorded_while_another_thread_pins_batches():
    import threading

    from drivetrain.optim import MuonHybrid

    is_done = threading.Event()

    def pin():
        size = 0
        while not is_done.is_set():
            size += 4096  # always memory that is not cached yet
            torch.empty(size, pin_memory=True)

    model = nn.Linear(64, 64, bias=False).cuda()
    optimizer = MuonHybrid(model, lr=0.02, adam_match=(), cuda_graph=True)
    other = threading.Thread(target=pin)
    other.start()
    try:
        for _ in range(3):
            model(torch.ones(8, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        is_done.set()
        other.join()
    assert bool(torch.isfinite(model.weight).all())
