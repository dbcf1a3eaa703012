"""The guide is complete, and the example program runs."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_method_is_in_the_guide():
    from drivetrain.strategy.registry import method_names

    text = (ROOT / "docs" / "strategy.md").read_text()
    assert not [name for name in method_names() if f"`{name}`" not in text]


@pytest.mark.slow
def test_the_example_learns_and_its_plan_is_reused(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("example_auto_accelerate", ROOT / "examples" / "auto_accelerate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    first = module.main(epochs=2, save_to=tmp_path / "plan.json")
    assert first[1] < first[0]
    again = module.main(epochs=1, plan=tmp_path / "plan.json", save_to=tmp_path / "again.json")
    assert again[0] == pytest.approx(first[0], rel=1e-3)
    assert "micro_batch" in capsys.readouterr().out
