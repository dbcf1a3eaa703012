"""Resolution: small training images, larger evaluation crops."""

import pytest
import torch
from torch.nn import functional as F

from drivetrain.algorithms.progressive_resizing import ProgressiveResizing
from drivetrain.algorithms.resolution import Resolution
from drivetrain.core.errors import PluginConflictError
from drivetrain.core.event import Event
from tests.algorithms.tasks import Watch, conv_trainer, image_data, make_state, run, train


def test_training_images_are_resized_bilinear_and_antialiased():
    x = torch.rand(2, 3, 20, 20)
    batch = run(Resolution(12, 30, 24), make_state([x, None]), Event.AFTER_DATALOADER)
    torch.testing.assert_close(
        batch[0], F.interpolate(x, size=(12, 12), mode="bilinear", align_corners=False, antialias=True)
    )


def test_evaluation_takes_the_centre_of_larger_images():
    x = torch.rand(2, 3, 20, 40)
    batch = run(Resolution(12, 30, 24), make_state([x, None]), Event.EVAL_BATCH_START)
    whole = F.interpolate(x, size=(30, 60), mode="bilinear", align_corners=False, antialias=True)
    torch.testing.assert_close(batch[0], whole[..., 3:27, 18:42])


def test_long_images_are_cropped_at_random():
    x = torch.rand(1, 3, 12, 48)
    windows = {
        run(Resolution(12), make_state([x, None], seed=seed), Event.AFTER_DATALOADER)[0].numpy().tobytes()
        for seed in range(20)
    }
    assert len(windows) > 5


def test_several_inputs_are_cropped_alike():
    x = torch.rand(2, 3, 12, 48)
    for seed in range(5):
        batch = run(Resolution(12, input_key=[0, 1]), make_state([x, x.clone()], seed=seed), Event.AFTER_DATALOADER)
        assert torch.equal(batch[0], batch[1])


def test_images_without_channels_and_videos_keep_their_dimensions():
    x = torch.rand(2, 3, 4, 20, 20)
    for part in (x, x[:, 0, 0], x[:, :, 0]):
        small = run(Resolution(8), make_state([part, None]), Event.AFTER_DATALOADER)[0]
        assert small.shape == (*part.shape[:-2], 8, 8)
        single = run(Resolution(8), make_state([x[:, :, 0], None]), Event.AFTER_DATALOADER)[0]
        torch.testing.assert_close(
            small[:, 0, 0] if part is x else small[:, 0] if part.ndim == 4 else small, single[:, 0]
        )


def test_a_schedule_changes_the_size_at_its_moments():
    sizes = Watch(Event.BATCH_START, lambda state: state.batch[0].shape[-1])
    algorithm = Resolution(eval_resize=10, eval_crop=8, schedule=[("0dur", 4), ("0.5dur", 6), ("7ba", 8)])
    trainer = conv_trainer(algorithm, callbacks=[sizes])
    train(trainer, image_data(24), eval_dataset=image_data(6), num_epochs=2)
    assert sizes.values == [4] * 4 + [6] * 3 + [8] and algorithm.count_shapes() == 3


def test_two_who_decide_the_size_are_refused():
    with pytest.raises(PluginConflictError, match="ProgressiveResizing"):
        conv_trainer(Resolution(), ProgressiveResizing())
    with pytest.raises(ValueError, match="must fit"):
        Resolution(eval_resize=200, eval_crop=224)
