"""The example program and the benchmark run."""

import runpy
from pathlib import Path

from benchmarks import loader as benchmark

ROOT = Path(__file__).parents[2]


def test_the_example_goes_on_where_it_stopped(capsys):
    main = runpy.run_path(str(ROOT / "examples" / "smart_loader.py"))["main"]
    assert main(stop_after=3, num_workers=1)
    assert "stopped at sample 24 of epoch 0" in capsys.readouterr().out


def test_the_benchmark_prints_a_ratio_well_below_one(tmp_path, capsys):
    ratios = benchmark.main(blocks=3, num_samples=512, folder=tmp_path)
    assert ratios["shuffled"] < 0.5 and ratios["in order"] < 0.5
    assert "of torch's DataLoader" in capsys.readouterr().out and (tmp_path / "loader.json").exists()
