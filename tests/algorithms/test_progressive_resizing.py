"""Progressive resizing: the course of the scale, and what happens to images and targets."""

import pytest
import torch
from torch.nn import functional as F

from drivetrain.algorithms.progressive_resizing import ProgressiveResizing, resize_batch
from drivetrain.core.event import Event
from tests.algorithms.tasks import Log, conv_trainer, image_data, make_state, run, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resizing_takes_the_nearest_pixels(dtype):
    x, y = torch.randn(2, 3, 16, 12).to(dtype), torch.tensor([0, 1])
    small, same = resize_batch(x, y, 0.5)
    expected = F.interpolate(x, scale_factor=0.5, mode="nearest", recompute_scale_factor=False)
    assert torch.equal(small, expected) and same is y and small.dtype == dtype


def test_cropping_takes_one_window():
    x = torch.arange(2 * 100).view(2, 1, 10, 10)
    places = set()
    for seed in range(60):
        window, _ = resize_batch(x, None, 0.8, "crop", generator=torch.Generator().manual_seed(seed))
        assert window.shape == (2, 1, 8, 8)
        top, left = divmod(window[0, 0, 0, 0].item(), 10)
        places.add((top, left))
        assert torch.equal(window, x[:, :, top : top + 8, left : left + 8])
    assert places == {(top, left) for top in range(3) for left in range(3)}  # both ends are possible


def test_integer_targets_are_resized_with_the_images():
    x, y = torch.randn(2, 3, 8, 8), torch.randint(0, 200, (2, 8, 8))
    _, small = resize_batch(x, y, 0.5, resize_targets=True)
    assert small.dtype == torch.int64 and torch.equal(small, y[:, ::2, ::2])


def test_cropped_targets_of_another_size_show_the_same_place():
    x = torch.arange(64).view(1, 1, 8, 8)
    y = F.interpolate(x.float(), scale_factor=2, mode="nearest").long().squeeze(1)
    window, target = resize_batch(x, y, 0.5, "crop", resize_targets=True, generator=torch.Generator().manual_seed(3))
    assert target.shape == (1, 8, 8) and torch.equal(target[:, ::2, ::2], window[:, 0])


def test_a_factor_of_one_changes_nothing():
    x, y = torch.randn(1, 1, 4, 4), torch.tensor([0])
    assert resize_batch(x, y, 1.0)[0] is x


def test_one_pixel_rows_never_vanish():
    assert resize_batch(torch.randn(1, 1, 1, 8), None, 0.5)[0].shape == (1, 1, 1, 4)
    assert resize_batch(torch.randn(1, 1, 1, 8), None, 0.5, "crop")[0].shape == (1, 1, 1, 4)


@pytest.mark.parametrize(
    ("elapsed", "scale"), [(0, 0.5), (0.49, 0.5), (0.5, 0.5), (0.65, 0.75), (0.8, 1.0), (1.0, 1.0)]
)
def test_the_course_of_the_scale(elapsed, scale):
    assert ProgressiveResizing().scale_at(elapsed) == pytest.approx(scale)


def test_delay_and_finetuning_may_fill_the_run():
    algorithm = ProgressiveResizing(delay_fraction=0.7, finetune_fraction=0.3)
    assert [algorithm.scale_at(moment) for moment in (0.0, 0.69, 0.7, 1.0)] == [0.5, 0.5, 1.0, 1.0]
    train(conv_trainer(ProgressiveResizing(delay_fraction=0.5, finetune_fraction=0.5)), image_data())


def test_every_width_is_exactly_a_multiple_of_the_increment():
    algorithm = ProgressiveResizing(size_increment=1)
    for width in range(3, 120):
        for scale in (0.3, 0.5, 0.68, 0.9):
            pixels = max(1, round(width * scale))
            small, _ = resize_batch(torch.zeros(1, 1, 1, width), None, algorithm.pinned(scale, width))
            assert small.shape[-1] == pixels


def test_small_images_never_become_empty():
    algorithm = ProgressiveResizing(initial_scale=0.1, size_increment=4)
    batch = run(algorithm, make_state([torch.randn(2, 1, 8, 8), torch.tensor([0, 1])]), Event.AFTER_DATALOADER)
    assert batch[0].shape == (2, 1, 4, 4)


def test_sizes_over_a_run_are_those_of_the_formula_and_logged_once_each():
    algorithm, log = ProgressiveResizing(initial_scale=0.25, size_increment=2), Log()
    state = make_state(max_duration="20ba", length=20)
    seen = []
    for _ in range(20):
        state.batch = [torch.randn(1, 1, 16, 16), torch.tensor([0])]
        seen.append(run(algorithm, state, Event.AFTER_DATALOADER, log=log)[0].shape[-1])
        state.clock.next_batch()
    expected = [round(16 * algorithm.scale_at(batch / 20) / 2) * 2 for batch in range(20)]
    assert seen == expected and seen[0] == 4 and seen[-1] == 16
    widths = [entry["progressive_resizing/width"] for entry in log.metrics]
    assert widths == sorted(set(expected)) and algorithm.count_shapes(16) == len(widths)
    assert log.metrics[0]["progressive_resizing/scale_factor"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "rezise"}, "Did you mean 'resize'"),
        ({"initial_scale": 1.5}, "initial_scale"),
        ({"finetune_fraction": -0.1}, "finetune_fraction"),
        ({"delay_fraction": 2}, "delay_fraction"),
        ({"delay_fraction": 0.7, "finetune_fraction": 0.5}, "more than the whole"),
        ({"size_increment": 0}, "size_increment"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        ProgressiveResizing(**arguments)


def test_targets_without_a_size_are_refused():
    with pytest.raises(TypeError, match="resize_targets=False"):
        train(conv_trainer(ProgressiveResizing(resize_targets=True)), image_data())


def test_large_numbers_and_the_frames_of_a_video_survive():
    numbers = torch.full((1, 4, 4), 2**53 - 1)
    video, targets = resize_batch(torch.rand(1, 3, 5, 4, 4), numbers, 0.5, resize_targets=True)
    assert video.shape == (1, 3, 5, 2, 2) and targets.unique().tolist() == [2**53 - 1]
