"""Gradient clipping by norm, by value and by unit, beside loops."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.gradient_clipping import AGC, GradientClipping, apply_agc, apply_gradient_clipping
from drivetrain.core.event import Event
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import ConvNet, Watch, image_data, train


def with_gradients(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet().double()
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn_like(parameter)
    return model


def test_norm_and_value_equal_torchs():
    for kind, clip in (("norm", nn.utils.clip_grad_norm_), ("value", nn.utils.clip_grad_value_)):
        ours, theirs = with_gradients(), with_gradients()
        apply_gradient_clipping(ours, kind, 0.3)
        clip(theirs.parameters(), 0.3)
        for a, b in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_units_are_clipped_relative_to_their_weights(eps):
    model, threshold = with_gradients(), 0.05
    model.features[0].bias.data.zero_()
    model.head.weight.grad[1].zero_()
    expected = []
    for p in model.parameters():
        rows = [(p.detach(), p.grad)] if p.ndim < 2 else list(zip(p.detach(), p.grad))
        parts = []
        for weight, gradient in rows:
            limit, size = threshold * max(weight.norm().item(), eps), gradient.norm().item()
            parts.append(gradient * (min(1.0, limit / size) if size else 1.0))
        expected.append(parts[0] if p.ndim < 2 else torch.stack(parts))
    apply_gradient_clipping(model, "adaptive", threshold, eps=eps)
    for p, wanted in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, wanted)


def test_the_function_agc_has_no_floor_and_the_class_has_one():
    model, other = with_gradients(), with_gradients()
    model.head.bias.data.zero_()
    apply_agc(model, 0.1)
    apply_gradient_clipping(other, "adaptive", 0.1)
    assert not model.head.bias.grad.any()
    torch.testing.assert_close(model.head.weight.grad, other.head.weight.grad)
    assert AGC().eps == 1e-3 and AGC(0.2).clipping_threshold == 0.2


def test_a_bias_of_zero_trains_under_agc():
    trainer = conv_run(AGC())
    nn.init.zeros_(trainer.model.head.bias)
    train(trainer, image_data(), num_epochs=1)
    assert trainer.model.head.bias.abs().min() > 0


def test_a_run_steps_with_clipped_gradients_of_whole_windows():
    norms = Watch(
        Event.BEFORE_STEP, lambda state: nn.utils.get_total_norm([p.grad for p in state.model.parameters()]).item()
    )
    train(conv_run(GradientClipping("norm", 0.05), callbacks=[norms]), image_data(), gradient_accumulation_steps=2)
    assert norms.values == pytest.approx([0.05] * 4, rel=1e-4)


def test_nothing_to_clip_is_fine():
    model = nn.Linear(2, 2)
    apply_gradient_clipping(model, "adaptive", 1.0)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("nrom", 1.0), "norm"), (("norm", 0.0), "above 0"), (("value", -1), "above 0"), (("adaptive", 0.1, -1), "eps")],
)
def test_bad_settings_are_refused_in_the_constructor(arguments, text):
    with pytest.raises(ValueError, match=text):
        GradientClipping(*arguments)
    with pytest.raises(ValueError, match="above 0"):
        AGC(0)
