"""A program written for Composer trains here as our own Trainer does."""

import warnings

import pytest
import torch
from drivetrain.compat.composer.algorithms import LabelSmoothing
from drivetrain.compat.composer.loggers import InMemoryLogger, LoggerDestination
from drivetrain.compat.composer.loss import binary_cross_entropy_with_logits, soft_cross_entropy
from drivetrain.compat.composer.models import ComposerClassifier, ComposerModel
from drivetrain.compat.composer.optim import CosineAnnealingWithWarmupScheduler, LinearScheduler, MultiStepScheduler
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import SmartDataLoader
from drivetrain import Trainer as NativeTrainer
from drivetrain.algorithms import ScaleSchedule
from drivetrain.compat.composer import Callback, DataSpec, Evaluator, Trainer
from drivetrain.context.batch import ensure_targets_one_hot
from drivetrain.core.errors import ConfigError, DrivetrainWarning

DATA = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3)


def loader(data=DATA, batch_size=8):
    return SmartDataLoader(data, batch_size=batch_size)


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make(**settings) -> Trainer:
    model = ComposerClassifier(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(
        **{
            "model": model, "train_dataloader": loader(), "max_duration": "2ep", "optimizers": optimizer,
            "progress_bar": False, "device": "cpu", "seed": 1, **settings,
        }
    )  # fmt: skip


def weights(trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.model.parameters()]


def test_it_trains_as_our_trainer_with_a_loss_function_a_schedule_and_an_algorithm():
    theirs = make(schedulers=LinearScheduler(), algorithms=LabelSmoothing(0.1), callbacks=[])
    theirs.fit()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ours = NativeTrainer(
        model,
        nn.functional.cross_entropy,
        optimizer,
        algorithms=[LabelSmoothing(0.1)],
        seed=1,
        device="cpu",
        callbacks=(),
    )
    ours.train(loader(), num_epochs=2, create_scheduler_fn=LinearScheduler())
    for one, other in zip(weights(theirs), weights(ours), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert theirs.optimizer.param_groups[0]["lr"] == pytest.approx(ours.optimizer.param_groups[0]["lr"])


def test_a_schedule_may_be_a_plain_function_or_one_of_torchs():
    rates = []

    class Rates(Callback):
        def before_step(self, state, logger):
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    make(schedulers=[lambda state, ssr=1.0: 0.5], callbacks=Rates()).fit()
    assert set(rates) == {0.05} and len(rates) == 12
    rates.clear()
    model = ComposerClassifier(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    settings = {"model": model, "optimizers": optimizer, "schedulers": schedule, "step_schedulers_every_batch": False}
    make(**settings, callbacks=Rates()).fit()
    assert rates == pytest.approx([0.1] * 6 + [0.01] * 6)
    with pytest.raises(ConfigError, match="schedulers: 2 were given"):
        make(schedulers=[LinearScheduler(), LinearScheduler()])


def test_events_of_the_base_callback_can_be_called_with_super():
    class Counting(Callback):
        batches = 0

        def batch_end(self, state, logger):
            super().batch_end(state, logger)
            self.batches += 1

    counting = Counting()
    make(callbacks=[counting]).fit(duration="3ba")
    assert counting.batches == 3


def test_a_data_spec_transforms_batches_and_a_plain_one_is_the_loader():
    seen = []

    def halve(batch):
        seen.append(len(batch[0]))
        return batch[0][:4], batch[1][:4]

    trainer = make(train_dataloader=DataSpec(loader(), batch_transforms=halve))
    trainer.fit()
    assert seen == [8] * 12 and trainer.state.timestamp.sample == 48
    plain = loader()
    assert DataSpec(plain).loader() is plain and len(DataSpec(plain)) == 6
    with pytest.raises(ConfigError, match=r"get_num_tokens_in_batch.*count_items"):
        DataSpec(plain, get_num_tokens_in_batch=len)


def test_evaluators_are_evaluated_by_name_with_the_metrics_of_the_model():
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")

    class Model(ComposerClassifier):
        updates = 0

        def update_metric(self, batch, outputs, metric):
            type(self).updates += 1
            super().update_metric(batch, outputs, metric)

    model = Model(network(), val_metrics={"accuracy": accuracy})
    sets = [Evaluator(label=name, dataloader=loader(batch_size=size)) for name, size in (("a", 8), ("b", 5))]
    trainer = make(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), eval_dataloader=sets)
    history = trainer.fit()
    with torch.no_grad():
        expected = (model((DATA.tensors[0], None)).argmax(1) == DATA.tensors[1]).float().mean().item()
    for name in "ab":
        assert history.get_metric_values(f"eval_{name}_accuracy_epoch")[-1] == pytest.approx(expected)
    assert Model.updates == 2 * (6 + 10)
    with pytest.raises(ConfigError, match="labels x, x"):
        make(eval_dataloader=[Evaluator(label="x", dataloader=loader())] * 2)
    with pytest.raises(ConfigError, match="metric_names"):
        Evaluator(label="x", dataloader=loader(), metric_names=["accuracy"])


def test_the_data_of_the_constructor_are_those_that_eval_uses():
    trainer = make(eval_dataloader=DataSpec(loader()))
    trainer.eval()
    value = trainer.run_history.get_latest_metric("evaluation_loss")
    with torch.no_grad():
        expected = nn.functional.cross_entropy(trainer.model((DATA.tensors[0], None)), DATA.tensors[1]).item()
    assert value == pytest.approx(expected, rel=1e-5)


def test_a_run_with_a_save_folder_resumes_where_it_ended(tmp_path):
    whole = make(max_duration="4ep")
    whole.fit()
    make(save_folder=tmp_path / "run").fit()
    resumed = make(save_folder=tmp_path / "run", autoresume=True, max_duration="4ep")
    resumed.fit()
    assert resumed.state.clock.epoch == 4
    assert all(torch.equal(one, other) for one, other in zip(weights(whole), weights(resumed), strict=True))


def test_without_an_optimizer_it_is_composers_and_a_warning_says_so():
    with pytest.warns(DrivetrainWarning, match="DecoupledSGDW"):
        trainer = make(optimizers=None)
    trainer.fit()
    assert type(trainer.optimizer).__name__ == "DecoupledSGDW" and trainer.optimizer.defaults["lr"] == 0.1


def test_limits_and_microbatches_reach_the_run():
    limited = make(train_subset_num_batches=2, save_num_checkpoints_to_keep=-1)
    limited.fit()
    assert limited.state.clock.batch == 4
    whole, cut = make(), make(device_train_microbatch_size=2)
    whole.fit(), cut.fit()
    for one, other in zip(weights(whole), weights(cut), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_loggers_receive_metrics_and_keep_them():
    class Own(LoggerDestination):
        names: set[str] = set()

        def log_metrics(self, metrics, step=None):
            self.names |= set(metrics)

    memory, own = InMemoryLogger(), Own()
    make(loggers=[memory, own]).fit()
    assert "train_loss_epoch" in memory.data and own.names == set(memory.data)
    steps = [step for step, _ in memory.data["train_loss_epoch"]]
    assert steps == [6, 12] and memory.most_recent_values["train_loss_epoch"] == memory.data["train_loss_epoch"][-1][1]


def test_a_logger_with_events_is_called_at_them():
    class Own(LoggerDestination):
        def __init__(self):
            self.seen = []

        def epoch_end(self, state, logger):
            self.seen.append(state.timestamp.epoch.value)

        def close(self, state, logger):
            self.seen.append("closed")

    own = Own()
    trainer = make(loggers=own)
    trainer.fit()
    assert own.seen[:2] == [1, 2]


def test_counters_of_the_timestamp_are_numbers_with_a_value():
    trainer = make()
    trainer.fit(duration="3ba")
    now = trainer.state.timestamp
    assert now.batch == now.batch.value == 3 and type(now.batch.value) is int
    assert trainer.state.seed == 1
    assert now.batch % 2 == 1 and now.sample.value == 24 and now >= "3ba"


def test_losses_take_class_indices_and_one_weight_per_class():
    logits, targets = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    dense = nn.functional.one_hot(targets, 3).double()
    expected = nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(soft_cross_entropy(logits, targets), expected)
    torch.testing.assert_close(soft_cross_entropy(logits, dense), expected)
    torch.testing.assert_close(soft_cross_entropy(logits, dense, reduction="none").sum(), expected * 5)
    by_hand = -(dense * logits.sigmoid().log() + (1 - dense) * (1 - logits.sigmoid()).log()).sum() / 5
    torch.testing.assert_close(binary_cross_entropy_with_logits(logits, dense), by_hand)
    torch.testing.assert_close(binary_cross_entropy_with_logits(logits, targets), by_hand)
    torch.testing.assert_close(binary_cross_entropy_with_logits(logits, dense.bool(), reduction="sum"), by_hand)
    whole = binary_cross_entropy_with_logits(logits, dense, scale_by_batch_size=False)
    torch.testing.assert_close(whole, by_hand * 5)


def test_the_soft_loss_of_maps_is_a_mean_over_places_that_have_a_target():
    logits, targets = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randint(0, 3, (2, 4, 5))
    targets[0, :2] = -100
    dense = ensure_targets_one_hot(logits, targets)
    expected = nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(soft_cross_entropy(logits, dense), expected)
    torch.testing.assert_close(soft_cross_entropy(logits, dense.long()), expected)


def test_a_model_without_its_methods_says_which_is_missing():
    with pytest.raises(NotImplementedError, match=r"forward\(self, batch\)"):
        ComposerModel()(1)
    with pytest.raises(NotImplementedError, match=r"loss\(self, outputs, batch\)"):
        ComposerModel().loss(1, 2)


def test_the_algorithm_that_scales_a_run_scales_its_schedule():
    rates = []
    for scaling in ({"scale_schedule_ratio": 0.5}, {"algorithms": ScaleSchedule(0.5)}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            trainer = make(schedulers=MultiStepScheduler(["10ba"]), **scaling)
            trainer.fit()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.01])


def test_arguments_that_ask_for_nothing_are_taken_and_the_name_of_the_run_is_kept():
    trainer = make(run_name="first", parallelism_config=None, load_weights_only=False, compile_config=None)
    assert trainer.state.run_name == "first"
    with pytest.raises(TypeError, match="'progres_bar'"):
        make(progres_bar=False)
    for name in ("algorithm_passes", "save_filename", "log_traces", "profiler", "load_ignore_keys"):
        with pytest.raises(TypeError, match=rf"{name}'\. Write instead: "):
            make(**{name: ["anything"]})


def test_a_sampler_of_composer_gives_this_process_its_share():
    from drivetrain.compat.composer.utils import dist

    sampler = dist.get_sampler(DATA, shuffle=False)
    trainer = make(train_dataloader=torch.utils.data.DataLoader(DATA, batch_size=8, sampler=sampler))
    trainer.fit()
    assert list(sampler) == list(range(48)) and trainer.state.timestamp.sample == 96
    assert len(dist.get_sampler(DATA, num_replicas=4, rank=1)) == 12


@pytest.mark.parametrize("duration", ["4ep", "192sp"])
def test_a_run_that_a_callback_stops_continues_its_schedule_when_it_is_resumed(tmp_path, duration):
    class Rates(Callback):
        def __init__(self, stop_at=None):
            self.stop_at, self.seen = stop_at, []

        def before_step(self, state, logger):
            self.seen.append(state.optimizers[0].param_groups[0]["lr"])

        def after_loss(self, state, logger):
            if state.timestamp.batch == self.stop_at:
                state.stop_training()

    def train(folder, stop_at=None):
        rates = Rates(stop_at)
        schedule = CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur" if duration == "4ep" else "16sp")
        settings = {"save_folder": folder, "save_interval": "1ba", "autoresume": True, "schedulers": schedule}
        trainer = make(max_duration=duration, callbacks=[rates], **settings)
        trainer.fit()
        return rates.seen, weights(trainer)

    whole, expected = train(tmp_path / "whole")
    first, _ = train(tmp_path / "stopped", stop_at=9)
    second, found = train(tmp_path / "stopped")
    assert len(first) == 10 and first + second == whole
    assert all(map(torch.equal, found, expected))


def test_nothing_is_printed_without_a_progress_bar(capsys):
    make().fit()
    assert capsys.readouterr().out == ""
