"""Optimizers beyond torch, each beside a loop in float64 or torch's own."""

import copy
import io
import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import drivetrain.optim
from drivetrain.core.errors import ConfigError
from drivetrain.module.params import muon_groups
from drivetrain.optim import (
    SAM,
    SOAP,
    AdamWScheduleFree,
    Cautious,
    ConstantLr,
    CosineLr,
    DecoupledAdamW,
    DecoupledSGDW,
    Lion,
    Lookahead,
    MuonHybrid,
    SAMOptimizer,
    SGDScheduleFree,
)
from drivetrain.optim.optimizers.muon_hybrid import orthogonalise

F64 = torch.float64


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)
    )


def gradients(count: int, *shape: int, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(count)]


def follow(
    make, start: torch.Tensor, steps: list[torch.Tensor], **settings
) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    weight = nn.Parameter(start.clone())
    optimizer = make([weight], **settings)
    for gradient in steps:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight, optimizer


def test_lion_equals_its_formula():
    start, steps = torch.randn(4, dtype=F64), gradients(6, 4)
    weight, _ = follow(Lion, start, steps, lr=0.03, betas=(0.8, 0.95), weight_decay=0.1)
    p, m = start.clone(), torch.zeros(4, dtype=F64)
    for g in steps:
        p = p - 0.03 * ((0.8 * m + 0.2 * g).sign() + 0.1 * p)
        m = 0.95 * m + 0.05 * g
    torch.testing.assert_close(weight.detach(), p, rtol=0, atol=1e-14)


def test_a_rate_on_the_device_is_used_without_being_read():
    start, steps = torch.randn(4, dtype=F64), gradients(3, 4)
    plain, _ = follow(Lion, start, steps, lr=0.03, weight_decay=0.1)
    tensor, _ = follow(Lion, start, steps, lr=torch.tensor(0.03, dtype=F64), weight_decay=0.1)
    torch.testing.assert_close(plain, tensor)


def test_decoupled_adamw_equals_its_formula_under_a_schedule():
    start, steps = torch.randn(5, dtype=F64), gradients(8, 5)
    weight = nn.Parameter(start.clone())
    optimizer = DecoupledAdamW([weight], lr=0.02, betas=(0.9, 0.95), weight_decay=5e-4)
    p, m, v = start.clone(), torch.zeros(5, dtype=F64), torch.zeros(5, dtype=F64)
    for t, g in enumerate(steps, 1):
        lr = optimizer.param_groups[0]["lr"] = 0.02 * (1 - t / 10)
        weight.grad = g.clone()
        optimizer.step()
        p = p * (1 - 5e-4 * lr / 0.02)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        p = p - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), p, rtol=1e-12, atol=1e-12)
    assert optimizer.param_groups[0]["weight_decay"] == 5e-4


@pytest.mark.parametrize("kernel", [{"foreach": True}, {"fused": True}])
def test_decoupled_optimizers_use_torchs_kernels(kernel):
    start, steps = torch.randn(5), gradients(5, 5, dtype=torch.float32)
    for make, settings in ((DecoupledAdamW, {"lr": 0.02}), (DecoupledSGDW, {"lr": 0.02, "momentum": 0.9})):
        plain, _ = follow(make, start, steps, weight_decay=9e-4, **settings)
        quick, _ = follow(make, start, steps, weight_decay=9e-4, **settings, **kernel)
        torch.testing.assert_close(plain, quick)


def test_decoupled_sgdw_equals_its_formula():
    start, steps = torch.randn(5, dtype=F64), gradients(6, 5)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    weight, optimizer = follow(DecoupledSGDW, start, steps, **settings)
    p, b = start.clone(), None
    for g in steps:
        p = p * (1 - 5e-4)
        b = g.clone() if b is None else 0.9 * b + g
        p = p - 0.1 * (g + 0.9 * b)
    torch.testing.assert_close(weight.detach(), p, rtol=1e-12, atol=1e-12)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1


