"""Label smoothing: soft targets for the loss, the true object back afterwards."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.algorithms.label_smoothing import LabelSmoothing, smooth_labels
from drivetrain.core.errors import ConfigError, PluginConflictError
from drivetrain.core.event import Event
from tests.algorithms.tasks import (
    ConvNet,
    TokenData,
    conv_trainer,
    image_data,
    make_state,
    run,
    text_trainer,
    train,
    weights,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula(dtype):
    logits, y = torch.randn(4, 5).to(dtype), torch.tensor([0, 4, 2, 2])
    expected = F.one_hot(y, 5) * 0.7 + 0.3 / 5
    torch.testing.assert_close(smooth_labels(logits, y, 0.3), expected.float())
    torch.testing.assert_close(smooth_labels(logits, F.one_hot(y, 5), 0.3), expected.float())  # dense already


def test_the_class_dimension_is_the_second():
    logits, y = torch.randn(2, 4, 3, 3), torch.randint(0, 4, (2, 3, 3))
    smooth = smooth_labels(logits, y, 0.2)
    assert smooth.shape == logits.shape
    torch.testing.assert_close(smooth.sum(1), torch.ones(2, 3, 3))


def test_ignored_labels_contribute_no_loss():
    logits, y = torch.randn(3, 4), torch.tensor([1, -100, -1])
    smooth = smooth_labels(logits, y, 0.1)
    assert not smooth[1:].any()
    loss = F.cross_entropy(logits, smooth, reduction="none")
    assert loss[0] > 0 and loss[1:].tolist() == [0, 0]


def test_targets_that_fit_nothing_are_refused():
    with pytest.raises(RuntimeError, match="do not fit"):
        smooth_labels(torch.randn(4, 5), torch.zeros(4, 5, 2))


def test_it_equals_torchs_own_smoothing_and_puts_targets_back():
    logits, y = torch.randn(4, 5), torch.tensor([0, 4, 2, 2])
    state = make_state((logits, y), model=ConvNet(), outputs=logits, loss_fn=nn.CrossEntropyLoss())
    algorithm = LabelSmoothing(0.25)
    run(algorithm, state, Event.BEFORE_LOSS)
    ours = F.cross_entropy(logits, state.batch[1])
    torch.testing.assert_close(ours, F.cross_entropy(logits, y, label_smoothing=0.25))
    run(algorithm, state, Event.AFTER_LOSS)
    assert state.batch[1] is y


def test_training_equals_training_with_torchs_own_smoothing():
    ours = conv_trainer(LabelSmoothing(0.1))
    train(ours, image_data())
    theirs = conv_trainer(loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    train(theirs, image_data())
    for mine, reference in zip(weights(ours.model), weights(theirs.model)):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)


def test_evaluation_sees_true_labels():
    trainer = conv_trainer(LabelSmoothing(0.5))
    train(trainer, image_data(), eval_dataset=image_data(), num_epochs=1)
    images, labels = image_data().tensors
    trainer.model.eval()
    expected = F.cross_entropy(trainer.model(images), labels).item()
    assert trainer.run_history.get_latest_metric("eval_loss_epoch") == pytest.approx(expected, rel=1e-5)


def test_several_targets_beside_several_outputs():
    outputs = [torch.randn(2, 3), torch.randn(2, 4)]
    state = make_state(
        (torch.zeros(2), torch.tensor([0, 1]), torch.tensor([3, 0])),
        model=ConvNet(),
        outputs=outputs,
        loss_fn=lambda o, t: o[0],
    )
    batch = run(LabelSmoothing(0.1, target_key=[1, 2]), state, Event.BEFORE_LOSS)
    assert batch[1].shape == (2, 3) and batch[2].shape == (2, 4)


@pytest.mark.parametrize("key", ["labels", 1])  # a batch of this model has no entry 1, which is the default
def test_a_loss_inside_the_model_is_out_of_reach(key):
    with pytest.raises(ConfigError, match="computes its loss itself"):
        train(text_trainer(LabelSmoothing(target_key=key)), TokenData())


def test_a_loss_of_indices_only_is_refused():
    with pytest.raises(PluginConflictError, match="LabelSmoothing and the loss"):
        train(conv_trainer(LabelSmoothing(), loss=nn.MultiMarginLoss()), image_data())


@pytest.mark.parametrize(
    ("logits", "targets", "text"),
    [
        (torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.long), r"classes last: transpose\(1, -1\)"),
        (torch.zeros(2, 1), torch.zeros(2), "float32 numbers, not class indices"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), "do not fit"),
    ],
)
def test_targets_that_are_not_classes_of_the_outputs_are_explained(logits, targets, text):
    with pytest.raises(RuntimeError, match=text):
        smooth_labels(logits, targets)


def test_the_reason_why_a_loss_rejects_soft_targets_is_its_own():
    with pytest.raises(PluginConflictError, match=r"rejects them: ignore_index is not supported.*marked by -100"):
        train(conv_trainer(LabelSmoothing(), loss=nn.CrossEntropyLoss(ignore_index=1)), image_data())


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, None])
def test_a_bad_rate_is_refused(smoothing):
    with pytest.raises(ValueError, match="smoothing"):
        LabelSmoothing(smoothing)


def test_labels_beyond_the_classes_get_no_weight():
    y = torch.tensor([2, 255], dtype=torch.uint8)
    assert smooth_labels(torch.zeros(2, 3), y, 0.3).sum(1).tolist() == pytest.approx([1.0, 0.0])
