"""What this package provides is there, and is used."""

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain
from drivetrain.compat.atorch_plans import read_legacy_pickle
from drivetrain.compat.registry import EXPORTS, MODULES, SLOTS
from drivetrain.core.errors import StrategyFormatError
from drivetrain.core.lazy import Slot

PACKAGE = Path(drivetrain.__file__).parent


def slots_in_the_source() -> set[str]:
    """Return the names of all slots that lower folders define."""
    calls = [
        node
        for path in PACKAGE.rglob("*.py")
        if "from drivetrain.core.lazy import Slot" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Slot"
    ]
    return {ast.literal_eval(call.args[0]) for call in calls}


def test_every_slot_of_a_lower_folder_is_filled_and_no_other():
    assert slots_in_the_source() == set(SLOTS)
    for name in SLOTS:
        assert Slot(name).load() is not None


@pytest.mark.parametrize("path", MODULES)
def test_a_second_path_is_the_same_module(path):
    assert importlib.import_module(path) is importlib.import_module(MODULES[path])
    parent, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(parent), name) is importlib.import_module(MODULES[path])


def test_a_second_path_works_as_the_first_import_and_leaves_the_home_its_name():
    program = """
from drivetrain.context.surgery import replace_module_classes
from drivetrain.optim.curves import cosine
from drivetrain.algorithms.alibi.attention_surgery_functions import policy_registry
import drivetrain.experiment.core, drivetrain.module.surgery, drivetrain.optim.schedules
assert drivetrain.module.surgery.__name__ == drivetrain.module.surgery.__spec__.name == "drivetrain.module.surgery"
assert replace_module_classes is drivetrain.module.surgery.replace_module_classes
assert cosine is drivetrain.optim.schedules.cosine
assert drivetrain.experiment.core.app
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_path_that_is_in_no_table_is_still_missing():
    with pytest.raises(ModuleNotFoundError, match="drivetrain.context.parms"):
        importlib.import_module("drivetrain.context.parms")


@pytest.mark.parametrize("package", EXPORTS)
def test_names_for_people_who_come_from_elsewhere_are_offered(package):
    module = importlib.import_module(package)
    for home, names in EXPORTS[package].items():
        for name in names:
            assert getattr(module, name) is getattr(importlib.import_module(home), name)
            assert (name in dir(module)) == (package != "drivetrain.core")  # listing them there would load torch


def test_a_damaged_pickle_of_a_plan_is_reported_as_such():
    inner = pickle.dumps({"a": 1})
    for damaged in (inner[:-1], inner[:-3], b"\x80\x12.", b""):
        for data in (damaged, pickle.dumps([("fsdp", damaged, False)])):
            if data:
                with pytest.raises(StrategyFormatError):
                    read_legacy_pickle(data)
