"""Units driven by the Trainer: windows that end with the epoch, several losses, lengths, manual units, examples."""

import copy
import cProfile
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.core.errors import ConfigError
from drivetrain.optim import ConstantLr, CosineLr, NoamLr, OptimSet
from tests.optim.models import EncoderDecoder, batches, losses_of, own_gradients, same, weights

EXAMPLES = Path(__file__).parents[2] / "examples"


class TwoLosses(Trainer):
    """Writes down what each unit does in each batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, callbacks=(), **kwargs)
        self.marks, self.real_steps, self._counts = [], [], {}

    def calculate_train_batch_loss(self, batch):
        (x,) = batch
        self._note()
        losses = losses_of(self.model, x)
        return {"loss": losses.pop("loss"), "losses": losses, "model_outputs": x, "batch_size": len(x)}

    def _note(self):
        """Close the line of the batch before, once its update is known."""
        units = self.optimizer
        if self.marks:
            self.marks[-1] += "S" if units["main"].update_count > self._counts else "-"
        self._counts = units["main"].update_count
        self.marks.append("B" if units["main"].is_active else "-")
        self.real_steps.append(units["main"].real_step)

    def training_run_end(self):
        super().training_run_end()
        self.marks[-1] += "S" if self.optimizer["main"].update_count > self._counts else "-"


def dataset(rows):
    return TensorDataset(torch.cat(batches(rows, rows=1)))


def run(trainer, rows, epochs=1, batch=1, **kwargs):
    kwargs.setdefault("train_dataloader_kwargs", {"shuffle": False, "num_workers": 0})
    return trainer.train(dataset(rows), num_epochs=epochs, per_device_batch_size=batch, **kwargs)


def unit(model, **conf):
    return ConstantLr("SGD", {"lr": 0.1}, model, **{"grad_clip": None, **conf})


@pytest.mark.parametrize(
    ("accum", "every", "skipped", "rows", "epochs", "marks", "steps"),
    [
        (1, 2, False, 8, 1, "-- BS -- BS -- BS -- BS", [1, 2, 3, 4, 5, 6, 7, 8]),
        (2, 1, False, 8, 1, "B- BS B- BS B- BS B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
        (2, 2, False, 8, 1, "-- -- B- BS -- -- B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
        (2, 2, True, 8, 1, "B- B- B- BS B- B- B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
        (4, 1, False, 6, 2, "B- B- B- BS B- BS B- B- B- BS B- BS", [1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4]),
    ],
)
def test_traces_hold_under_the_trainer(accum, every, skipped, rows, epochs, marks, steps):
    model = EncoderDecoder()
    made = unit(model, step_per_update=every, accumulate_skipped=skipped)
    trainer = TwoLosses(model, None, OptimSet(main=made))
    run(trainer, rows, epochs, gradient_accumulation_steps=accum)
    assert (" ".join(trainer.marks), trainer.real_steps) == (marks, steps)


def test_a_unit_under_the_trainer_equals_a_hand_written_loop():
    ours, theirs = EncoderDecoder(), EncoderDecoder()
    run(TwoLosses(ours, None, CosineLr("Adam", {"lr": 0.1}, ours, warmup_steps=2, grad_clip=None)), 8, 2)
    made = CosineLr("Adam", {"lr": 0.1}, theirs, warmup_steps=2, grad_clip=None, total_steps=16)
    for _ in range(2):
        for (x,) in dataset(8):
            made.step(losses_of(theirs, x[None]))
    assert same(weights(ours), weights(theirs))


def test_batches_of_skipped_windows_count_by_their_samples():
    model, reference = EncoderDecoder(), EncoderDecoder()
    run(TwoLosses(model, None, unit(model, step_per_update=2, accumulate_skipped=True)), 3, batch=2)  # 2 samples, and 1
    losses_of(reference, torch.cat(batches(3, rows=1)))["loss"].backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(p, q, rtol=0, atol=1e-12)


def test_each_unit_follows_its_own_loss_also_where_another_is_inactive():
    model = EncoderDecoder()
    optim = OptimSet(
        main=unit(model, optim_loss="decoder_loss", updated_modules="decoder"),
        encoder=unit(model, optim_loss="encoder_loss", updated_modules="encoder", step_per_update=2),
    )
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    reference = EncoderDecoder()
    for number, (x,) in enumerate(dataset(4), start=1):
        grads = {part: own_gradients(reference, x[None], part, f"{part}_loss") for part in ("decoder", "encoder")}
        with torch.no_grad():
            for part in ("decoder", "encoder") if number % 2 == 0 else ("decoder",):
                for p, grad in zip(getattr(reference, part).parameters(), grads[part]):
                    p -= 0.1 * grad
    run(TwoLosses(model, None, optim), 4)
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        assert torch.allclose(p, q, rtol=0, atol=1e-12) and not torch.equal(p, expected[name])


def test_the_length_of_the_run_reaches_the_schedule():
    model = EncoderDecoder()
    made = CosineLr("SGD", {"lr": 1.0}, model)
    run(TwoLosses(model, None, made), 6, 2, gradient_accumulation_steps=4)
    assert [made.lr_at(step) for step in (1, 3, 5)] == pytest.approx(
        [1.0, 0.5, 0.0]
    )  # two windows in each of two epochs


def test_a_scheduler_beside_units_is_refused():
    model = EncoderDecoder()
    with pytest.raises(ConfigError, match="create_scheduler_fn"):
        run(TwoLosses(model, None, unit(model)), 4, create_scheduler_fn=lambda optimizer: None)


@pytest.mark.parametrize("form", ["unit", "mapping", "set", "config", "path", "function"])
def test_whatever_describes_units_is_an_optimizer(form, tmp_path):
    model = EncoderDecoder()
    made = NoamLr("SGD", {"lr": 0.1}, model, warmup_steps=4)
    config = OptimSet(main=NoamLr("SGD", {"lr": 0.1}, model, warmup_steps=4)).to_config()
    if form == "path":
        from drivetrain.optim import to_yaml

        to_yaml(OptimSet(main=made), tmp_path / "optim.yaml")
    optimizer = {
        "unit": made,
        "mapping": {"main": made},
        "set": OptimSet(main=made),
        "config": config,
        "path": str(tmp_path / "optim.yaml"),
        "function": lambda model: NoamLr("SGD", {"lr": 0.1}, model, warmup_steps=4),
    }[form]
    trainer = TwoLosses(model, None, optimizer)
    run(trainer, 3)
    assert isinstance(trainer.optimizer, OptimSet) and trainer.optimizer["main"].update_count == 3


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_encoder_decoder_example_learns_with_the_encoder_at_half_pace():
    result = example("encoder_decoder_losses").main(num_epochs=3)
    assert result["last"] < 0.5 * result["first"] and result["decoder_optim"] == 2 * result["encoder_optim"] == 48


def test_the_gan_example_finds_the_mean_of_the_data():
    assert example("gan").main() == pytest.approx(3.0, abs=0.3)


def test_the_gan_leaves_no_foreign_gradients():
    module = example("gan")
    seen = []

    class Watching(module.GanTrainer):
        def optimizer_step(self):
            seen.append([p.grad is None for p in self.get_model().disc.parameters()])
            super().optimizer_step()

    model = module.Gan()
    optim = OptimSet(
        disc=ConstantLr("Adam", {"lr": 0.01}, model, optim_loss="disc_loss", updated_modules="disc", manual=True),
        gen=ConstantLr("Adam", {"lr": 0.01}, model, optim_loss="gen_loss", updated_modules="gen"),
    )
    data = TensorDataset(torch.randn(8, 1), torch.randn(8, 1))
    Watching(model, None, optim, callbacks=()).train(data, num_epochs=1, per_device_batch_size=4)
    assert seen == [[True] * 4] * 2 and (optim["disc"].update_count, optim["gen"].update_count) == (2, 2)


def test_the_fine_tuning_example_scales_every_rate():
    result = example("finetune_ft_factor").main(num_epochs=1)
    assert result["small_rate"] == pytest.approx(0.1 * result["rate"], rel=1e-12)


def test_the_large_batch_example_gives_the_same_weights():
    assert example("large_batch").main(num_epochs=1) < 1e-12


def test_a_recipe_file_decides_about_windows_rates_and_clipping_under_the_trainer(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "accum_grad: 2\nft_factor: 0.5\ngrad_clip: null\ntrain_cfg:\n  optim_sches:\n"
        "    type: constant.ConstantLr\n    conf: {optim_type: SGD, optim_conf: {lr: 0.2}}\n"
    )
    by_file, by_hand = EncoderDecoder(), EncoderDecoder()
    first = TwoLosses(by_file, None, str(recipe))
    run(first, 8)
    second = TwoLosses(by_hand, None, OptimSet(main=unit(by_hand)))
    run(second, 8, gradient_accumulation_steps=2)
    assert " ".join(first.marks) == " ".join(second.marks) == "B- BS B- BS B- BS B- BS"
    assert same(weights(by_file), weights(by_hand))


@pytest.mark.parametrize("nonfinite", ["skip", "raise", "ignore"])
def test_a_gradient_that_is_not_finite_concerns_its_own_unit_alone(nonfinite):
    class Poisoned(Trainer):
        def calculate_train_batch_loss(self, batch):
            losses = losses_of(self.model, batch[0])
            losses["encoder_loss"] = losses["encoder_loss"] * (float("nan") if self.state.clock.batch == 1 else 1)
            return {"loss": losses.pop("loss"), "losses": losses, "model_outputs": batch[0], "batch_size": 1}

    model = EncoderDecoder()
    parts = {name: {"optim_loss": f"{name}_loss", "updated_modules": name} for name in ("encoder", "decoder")}
    optim = OptimSet({name: unit(model, nonfinite=nonfinite, **conf) for name, conf in parts.items()})
    trainer = Poisoned(model, None, optim, callbacks=())
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="unit 'encoder'"):
            run(trainer, 4)
        return
    run(trainer, 4)
    is_skipped = nonfinite == "skip"
    assert (optim["encoder"].update_count, optim["encoder"].skipped_steps) == (4 - is_skipped, int(is_skipped))
    assert (optim["decoder"].update_count, optim["decoder"].skipped_steps) == (4, 0)
    assert model.encoder.weight.isnan().any() != is_skipped


def test_units_step_without_the_profilers_mark_and_are_judged_by_one_number_each():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
    hand = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in hand]
    units = {name: torch.optim.SGD(model[place].parameters(), lr=0.1) for place, name in enumerate(("first", "last"))}
    trainer = Trainer(model, torch.nn.MSELoss(), units, callbacks=())
    rows = TensorDataset(torch.arange(8.0).reshape(8, 1), torch.ones(8, 1))
    hooked = []
    units["last"].register_step_post_hook(lambda *_: hooked.append(1))
    with cProfile.Profile() as profile:
        trainer.train(
            rows, num_epochs=1, per_device_batch_size=2, train_dataloader_kwargs={"shuffle": False, "num_workers": 0}
        )
    calls = {str(entry.code): entry.callcount for entry in profile.getstats()}
    marks = sum(count for code, count in calls.items() if "_record_function_enter" in code)
    assert len(hooked) == marks == 4  # only a unit with a hook is stepped through torch's wrapper
    assert not any("get_total_norm" in code or "nonfinite_flag" in code for code in calls)
    for x, y in zip(rows.tensors[0].split(2), rows.tensors[1].split(2)):
        torch.nn.functional.mse_loss(hand(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), hand.parameters()))
