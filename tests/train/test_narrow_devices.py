"""Devices without float64, as those of Apple, emulated: the sums of a run then use float32, and nothing else asks for more."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import drivetrain
from drivetrain.algorithms import factorize
from drivetrain.algorithms.progressive_resizing import resize_batch
from drivetrain.context.moving import move_to_device
from drivetrain.module.loss_items import LossItems
from drivetrain.runtime import device as devices
from drivetrain.strategy.trial.per_parameter import sketch
from drivetrain.train.trainer import Trainer

SOURCE = Path(drivetrain.__file__).parent


class _NoFloat64(TorchDispatchMode):
    """Raises where an operator returns float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype is torch.float64 for leaf in tree_leaves(out)):
            raise TypeError(f"{func} made float64, which this device does not have")
        return out


@pytest.fixture
def narrow(monkeypatch):
    """Let no device have float64, in every module that asks."""
    for module in list(sys.modules.values()):
        if module is not None and module.__name__.startswith("drivetrain") and "wide_dtype" in vars(module):
            monkeypatch.setattr(module, "wide_dtype", lambda device: torch.float32)


def test_the_widest_type_is_probed_once_where_it_is_not_known(monkeypatch):
    assert devices.wide_dtype(torch.device("cpu")) is torch.float64 is devices.wide_dtype(torch.device("meta"))
    asked = []

    def ones(*size, dtype, device):
        asked.append(device)
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    devices._has_float64.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ones", ones)
        assert [devices.wide_dtype(torch.device("mps")) for _ in range(2)] == [torch.float32] * 2
    assert asked == ["mps"]
    devices._has_float64.cache_clear()


def test_a_run_makes_no_float64_where_the_device_has_none(narrow):
    inputs = torch.randn(16, 4)
    dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Linear(4, 2)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]), label_smoothing=0.1)
    trainer = Trainer(model, loss, torch.optim.AdamW(model.parameters()), precision="bf16", device="cpu", seed=1)
    with _NoFloat64():
        trainer.train(
            dataset, eval_dataset=dataset, num_epochs=2, per_device_batch_size=4, gradient_accumulation_steps=2,
            gradient_clip_value=1.0,
        )  # fmt: skip
    assert trainer.run_history.get_latest_metric("eval_loss_epoch") > 0


def test_items_sketches_and_masks_are_computed_in_float32_there(narrow):
    labels = torch.tensor([0, 1, 1, -100], device="meta")
    items = LossItems(kind="labels", path=(1,), weight=torch.tensor([1.0, 2.0], device="meta"))
    mask = torch.randint(0, 9, (2, 8, 8), dtype=torch.uint8)
    with _NoFloat64():
        assert items.count((None, labels)).dtype is torch.float32
        encoded = sketch(torch.arange(6.0))
        _, small = resize_batch(torch.rand(2, 3, 8, 8), mask, 0.5, "resize", resize_targets=True)
    assert encoded and set(small.unique().tolist()) <= set(mask.unique().tolist())


def test_float64_in_a_batch_becomes_float32_with_a_warning_where_it_cannot_be_moved(monkeypatch):
    class Narrow(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is Tensor.to and torch.float32 not in args:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
            return super().__torch_function__(func, types, args, kwargs or {})

    batch = {"x": torch.ones(2, dtype=torch.float64).as_subclass(Narrow)}
    with pytest.raises(TypeError, match="MPS"):  # another reason is not hidden
        move_to_device("cpu", batch)
    monkeypatch.setattr("drivetrain.context.moving.wide_dtype", lambda device: torch.float32)
    with pytest.warns(drivetrain.DrivetrainWarning, match="'cpu' has no float64, so float64 tensors become float32"):
        assert move_to_device("cpu", batch)["x"].dtype is torch.float32


@pytest.mark.parametrize(("kind", "is_asynchronous"), [("cuda", True), ("xpu", True), ("mps", False), ("cpu", False)])
def test_the_host_goes_on_during_a_copy_only_where_that_is_safe(kind, is_asynchronous):
    seen = []

    class Sent(Tensor):
        def to(self, *args, **kwargs):
            seen.append(kwargs)
            return self

    move_to_device(kind, torch.ones(1).as_subclass(Sent), non_blocking=True)
    devices.copy_to(torch.device(kind), torch.ones(1).as_subclass(Sent))
    assert seen == [{"non_blocking": is_asynchronous}] * 2


CUDA_ONLY = {
    "runtime/device.py", "record/buffer.py", "strategy/profile/measure_machine.py", "strategy/trial/measuring.py",
}  # fmt: skip
"""Files whose copies without waiting are on CUDA, behind a test of the device."""


def test_copies_that_do_not_wait_ask_for_the_kind_of_device():
    """torch's copies to MPS may read a source that is already released, so `copy_to` and `move_to_device` decide."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "non_blocking=True" not in text or path.relative_to(SOURCE).as_posix() in CUDA_ONLY:
            continue
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call):
                continue
            is_always = any(
                keyword.arg == "non_blocking"
                and isinstance(keyword.value, ast.Constant)
                and keyword.value.value is True
                for keyword in call.keywords
            )
            decides = "move_to_device" in ast.unparse(call)
            assert not is_always or decides, f"{path}:{call.lineno}: use copy_to(device, tensor)"


def test_low_rank_solutions_are_found_on_the_host_where_the_device_has_no_float64(monkeypatch):
    torch.manual_seed(0)
    inputs, known = torch.randn(32, 6), torch.randn(6, 6)
    given = (inputs, inputs @ known, known, None, torch.zeros(6))
    expected = factorize.factorize_matrix(*given, rank=2)
    asked = []

    def wide_dtype(device):
        asked.append(device)
        return torch.float32 if len(asked) == 1 else torch.float64

    monkeypatch.setattr(factorize, "wide_dtype", wide_dtype)
    found = factorize.factorize_matrix(*given, rank=2)
    assert len(asked) == 2 and found.rank == expected.rank == 2
    assert torch.equal(found.Wa, expected.Wa) and torch.equal(found.bias, expected.bias)
