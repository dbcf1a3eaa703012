"""The examples of the guide and of the docstrings run as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "runtime.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "__main__" not in block])
def test_guide_examples_run(block):
    from drivetrain.runtime.seeds import capture_rng, restore_rng

    state = capture_rng()
    exec(compile(block, "docs/runtime.md", "exec"), {})
    restore_rng(state)


@pytest.mark.slow
def test_guide_example_launches_itself(tmp_path):
    (program,) = [block for block in BLOCKS if "__main__" in block]
    file = tmp_path / "program.py"
    file.write_text(program)
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import runpy; "
    code = path + f"runpy.run_path({str(file)!r}, run_name='__main__')"
    env = os.environ | {"ACCELERATE_USE_CPU": "true"}  # two processes, whatever accelerators there are
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "[[10, 11], [10, 11]]", done.stderr