def test_a_rate_that_starts_at_zero_decays_nothing():
    start = torch.ones(2)
    for make in (DecoupledAdamW, DecoupledSGDW):
        weight, _ = follow(make, start, [torch.zeros(2)], lr=0.0, weight_decay=5e-4)
        assert torch.equal(weight, start)


def test_a_decay_meant_for_torchs_adamw_warns():
    with pytest.warns(UserWarning, match="multiplied by its learning rate"):
        DecoupledAdamW([nn.Parameter(torch.ones(1))], weight_decay=0.01)


def test_hooks_around_a_step_run_once():
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # patches torch's own step
    weight = nn.Parameter(torch.ones(1))
    optimizer = DecoupledAdamW([weight])
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    weight.grad = torch.ones(1)
    optimizer.step()
    assert calls == [1]


def schedule_free_reference(start, steps, lr, beta, warmup, decay, r, power, beta2=None):
    """x, y and z as three tensors; `beta2` makes it Adam."""
    x, y, z, v = start.clone(), start.clone(), start.clone(), torch.zeros_like(start)
    total = highest = 0.0
    for t, g in enumerate(steps, 1):
        rate = lr * (min(1.0, t / warmup) if warmup else 1.0)
        highest = max(highest, rate)
        weight = t**r * highest**power
        total += weight
        if beta2 is None:
            direction = g + decay * y
        else:
            v = beta2 * v + (1 - beta2) * g * g
            direction = g / ((v / (1 - beta2**t)).sqrt() + 1e-8) + decay * y
        z = z - rate * direction
        x = (1 - weight / total) * x + weight / total * z
        y = (1 - beta) * z + beta * x
    return x, y, z


@pytest.mark.parametrize("warmup", [0, 4])
def test_schedule_free_optimizers_equal_their_three_sequences(warmup):
    start, steps = torch.randn(6, dtype=F64), gradients(10, 6)
    shared = {"weight_decay": 0.05, "r": 0.5, "weight_lr_power": 2.0}
    adam, optimizer = follow(AdamWScheduleFree, start, steps, lr=0.1, betas=(0.9, 0.99), warmup_steps=warmup, **shared)
    x, y, z = schedule_free_reference(start, steps, 0.1, 0.9, warmup, 0.05, 0.5, 2.0, 0.99)
    torch.testing.assert_close(adam.detach(), y)
    torch.testing.assert_close(optimizer.state[adam]["z"], z)
    optimizer.eval()
    torch.testing.assert_close(adam.detach(), x)
    sgd, optimizer = follow(SGDScheduleFree, start, steps, lr=0.3, momentum=0.8, warmup_steps=warmup, **shared)
    x, y, z = schedule_free_reference(start, steps, 0.3, 0.8, warmup, 0.05, 0.5, 2.0)
    torch.testing.assert_close(sgd.detach(), y)
    optimizer.eval()
    torch.testing.assert_close(sgd.detach(), x)


def test_evaluating_does_not_change_what_is_trained_by_one_bit():
    start, steps = torch.randn(50), gradients(6, 50, dtype=torch.float32)
    undisturbed, _ = follow(AdamWScheduleFree, start, steps, lr=0.1)
    weight = nn.Parameter(start.clone())
    optimizer = AdamWScheduleFree([weight], lr=0.1)
    for gradient in steps:
        weight.grad = gradient.clone()
        optimizer.step()
        before = weight.detach().clone()
        optimizer.eval()
        optimizer.eval()
        assert not optimizer.training
        optimizer.train()
        assert torch.equal(weight, before) and optimizer.training
    assert torch.equal(weight, undisturbed)


