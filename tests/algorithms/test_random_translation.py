"""Images move by whole pixels and are reflected at their edges."""

import pytest
import torch
from torch.nn import functional as F

from drivetrain.algorithms.alternating_flip import AlternatingFlip
from drivetrain.algorithms.random_translation import RandomTranslation, translate, translate_batch
from drivetrain.core.errors import NotIntendedUseWarning
from drivetrain.core.event import Event
from tests.algorithms.tasks import Watch, conv_trainer, image_data, make_state, run, train


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moving_is_padding_by_reflection_and_cropping(layout):
    x = torch.rand(25, 3, 7, 9).to(memory_format=layout)
    down, right = (torch.arange(25) // 5 - 2), (torch.arange(25) % 5 - 2)
    padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
    expected = torch.stack(
        [image[:, 2 - d : 9 - d, 2 - r : 11 - r] for image, d, r in zip(padded, down.tolist(), right.tolist())]
    )
    moved = translate(x, down, right)
    assert torch.equal(moved, expected) and moved.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_shifts_are_those_of_the_generator_and_cover_the_range(dtype):
    x = torch.zeros(400, 1, 9, 9, dtype=dtype)
    x[:, :, 4, 4] = 1  # a point in the middle: its place tells the shift
    moved = translate_batch(x, 2, generator=torch.Generator().manual_seed(3))
    places = {(int(row) - 4, int(column) - 4) for _, _, row, column in moved.nonzero()}
    assert places == {(d, r) for d in range(-2, 3) for r in range(-2, 3)} and moved.dtype == dtype
    assert torch.equal(moved, translate_batch(x, 2, generator=torch.Generator().manual_seed(3)))


def test_a_run_trains_on_moved_images_and_repeats_itself():
    runs = []
    for _ in range(2):
        seen = Watch(Event.BATCH_START, lambda state: state.batch[0].clone())
        train(
            conv_trainer(RandomTranslation(1), callbacks=[seen]),
            image_data(),
            train_dataloader_kwargs={"shuffle": False},
        )
        runs.append(torch.cat(seen.values))
    assert torch.equal(*runs)
    original, moved = image_data().tensors[0], runs[0][:24]
    assert 10 < sum(not torch.equal(a, b) for a, b in zip(original, moved)) <= 24


def test_several_inputs_are_moved_alike():
    x = torch.randn(4, 3, 8, 8)
    first, second = translate_batch([x, x], 3)
    assert torch.equal(first, second) and not torch.equal(first, x)


def test_masks_are_moved_with_their_images_if_named():
    x = torch.rand(6, 1, 7, 9)
    moved, mask = translate_batch([x, x[:, 0].mul(9).long()], 3)
    assert torch.equal(moved[:, 0].mul(9).long(), mask) and not torch.equal(moved, x)


@pytest.mark.parametrize("make", [RandomTranslation, AlternatingFlip])
def test_masks_that_stay_behind_are_reported(make):
    x, mask = torch.rand(4, 3, 8, 8), torch.randint(0, 3, (4, 8, 8))
    state = make_state([x, mask])
    state.sample_index = torch.arange(4)
    with pytest.warns(NotIntendedUseWarning, match=r"\(4, 8, 8\).*input_key=\[0, 1\]"):
        run(make(), state, Event.AFTER_DATALOADER)
    state.batch = [x, mask]
    run(make(input_key=[0, 1]), state, Event.AFTER_DATALOADER)
    assert not torch.equal(state.batch[1], mask)


def test_a_shift_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match="sides above 8"):
        translate_batch(torch.zeros(2, 3, 8, 8), 8)
    with pytest.raises(ValueError, match="pixels=0"):
        RandomTranslation(0)
