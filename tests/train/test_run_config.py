"""The facts of a run."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from drivetrain.train.settings import TrainerRunConfig, count_update_steps


def make_config(**changes):
    values = {
        "num_epochs": 300,
        "train_per_device_batch_size": 8,
        "train_dl_kwargs": {"shuffle": True},
        "eval_per_device_batch_size": None,
        "eval_dl_kwargs": None,
        "gradient_accumulation_steps": 1,
        "gradient_clip_value": None,
        "train_total_batch_size": 32,
        "eval_total_batch_size": None,
        "num_update_steps_per_epoch": 80,
        "num_local_update_steps_per_epoch": 20,
        "max_num_train_steps": 24001,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "is_distributed": True,
        "mixed_precision": "no",
        "num_processes": 4,
    }
    return TrainerRunConfig(**{**values, **changes})


def test_update_steps_are_counted_over_all_processes_and_on_each():
    assert count_update_steps(20, num_processes=4, gradient_accumulation_steps=1) == (80, 20)
    assert count_update_steps(5, num_processes=1, gradient_accumulation_steps=4) == (2, 2)
    assert count_update_steps(5, num_processes=3, gradient_accumulation_steps=4) == (4, 2)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        make_config().num_epochs = 3


def test_new_fields_have_defaults():
    config = make_config()
    assert (config.gradient_clip_norm, config.max_duration, config.microbatch_size, config.seed) == (None,) * 4


def test_to_dict_works_without_an_evaluation_loader_and_with_a_generator():
    generator = torch.Generator()
    config = make_config(train_dl_kwargs={"generator": generator, "sampler": [1, 2]})
    made = config.to_dict()
    assert made["train_dl_kwargs"]["generator"] is generator
    assert made["eval_dl_kwargs"] is None


def test_to_dict_gives_copies_so_that_the_configuration_stays_as_it_is():
    config = make_config(train_dl_kwargs={"sampler": object(), "nested": {"a": [1]}})
    made = config.to_dict()
    made["train_dl_kwargs"].pop("sampler")
    made["train_dl_kwargs"]["nested"]["a"].append(2)
    assert set(config.train_dl_kwargs) == {"sampler", "nested"}
    assert config.train_dl_kwargs["nested"] == {"a": [1]}