def test_a_schedule_free_state_saved_in_evaluation_mode_goes_on_from_y():
    start, steps = torch.randn(8, dtype=F64), gradients(6, 8)
    whole, _ = follow(SGDScheduleFree, start, steps, lr=0.5)
    weight, optimizer = follow(SGDScheduleFree, start, steps[:3], lr=0.5)
    optimizer.eval()
    other = nn.Parameter(weight.detach().clone())
    resumed = SGDScheduleFree([other], lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(RuntimeError, match="evaluation mode"):
        resumed.step()
    resumed.train()
    for gradient in steps[3:]:
        other.grad = gradient.clone()
        resumed.step()
    torch.testing.assert_close(other, whole)


def test_a_falling_rate_warns_once():
    weight = nn.Parameter(torch.ones(1))
    optimizer = AdamWScheduleFree([weight], lr=0.1)
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.warns(UserWarning, match="constant rate"):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize(("adjust", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_muon_hybrid_equals_torchs_muon_and_adamw(adjust, nesterov):
    ours, theirs = net(), net()
    hybrid = MuonHybrid(
        ours, lr=0.02, nesterov=nesterov, weight_decay=0.1, adam_lr=1e-3, adam_weight_decay=0.05, adjust_lr=adjust
    )
    split = muon_groups(theirs)
    # torch's Muon takes matrices only, so it gets a flat copy of the kernel and gives its result back.
    flat = {name: nn.Parameter(p.detach().flatten(1).clone()) for name, p in split.muon}
    settings = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    muon = torch.optim.Muon(flat.values(), **settings)
    adam = torch.optim.AdamW([p for _, p in split.other], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
    for step in range(6):
        x = torch.randn(8, 2, 3, 3, generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            model.zero_grad()
            model(x).pow(2).mean().backward()
        for name, p in split.muon:
            flat[name].grad = p.grad.flatten(1)
        hybrid.step(), muon.step(), adam.step()
        with torch.no_grad():
            for name, p in split.muon:
                p.copy_(flat[name].view_as(p))
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, msg=name)


def test_stacked_orthogonalisation_equals_one_by_one():
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (4, 6), (6, 4), (3, 3)]
    matrices = [torch.randn(*shape, generator=generator) for shape in shapes]
    for together, matrix in zip(orthogonalise(matrices), matrices):
        torch.testing.assert_close(together, orthogonalise([matrix])[0], rtol=0.02, atol=0.02)
        assert together.shape == matrix.shape


def test_muon_hybrid_takes_a_model_names_or_groups():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 5)})
    for params in (model, model.named_parameters()):
        optimizer = MuonHybrid(params)
        assert [(g["muon"], g["param_names"]) for g in optimizer.param_groups] == [
            (True, ["body.weight"]),
            (False, ["embed.weight", "body.bias", "head.weight", "head.bias"]),
        ]
    groups = [
        {"params": [model["body"].weight], "muon": True, "lr": 0.5},
        {"params": [model["head"].weight], "muon": False},
    ]
    optimizer = MuonHybrid(groups, adam_lr=0.1)
    assert [(g["muon"], g["lr"]) for g in optimizer.param_groups] == [(True, 0.5), (False, 0.1)]
    with pytest.raises(ConfigError, match="not matrices"):
        MuonHybrid([{"params": [model["body"].bias], "muon": True}])
    with pytest.warns(UserWarning, match="without names"):
        MuonHybrid(model.parameters())
    with warnings.catch_warnings():
        MuonHybrid(model.parameters(), adam_match=())


def test_settings_of_a_group_for_adamw_count():
    bias, weight = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))
    own = {"lr": 0.3, "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.2}
    for group in ({"params": [bias]}, {"params": [weight], "muon": False}):
        (made,) = MuonHybrid([{**group, **own}]).param_groups
        assert {name: made[name] for name in own} == own
    (both,) = MuonHybrid([{"params": [bias], **own, "adam_lr": 0.7}]).param_groups
    assert both["lr"] == 0.7 and both["betas"] == (0.5, 0.6)
    muon, adam = MuonHybrid([{"params": [("w", weight), ("b", bias)], "lr": 0.3}], adam_lr=0.1).param_groups
    assert (muon["lr"], adam["lr"]) == (0.3, 0.1)
    unit = ConstantLr("MuonHybrid", None, nn.Linear(2, 2), param_groups=[{"match": "bias", "lr": 1e-5}])
    assert [group["lr"] for group in unit.optimizer.param_groups] == [0.02, 1e-5]


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (3, 0, 2)])
def test_empty_matrices_need_no_update(shape):
    empty, weight = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.eye(2))
    optimizer = MuonHybrid([("empty", empty), ("weight", weight)])
    empty.grad, weight.grad = torch.zeros(shape), torch.ones(2, 2)
    optimizer.step()
    assert not torch.equal(weight, torch.eye(2))


