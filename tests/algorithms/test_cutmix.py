"""CutMix: a box of another image, and targets by area."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.algorithms.cutmix import CutMix, cutmix, cutmix_batch
from drivetrain.algorithms.mixup import MixUp
from drivetrain.core.errors import NoEffectWarning, PluginConflictError
from drivetrain.core.event import Event
from drivetrain.core.one_of import OneOf
from tests.algorithms.tasks import ConvNet, conv_trainer, image_data, make_state, run, train

INDEX = torch.tensor([1, 2, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_formula_with_a_given_box(dtype):
    x, y = (torch.rand(3, 2, 6, 8) * 255).to(dtype), torch.tensor([0, 1, 2])
    before = x.clone()
    mixed, other, area, bbox = cutmix_batch(x, y, bbox=(1, 2, 4, 6), indices=INDEX)
    expected = x.clone()
    expected[:, :, 1:4, 2:6] = x[INDEX][:, :, 1:4, 2:6]
    assert torch.equal(mixed, expected) and mixed.dtype == dtype and bbox == (1, 2, 4, 6)
    assert area == pytest.approx(1 - 12 / 48) and other.tolist() == [1, 2, 0]
    assert torch.equal(x, before)


def test_length_one_half_cuts_a_box_of_half_the_side():
    x, y = torch.zeros(2, 1, 32, 32), torch.tensor([0, 1])
    sides = set()
    for seed in range(40):
        *_, (top, left, bottom, right) = cutmix_batch(x, y, length=0.5, generator=torch.Generator().manual_seed(seed))
        sides.add((bottom - top, right - left))
    assert max(sides) == (16, 16)  # others were clipped at the border


def test_boxes_stay_inside_and_area_is_what_is_left():
    x, y = torch.zeros(2, 1, 9, 13), torch.tensor([0, 1])
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        mixed, _, area, (top, left, bottom, right) = cutmix_batch(
            x + torch.tensor([0.0, 1.0]).view(2, 1, 1, 1),
            y,
            indices=torch.tensor([1, 0]),
            uniform_sampling=seed % 2 == 0,
            generator=generator,
        )
        assert 0 <= top <= bottom <= 9 and 0 <= left <= right <= 13
        assert area == pytest.approx(1 - mixed[0].mean().item(), abs=1e-6)


def test_uniform_sampling_covers_all_pixels_equally_often():
    x, y = torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
    covered = {True: torch.zeros(8, 8), False: torch.zeros(8, 8)}
    for uniform, counts in covered.items():
        generator = torch.Generator().manual_seed(0)
        for _ in range(3000):
            *_, (top, left, bottom, right) = cutmix_batch(
                x, y, length=0.5, uniform_sampling=uniform, generator=generator
            )
            counts[top:bottom, left:right] += 1
    spread = {uniform: (counts.max() / counts.min()).item() for uniform, counts in covered.items()}
    assert spread[True] < 1.4 < spread[False]


def test_alpha_zero_does_not_mix():
    x, y = torch.randn(3, 1, 4, 4), torch.arange(3)
    mixed, _, area, bbox = cutmix_batch(x, y, alpha=0)
    assert torch.equal(mixed, x) and area == 1 and bbox == (0, 0, 0, 0)


def test_box_and_length_together_are_refused():
    with pytest.raises(ValueError, match="bbox.*length"):
        cutmix_batch(torch.zeros(2, 1, 4, 4), torch.arange(2), length=0.5, bbox=(0, 0, 1, 1))
    with pytest.raises(ValueError, match="length=1.5"):
        cutmix_batch(torch.zeros(2, 1, 4, 4), torch.arange(2), length=1.5)


def test_the_short_form_returns_images_and_soft_targets():
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    mixed, soft = cutmix(x, y, alpha=1, num_classes=3, generator=torch.Generator().manual_seed(2))
    again, other, area, _ = cutmix_batch(x, y, alpha=1, generator=torch.Generator().manual_seed(2))
    assert torch.equal(mixed, again)
    torch.testing.assert_close(soft, F.one_hot(y, 3) * area + F.one_hot(other, 3) * (1 - area))


def test_soft_targets_by_area_with_ignored_labels():
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, -1, 2])
    state = make_state([x, y], model=ConvNet(), loss_fn=nn.CrossEntropyLoss(), outputs=torch.randn(4, 3))
    algorithm = CutMix()
    run(algorithm, state, Event.BEFORE_FORWARD, Event.BEFORE_LOSS)
    own, index, dense = algorithm._own_weight, algorithm._index, torch.eye(4, 3)[[0, 1, 3, 2]]
    torch.testing.assert_close(state.batch[1], own * dense + (1 - own) * dense[index])
    run(algorithm, state, Event.AFTER_LOSS)
    assert state.batch[1] is y


def test_segmentation_targets_are_pasted_on_a_copy():
    x, y = torch.randn(3, 2, 8, 8), torch.randint(0, 3, (3, 8, 8))
    before = y.clone()
    state = make_state((x, y), model=ConvNet(), loss_fn=nn.CrossEntropyLoss(), outputs=torch.randn(3, 3, 8, 8))
    algorithm = CutMix()
    run(algorithm, state, Event.BEFORE_FORWARD, Event.BEFORE_LOSS)
    (top, left, bottom, right), index = algorithm._bbox, algorithm._index
    expected = before.clone()
    expected[:, top:bottom, left:right] = before[index][:, top:bottom, left:right]
    assert torch.equal(state.batch[1], expected) and torch.equal(y, before)
    with pytest.raises(ValueError, match="interpolate_loss"):
        run(CutMix(interpolate_loss=True), make_state((x, y), loss_fn=nn.CrossEntropyLoss()), Event.BEFORE_FORWARD)


def test_masks_among_several_targets_are_pasted_and_labels_mixed():
    x, mask, label = torch.randn(3, 2, 8, 8), torch.randint(0, 3, (3, 8, 8)), torch.tensor([0, 1, 2])
    outputs = [torch.randn(3, 3, 8, 8), torch.randn(3, 3)]
    state = make_state((x, mask, label), model=ConvNet(), loss_fn=nn.CrossEntropyLoss(), outputs=outputs)
    algorithm = CutMix(target_key=[1, 2])
    run(algorithm, state, Event.BEFORE_FORWARD, Event.BEFORE_LOSS)
    (top, left, bottom, right), index, own = algorithm._bbox, algorithm._index, algorithm._own_weight
    expected, dense = mask.clone(), torch.eye(3)
    expected[:, top:bottom, left:right] = mask[index][:, top:bottom, left:right]
    assert torch.equal(state.batch[1], expected)
    torch.testing.assert_close(state.batch[2], own * dense + (1 - own) * dense[index])
    both = CutMix(interpolate_loss=True, target_key=[1, 2])
    with pytest.raises(ValueError, match="interpolate_loss"):
        run(both, make_state((x, mask, label), loss_fn=nn.CrossEntropyLoss()), Event.BEFORE_FORWARD)


def test_a_signal_taken_for_images_warns():
    with pytest.warns(NoEffectWarning, match=r"CutMix changes nothing.*\(4, 2, 33\)"):
        cutmix_batch(torch.zeros(4, 2, 33), torch.arange(4), alpha=1.0)


def test_images_of_two_sizes_have_no_common_box():
    with pytest.raises(TypeError, match=r"\(2, 3, 8, 8\) and \(2, 3, 4, 4\)"):
        cutmix_batch([torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 4, 4)], torch.arange(2))


def test_inputs_that_are_no_images_are_refused():
    with pytest.raises(TypeError, match=r"images.*\(4, 6\)"):
        train(conv_trainer(CutMix(input_key=[0])), [(torch.zeros(6), 0)] * 4, per_device_batch_size=4)


def test_mixup_beside_cutmix_is_refused_and_one_of_is_the_way_out():
    with pytest.raises(PluginConflictError, match=r"MixUp and CutMix.*OneOf"):
        conv_trainer(MixUp(), CutMix())
    train(conv_trainer(OneOf(MixUp(0.2), CutMix(1.0))), image_data(), num_epochs=1)


def test_two_interpolated_losses_are_refused_outside_one_of():
    class Other(MixUp):
        conflicts = ()

    class Another(CutMix):
        conflicts = ()

    with pytest.raises(PluginConflictError, match="interpolate"):
        conv_trainer(Other(interpolate_loss=True), Another(interpolate_loss=True))
