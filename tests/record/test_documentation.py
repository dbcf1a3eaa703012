"""The example program and the benchmark run."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_has_one_history(capsys):
    main = runpy.run_path(str(ROOT / "examples" / "record_metrics.py"))["main"]
    assert main(steps=40)
    assert "images/weights/40.png, metrics.jsonl, scalars.csv" in capsys.readouterr().out


def test_the_benchmark_prints_a_ratio(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from benchmarks import recorder

    assert recorder.main(blocks=3, steps=5, folder=tmp_path, long=1000) > 0
    assert "SummaryWriter alone" in capsys.readouterr().out and (tmp_path / "recorder.json").exists()