@pytest.mark.parametrize("shape", [(), (4,), (3, 2)])
@pytest.mark.parametrize(
    "make",
    [
        Lion,
        AdamWScheduleFree,
        lambda params: SGDScheduleFree(params, weight_decay=0.1),
        lambda params: MuonHybrid(params, adam_match=()),
        lambda params: Cautious(torch.optim.AdamW(params)),
        lambda params: Lookahead(Lion(params), k=2),
    ],
)
def test_a_complex_number_is_updated_as_two_real_ones(make, shape):
    generator = torch.Generator().manual_seed(3)
    whole = nn.Parameter(torch.randn(shape, dtype=torch.complex128, generator=generator))
    parts = nn.Parameter(torch.view_as_real(whole.detach()).flatten().clone())
    optimizers = make([whole]), make([parts])
    for _ in range(5):
        whole.grad = torch.randn(shape, dtype=torch.complex128, generator=generator)
        parts.grad = torch.view_as_real(whole.grad).flatten().clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.view_as_real(whole.detach()).flatten(), parts.detach())


def test_complex_matrices_have_no_muon_and_no_soap():
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="not matrices of real numbers"):
        MuonHybrid([{"params": [weight], "muon": True}])
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ConfigError, match="complex"):
        SOAP([weight]).step()


@pytest.mark.parametrize(
    ("plain", "ours"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: DecoupledAdamW(p, lr=0.1, weight_decay=1e-4)),
        (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: DecoupledSGDW(p, lr=0.1, weight_decay=1e-4)),
    ],
)
def test_decoupled_optimizers_go_on_from_torchs_states(plain, ours):
    start, steps = torch.randn(4, dtype=F64), gradients(3, 4)
    weight, optimizer = follow(plain, start, steps)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["weight_decay"] = 1e-4
    other = ours([nn.Parameter(weight.detach().clone())])
    other.load_state_dict(saved)
    assert other.param_groups[0]["initial_lr"] == 0.1
    before = other.param_groups[0]["params"][0].detach().clone()
    other.param_groups[0]["params"][0].grad = torch.zeros(4, dtype=F64)
    optimizer.param_groups[0]["weight_decay"], weight.grad = 0.0, torch.zeros(4, dtype=F64)
    optimizer.step()
    other.step()  # the step of torch, from weights that are smaller by the decay
    torch.testing.assert_close(other.param_groups[0]["params"][0], weight - before * 1e-4)


def test_both_rates_keep_their_ratio_under_a_schedule():
    model = net()
    unit = CosineLr("MuonHybrid", {"lr": 0.02, "adam_lr": 0.001}, model, total_steps=10)
    for _ in range(4):
        unit.step(model(torch.randn(4, 2, 3, 3)).pow(2).mean())
    muon, adam = unit.optimizer.param_groups
    assert muon["muon"] and muon["lr"] < 0.02 and math.isclose(muon["lr"] / adam["lr"], 20)
    assert "4.weight" in muon["param_names"] and "0.bias" in adam["param_names"]


def test_lookahead_equals_its_formula():
    start, steps = torch.randn(4, dtype=F64), gradients(7, 4)
    inside = lambda params: Lookahead(torch.optim.SGD(params, lr=0.1, momentum=0.9), k=3, alpha=0.4)
    weight, _ = follow(inside, start, steps)
    fast, slow, b = start.clone(), start.clone(), None
    for t, g in enumerate(steps, 1):
        b = g.clone() if b is None else 0.9 * b + g
        fast = fast - 0.1 * b
        if t % 3 == 0:
            slow = slow + 0.4 * (fast - slow)
            fast = slow.clone()
    torch.testing.assert_close(weight.detach(), fast)


