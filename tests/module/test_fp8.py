"""8-bit products are what rounding to 8 bits says, in both directions."""

import pytest
import torch
from torch import nn

from drivetrain.module import fp8
from drivetrain.module.fp8 import (
    FORWARD,
    GRADIENT,
    Float8Linear,
    convert_linears_to_fp8,
    matmul_fp8,
    quantize,
    supports_fp8,
)

RECIPES = ["tensorwise", "rowwise"]


@pytest.mark.parametrize(("dtype", "largest"), [(FORWARD, 448.0), (GRADIENT, 57344.0)])
def test_the_largest_value_uses_the_whole_range(dtype, largest):
    x = torch.randn(6, 5) * 3
    values, factor = quantize(x, dtype)
    assert values.dtype is dtype and values.float().abs().max() == largest
    assert factor == pytest.approx((x.abs().max() / largest).item())
    rows, factors = quantize(x, dtype, dim=1)
    assert (rows.float().abs().amax(1) == largest).all() and factors.shape == (6, 1)


def test_zeros_stay_zeros():
    values, factor = quantize(torch.zeros(3, 3), FORWARD)
    assert not values.float().any() and torch.isfinite(factor)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_product_is_that_of_the_rounded_values(recipe):
    a, b = torch.randn(5, 16), torch.randn(16, 7)
    rowwise = recipe == "rowwise"
    (qa, fa), (qb, fb) = quantize(a, FORWARD, 1 if rowwise else None), quantize(b, FORWARD, 0 if rowwise else None)
    expected = (qa.double() * fa) @ (qb.double() * fb)
    torch.testing.assert_close(
        matmul_fp8(a, b, FORWARD, FORWARD, recipe, torch.float32).double(), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_close_to_exact_ones(recipe, bias):
    torch.manual_seed(0)
    exact = nn.Linear(32, 48, bias=bias)
    low = Float8Linear.from_linear(exact, recipe=recipe)
    assert low.weight is exact.weight and low.bias is exact.bias
    x = torch.randn(4, 6, 32)
    results = []
    for layer in (exact, low):
        inputs = x.clone().requires_grad_()
        exact.zero_grad()
        out = layer(inputs)
        out.square().sum().backward()
        results.append(
            [out.detach(), inputs.grad, exact.weight.grad.clone(), *([exact.bias.grad.clone()] if bias else [])]
        )
    for one, other in zip(*results):
        assert (one - other).norm() / one.norm() < 0.06
        assert not torch.equal(one, other)


def test_the_result_has_the_type_of_autocast():
    layer = Float8Linear(16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 16)).dtype is torch.bfloat16
    assert layer(torch.randn(2, 16)).dtype is torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_without_rows_returns_none_and_has_zero_gradients(recipe):
    layer = Float8Linear.from_linear(nn.Linear(32, 16), recipe=recipe)
    out = layer(torch.ones(2, 0, 32))
    out.sum().backward()
    assert out.shape == (2, 0, 16) and not layer.weight.grad.any()


def test_only_wide_layers_with_fitting_sizes_are_converted():
    model = nn.ModuleDict(
        {
            "wide": nn.Linear(32, 64),
            "narrow": nn.Linear(16, 64),
            "odd": nn.Linear(40, 64),
            "lm_head": nn.Linear(64, 64),
            "deep": nn.Sequential(nn.Linear(64, 32, bias=False)),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(optimizer.param_groups[0]["params"])
    keys = list(model.state_dict())
    assert convert_linears_to_fp8(model, min_features=32, optimizers=optimizer) == ["wide", "deep.0"]
    assert convert_linears_to_fp8(model, min_features=32) == ["wide", "deep.0"]
    assert all(a is b for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))
    assert list(model.state_dict()) == keys


def test_unknown_recipes_are_refused():
    with pytest.raises(ValueError, match="rowwise"):
        convert_linears_to_fp8(nn.Sequential(), recipe="rows")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does that
def test_it_learns_and_compiles():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    convert_linears_to_fp8(model, min_features=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, target = torch.randn(32, 16), torch.randn(32, 16)
    losses = []
    for _ in range(40):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()


def test_a_cpu_has_no_8_bit_products():
    assert not supports_fp8("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [64, 50])
def test_the_kernel_agrees_with_the_emulation(recipe, rows):
    if not supports_fp8("cuda"):
        pytest.skip("needs compute capability 8.9")
    a, b = torch.randn(rows, 64), torch.randn(64, 128)
    on_gpu = matmul_fp8(a.cuda(), b.cuda(), FORWARD, FORWARD, recipe, torch.bfloat16)
    torch.testing.assert_close(
        on_gpu.cpu(), matmul_fp8(a, b, FORWARD, FORWARD, recipe, torch.bfloat16), atol=0.1, rtol=0.02
    )
    layer = Float8Linear(64, 128, device="cuda", dtype=torch.bfloat16)
    layer.recipe = recipe
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(layer.weight.grad).all()


def gradients_of(layer, linear, x, grad, dtype):
    x.grad = linear.weight.grad = None
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        layer(x).backward(grad)
    return x.grad.double(), linear.weight.grad.double()


def check_compiled_gradients(device, recipe, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(64, 128, device=device)
    layer = Float8Linear.from_linear(linear, recipe=recipe)
    x = torch.randn(48, 64, device=device, requires_grad=True)
    grad = torch.randn(48, 128, device=device, dtype=dtype or torch.float32) * 1e-4
    torch._dynamo.reset()
    exact = gradients_of(linear, linear, x, grad, dtype)
    eager = gradients_of(layer, linear, x, grad, dtype)
    compiled = gradients_of(torch.compile(layer, fullgraph=True), linear, x, grad, dtype)
    for one, two, three in zip(exact, eager, compiled):
        assert (two - one).norm() < 0.1 * one.norm() and (three - two).norm() < 0.02 * two.norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does that
@pytest.mark.slow
def test_compiled_gradients_are_those_of_the_library_s_kernel(monkeypatch):
    monkeypatch.setattr(fp8, "supports_fp8", lambda device: True)  # torch's kernel for CPUs, where this one has it
    try:
        matmul_fp8(torch.ones(16, 16), torch.ones(16, 16), FORWARD, FORWARD, "tensorwise", torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no 8-bit product on this CPU: {error}")
    check_compiled_gradients("cpu", "tensorwise", None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context"
)  # a thread's first product
def test_compiled_gradients_on_the_device(recipe, dtype):
    if not supports_fp8("cuda"):
        pytest.skip("no 8-bit matrix units")
    check_compiled_gradients("cuda", recipe, dtype)
