"""Alternating flip: both sides of every image in two epochs."""

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.algorithms.alternating_flip import AlternatingFlip, alternating_flip, hash_bits
from drivetrain.algorithms.selective_backprop import SelectiveBackprop
from drivetrain.core.event import Event
from tests.algorithms.tasks import Watch, conv_trainer, image_data, train


def splitmix64(value):
    """The reference, in Python's own integers."""
    mask = 2**64 - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_the_bit_is_that_of_splitmix64(seed):
    index = torch.cat([torch.arange(500), torch.tensor([2**40 + 7, 2**62])])
    assert hash_bits(index, seed).tolist() == [splitmix64(int(i) ^ seed) & 1 for i in index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_two_epochs_show_both_sides_of_every_image(dtype):
    x = (torch.rand(50, 3, 4, 5) * 255).to(dtype)
    index = torch.randperm(1000)[:50]
    first, second, third = (alternating_flip(x, index, epoch) for epoch in range(3))
    assert torch.equal(second, first.flip(-1)) and torch.equal(third, first) and first.dtype == dtype
    flipped = [not torch.equal(a, b) for a, b in zip(first, x)]
    assert 10 < sum(flipped) < 40


def test_the_index_must_fit_the_images():
    with pytest.raises(ValueError, match="one number for each"):
        alternating_flip(torch.zeros(3, 1, 2, 2), torch.arange(2), 0)


def test_in_a_run_each_sample_alternates_although_the_order_changes():
    data = image_data(24)

    def look(state):
        return list(zip(state.train_dataloader.sample_index.tolist(), state.batch[0].clone()))

    seen = Watch(Event.BATCH_START, look)
    train(
        conv_trainer(AlternatingFlip(), callbacks=[seen]), data, num_epochs=2, train_dataloader_kwargs={"shuffle": True}
    )
    shown = {}
    for batch in seen.values:
        for index, image in batch:
            shown.setdefault(index, []).append(image)
    assert len(shown) == 24
    for index, (first, second) in shown.items():
        assert torch.equal(first, second.flip(-1))
        assert torch.equal(first, data[index][0]) or torch.equal(second, data[index][0])


def test_it_acts_before_samples_are_selected():
    trainer = conv_trainer(SelectiveBackprop(start=0, end=1, interrupt=0), AlternatingFlip())
    assert [str(one) for one in trainer.engine.listeners(Event.AFTER_DATALOADER)] == [
        "AlternatingFlip",
        "SelectiveBackprop",
    ]
    train(trainer, image_data(), num_epochs=1)


def test_a_loader_that_does_not_know_its_samples_is_refused_before_the_first_step():
    trainer = conv_trainer(AlternatingFlip())
    with pytest.raises(ValueError, match="SmartDataLoader"):
        trainer.train(DataLoader(image_data(), batch_size=4), num_epochs=1)
    assert trainer.state.clock.batch == 0