def test_sam_equals_its_formula_and_counts_its_interval():
    matrix = torch.randn(4, 4, dtype=F64)
    matrix = matrix @ matrix.T
    weight = nn.Parameter(torch.ones(4, dtype=F64))
    optimizer = SAM(torch.optim.SGD([weight], lr=0.05), rho=0.1, interval=2)
    assert SAM is SAMOptimizer and optimizer.needs_closure

    def closure():
        optimizer.zero_grad()
        loss = weight @ matrix @ weight / 2
        loss.backward()
        return loss

    p = weight.detach().clone()
    for step in range(1, 5):
        closure()
        optimizer.step(closure)
        g = matrix @ p
        p = p - 0.05 * (matrix @ (p + 0.1 * g / (g.norm() + 1e-12)) if step % 2 == 0 else g)
        torch.testing.assert_close(weight.detach(), p)
    optimizer.step()  # a step of the plain kind needs no closure
    with pytest.raises(ConfigError, match="needs a closure"):
        optimizer.step()


def test_sam_puts_the_weights_back_exactly_also_when_the_closure_fails():
    weight = nn.Parameter(torch.randn(100))
    optimizer = SAM(torch.optim.SGD([weight], lr=0.0), rho=0.3)
    before = weight.detach().clone()
    weight.grad = torch.randn(100)

    def broken():
        assert not torch.equal(weight, before)
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(broken)
    assert torch.equal(weight, before)


def test_cautious_equals_its_formula_and_leaves_decay_alone():
    start, steps = torch.randn(6, dtype=F64), gradients(8, 6)
    weight, optimizer = follow(lambda p: Cautious(torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)), start, steps)
    p, m, v = start.clone(), torch.zeros(6, dtype=F64), torch.zeros(6, dtype=F64)
    for t, g in enumerate(steps, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = 0.05 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        mask = (u * g > 0).double()
        p = p * (1 - 0.05 * 0.1) - u * mask / mask.mean().clamp(min=1e-3)
    torch.testing.assert_close(weight.detach(), p)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("wrap", [Cautious, Lookahead, SAMOptimizer])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_wrappers_maximise_as_they_minimise_the_negative(optimizer, wrap):
    """Of two groups, so that each has its own direction."""
    ends = []
    for maximize in (False, True):
        weights = [nn.Parameter(torch.full((3,), start, dtype=F64)) for start in (0.5, -1.0)]
        groups = [{"params": [weights[0]], "maximize": maximize}, {"params": [weights[1]]}]
        stepped = wrap(optimizer(groups, lr=0.1))

        def closure(weights=weights, maximize=maximize, stepped=stepped):
            stepped.zero_grad()
            first, second = ((weight * weight).sin().sum() for weight in weights)
            (-first if maximize else first).backward()
            second.backward()

        for _ in range(3):
            closure()
            stepped.step(closure if wrap is SAMOptimizer else None)
        ends.append(torch.cat(weights).detach())
    assert torch.equal(*ends) and (ends[0][0] - 0.5).abs() > 0.01


def raised_from_zero(optimizer):
    optimizer.param_groups[0]["lr"] = 0.1
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.5),
        lambda p: Lookahead(Lion(p, lr=0.1, weight_decay=5.0)),
        lambda p: SAMOptimizer(torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), interval=2),
        lambda p: type("OwnLion", (Lion,), {})(p, lr=0.1, weight_decay=5.0),
        lambda p: raised_from_zero(DecoupledAdamW(p, lr=0.0, weight_decay=5e-4)),
    ],
)
def test_cautious_leaves_every_decoupled_decay_alone(make):
    """With a gradient against which the decay pulls, a masked decay would leave the weight larger."""
    start, step = torch.full((3,), -1.0, dtype=F64), torch.full((3,), 1e-9, dtype=F64)
    weight, _ = follow(lambda p: Cautious(make(p)), start, [step])
    plain, _ = follow(make, start, [step])
    torch.testing.assert_close(weight, plain)


