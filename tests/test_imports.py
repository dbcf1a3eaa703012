"""Importing is light: what is not used is not loaded."""

import subprocess
import sys

import pytest

import drivetrain


def loaded_after(code: str, after: str = "") -> set[str]:
    """Run code in a fresh interpreter and return the modules that it loaded, `after` what ran before it."""
    program = f"{after}\nimport sys; loaded_before = set(sys.modules)\n{code}\nprint('\\n'.join(sorted({{*sys.modules}} - loaded_before)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_import_drivetrain_loads_no_torch_and_no_optional_package():
    loaded = loaded_after("import drivetrain")
    assert not loaded & {"torch", "numpy", "rich", "yaml", "pydantic", "safetensors"}


def test_help_loads_no_torch():
    code = "import sys\nfrom drivetrain.__main__ import main\ntry:\n    main(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0"
    assert "torch" not in loaded_after(code)


def test_functional_modules_of_core_load_no_torch():
    assert "torch" not in loaded_after(
        "import drivetrain; drivetrain.Event; drivetrain.Time; drivetrain.Engine; drivetrain.Algorithm"
    )


BARE_LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(3, 2)
data = TensorDataset(torch.randn(8, 3), torch.randint(0, 2, (8,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
from drivetrain import Trainer
Trainer(model, torch.nn.functional.cross_entropy, optimizer, callbacks=()).train(data, num_epochs=1)
"""


def test_a_one_process_trainer_loads_neither_fsdp_nor_distributed_checkpointing():
    added = loaded_after(TRAINER, after=BARE_LOOP)  # making an optimizer loads much of torch already
    assert "drivetrain.train.trainer" in added
    assert not {
        name
        for name in added
        if name.startswith(("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._inductor"))
    }
    assert not {name.split(".")[0] for name in added} & {
        "rich",
        "torchvision",
        "PIL",
        "transformers",
        "tensorboard",
        "matplotlib",
        "sklearn",
    }


def test_importing_changes_no_random_state_and_no_signal_handler():
    code = """
import random, signal, torch
before = random.getstate(), torch.get_rng_state(), signal.getsignal(signal.SIGTERM)
import drivetrain
from drivetrain import Trainer, Context, SmartDataLoader
assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1]) and signal.getsignal(signal.SIGTERM) is before[2]
print("unchanged")
"""
    assert "unchanged" in loaded_after(code)


def test_every_public_name_resolves():
    for name in drivetrain.__dir__():
        assert getattr(drivetrain, name) is not None or name.startswith("__")


def test_the_root_lists_what_a_newcomer_meets_first_and_still_offers_the_rest():
    listed = drivetrain.__dir__()
    assert listed[:2] == drivetrain.__all__[:2] == ["Trainer", "auto_accelerate"]
    assert len(set(listed)) == len(listed)
    second = [
        "Error",
        "ConfigurationError",
        "TorchContext",
        "TimeUnit",
        "TrainerWithTimmScheduler",
        "run_parameter_sweep",
    ]
    for name in second:
        assert getattr(drivetrain, name) is not None
        assert name in drivetrain.__all__ and name not in dir(drivetrain)
    assert not {"lazy_exports", "use_provider"} & set(listed)


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="Trainer"):
        drivetrain.Trainr


def test_a_torch_without_distributed_is_named_when_the_trainer_is_imported():
    program = "import torch.distributed\ntorch.distributed.is_available = lambda: False\nimport drivetrain.trainer"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "has no torch.distributed, which Drivetrain needs" in done.stderr.splitlines()[-1]


def test_random_states_with_numpys_part_are_restored_before_numpy_random_is_imported():
    program = """
import sys, torch
from drivetrain.runtime import seeds
assert "numpy.random" not in sys.modules
numpy = {"generator": "MT19937", "words": torch.ones(624), "position": 3, "has_gauss": 0, "gauss": 0.0}
seeds.restore_rng({**seeds.capture_rng(), "numpy": numpy})
assert seeds.capture_rng()["numpy"]["position"] == 3
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
