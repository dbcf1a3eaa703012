"""Every example runs, for a few steps."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look the module up by name
    spec.loader.exec_module(module)
    return module


def test_mnist_falls_back_to_digits_and_learns():
    pytest.importorskip("sklearn")
    assert load("train_mnist").main(num_epochs=3) > 0.8


def test_mnist_reads_the_original_files(tmp_path):
    import gzip

    import torch

    images = torch.randint(0, 256, (120, 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (120,), dtype=torch.uint8)
    header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (120, 28, 28))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.numpy().tobytes()))
    header = bytes([0, 0, 8, 1]) + (120).to_bytes(4, "big")
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.numpy().tobytes()))
    module = load("train_mnist")
    data = module.load_data(str(tmp_path))
    assert torch.equal(data.tensors[1], labels.long()) and torch.equal((data.tensors[0] * 255).round().byte(), images)
    assert 0 <= module.main(str(tmp_path), num_epochs=1) <= 1


def test_a_text_transformer_learns():
    losses = load("train_text_transformer").main(num_epochs=2, length=32)
    assert losses[1] < losses[0]


def test_fine_tuning_in_two_stages_improves():
    head_only, whole = load("finetune_with_freezer").main()
    assert whole < head_only


def test_a_callback_reads_gradient_norms():
    means = load("write_a_callback").main()
    assert len(means) == 3 and means[-1] < means[0]


def test_a_subclass_distils_a_teacher():
    assert load("subclass_the_trainer").main() > 0.8


def test_whole_answers_are_generated_and_compared():
    assert load("generate_in_evaluation").main(num_epochs=1) > 0.5


def test_every_example_has_a_main_and_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert "def main(" in text and f"examples/{path.name}" in text.split('"""')[1], path.name


@pytest.mark.slow
def test_the_same_script_runs_on_two_processes():
    import subprocess

    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / "train_mnist.py"),
        "--num-epochs",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("eval_accuracy_epoch") == 2  # one rank speaks


@pytest.fixture
def lora():
    from drivetrain.strategy.registry import _methods

    yield load("lora_method")
    del _methods["lora"]


def test_lora_is_a_method_that_plans_verify(lora, monkeypatch):
    losses, plan = lora.main(num_epochs=6)
    assert losses[-1] < 0.7 * losses[0] and plan.opt_names() == ["lora"]
    assert "lora changes them by design" in plan.explain(width=400)

    def forget_the_optimizer(self, ctx, config):
        ctx.recipe, kept = None, ctx.recipe
        applied(self, ctx, config)
        ctx.recipe = kept
        kept.groups = lambda model: [module.layer.weight for module in model.modules() if hasattr(module, "down")]

    applied = lora.Lora.apply
    monkeypatch.setattr(lora.Lora, "apply", forget_the_optimizer)
    with pytest.raises(AssertionError, match="lora changes the gradient, and no parameter moves"):
        lora.main(num_epochs=1)


def test_a_search_uses_lora_where_it_is_included_and_not_by_surprise(lora):
    from drivetrain.strategy.search.space import build_space
    from tests.strategy.test_search import CPU, place

    included = build_space(place(machine=CPU, batch=16, included=("lora",))).candidates
    assert included and all("lora" in candidate.names() for candidate in included)
    assert not any("lora" in c.names() for c in build_space(place(machine=CPU, batch=16)).candidates)


@pytest.mark.slow
def test_a_search_around_lora_finds_a_plan_that_learns(lora):
    losses, plan = lora.main(search=True, num_epochs=6)
    assert "lora" in plan.opt_names() and losses[-1] < losses[0]