def test_soap_with_fixed_axes_equals_adam_in_the_rotated_basis():
    start, steps = torch.randn(3, 5, dtype=F64), gradients(6, 3, 5)
    settings = {"lr": 0.05, "weight_decay": 0.1, "precondition_frequency": 100}
    weight, optimizer = follow(SOAP, start, steps, **settings)
    left, right = (optimizer.state[weight][f"{side}_basis"] for side in ("left", "right"))
    # Which axes span the null space of the wider side is arbitrary, so they are checked, not computed.
    for basis, gram in ((left, steps[0] @ steps[0].T), (right, steps[0].T @ steps[0])):
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis), dtype=F64))
        values = basis.T @ gram @ basis
        torch.testing.assert_close(values, values.diagonal().sort(descending=True).values.clamp(min=0).diag())
    p, m, v = start.clone(), torch.zeros(3, 5, dtype=F64), torch.zeros(3, 5, dtype=F64)
    for t, g in enumerate(steps[1:], 1):
        rotated = left.T @ g @ right
        m, v = 0.95 * m + 0.05 * g, 0.95 * v + 0.05 * rotated**2
        scaled = (left.T @ m @ right / (1 - 0.95**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        p = p * (1 - 0.05 * 0.1) - 0.05 * left @ scaled @ right.T
    torch.testing.assert_close(weight.detach(), p)


def test_soap_treats_long_sides_and_vectors_as_adam_does():
    start, steps = torch.randn(6, dtype=F64), gradients(5, 6)
    adam, _ = follow(torch.optim.AdamW, start, steps[1:], lr=0.05, betas=(0.95, 0.95), weight_decay=0.1)
    vector, _ = follow(SOAP, start, steps, lr=0.05, weight_decay=0.1)
    matrix, _ = follow(SOAP, start.view(2, 3), [g.view(2, 3) for g in steps], lr=0.05, weight_decay=0.1, max_dim=1)
    torch.testing.assert_close(vector, adam)
    torch.testing.assert_close(matrix.flatten(), adam)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (F64, 1e-13)])
def test_soap_keeps_orthogonal_axes_and_descends(dtype, tolerance):
    torch.manual_seed(0)
    target, weight = torch.randn(6, 4, dtype=dtype), nn.Parameter(torch.zeros(6, 4, dtype=dtype))
    optimizer = SOAP([weight], lr=0.1, weight_decay=0.0, precondition_frequency=2)
    for _ in range(60):
        optimizer.zero_grad()
        (weight - target).pow(2).sum().backward()
        optimizer.step()
    basis = optimizer.state[weight]["left_basis"]
    torch.testing.assert_close(basis.T @ basis, torch.eye(6, dtype=dtype), atol=tolerance, rtol=0)
    assert (weight - target).pow(2).sum() < 0.05 * target.pow(2).sum()


MAKERS = {
    "Lion": lambda m: Lion(m.parameters(), lr=1e-3, weight_decay=0.1),
    "DecoupledAdamW": lambda m: DecoupledAdamW(m.parameters()),
    "DecoupledSGDW": lambda m: DecoupledSGDW(m.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4),
    "AdamWScheduleFree": lambda m: AdamWScheduleFree(m.parameters(), lr=0.01, warmup_steps=3),
    "SGDScheduleFree": lambda m: SGDScheduleFree(m.parameters(), lr=0.1),
    "MuonHybrid": lambda m: MuonHybrid(m),
    "Lookahead": lambda m: Lookahead(torch.optim.AdamW(m.parameters(), lr=0.01), k=3),
    "Lookahead of SGD": lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.1), k=4),
    "SAM": lambda m: SAM(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), interval=2),
    "SAM of SGD": lambda m: SAM(torch.optim.SGD(m.parameters(), lr=0.1)),
    "Cautious": lambda m: Cautious(Lion(m.parameters(), lr=1e-3)),
    "SOAP": lambda m: SOAP(m.parameters(), precondition_frequency=2),
}


