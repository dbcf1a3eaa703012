"""A trainer that runs where its own `accelerate.Accelerator` says."""

import json
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from drivetrain.compat.accelerate import AccelerateRuntime, recognizes
from drivetrain.core.errors import ConfigError, DrivetrainWarning, ResumeError
from drivetrain.train.accelerator import TrainerRuntime, as_runtime
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, make_trainer, train, weights


class Accelerator(SimpleNamespace):
    """As much of accelerate's as a runtime asks for."""

    __module__ = "accelerate.accelerator"

    def __init__(self, **changes):
        super().__init__(
            device=torch.device("cpu"), mixed_precision="no", scaler=None, distributed_type="NO",
            gradient_accumulation_steps=1, ddp_handler=None, sync_gradients=True, tracked=[],
        )  # fmt: skip
        self.__dict__.update(changes)

    def log(self, values):
        self.tracked.append(values)


def trainer_with(accelerator, **kwargs):
    class Mine(Trainer):
        def _create_accelerator(self):
            return accelerator

    return make_trainer(cls=Mine, **kwargs)


def test_a_trainer_runs_on_an_accelerator_of_the_users_own():
    accelerator = Accelerator()
    trainer, plain = trainer_with(accelerator), make_trainer()
    train(trainer, eval_dataset=make_data(8))
    train(plain, eval_dataset=make_data(8))
    assert all(map(torch.equal, weights(trainer.model), weights(plain.model)))
    calls = trainer._choose_calls()
    assert (calls.backward, calls.step) == (torch.Tensor.backward, trainer.run.stepper.step)  # and the loop is as short
    trainer._accelerator.log({"loss": 1.0})
    assert accelerator.tracked == [{"loss": 1.0}] and trainer._accelerator.sync_gradients
    assert trainer.runtime is trainer._accelerator and isinstance(trainer.runtime, TrainerRuntime)


def test_precision_comes_from_the_accelerator_unless_the_trainer_has_one():
    accelerator = Accelerator(mixed_precision="bf16")
    assert trainer_with(accelerator)._accelerator.precision.name == "bf16"
    assert trainer_with(accelerator, precision="no")._accelerator.precision.name == "no"


def test_settings_of_ddp_come_from_the_accelerator(monkeypatch):
    asked = {}
    monkeypatch.setattr(TrainerRuntime, "prepare_model", lambda self, model, **kwargs: asked.update(kwargs))
    handler = SimpleNamespace(to_kwargs=lambda: {"find_unused_parameters": True, "static_graph": True})
    AccelerateRuntime(Accelerator(ddp_handler=handler)).prepare_model(None, static_graph=False)
    assert asked == {"find_unused_parameters": True, "static_graph": False}


def test_settings_that_would_have_no_effect_are_refused():
    with pytest.raises(ConfigError, match="FSDP.*strategy"):
        as_runtime(Accelerator(distributed_type="FSDP"))
    with pytest.raises(ConfigError, match=r"train\(gradient_accumulation_steps=4\)"):
        as_runtime(Accelerator(gradient_accumulation_steps=4))


def test_an_accelerator_made_while_preparing_is_taken_over():
    class Mine(Trainer):
        def _prepare_model_optimizer_and_dataloaders(self):
            super()._prepare_model_optimizer_and_dataloaders()
            self._accelerator = Accelerator()

    trainer = make_trainer(cls=Mine)
    train(trainer)
    assert isinstance(trainer._accelerator, AccelerateRuntime) and trainer.runtime is trainer._accelerator


def test_a_real_accelerator_works():
    accelerate = pytest.importorskip("accelerate")
    trainer = trainer_with(accelerate.Accelerator(cpu=True))
    train(trainer, eval_dataset=make_data(8))
    plain = make_trainer()
    train(plain, eval_dataset=make_data(8))
    assert all(map(torch.equal, weights(trainer.model), weights(plain.model)))


@pytest.mark.parametrize("data", [make_data(8), DataLoader(make_data(8), batch_size=4)])
def test_loaders_say_on_which_device_they_deliver(data):
    trainer = make_trainer()
    train(trainer, eval_dataset=data, limit_eval_batches=1)
    assert trainer._eval_dataloader.device == trainer._train_dataloader.device == torch.device(trainer.device)
    assert TrainerRuntime("cpu").prepare(DataLoader(make_data(8))).device == torch.device("cpu")


STEP = torch.optim.lr_scheduler.StepLR


def scheduler_of(optimizer):
    return STEP(optimizer, 2, gamma=0.5)


