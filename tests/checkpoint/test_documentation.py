"""The guide runs from top to bottom, and so does the example."""

import re
import runpy
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_the_guide_runs_from_top_to_bottom():
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "checkpoint.md").read_text(), re.DOTALL | re.MULTILINE)
    namespace: dict = {}
    with torch.random.fork_rng():
        for snippet in snippets:
            exec(compile(snippet, "docs/checkpoint.md", "exec"), namespace)
    assert namespace["state"]["epoch"] == 0 and len(snippets) == 2


def test_the_example_survives_a_kill(monkeypatch, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "resume_after_kill.py"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with torch.random.fork_rng():
        assert example["main"](kills=1, num_epochs=2)
    assert "bit-identical" in capsys.readouterr().out
