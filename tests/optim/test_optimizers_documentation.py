"""The guide is complete, and the benchmark runs."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


def test_every_optimizer_and_scheduler_is_in_the_guide():
    from drivetrain.compat.registry import EXPORTS
    from drivetrain.optim import optimizers

    text = PAGE.read_text()
    for names in (optimizers.__all__, *EXPORTS["drivetrain.optim"].values()):
        assert all(f"{name}" in text for name in names if name != "ComposerScheduler")


def test_the_benchmark_runs():
    from benchmarks.muon_step import main

    numbers = main(width=8, blocks=1, turns=2, steps=1, device="cpu", write=False)
    assert numbers["ratio"] > 0
