"""CutOut: zero squares, the same for the whole batch."""

import pytest
import torch

from drivetrain.algorithms.cutout import CutOut, cutout_batch
from drivetrain.core.errors import NoEffectWarning
from drivetrain.core.event import Event
from tests.algorithms.tasks import make_state, run


def holes(x):
    return x == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_one_square_of_the_right_side_for_all_images(dtype):
    x = torch.ones(3, 2, 12, 20, dtype=dtype)
    sizes = set()
    for seed in range(30):
        cut = holes(cutout_batch(x, length=0.5, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(cut, cut[:1, :1].expand_as(cut))
        rows, columns = cut[0, 0].any(1).sum().item(), cut[0, 0].any(0).sum().item()
        assert cut[0, 0].sum() == rows * columns
        sizes.add((rows, columns))
    assert max(sizes) == (6, 6)  # int(12 * 0.5), unless clipped
    assert x.all()


def test_a_signal_taken_for_images_warns():
    with pytest.warns(NoEffectWarning, match=r"CutOut changes nothing.*\(4, 2, 33\)"):
        cutout_batch(torch.zeros(4, 2, 33))


def test_a_table_among_the_images_is_refused():
    with pytest.raises(TypeError, match=r"images.*\(4, 6\)"):
        cutout_batch([torch.zeros(4, 3, 8, 8), torch.zeros(4, 6)])


def test_several_holes_cut_more():
    x = torch.ones(1, 1, 16, 16)
    one = holes(cutout_batch(x, 1, 0.25, generator=torch.Generator().manual_seed(1))).sum()
    many = holes(cutout_batch(x, 6, 0.25, generator=torch.Generator().manual_seed(1))).sum()
    assert cutout_batch(x, 0).all() and many > one > 0


def test_uniform_sampling_may_miss_the_image():
    x = torch.ones(1, 1, 8, 8)
    generator = torch.Generator().manual_seed(0)
    sums = [
        holes(cutout_batch(x, length=0.5, uniform_sampling=True, generator=generator)).sum().item() for _ in range(300)
    ]
    plain = [holes(cutout_batch(x, length=0.5, generator=generator)).sum().item() for _ in range(300)]
    assert min(sums) == 0 < min(plain) and max(sums) == max(plain) == 16


def test_pil_in_pil_out():
    image_module = pytest.importorskip("PIL.Image")
    for mode in ("RGB", "L"):
        image = image_module.new(mode, (20, 12), "white")
        cut = cutout_batch(image, length=0.5)
        assert isinstance(cut, image_module.Image) and cut.size == (20, 12) and cut.mode == mode
        assert 0 in cut.convert("L").tobytes() and 0 not in image.convert("L").tobytes()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"length": 1.5}, "length"), ({"num_holes": -1}, "num_holes"), ({"num_holes": 1.5}, "num_holes")],
)
def test_bad_settings_are_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        CutOut(**arguments)


def test_the_class_uses_its_key_and_the_states_generator():
    batch = {"image": torch.ones(2, 1, 8, 8), "y": torch.zeros(2)}
    first = run(CutOut(input_key="image"), make_state(dict(batch), seed=3), Event.AFTER_DATALOADER)
    second = run(CutOut(input_key="image"), make_state(dict(batch), seed=3), Event.AFTER_DATALOADER)
    assert torch.equal(first["image"], second["image"]) and holes(first["image"]).any()


def test_a_key_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="imgae.*image"):
        run(CutOut(input_key="imgae"), make_state({"image": torch.ones(2, 1, 8, 8)}), Event.AFTER_DATALOADER)
