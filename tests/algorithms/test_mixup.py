"""MixUp: samples, targets and losses are mixed in one proportion."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.algorithms.label_smoothing import LabelSmoothing
from drivetrain.algorithms.mixup import MixUp, draw_mixing, mixup, mixup_batch
from drivetrain.core.errors import ConfigError, PluginConflictError
from drivetrain.core.event import Event
from tests.algorithms.tasks import ConvNet, Watch, conv_trainer, image_data, make_state, run, train

INDEX = torch.tensor([2, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_formula_with_given_coefficient_and_partners(dtype):
    x, y = torch.randn(3, 2, 4, 4).to(dtype), torch.tensor([0, 1, 2])
    mixed, other, mixing = mixup_batch(x, y, mixing=0.3, indices=INDEX)
    assert mixing == 0.3 and other.tolist() == [2, 0, 1]
    assert mixed.dtype == dtype and mixed.shape == x.shape
    expected = 0.7 * x.double() + 0.3 * x[INDEX].double()
    torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=1e-2 if dtype is torch.bfloat16 else 1e-6)


def test_a_given_coefficient_is_not_folded():
    x = torch.tensor([[0.0], [1.0]])
    mixed, _, mixing = mixup_batch(x, x, mixing=0.9, indices=torch.tensor([1, 0]))
    assert mixing == 0.9 and mixed[0].item() == pytest.approx(0.9)


def test_a_tensor_coefficient_stays_one():
    x = torch.tensor([[0.0], [1.0]])
    mixed, _, mixing = mixup_batch(x, x, mixing=torch.tensor(0.25), indices=torch.tensor([1, 0]))
    assert isinstance(mixing, torch.Tensor) and mixed.flatten().tolist() == [0.25, 0.75]


def test_drawn_coefficients_are_a_folded_beta_distribution():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([draw_mixing(0.2, generator) for _ in range(2000)], dtype=torch.float64)
    assert drawn.min() >= 0 and drawn.max() <= 0.5
    beta = torch.distributions.Beta(0.2, 0.2).sample((20000,)).double()
    expected = torch.minimum(beta, 1 - beta)
    assert drawn.mean().item() == pytest.approx(expected.mean().item(), abs=0.02)


def test_alpha_zero_mixes_nothing():
    x, y = torch.randn(3, 2), torch.tensor([0, 1, 2])
    mixed, _, mixing = mixup_batch(x, y, alpha=0)
    assert mixing == 0 and torch.equal(mixed, x)


def test_the_same_generator_gives_the_same_mix_and_the_global_one_is_left_alone():
    x, y = torch.randn(8, 2), torch.arange(8)
    before = torch.get_rng_state()
    first = mixup_batch(x, y, generator=torch.Generator().manual_seed(4))
    second = mixup_batch(x, y, generator=torch.Generator().manual_seed(4))
    assert torch.equal(first[0], second[0]) and first[2] == second[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_several_inputs_and_targets_share_partners():
    a, b = torch.randn(3, 2), torch.randn(3, 5)
    (mixed_a, mixed_b), (y1, y2), _ = mixup_batch([a, b], [torch.arange(3), torch.arange(3) * 10], 0.5, indices=INDEX)
    torch.testing.assert_close(mixed_a, (a + a[INDEX]) / 2)
    torch.testing.assert_close(mixed_b, (b + b[INDEX]) / 2)
    assert y1.tolist() == [2, 0, 1] and y2.tolist() == [20, 0, 10]


def test_token_ids_are_refused():
    with pytest.raises(TypeError, match="floating-point"):
        mixup_batch(torch.arange(4).view(2, 2), torch.arange(2))


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), "0.2"])
def test_a_bad_alpha_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        MixUp(alpha)


def test_the_short_form_returns_soft_targets():
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    mixed, soft = mixup(x, y, alpha=0.4, num_classes=3, generator=torch.Generator().manual_seed(1))
    again, other, mixing = mixup_batch(x, y, alpha=0.4, generator=torch.Generator().manual_seed(1))
    expected = F.one_hot(y, 3) * (1 - mixing) + F.one_hot(other, 3) * mixing
    assert torch.equal(mixed, again)
    torch.testing.assert_close(soft, expected.float())
    with pytest.raises(ConfigError, match="num_classes"):
        mixup(x, y)


def test_soft_targets_for_the_loss_and_hard_ones_afterwards():
    x, y = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, -100])
    state = make_state((x, y), model=ConvNet(), loss_fn=nn.CrossEntropyLoss())
    algorithm = MixUp(0.4)
    run(algorithm, state, Event.BEFORE_FORWARD)
    own, index = algorithm._own_weight, algorithm._index
    torch.testing.assert_close(state.batch[0], own * x + (1 - own) * x[index])
    state.outputs = torch.randn(4, 3)
    run(algorithm, state, Event.BEFORE_LOSS)
    dense = torch.cat([torch.eye(3), torch.zeros(1, 3)])  # an ignored label has no weight anywhere
    torch.testing.assert_close(state.batch[1], own * dense + (1 - own) * dense[index])
    run(algorithm, state, Event.AFTER_LOSS)
    assert state.batch[1] is y


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 2)])
def test_numbers_to_predict_are_mixed_in_their_own_shape(shape):
    x, y = torch.randn(4, 3, 4, 4), torch.randn(shape)
    loss = lambda outputs, targets: F.mse_loss(outputs.view_as(targets), targets)
    state = make_state((x, y), model=ConvNet(), loss_fn=loss, outputs=torch.randn(4, 2 if shape == (4, 2) else 1))
    algorithm = MixUp(0.8)
    run(algorithm, state, Event.BEFORE_FORWARD, Event.BEFORE_LOSS)
    own, index = algorithm._own_weight, algorithm._index
    torch.testing.assert_close(state.batch[1], own * y + (1 - own) * y[index])


def test_interpolated_loss_equals_the_mix_of_both_losses():
    x, y = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, 1])
    state = make_state((x, y), model=ConvNet(), loss_fn=nn.CrossEntropyLoss())
    algorithm = MixUp(0.8, interpolate_loss=True)
    run(algorithm, state, Event.BEFORE_FORWARD)
    state.outputs = torch.randn(4, 3, requires_grad=True)
    state.loss = F.cross_entropy(state.outputs, y)
    run(algorithm, state, Event.AFTER_LOSS)
    own, index = algorithm._own_weight, algorithm._index
    expected = own * F.cross_entropy(state.outputs, y) + (1 - own) * F.cross_entropy(state.outputs, y[index])
    torch.testing.assert_close(state.loss, expected)
    assert state.batch[1] is y


def test_soft_targets_and_interpolated_losses_train_alike():
    results = []
    for interpolate in (False, True):
        trainer = conv_trainer(MixUp(0.5, interpolate_loss=interpolate))
        history = train(trainer, image_data())
        results.append(
            (
                history.get_metric_values("train_loss_epoch"),
                torch.nn.utils.parameters_to_vector(trainer.model.parameters()),
            )
        )
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)


def test_the_tracked_loss_is_the_interpolated_one():
    trained = Watch(Event.BEFORE_BACKWARD, lambda state: state.loss.item())
    shown = Watch(Event.STEP_OUTPUT, lambda state: state.batch_output["loss"].item())
    history = train(
        conv_trainer(MixUp(1.0, interpolate_loss=True), callbacks=[trained, shown]), image_data(), num_epochs=1
    )
    assert shown.values == trained.values
    assert history.get_latest_metric("train_loss_epoch") == pytest.approx(sum(trained.values) / 4, rel=1e-6)


@pytest.mark.parametrize("interpolate", [False, True])
def test_label_smoothing_beside_mixup_smooths_both_targets(interpolate):
    losses = []
    for order in (0, 1):
        mix, smooth = MixUp(0.6, interpolate_loss=interpolate), LabelSmoothing(0.2)
        trainer = conv_trainer(*((mix, smooth) if order else (smooth, mix)))
        losses.append(train(trainer, image_data(), num_epochs=1).get_latest_metric("train_loss_epoch"))
    # The reference: a loss that smooths by itself, on interpolated losses.
    reference = conv_trainer(MixUp(0.6, interpolate_loss=True), loss=nn.CrossEntropyLoss(label_smoothing=0.2))
    expected = train(reference, image_data(), num_epochs=1).get_latest_metric("train_loss_epoch")
    assert losses == pytest.approx([expected, expected], rel=1e-5)


def test_train_metrics_count_true_labels():
    seen = []

    def keep(outputs, targets):
        seen.append(targets.dtype)
        return (outputs.argmax(-1) == targets).float().mean()

    train(conv_trainer(MixUp(), train_metrics={"accuracy": keep}), image_data(), num_epochs=1)
    assert set(seen) == {torch.int64}


def test_a_loss_of_class_indices_only_is_refused_by_name():
    def nll(outputs, targets):
        return F.nll_loss(outputs.log_softmax(1), targets)

    with pytest.raises(PluginConflictError, match="MixUp and the loss nll.*interpolate_loss=True"):
        train(conv_trainer(MixUp(), loss=nll), image_data())
    train(conv_trainer(MixUp(interpolate_loss=True), loss=nll), image_data(), num_epochs=1)


def test_microbatches_mix_within_themselves():
    history = train(conv_trainer(MixUp(0.5)), image_data(), microbatch_size=3, num_epochs=1)
    assert torch.isfinite(torch.tensor(history.get_latest_metric("train_loss_epoch")))


def test_outputs_without_logits_are_named():
    state = make_state((torch.randn(2, 3), torch.tensor([0, 1])), model=ConvNet(), loss_fn=nn.CrossEntropyLoss())
    run(MixUp(), state, Event.BEFORE_FORWARD)
    state.outputs = {"features": torch.randn(2, 3)}
    with pytest.raises(TypeError, match="logits"):
        run(MixUp(), state, Event.BEFORE_LOSS)
