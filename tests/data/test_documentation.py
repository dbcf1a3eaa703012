"""The guide's snippets, the docstrings' examples, the example program and the benchmark run as printed."""

import re
import runpy
from pathlib import Path

from benchmarks import loader as benchmark
from drivetrain.runtime.seeds import capture_rng, restore_rng

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)


def test_the_guide_runs_from_top_to_bottom():
    state = capture_rng()
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/data.md", "exec"), names)
    restore_rng(state)
    assert len(BLOCKS) == 3


def test_the_example_goes_on_where_it_stopped(capsys):
    main = runpy.run_path(str(ROOT / "examples" / "smart_loader.py"))["main"]
    assert main(stop_after=3, num_workers=1)
    assert "stopped at sample 24 of epoch 0" in capsys.readouterr().out


def test_the_benchmark_prints_a_ratio_well_below_one(tmp_path, capsys):
    ratios = benchmark.main(blocks=3, num_samples=512, folder=tmp_path)
    assert ratios["shuffled"] < 0.5 and ratios["in order"] < 0.5
    assert "of torch's DataLoader" in capsys.readouterr().out and (tmp_path / "loader.json").exists()
