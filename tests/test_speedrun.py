"""The CIFAR-10 recipe runs on invented pictures, repeats itself, and leaves nothing of one run in the next."""

import pytest
import torch

from tests.test_examples import load

SMALL = {"epochs": 2, "batch_size": 16, "synthetic": True, "size": 64, "widths": (8, 12, 12), "device": "cpu"}


def test_the_recipe_learns_and_says_where_the_time_goes(capsys):
    module = load("cifar10_speedrun")
    result = module.main(seeds=1, split=True, **{**SMALL, "epochs": 6, "batch_size": 8})
    assert result["accuracies"][0] > 0.3  # by chance 0.1
    assert set(result["parts"]) == {"set-up", "framework", "data", "forward and backward", "optimizer", "evaluation"}
    assert sum(result["parts"].values()) == pytest.approx(result["seconds"][0], rel=1e-6)
    assert "accuracy" in capsys.readouterr().out


def test_a_run_does_not_depend_on_those_before_it(capsys):
    module = load("cifar10_speedrun")
    once, twice = module.main(seeds=1, **SMALL), module.main(seeds=2, **SMALL)
    assert once["accuracies"][0] == twice["accuracies"][0]
    # The first seed again, after another one, on the same model and trainer.
    original = range
    module.range = lambda count: (0, 1, 0)
    again = module.main(seeds=3, **SMALL)["accuracies"]
    assert original is range and again[0] == again[2] == once["accuracies"][0]


def test_each_unit_has_its_parameters_and_schedule():
    module = load("cifar10_speedrun")
    model = module.SpeedNet((8, 12, 12))
    units = module.make_optimizer(model, 100, 8)
    owned = {name: len(unit.params) for name, unit in units.items()}
    assert owned == {"kernels": 6, "whitening": 1, "rest": 7}
    assert sum(owned.values()) == sum(p.requires_grad for p in model.parameters())
    units.bind(total_steps=80, steps_per_epoch=10)
    kernels, whitening, rest = units.values()
    assert kernels.update_lr(41) == pytest.approx(0.24 / 2) and rest.update_lr(1) == pytest.approx(5.3)
    assert whitening.update_lr(16) == pytest.approx(5.3 / 2) and whitening.update_lr(60) == 0


def test_kernels_begin_by_passing_their_input_on():
    module = load("cifar10_speedrun")
    model = module.SpeedNet((24, 24, 24))
    model.reset()
    x = torch.randn(2, 24, 5, 5)
    assert torch.equal(model.stages[0].conv1(x), x)


def test_synthetic_pictures_on_a_cpu_are_a_quick_trial_with_progress(capsys):
    result = load("cifar10_speedrun").main(epochs=1, synthetic=True, device="cpu")
    assert len(result["accuracies"]) == 1 and "8/8" in capsys.readouterr().out


def test_missing_data_is_explained(monkeypatch):
    monkeypatch.delenv("DRIVETRAIN_DATA", raising=False)
    with pytest.raises(SystemExit, match="DRIVETRAIN_DATA"):
        load("cifar10_speedrun").main(device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiled_recipe_runs_on_a_gpu(capsys):
    module = load("cifar10_speedrun")
    result = module.main(seeds=2, epochs=4, batch_size=200, synthetic=True, size=2000, device="cuda")
    assert min(result["accuracies"]) > 0.5 and max(result["seconds"]) < 30  # compilation is not among them
