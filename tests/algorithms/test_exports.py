"""What can be imported from where, and what importing loads."""

import importlib
import inspect
import subprocess
import sys

import pytest

import drivetrain.algorithms
import drivetrain.functional
from drivetrain.algorithms import registry


def public(table):
    return {entry.partition("=")[0] for names in table.values() for entry in names}


def test_every_listed_name_resolves():
    for name in public(registry.ALGORITHMS) | public(registry.PARTS) | {"OneOf", "NoEffectWarning"}:
        assert isinstance(getattr(drivetrain.algorithms, name), type) and name in dir(drivetrain.algorithms)
    for name in public(registry.FUNCTIONS):
        assert callable(getattr(drivetrain.functional, name)) and name in dir(drivetrain.functional)


def test_no_class_is_forgotten():
    from drivetrain.core.plugin import Algorithm

    listed = public(registry.ALGORITHMS)
    for module in registry.ALGORITHMS:
        for name, value in vars(importlib.import_module(f"drivetrain.algorithms.{module}")).items():
            if inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__.endswith(f".{module}"):
                assert name in listed or name.startswith("_"), f"{module}.{name} is not in the table"


DEFAULTS = {
    "AugMix": {"severity": 3, "depth": -1, "width": 3, "alpha": 1.0, "augmentation_set": "all"},
    "AugmentAndMixTransform": {"severity": 3, "depth": -1, "width": 3, "alpha": 1.0, "augmentation_set": "all"},
    "ColOut": {"p_row": 0.15, "p_col": 0.15, "batch": True, "resize_target": "auto", "input_key": 0, "target_key": 1},
    "CutMix": {"alpha": 1.0, "interpolate_loss": False, "uniform_sampling": False, "input_key": 0, "target_key": 1},
    "CutOut": {"num_holes": 1, "length": 0.5, "uniform_sampling": False, "input_key": 0},
    "LabelSmoothing": {"smoothing": 0.1, "target_key": 1},
    "MixUp": {"alpha": 0.2, "interpolate_loss": False, "input_key": 0, "target_key": 1},
    "ProgressiveResizing": {
        "mode": "resize", "initial_scale": 0.5, "finetune_fraction": 0.2, "delay_fraction": 0.5, "size_increment": 4,
        "resize_targets": False, "input_key": 0, "target_key": 1,
    },
    "RandAugment": {"severity": 9, "depth": 2, "augmentation_set": "all"},
    "RandAugmentTransform": {"severity": 9, "depth": 2, "augmentation_set": "all"},
    "SelectiveBackprop": {
        "start": 0.5, "end": 0.9, "keep": 0.5, "scale_factor": 1.0, "interrupt": 2, "input_key": 0, "target_key": 1,
    },
    "SeqLengthWarmup": {
        "duration": 0.3, "min_seq_length": 8, "max_seq_length": 1024, "step_size": 8, "truncate": True,
        "preserve_end_of_sequence": False,
    },
    "AlternatingFlip": {"seed": 0, "input_key": 0},
    "DeviceResidentData": {"max_fraction": 0.5, "dtype": "keep"},
    "SequencePacking": {
        "max_length": inspect.Parameter.empty, "strategy": "best_fit", "buffer": 1000, "document_mask": True, "ignore_index": -100,
    },
    "Resolution": {"train_crop": 176, "eval_resize": 232, "eval_crop": 224, "schedule": None},
    "BatchSizeWarmup": {"initial": 0.25, "duration": "0.3dur", "lr_rule": "sqrt"},
}  # fmt: skip

FUNCTION_DEFAULTS = {
    "augmix_image": ["img", ("severity", 3), ("depth", -1), ("width", 3), ("alpha", 1.0), ("augmentation_set", "all")],
    "colout_batch": ["sample", ("p_row", 0.15), ("p_col", 0.15), ("resize_target", "auto")],
    "cutmix_batch": [
        "input", "target", ("length", None), ("alpha", 1.0), ("bbox", None), ("indices", None), ("uniform_sampling", False),
    ],
    "cutout_batch": ["input", ("num_holes", 1), ("length", 0.5), ("uniform_sampling", False)],
    "mixup_batch": ["input", "target", ("mixing", None), ("alpha", 0.2), ("indices", None)],
    "randaugment_image": ["img", ("severity", 9), ("depth", 2), ("augmentation_set", "all")],
    "resize_batch": ["input", "target", "scale_factor", ("mode", "resize"), ("resize_targets", False)],
    "select_using_loss": ["input", "target", "model", "loss_fun", ("keep", 0.5), ("scale_factor", 1)],
    "set_batch_sequence_length": ["batch", "curr_seq_len", ("truncate", True), ("preserve_end_of_sequence", False)],
    "should_selective_backprop": ["current_duration", "batch_idx", ("start", 0.5), ("end", 0.9), ("interrupt", 2)],
    "smooth_labels": ["logits", "target", ("smoothing", 0.1)],
    "alternating_flip": ["x", "index", "epoch", ("seed", 0)],
}  # fmt: skip
DETERMINISTIC = {"set_batch_sequence_length", "should_selective_backprop", "smooth_labels", "alternating_flip"}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_the_classes(name):
    parameters = inspect.signature(getattr(drivetrain.algorithms, name)).parameters
    assert {key: parameters[key].default for key in DEFAULTS[name]} == DEFAULTS[name]
    assert list(parameters)[: len(DEFAULTS[name])] == list(DEFAULTS[name])  # also by position


@pytest.mark.parametrize("name", FUNCTION_DEFAULTS)
def test_defaults_of_the_functions(name):
    parameters = list(inspect.signature(getattr(drivetrain.functional, name)).parameters.values())
    expected = [one if isinstance(one, tuple) else (one, inspect.Parameter.empty) for one in FUNCTION_DEFAULTS[name]]
    assert [(p.name, p.default) for p in parameters[: len(expected)]] == expected
    if name not in DETERMINISTIC:
        assert parameters[-1].name == "generator" and parameters[-1].default is None


def test_aliases_are_the_same_functions():
    from drivetrain import functional as cf

    assert cf.cutout is cf.cutout_batch and cf.colout is cf.colout_batch and cf.augment_and_mix is cf.augmix_image


@pytest.mark.slow
def test_importing_everything_loads_no_optional_package_and_changes_no_random_state():
    program = """
import random, signal, sys, torch
before = random.getstate(), torch.get_rng_state(), signal.getsignal(signal.SIGTERM)
import drivetrain.algorithms as algorithms, drivetrain.functional as functional
for package in (algorithms, functional):
    for name in dir(package):
        getattr(package, name)
assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1]) and signal.getsignal(signal.SIGTERM) is before[2]
print(*{"PIL", "torchvision", "transformers"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


def test_listing_the_names_loads_no_torch():
    program = "import sys, drivetrain.algorithms, drivetrain.functional; dir(drivetrain.algorithms); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
