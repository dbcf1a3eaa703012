"""Device-resident data: the same batches, from another place."""

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.algorithms.device_resident import DeviceResidentData
from drivetrain.algorithms.randaugment import RandAugment
from drivetrain.core.errors import PluginConflictError
from tests.algorithms.tasks import Documents, conv_trainer, image_data, same, train, weights


def test_training_is_the_same_with_resident_data():
    results = []
    for algorithms in ((), (DeviceResidentData(),)):
        trainer = conv_trainer(*algorithms)
        train(trainer, image_data(), train_dataloader_kwargs={"shuffle": True})
        results.append(weights(trainer.model))
    assert same(*results)


def test_floats_can_be_stored_smaller():
    from drivetrain.core.event import Event
    from tests.algorithms.tasks import Watch

    seen = Watch(Event.AFTER_DATALOADER, lambda state: (state.batch[0].dtype, state.batch[1].dtype))
    trainer = conv_trainer(DeviceResidentData(dtype="bfloat16"), callbacks=[seen], precision="bf16-true")
    train(trainer, image_data(), num_epochs=1)
    assert set(seen.values) == {(torch.bfloat16, torch.int64)}


def test_what_cannot_be_resident_is_refused():
    with pytest.raises(ValueError, match="SmartDataLoader"):
        conv_trainer(DeviceResidentData()).train(DataLoader(image_data(), batch_size=4), num_epochs=1)
    with pytest.raises(ValueError, match="tensors"):
        train(conv_trainer(DeviceResidentData()), Documents())
    with pytest.raises(PluginConflictError, match="DeviceResidentData and RandAugment"):
        conv_trainer(DeviceResidentData(), RandAugment())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"max_fraction": 0}, "max_fraction"), ({"max_fraction": 2}, "max_fraction"), ({"dtype": "bfloat"}, "bfloat16")],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        DeviceResidentData(**arguments)