def test_a_rate_on_the_device_changes_no_step_of_muon():
    ends = []
    for lr in (0.01, torch.tensor(0.01, dtype=F64)):
        model = net().double()
        optimizer = MuonHybrid(model, lr=lr, adam_lr=lr, weight_decay=0.1)
        for step in range(4):
            for p in model.parameters():
                p.grad = torch.sin(p.detach() * 7 + step)
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (DecoupledAdamW, {"lr": 0.01, "weight_decay": 5e-4}, {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-3}),
        (DecoupledSGDW, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.3, "momentum": 0.5, "weight_decay": 5e-4}),
        (Lion, {"lr": 0.01}, {"lr": 0.05, "betas": (0.3, 0.4), "weight_decay": 0.5}),
        (AdamWScheduleFree, {"lr": 0.01}, {"lr": 0.05, "betas": (0.8, 0.9), "r": 1.0, "warmup_steps": 3}),
        (SGDScheduleFree, {"lr": 0.1}, {"lr": 0.05, "momentum": 0.7, "weight_lr_power": 1.0}),
        (SOAP, {"lr": 0.01}, {"lr": 0.05, "betas": (0.7, 0.8), "precondition_frequency": 2, "max_dim": 3}),
    ],
)
def test_groups_of_unequal_settings_step_as_optimizers_of_their_own(make, first, second):
    def weights():
        return [nn.Parameter(one.clone()) for one in gradients(2, 4, 3)]

    def step(optimizer, own, alone):
        for number in range(5):
            for index, weight in zip(alone, own):
                weight.grad = torch.sin(weight.detach() * (3 + index) + number)
            optimizer.step()

    together, apart = weights(), weights()
    step(make([{"params": together[0], **first}, {"params": together[1], **second}], lr=0.7), together, (0, 1))
    step(make([apart[0]], **first), apart[:1], (0,))
    step(make([apart[1]], **second), apart[1:], (1,))
    assert all(map(torch.equal, together, apart))


