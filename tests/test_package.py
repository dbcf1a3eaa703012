"""The wheel holds what is needed, and works when it is installed alone."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_installs_and_starts_outside_of_the_tree(tmp_path):
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools 77")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"  # building writes next to the sources
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(source)], check=True, timeout=120)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(source / "src").as_posix() for path in (source / "src" / "drivetrain").rglob("*.py*")}
    assert {name for name in modules if name.endswith((".py", ".pyi"))} <= names and "drivetrain/py.typed" in names
    assets = {path.name for path in (source / "src/drivetrain/experiment/reports/assets").iterdir()}
    assert assets and {f"drivetrain/experiment/reports/assets/{name}" for name in assets} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks", "tools"))]
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=120
    )
    code = "import sys; sys.path.insert(0, 'site'); import drivetrain, drivetrain.__main__ as command; "
    code += "print(drivetrain.__file__); command.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert str(tmp_path / "site") in done.stdout or "site/drivetrain" in done.stdout, done.stderr
    assert "demo" in done.stdout