@pytest.fixture
def folder(tmp_path):
    """What pytorch-accelerated leaves behind after two epochs of three batches."""
    trainer = make_trainer()
    train(trainer, num_epochs=2, create_scheduler_fn=scheduler_of)
    save_file(
        {name: tensor.contiguous() for name, tensor in trainer.model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    torch.save(trainer.optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save(trainer.scheduler.state_dict(), tmp_path / "custom_checkpoint_0.pkl")
    torch.save({"current_epoch": 3, "note": "kept"}, tmp_path / "trainer_metadata.pt")
    return tmp_path


def resume(folder, **kwargs):
    trainer = make_trainer()
    train(trainer, num_epochs=3, create_scheduler_fn=scheduler_of, resume_from=folder, **kwargs)
    return trainer


def unbroken():
    trainer = make_trainer()
    train(trainer, num_epochs=3, create_scheduler_fn=scheduler_of)
    return trainer


def test_the_run_goes_on_with_the_named_epoch_and_ends_as_if_unbroken(folder):
    whole, resumed = unbroken(), resume(folder)
    for expected, given in zip(weights(whole.model), weights(resumed.model), strict=True):
        assert torch.equal(expected, given)
    assert resumed.state.clock.epoch == 3 and resumed.state.clock.step == whole.state.clock.step
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert resumed.state.custom_entries["note"] == "kept"


def test_metadata_as_json_does_as_well(folder):
    (folder / "trainer_metadata.pt").unlink()
    (folder / "trainer_metadata.json").write_text(json.dumps({"current_epoch": 3}))
    assert resume(folder).state.clock.epoch == 3


def test_random_states_are_not_unpickled_and_that_is_said(folder):
    class Trap:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran code from a file')",)

    (folder / "random_states_0.pkl").write_bytes(pickle.dumps(Trap()))
    with pytest.warns(DrivetrainWarning, match="its random states are a pickle"):
        resume(folder)


@pytest.mark.parametrize("name", ["optimizer.bin", "trainer_metadata.pt", "custom_checkpoint_0.pkl"])
def test_a_file_with_more_than_tensors_is_refused_before_anything_changes(folder, name):
    class Trap:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran code from a file')",)

    torch.save({"current_epoch": 3, "trap": Trap()}, folder / name)
    trainer = make_trainer()
    before = weights(trainer.model)
    with pytest.raises(ResumeError, match=re.escape(name) + r"(?s:.*)cannot be read safely.*save_checkpoint"):
        train(trainer, num_epochs=3, create_scheduler_fn=scheduler_of, resume_from=folder)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer.model)))


def test_states_in_several_parts_are_refused_with_a_way_out(folder):
    (folder / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(ResumeError, match=r"several parts \(pytorch_model_fsdp_0\).*save_checkpoint"):
        resume(folder)


def test_a_folder_without_epoch_or_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "kept")
    with pytest.raises(ResumeError, match=r"holds no weights: expected model\.safetensors"):
        resume(folder)
    (folder / "kept").rename(folder / "model.safetensors")
    torch.save({"current_epoch": "three"}, folder / "trainer_metadata.pt")
    with pytest.raises(ResumeError, match="current_epoch is 'three'"):
        resume(folder)
    (folder / "trainer_metadata.pt").unlink()
    with pytest.raises(ResumeError, match="does not record the next epoch"):
        resume(folder)


def test_a_damaged_file_is_named(folder):
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ResumeError, match=r"model\.safetensors"):
        resume(folder)


def test_a_state_that_nobody_can_take_is_refused(folder):
    trainer = make_trainer()
    with pytest.raises(ValueError, match="state of the scheduler, but the Trainer has none"):
        train(trainer, num_epochs=3, resume_from=folder)


def test_our_own_folders_are_not_taken_for_them(tmp_path):
    trainer = make_trainer()
    train(trainer)
    trainer.save_training_state(tmp_path / "state")
    assert not recognizes(tmp_path / "state") and not recognizes(tmp_path / "absent")


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_the_installed_pytorch_accelerated_is_taken_up(tmp_path):
    reference = pytest.importorskip("pytorch_accelerated")
    model = make_model()
    other = reference.Trainer(
        model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), callbacks=()
    )
    other.train(
        make_data(), num_epochs=2, per_device_batch_size=8, train_dataloader_kwargs={"shuffle": False, "num_workers": 0}
    )
    other.save_training_state(tmp_path / "theirs")
    trainer = make_trainer()
    train(trainer, num_epochs=4, resume_from=tmp_path / "theirs")
    whole = make_trainer()
    train(whole, num_epochs=4)
    assert trainer.state.clock.epoch == 4
    if other.run_history.current_epoch == 3:  # it counts the next epoch
        torch.testing.assert_close(weights(trainer.model), weights(whole.model), rtol=1e-5, atol=1e-6)
