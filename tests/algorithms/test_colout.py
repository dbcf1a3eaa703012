"""ColOut: rows and columns are dropped, in order."""

import pytest
import torch
from torch.utils.data import Dataset

from drivetrain.algorithms.colout import ColOut, ColOutTransform, colout_batch
from drivetrain.core.event import Event
from tests.algorithms.tasks import conv_trainer, image_data, make_state, run, train


def numbered(rows, columns):
    """Return an image whose pixels say where they were."""
    return torch.arange(rows).view(1, 1, rows, 1) * 100 + torch.arange(columns).view(1, 1, 1, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_left_is_a_sorted_subset_of_rows_and_columns(dtype):
    x = numbered(10, 20).repeat(3, 2, 1, 1).to(dtype)
    small = colout_batch(x, 0.15, 0.3, generator=torch.Generator().manual_seed(0))
    assert small.shape == (3, 2, int(0.85 * 10), int(0.7 * 20)) and small.dtype == dtype
    rows, columns = small[0, 0, :, 0].long() // 100, small[0, 0, 0].long() % 100
    assert (rows.diff() > 0).all() and (columns.diff() >= 0).all()
    assert torch.equal(small, x[:, :, rows][..., columns]) or dtype is torch.bfloat16


def test_rows_are_drawn_first():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(10, generator=generator)[:8].sort().values
    columns = torch.randperm(10, generator=generator)[:8].sort().values
    x = numbered(10, 10)
    small = colout_batch(x, 0.2, 0.2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(small, x[:, :, rows][..., columns])


def test_targets_follow_only_where_they_are_images():
    x, mask, labels = torch.randn(2, 3, 10, 10), torch.randint(0, 3, (2, 10, 10)), torch.tensor([0, 1])
    small, small_mask = colout_batch((x, mask))
    assert small_mask.shape == (2, 8, 8) and small.shape == (2, 3, 8, 8)
    assert colout_batch((x, labels))[1] is labels
    assert colout_batch((x, mask), resize_target=False)[1] is mask


def test_pil_images_stay_pil_images():
    image_module = pytest.importorskip("PIL.Image")
    image, mask = image_module.new("RGB", (20, 10)), image_module.new("L", (20, 10))
    small, small_mask = colout_batch((image, mask), 0.2, 0.1)
    assert small.size == small_mask.size == (18, 8) and small.mode == "RGB"
    assert ColOutTransform(0.5, 0.5)(image).size == (10, 5)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"p_row": -0.1}, ValueError, "p_row"),
        ({"p_col": 1.1}, ValueError, "p_col"),
        ({"resize_target": "yes"}, ValueError, "'auto'"),
        ({"resize_target": True, "batch": False}, NotImplementedError, "batch=True"),
    ],
)
def test_bad_settings_are_refused(arguments, kind, text):
    with pytest.raises(kind, match=text):
        ColOut(**arguments)


def test_a_whole_batch_loses_the_same_rows():
    batch = run(
        ColOut(0.25, 0.25), make_state([numbered(8, 8).repeat(4, 1, 1, 1), torch.arange(4)]), Event.AFTER_DATALOADER
    )
    assert batch[0].shape == (4, 1, 6, 6) and torch.equal(batch[0][0], batch[0][3])


class Pictures(Dataset):
    def __init__(self, transform=None):
        self.transform, self.data = transform, image_data()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return (image if self.transform is None else self.transform(image)), label


def test_single_images_lose_their_own_rows_inside_the_dataset():
    data = Pictures()
    trainer = conv_trainer(ColOut(0.25, 0.25, batch=False))
    assert trainer._algorithms[0].events == {Event.FIT_START}
    train(trainer, data, num_epochs=1)
    assert trainer.state.train_dataloader.dataset[0][0].shape == (3, 6, 6)
    assert data.transform is None and data[0][0].shape == (3, 8, 8)


def test_an_image_with_a_palette_keeps_its_colors():
    Image = pytest.importorskip("PIL.Image")
    image = Image.new("P", (4, 3))
    image.putpalette([0, 0, 0, 250, 10, 20, 30, 240, 50])
    image.putdata([0, 1, 2, 1] * 3)
    whole = colout_batch(image, 0.0, 0.0)
    assert whole.mode == "P" and whole.tobytes() == image.tobytes()
    assert whole.convert("RGB").tobytes() == image.convert("RGB").tobytes()