def run_steps(model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(8, 2, 3, 3, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if isinstance(optimizer, SAM) else optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_went_through_a_safe_file_continues_bit_for_bit(name):
    whole = net()
    run_steps(whole, MAKERS[name](whole), 0, 9)
    model = net()
    optimizer = MAKERS[name](model)
    run_steps(model, optimizer, 0, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = net()
    resumed = MAKERS[name](other)
    run_steps(other, resumed, 40, 42)  # what it has learnt so far must not show
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    run_steps(other, resumed, 5, 9)
    assert all(map(torch.equal, whole.parameters(), other.parameters()))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_in_torchs_distributed_form_continues_bit_for_bit(name, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    whole = net()
    run_steps(whole, MAKERS[name](whole), 0, 9)
    model = net()
    optimizer = MAKERS[name](model)
    run_steps(model, optimizer, 0, 5)
    optimizer.zero_grad()  # without gradients torch looks for a state, and makes one by a step at a rate of zero
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other = net()
    resumed = MAKERS[name](other)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    for pair in ((model, optimizer), (other, resumed)):  # reading the state has changed nothing either
        run_steps(*pair, 5, 9)
        assert all(map(torch.equal, whole.parameters(), pair[0].parameters()))


@pytest.mark.parametrize("name", MAKERS)
def test_where_gradients_are_in_memory_changes_no_bit(name):
    """DDP keeps gradients in buckets, which it divides again after the first step of each process."""

    def weights(place):
        model = net()
        optimizer = MAKERS[name](model)
        for step in range(5):
            for p in model.parameters():
                p.grad = place(torch.sin(p.detach() * 7 + step))
            optimizer.step((lambda: 0.0) if isinstance(optimizer, SAM) else None)
        return list(model.parameters())

    def in_bucket(gradient):
        return torch.cat([torch.zeros(3), gradient.flatten()])[3:].view_as(gradient)

    assert all(map(torch.equal, weights(torch.clone), weights(in_bucket)))


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_steps_as_the_original_does(name):
    model = net()
    optimizer = MAKERS[name](model)
    run_steps(model, optimizer, 0, 3)
    pair = copy.deepcopy((model, optimizer))
    run_steps(model, optimizer, 3, 6)
    run_steps(*pair, 3, 6)
    assert all(map(torch.equal, model.parameters(), pair[0].parameters()))


@pytest.mark.parametrize("name", MAKERS)
def test_schedulers_drive_the_rates_that_are_used(name):
    model = net()
    optimizer = MAKERS[name](model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
    first = [group["lr"] for group in optimizer.param_groups]
    run_steps(model, optimizer, 0, 1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2 * lr for lr in first]


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_without_a_gradient_stay_until_they_have_one(name):
    model = net()
    optimizer = MAKERS[name](model)
    optimizer.step(None if "SAM" not in name else lambda: None)  # nobody has one
    model[2].requires_grad_(False)
    before = model[2].weight.detach().clone()
    run_steps(model, optimizer, 0, 4)
    assert torch.equal(model[2].weight, before)
    model[2].requires_grad_(True)
    run_steps(model, optimizer, 4, 7)
    assert not torch.equal(model[2].weight, before)


def test_names_resolve_in_a_unit():
    model = net()
    for name in ("Lion", "DecoupledAdamW", "AdamWScheduleFree", "MuonHybrid", "SOAP"):
        unit = ConstantLr(name, {"lr": 0.01}, model)
        assert type(unit.optimizer).__name__ == name
    assert {"Lookahead", "SAM", "SGDScheduleFree"} <= set(dir(drivetrain.optim))
    with pytest.raises(ConfigError, match="Lion"):
        ConstantLr("Lionn", {}, model)
    with pytest.raises(ConfigError, match="wraps an optimizer"):
        ConstantLr("SAM", {}, model)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: Lion(p, lr=-1), "lr=-1"),
        (lambda p: Lion(p, betas=(0.9, 1.0)), "betas"),
        (lambda p: Lion(p, betas=0.9), "two numbers"),
        (lambda p: MuonHybrid(p, adam_match=(), momentum=1.5), "momentum"),
        (lambda p: MuonHybrid(p, adam_match=(), adjust_lr="orginal"), "original"),
        (lambda p: MuonHybrid(p, adam_match=(), ns_steps=0), "ns_steps"),
        (lambda p: AdamWScheduleFree(p, betas=(0.0, 0.9)), "above 0"),
        (lambda p: SGDScheduleFree(p, warmup_steps=1.5), "warmup_steps"),
        (lambda p: SGDScheduleFree(p, lr=torch.tensor(0.1)), "expected a number"),
        (lambda p: Lookahead(torch.optim.SGD(p), k=0), "k=0"),
        (lambda p: Lookahead(p), "wraps an optimizer"),
        (lambda p: SAM(torch.optim.SGD(p), interval=0), "interval"),
        (lambda p: SOAP(p, precondition_frequency=0), "precondition_frequency"),
        (lambda p: Cautious(torch.optim.SGD(p), eps=-1), "eps"),
    ],
)
def test_bad_settings_are_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make([nn.Parameter(torch.ones(2, 2))])


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense"):
        Lion(table.parameters()).step()


def test_wrappers_around_one_optimizer_count_their_steps_apart():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = SAMOptimizer(Lookahead(torch.optim.SGD([weight], lr=0.1), k=5), interval=2)

    def closure():
        optimizer.zero_grad()
        loss = weight.pow(2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        closure()
        optimizer.step(closure)
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["sam_step"] == group["lookahead_step"] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_lookahead_continues_with_weights_of_another_type(dtype):
    def run(optimizer, weight, steps):
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()

    make = lambda weight: Lookahead(torch.optim.SGD([weight], lr=0.25, momentum=0.5), k=2)
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = make(weight)
    run(optimizer, weight, 3)  # in the middle of a round, so that the slow weights differ
    other = nn.Parameter(weight.detach().to(dtype))
    restored = make(other)
    restored.load_state_dict(optimizer.state_dict())
    run(optimizer, weight, 3)
    run(restored, other, 3)
    torch.testing.assert_close(other.float(), weight, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("wrap", [SAMOptimizer, Cautious])
def test_wrappers_that_need_dense_gradients_say_so(wrap):
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = wrap(torch.optim.SGD(embedding.parameters(), lr=0.1))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=f"{wrap.__name__} needs dense gradients"):
        optimizer.step(lambda: None)


def test_a_schedule_free_group_that_is_added_later_is_checked_too():
    optimizer = SGDScheduleFree([nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match="momentum=0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "momentum": 0.0})
