"""The first convolution is whitened from the training data before the first step."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from drivetrain.algorithms.device_resident import DeviceResidentData
from drivetrain.algorithms.whitening import Whitening
from drivetrain.module.convolutions import whitening_kernel
from drivetrain.optim import ConstantLr
from drivetrain.train.trainer import Trainer


def data(rows=40):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 3, 6, 6, generator=generator), torch.arange(rows) % 3)


def make(*algorithms, optimizer=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 2), nn.ReLU(), nn.Conv2d(24, 4, 2), nn.Flatten(), nn.Linear(64, 3))
    optimizer = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=algorithms, seed=1)


@pytest.mark.parametrize("others", [(), (DeviceResidentData(),)])
def test_the_first_convolution_comes_from_images_all_over_the_data(others):
    trainer, images = make(Whitening(num_images=20), *others), data()
    trainer.train(images, num_epochs=1, per_device_batch_size=8)
    expected = whitening_kernel(images.tensors[0][::2], (2, 2))
    weight = trainer.get_model()[0].weight
    assert torch.allclose(weight, torch.cat([expected, -expected]), atol=1e-5) and not weight.requires_grad
    assert trainer.get_model()[0].bias.any()  # trained


def test_data_without_columns_gives_the_same():
    class Images(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return data()[index]

    weights = []
    for dataset in (data(), Images()):
        trainer = make(Whitening(num_images=30))
        trainer.train(dataset, num_epochs=1, per_device_batch_size=8, train_dataloader_kwargs={"num_workers": 0})
        weights.append(trainer.get_model()[0].weight)
    assert torch.equal(*weights)


def test_units_of_an_optim_set_leave_the_frozen_weight_alone():
    def units(model):
        return ConstantLr("SGD", {"lr": 0.1, "weight_decay": 0.1}, model)

    kernel = whitening_kernel(data().tensors[0], (2, 2))
    trainer = make(Whitening(), optimizer=units)
    trainer.train(data(), num_epochs=1, per_device_batch_size=8)
    assert torch.allclose(trainer.get_model()[0].weight[:12], kernel, atol=1e-5)


def test_a_begun_run_keeps_its_filters(tmp_path):
    trainer = make(Whitening())
    trainer.train(data(), num_epochs=1, per_device_batch_size=8, checkpoint_dir=tmp_path)
    before = trainer.get_model()[0].weight.clone()
    other = make(Whitening())
    other.train(
        TensorDataset(data().tensors[0] * 3, data().tensors[1]),
        num_epochs=2,
        per_device_batch_size=8,
        checkpoint_dir=tmp_path,
        resume_from="auto",
    )
    assert torch.equal(other.get_model()[0].weight, before)


def test_names_are_checked_when_the_trainer_is_built():
    with pytest.raises(ValueError, match="'1'. Valid: 0, 2"):
        make(Whitening(layer="1"))
    with pytest.raises(ValueError, match="no 2-D convolution"):
        Trainer(nn.Linear(2, 2), nn.MSELoss(), None, callbacks=(), algorithms=[Whitening()])
