"""A cross entropy in chunks is the cross entropy: its value, its gradients, and less to keep."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import UnsupportedMethodError
from drivetrain.module.chunked_loss import linear_cross_entropy, rows_in_chunk
from drivetrain.module.deferred_logits import DeferredLogits, DeferredLoss, defer_head, find_final_linear

ROWS, FEATURES, CLASSES = 12, 8, 20


def parts(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, FEATURES, generator=generator, dtype=dtype)
    weight = torch.randn(CLASSES, FEATURES, generator=generator, dtype=dtype)
    offset = torch.randn(CLASSES, generator=generator, dtype=dtype) if bias else None
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[[1, 5, 6]] = -100
    tensors = [t.requires_grad_() for t in (hidden, weight, *([] if offset is None else [offset]))]
    return hidden, weight, offset, target, tensors


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 5, 1, 100])
def test_loss_and_gradients_are_the_plain_ones(bias, reduction, smoothing, chunk):
    hidden, weight, offset, target, tensors = parts(bias=bias)
    settings = {"reduction": reduction, "label_smoothing": smoothing}
    plain = F.cross_entropy(F.linear(hidden, weight, offset), target, **settings)
    expected = torch.autograd.grad(plain * 3, tensors)
    loss = linear_cross_entropy(hidden, weight, target, offset, chunk=chunk, **settings)
    found = torch.autograd.grad(loss * 3, tensors)
    torch.testing.assert_close(loss, plain, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_gradients_agree_with_finite_differences():
    hidden, weight, offset, target, tensors = parts()
    assert torch.autograd.gradcheck(lambda *_: linear_cross_entropy(hidden, weight, target, offset, chunk=5), tensors)


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, offset, target, _ = parts()
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, target, offset, chunk=4).backward()
    assert weight.grad is None and hidden.grad is not None and offset.grad is not None


def test_a_batch_of_ignored_targets_has_no_mean_as_in_torch():
    hidden, weight, _, target, _ = parts(bias=False)
    target = torch.full_like(target, -100)
    assert math.isnan(F.cross_entropy(F.linear(hidden, weight), target).item())
    assert math.isnan(linear_cross_entropy(hidden, weight, target).item())
    assert linear_cross_entropy(hidden, weight, target, reduction="sum").item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_type_of_products(dtype):
    hidden, weight, offset, target, tensors = parts(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        plain = F.cross_entropy(F.linear(hidden, weight, offset), target)
        loss = linear_cross_entropy(hidden, weight, target, offset, chunk=5)
    assert loss.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(torch.autograd.grad(loss, tensors), torch.autograd.grad(plain, tensors)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def test_float16_gradients_survive_a_mean_over_many_rows():
    torch.manual_seed(0)
    hidden = torch.randn(4096, 4, dtype=torch.float16, requires_grad=True)
    weight = torch.randn(8, 4, dtype=torch.float16, requires_grad=True)
    target = torch.randint(8, (4096,))
    (linear_cross_entropy(hidden, weight, target, chunk=512) * 65536).backward()
    exact = hidden.detach().double().requires_grad_()
    (F.cross_entropy(exact @ weight.detach().double().t(), target) * 65536).backward()
    assert (hidden.grad.double() - exact.grad).norm() < 2e-3 * exact.grad.norm()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")  # the compiler's own
def test_it_is_the_same_compiled():
    hidden, weight, offset, target, tensors = parts(torch.float32)
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, offset, chunk=6), tensors)
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    found = torch.autograd.grad(compiled(hidden, weight, target, offset, chunk=6), tensors)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler has much to say
def test_it_is_the_same_compiled_on_the_device():
    hidden, weight, offset, target, _ = parts(torch.float32)
    tensors = [tensor.detach().cuda().requires_grad_() for tensor in (hidden, weight, offset)]
    torch._dynamo.reset()
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            plain = linear_cross_entropy(tensors[0], tensors[1], target.cuda(), tensors[2], chunk=6)
            fast = torch.compile(linear_cross_entropy)(tensors[0], tensors[1], target.cuda(), tensors[2], chunk=6)
        for ours, theirs in zip(torch.autograd.grad(fast, tensors), torch.autograd.grad(plain, tensors)):
            assert (ours - theirs).norm() < 0.02 * theirs.norm()


def saved_bytes(function):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        function()
    return sum(kept)


def test_logits_are_not_kept():
    hidden, weight, target = (
        torch.randn(256, 8, requires_grad=True),
        torch.randn(512, 8, requires_grad=True),
        torch.zeros(256).long(),
    )
    plain = saved_bytes(lambda: F.cross_entropy(F.linear(hidden, weight), target))
    ours = saved_bytes(lambda: linear_cross_entropy(hidden, weight, target, chunk=32))
    assert plain > 256 * 512 * 4 and ours < 2 * (hidden.numel() + weight.numel()) * 4


def test_chunks_hold_half_a_gibibyte_and_are_equal():
    assert rows_in_chunk(65536, 50304) * 50304 * 4 <= 512 * 2**20 and 65536 % rows_in_chunk(65536, 50304) == 0
    assert rows_in_chunk(0, 10) == 1 and rows_in_chunk(3, 10**12) == 1


# What a loss function may do with logits that are not there.


class Model(nn.Module):
    def __init__(self, as_mapping=False, after=None):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.as_mapping, self.after = as_mapping, after

    def forward(self, x):
        logits = self.head(torch.tanh(self.body(x)))
        logits = logits if self.after is None else self.after(logits)
        return {"hidden": x, "logits": logits} if self.as_mapping else logits


X, Y = torch.randn(3, 4, FEATURES), torch.randint(CLASSES, (3, 4))

CHUNKED = {
    "flatten": lambda y, o: F.cross_entropy(o.flatten(0, 1), y.flatten()),
    "view": lambda y, o: F.cross_entropy(o.view(-1, o.size(-1)), y.view(-1)),
    "reshape, float": lambda y, o: F.cross_entropy(o.float().reshape(-1, o.shape[-1]), y.reshape(-1)),
    "torch.flatten": lambda y, o: F.cross_entropy(torch.flatten(o, 0, 1), y.flatten()),
    "shifted": lambda y, o: F.cross_entropy(o[:, :-1].contiguous().view(-1, CLASSES), y[:, 1:].reshape(-1)),
    "shifted with dots": lambda y, o: F.cross_entropy(o[..., :-1, :].flatten(0, 1), y[:, 1:].flatten()),
    "masked": lambda y, o: F.cross_entropy(o[y > 3], y[y > 3]),
    "transposed": lambda y, o: F.cross_entropy(o.transpose(1, 2), y),
    "permuted": lambda y, o: F.cross_entropy(o.permute(0, 2, 1), y),
    "module": lambda y, o: nn.CrossEntropyLoss(label_smoothing=0.1)(o.flatten(0, 1), y.flatten()),
    "sum of two": lambda y, o: (
        F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum") + F.cross_entropy(o[0], y[0])
    ),
}
COMPUTED = {
    "soft targets": lambda y, o: F.cross_entropy(o.flatten(0, 1), F.one_hot(y.flatten(), CLASSES).double()),
    "class weights": lambda y, o: F.cross_entropy(
        o.flatten(0, 1), y.flatten(), weight=(torch.arange(CLASSES) + 1.0).double()
    ),
    "rows": lambda y, o: F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="none").square().mean(),
    "log softmax": lambda y, o: F.nll_loss(F.log_softmax(o.flatten(0, 1), dim=-1), y.flatten()),
    "arithmetic": lambda y, o: F.cross_entropy((o * 2.0 + 1.0).flatten(0, 1), y.flatten()),
    "also a mean": lambda y, o: F.cross_entropy(o.flatten(0, 1), y.flatten()) + 1e-2 * o.square().mean(),
    "operators": lambda y, o: (abs(o) * (o != 0) * (o == o) / (1 + 2**-o)).mean(),
    "classes cut": lambda y, o: F.cross_entropy(o[..., :10].flatten(0, 1), y.flatten() % 10),
    "logsumexp": lambda y, o: torch.logsumexp(o, -1).mean(),
    "wrong dimension": lambda y, o: F.cross_entropy(o, y[:, :1].expand(3, CLASSES) % 4),
}


def losses(function, **kwargs):
    """Return loss and gradients, plain and deferred, and whether anything was computed in chunks."""
    results = []
    for deferred in (False, True):
        model = Model(**kwargs).double()
        call = function
        if deferred:
            _, leaf, _ = find_final_linear(model, (X.double(),), {})
            defer_head(model.head)
            call = DeferredLoss(function, model.head, position=1, leaf=leaf, chunk=5)
        loss = call(Y, model(X.double()))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if ours.dtype == torch.float32 else 1e-9, atol=1e-7)
    return call.is_chunked


@pytest.mark.parametrize("name", CHUNKED)
def test_cross_entropies_are_recognised(name):
    assert losses(CHUNKED[name])


@pytest.mark.parametrize("name", COMPUTED)
def test_anything_else_is_right_and_said(name):
    with pytest.warns(UserWarning, match="no memory is saved"):
        losses(COMPUTED[name])


def test_logits_inside_of_a_mapping_are_found():
    assert losses(lambda y, o: F.cross_entropy(o["logits"].flatten(0, 1), y.flatten()), as_mapping=True)


def test_what_the_loss_may_ask_is_known_without_computing():
    model = Model()
    loss = DeferredLoss(None, model.head, position=1)
    logits = DeferredLogits(torch.randn(3, 4, FEATURES), loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert logits.shape == (3, 4, CLASSES) and logits.size(-1) == CLASSES and logits.ndim == logits.dim() == 3
        assert len(logits) == 3 and logits.dtype == torch.float32 and logits.device.type == "cpu"
        assert logits.transpose(1, 2).shape == (3, CLASSES, 4) and logits.double().dtype == torch.float64


def test_evaluation_has_logits():
    model = Model()
    expected = model(X)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        defer_head(one.head)
        assert one(X).shape[-1] == FEATURES
        assert torch.equal(one.eval()(X), expected)
        assert list(one.state_dict()) == list(Model().state_dict())
    loss = DeferredLoss(CHUNKED["flatten"], model.head, position=1)
    assert loss(Y, model(X)).item() == pytest.approx(CHUNKED["flatten"](Y, expected).item())
    assert torch.equal(copy.deepcopy(model)(X), expected)


def test_a_model_that_does_more_after_its_last_layer_is_refused():
    with pytest.raises(UnsupportedMethodError, match="does not return the unchanged output of a linear layer.*head"):
        find_final_linear(Model(after=torch.tanh), (X,), {})
    with pytest.raises(UnsupportedMethodError, match="fake tensors"):
        find_final_linear(Model(after=lambda logits: logits[logits.sum().item() > 0]), (X,), {})
