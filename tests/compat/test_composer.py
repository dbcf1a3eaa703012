"""Every public module and name of Composer is here, or says what to use instead.

`composer_names.json` holds the names of Composer 0.32; where Composer is installed its own files are compared with it.
"""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.compat.composer_table import INSTEAD, OFFERED, composer_modules

NAMES: dict[str, list[str]] = {
    module: names.split()
    for module, names in json.loads(Path(__file__).with_name("composer_names.json").read_text()).items()
}


def load(module: str):
    return importlib.import_module(f"drivetrain.compat.composer.{module}".rstrip("."))


@pytest.mark.parametrize("package", sorted({module.split(".")[0] for module in NAMES}))
def test_every_name_of_a_module_is_offered_or_says_what_to_use_instead(package):
    modules = composer_modules()
    for module in (module for module in NAMES if module.split(".")[0] == package):
        here = load(module)
        listed = dir(here)
        for name in NAMES[module]:
            if name in modules[module].instead:
                with pytest.raises(ImportError, match=f"{name} is not supported. Use instead: .{{5,}}"):
                    getattr(here, name)
                assert name not in listed, module
            else:
                assert getattr(here, name) is not None, module
                assert name in listed, module


def test_the_table_has_no_module_and_no_name_that_composer_has_not():
    added = {"functional", "algorithms"}  # ours are offered there too
    older = {"algorithms.alibi.gpt2_alibi"}
    for path, module in composer_modules().items():
        assert path in {*NAMES, *older}, path
        if path.split(".")[0] not in added and not module.is_package:
            ours = {*module.names, *module.instead}
            # Names that a package of Composer exports and the module defines without listing them.
            parents = {name for parent in NAMES if path.startswith(f"{parent}.") for name in NAMES[parent]}
            assert ours <= {*NAMES[path], *parents, "Traces"}, path


def test_no_name_is_both_offered_and_advised_against():
    for module in composer_modules().values():
        assert not module.names.keys() & module.instead.keys()
    assert set(OFFERED) - {"", "algorithms.alibi.gpt2_alibi"} <= set(NAMES) and set(INSTEAD) <= set(NAMES)


def test_what_is_offered_is_ours_and_not_a_copy():
    from drivetrain import Event, State, functional
    from drivetrain.algorithms import MixUp
    from drivetrain.module import surgery
    from drivetrain.optim import CosineAnnealingScheduler

    assert load("algorithms.mixup").MixUp is load("algorithms.mixup.mixup").MixUp is load("algorithms").MixUp is MixUp
    assert load("functional").mixup_batch is load("algorithms.mixup").mixup_batch is functional.mixup_batch
    assert load("").Event is load("core.event").Event is Event and load("core").State is State
    assert load("utils.module_surgery").replace_module_classes is surgery.replace_module_classes
    assert load("optim.scheduler").CosineAnnealingScheduler is load("optim").CosineAnnealingScheduler
    assert load("optim").CosineAnnealingScheduler is CosineAnnealingScheduler


def test_imports_work_as_they_are_written_for_composer_in_a_new_process():
    program = """
import sys
import drivetrain.compat.composer.functional as cf
assert "torch" not in sys.modules
from drivetrain.compat.composer.algorithms.mixup import mixup_batch
from drivetrain.compat.composer.algorithms.blurpool.blurpool_layers import BlurMaxPool2d
from drivetrain.compat.composer.algorithms import mixup
from drivetrain.compat.composer.core.time import Time
from drivetrain.compat.composer.core import *
from drivetrain.compat.composer.utils import dist
import drivetrain.compat.composer as composer
assert cf.mixup_batch is mixup_batch is mixup.mixup.mixup_batch
assert composer.core.time.Time is Time and composer.algorithms.blurpool.BlurMaxPool2d is BlurMaxPool2d
assert dist.get_world_size() == 1 and DataSpec is composer.DataSpec
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_missing_name_is_explained_in_a_from_import():
    with pytest.raises(ImportError, match=r"composer.callbacks.EarlyStopper .*EarlyStoppingCallback"):
        from drivetrain.compat.composer.callbacks import EarlyStopper
    with pytest.raises(ImportError, match=r"composer.callbacks.early_stopper.EarlyStopper"):
        from drivetrain.compat.composer.callbacks.early_stopper import EarlyStopper  # noqa: F401
    with pytest.raises(AttributeError, match="Did you mean 'MixUp'"):
        load("algorithms.mixup").MixUpp
    assert not hasattr(load("algorithms.mixup"), "__wrapped__")


def test_a_module_that_composer_has_not_is_missing():
    with pytest.raises(ModuleNotFoundError, match="drivetrain.compat.composer.algorithm'"):
        load("algorithm")


def test_advice_names_things_that_exist():
    """Every dotted path of ours in an advice can be imported."""
    import re

    texts = {text for advice in INSTEAD.values() for text in advice.values()}
    paths = {path for text in texts for path in re.findall(r"drivetrain(?:\.\w+)+", text)}
    for path in sorted(paths):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def public_names(path: Path) -> list[str]:
    """Return `__all__` of a file, or what it defines without an underscore."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(node.value, ast.List):
                return ast.literal_eval(node.value)
            if isinstance(target, ast.Name) and not isinstance(node, ast.AugAssign | ast.For):
                names.append(target.id)
    return [name for name in names if not name.startswith("_") and name != "log"]


@pytest.mark.peers
def test_the_names_are_those_of_the_installed_composer():
    found = importlib.util.find_spec("composer")
    if found is None or found.origin is None:
        pytest.skip("Composer is not installed")
    root = Path(found.origin).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        assert {name for name in public_names(path) if not name.startswith("_") or name == "__version__"} == set(
            NAMES[module]
        ), module
