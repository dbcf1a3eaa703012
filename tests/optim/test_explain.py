"""Pictures and text lines of learning rates."""

import pytest
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.optim import CosineLr, ExponentDecayLr, NoamLr, OptimSet, plot, sparkline


def unit(cls, **conf):
    return cls("SGD", {"lr": 1.0}, nn.Linear(1, 1), **conf)


def test_a_plot_is_a_png_file_of_the_whole_run(tmp_path):
    pytest.importorskip("matplotlib")
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    optim = OptimSet(
        a=NoamLr("SGD", {"lr": 1.0}, model, updated_modules="a", warmup_steps=20),
        b=CosineLr("SGD", {"lr": 0.5}, model, updated_modules="b", warmup_steps=10),
    )
    optim.bind(total_steps=100, steps_per_epoch=10)
    path = plot(optim, tmp_path / "rates.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


def test_a_plot_takes_lists_units_and_epochs(tmp_path):
    pytest.importorskip("matplotlib")
    plot({"measured": [0.1, 0.2], "cosine": unit(CosineLr, total_steps=8)}, tmp_path / "a.png")
    plot(unit(ExponentDecayLr, decay_factor=0.5), tmp_path / "b.png", steps=6, steps_per_epoch=2, log_scale=True)
    with pytest.raises(ConfigError, match="steps=None"):
        plot(unit(NoamLr), tmp_path / "c.png")


def test_a_sparkline_shows_the_shape_and_both_ends():
    text = sparkline(unit(CosineLr, total_steps=40, warmup_steps=8), width=10)
    bars, low, _, high = text.split()
    assert len(bars) == 10 and "█" in bars and bars[-1] == "▁" and float(low) < 0.01 and float(high) <= 1
    assert sparkline([2.0, 2.0]) == "▁▁ 2 to 2"
    with pytest.raises(ConfigError, match="no values"):
        sparkline([])
