"""Mistakes of older trainers, each with the test that would bring it to light again; the number says which."""

import copy
import functools
import inspect
import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.core.errors import NonFiniteLossError, StopTrainingError
from drivetrain.train.callbacks import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
    TrainerCallback,
)
from drivetrain.train.finetuning import ModelFreezer
from drivetrain.train.loaders import DataLoaderSlice, LimitBatches
from drivetrain.train.schedulers import CosineLrScheduler, WSDLrScheduler
from drivetrain.train.settings import TrainerPlaceholderValues as P
from drivetrain.train.trainer import Trainer, TrainerWithTimmScheduler
from tests.train.tasks import Losses, make_data, make_model, make_trainer, train, weights


class Updates(TrainerCallback):
    """Counts optimizer updates."""

    def __init__(self):
        self.count = 0

    def after_step(self, state, logger):
        self.count += 1


def test_01_the_epoch_loss_is_the_mean_loss_whatever_the_accumulation():
    values = [
        train(make_trainer(lr=0.0), make_data(64), gradient_accumulation_steps=steps).get_latest_metric(
            "train_loss_epoch"
        )
        for steps in (1, 4)
    ]
    x, y = make_data(64).tensors
    expected = nn.functional.cross_entropy(make_model()(x), y).item()
    assert values == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("clip", [{"gradient_clip_value": 1e-3}, {"gradient_clip_norm": 1e-3}])
def test_02_gradients_are_clipped_once_per_update_and_complete_when_they_are(clip):
    seen = []

    class Look(Trainer):
        def _clip_gradients(self):
            x, y = (tensor[: 32 * (len(seen) + 1)][-32:] for tensor in make_data(64).tensors)
            expected = torch.autograd.grad(nn.functional.cross_entropy(self.model(x), y), list(self.model.parameters()))
            complete = all(
                torch.allclose(p.grad, g, atol=1e-6) for p, g in zip(self.model.parameters(), expected, strict=True)
            )
            super()._clip_gradients()
            largest = max(p.grad.abs().max().item() for p in self.model.parameters())
            norm = torch.cat([p.grad.flatten() for p in self.model.parameters()]).norm().item()
            seen.append((complete, largest <= 1e-3 + 1e-9, norm <= 1e-3 * 1.001))

    train(make_trainer(cls=Look), make_data(64), gradient_accumulation_steps=4, **clip)
    assert len(seen) == 2 and all(complete and by_value for complete, by_value, _ in seen)
    assert "gradient_clip_value" in clip or all(by_norm for _, _, by_norm in seen)


def test_03_the_epochs_end_a_run_before_a_larger_number_of_steps():
    counter = Updates()
    train(make_trainer(callbacks=[counter]), make_data(64), num_epochs=1, max_num_train_steps=20)
    assert counter.count == 8


def test_04_an_evaluation_inside_an_epoch_leaves_every_flag():
    seen = []

    class Look(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            trainer.model[2].eval()  # a mixture of modes

        def on_train_step_start(self, trainer, **kwargs):
            seen.append([module.training for module in trainer.model.modules()])

    train(make_trainer(callbacks=[Look()]), make_data(32), eval_dataset=make_data(), eval_interval="1ba")
    assert len(seen) == 4 and seen == [seen[0]] * 4 and set(seen[0]) == {True, False}


def test_05_a_limited_evaluation_runs_the_number_asked_for():
    seen = []

    class Count(TrainerCallback):
        def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.append(1)

    limit = LimitEvalStepsCallback(12, limit_intermediate_only=False)
    train(make_trainer(callbacks=[limit, Count()]), eval_dataset=make_data(24 * 8))
    assert len(seen) == 12


def test_06_a_misspelt_attribute_raises_in_the_users_line():
    class Wrong(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            return self.no_such_thing

    with pytest.raises(AttributeError, match="no_such_thing") as caught:
        train(make_trainer(callbacks=[Wrong()]))
    assert "return self.no_such_thing" in "".join(map(str, caught.traceback[-1].statement.lines))
    assert not hasattr(Wrong(), "x") and not hasattr(TrainerCallback(), "on_what_ever")


def test_07_resuming_at_epoch_two_of_three_trains_one_epoch_more_bit_for_bit(tmp_path):
    def run(epochs, folder, resume_from=None):
        losses = Losses()
        saving = SaveTrainingStateCallback(save_dir=folder, save_every_n_epochs=1)
        trainer = make_trainer(make_model(dropout=0.4), callbacks=[losses, saving], seed=2)
        train(trainer, num_epochs=epochs, resume_from=resume_from, train_dataloader_kwargs={})
        return weights(trainer.model), losses.values

    whole, all_losses = run(3, tmp_path / "whole")
    run(2, tmp_path / "part")
    torch.manual_seed(99)
    resumed, last_losses = run(3, tmp_path / "part", resume_from=tmp_path / "part" / "epoch_2")
    assert last_losses == all_losses[6:] and all(map(torch.equal, resumed, whole))


@pytest.mark.slow
def test_08_importing_and_building_touch_no_generator():
    code = (
        "import random, torch, numpy\n"
        "def state(): return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())\n"
        "before = state()\n"
        "import drivetrain, drivetrain.trainer, drivetrain.callbacks, drivetrain.schedulers\n"
        "model = torch.nn.Linear(2, 2); before = state()\n"
        "drivetrain.Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "assert state() == before\n"
    )
    imported = code.replace(
        "model = torch.nn.Linear(2, 2); before = state()",
        "assert state() == before; model = torch.nn.Linear(2, 2); before = state()",
    )
    subprocess.run([sys.executable, "-c", imported], check=True)


def test_09_expressions_of_placeholders_reach_the_scheduler_as_numbers():
    seen = {}

    def make(optimizer, first, **numbers):
        seen.update(numbers, first=first)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    fn = lambda optimizer, *args, **kwargs: make(optimizer, *args, **kwargs)
    steps = P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH
    partial = functools.partial(
        fn, first=2 * steps, b=(steps * 2) + 1, c=steps - 1, d=10 - steps, e=steps // 2, f=steps / 2
    )
    train(make_trainer(), create_scheduler_fn=partial)
    assert seen == {"first": 6, "b": 7, "c": 2, "d": 7, "e": 1, "f": 1.5}
    import drivetrain.train.settings as module

    assert "eval(" not in inspect.getsource(module).replace("evaluate(", "")


def test_10_a_second_run_without_a_scheduler_has_a_constant_rate():
    trainer = make_trainer(lr=1.0)
    train(trainer, create_scheduler_fn=functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5))
    train(trainer)
    assert trainer.scheduler is None and trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.125)


def test_11_short_windows_and_short_batches_equal_the_full_batch_gradient():
    seen = []

    class Look(TrainerCallback):
        def after_train_batch(self, state, logger):
            seen.append([p.grad.clone() for p in state.model.parameters()])

    double = torch.float64
    data = make_data(35, dtype=double)
    train(make_trainer(make_model(dtype=double), lr=0.0, callbacks=[Look()]), data, gradient_accumulation_steps=4)
    model = make_model(dtype=double)
    for gradients, rows in zip(seen, (slice(0, 32), slice(32, 35)), strict=True):
        x, y = (tensor[rows] for tensor in data.tensors)
        expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        for ours, theirs in zip(gradients, expected):
            assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-6


class TimmScheduler:
    """Stands in for timm's: told the number of updates, and the epochs that ended."""

    def __init__(self, optimizer):
        self.optimizer, self.updates, self.epochs = optimizer, [], []

    def step_update(self, num_updates, metric=None):
        self.updates.append(num_updates)

    def step(self, epoch, metric=None):
        self.epochs.append(epoch)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("with_evaluation", [False, True])
def test_12_timm_schedulers_hear_of_updates_and_finished_epochs(tmp_path, with_evaluation):
    callbacks = [ModelEmaCallback(save_path=tmp_path / "e.pt")] if with_evaluation else []
    trainer = make_trainer(cls=TrainerWithTimmScheduler, callbacks=callbacks)
    train(
        trainer,
        make_data(40),
        num_epochs=2,
        gradient_accumulation_steps=2,
        create_scheduler_fn=TimmScheduler,
        eval_dataset=make_data() if with_evaluation else None,
        eval_interval="1ba" if with_evaluation else None,
    )
    assert trainer.scheduler.updates == [1, 2, 3, 4, 5, 6] and trainer.num_updates == 6
    assert trainer.scheduler.epochs == [1, 2]
    train(trainer, create_scheduler_fn=TimmScheduler, eval_dataset=make_data())
    assert trainer.scheduler.updates == [1, 2, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_13_a_loss_that_is_no_number_ends_the_run_in_good_order(bad):
    calls = []

    class Told(TrainerCallback):
        def on_stop_training_error(self, trainer, **kwargs):
            calls.append("stop")

        def on_training_run_end(self, trainer, **kwargs):
            calls.append("end")

    class Broken(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * (bad if self.state.step == 1 else 1)}

    trainer = make_trainer(cls=Broken, callbacks=[TerminateOnNaNCallback(), Told()])
    with pytest.raises(NonFiniteLossError) as caught:
        train(trainer)
    assert calls == ["stop", "end"] and not isinstance(caught.value, SystemExit)
    assert (caught.value.epoch, caught.value.step, caught.value.where) == (1, 1, "training")
    assert trainer.state.clock.step == 1  # the bad loss was not trained on
    quiet = make_trainer(cls=Broken, callbacks=[TerminateOnNaNCallback(action="stop")])
    train(quiet)
    assert quiet.state.clock.step == 1


def test_14_freezing_sets_modes_that_last_and_unfreezing_may_leave_them():
    modes = []

    class Look(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            modes.append([module.training for module in trainer.model])

    model = make_model(dropout=0.5)
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    before = weights(model)
    train(make_trainer(model, callbacks=[Look()]), num_epochs=2, eval_dataset=make_data())
    assert set(map(tuple, modes)) == {(False, False, False, True)}
    assert torch.equal(before[0], model[0].weight) and not torch.equal(before[2], model[3].weight)
    freezer.unfreeze(set_modules_as_training=False)
    assert all(p.requires_grad for p in model.parameters()) and not model[0].training


def test_15_parameters_beside_children_are_frozen():
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 2))
    ModelFreezer(model).freeze()
    assert not model[0].in_proj_weight.requires_grad and not model[0].out_proj.weight.requires_grad
    assert model[1].weight.requires_grad


def rates_of(make, steps, lr=0.01):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_16_the_cosine_falls_smoothly_to_its_end_and_never_exceeds_the_base_rate():
    rates = rates_of(lambda o: CosineLrScheduler(o, 100, 1, num_warmup_epochs=20), 101)
    falls = [a - b for a, b in itertools.pairwise(rates[21:])]
    assert rates[-1] == pytest.approx(1e-6) and max(falls) < 0.01 * math.pi / 80 / 2 * 1.01
    ratio = rates_of(lambda o: CosineLrScheduler(o, 100, 1, num_warmup_epochs=20, warmup_starting_lr_ratio=0.5), 101)
    assert max(ratio) <= 0.01 + 1e-12 and ratio[0] == pytest.approx(0.005)


def cosine_rates():
    rates = []

    class Look(TrainerCallback):
        def after_step(self, state, logger):
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    trainer = make_trainer(callbacks=[Look()], seed=1)
    make = CosineLrScheduler.create_scheduler_fn()
    train(trainer, make_data(64), num_epochs=5, per_device_batch_size=8, create_scheduler_fn=make)
    config = trainer.run_config
    return rates, (
        config.num_update_steps_per_epoch,
        config.num_local_update_steps_per_epoch,
        config.max_num_train_steps,
    )


def test_17_the_cosine_covers_its_whole_curve_on_several_processes(world2):
    (first, counts), (second, _) = world2(cosine_rates)
    assert first == second and len(first) == 5 * 4
    assert first[0] == pytest.approx(0.1) and first[-1] < 0.1 * 0.03
    assert counts == (8, 4, 5 * 8 + 1)


def test_18_warm_up_stable_decay_keeps_its_count_and_its_ends():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = WSDLrScheduler(optimizer, total_steps=1000, num_checkpoints=2)
    assert list(scheduler.get_checkpoint_steps()) == [500, 1000]
    for _ in range(480):
        optimizer.step()
        scheduler.step()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    restored = WSDLrScheduler(other, total_steps=1000, num_checkpoints=2)
    restored.load_state_dict(scheduler.state_dict())
    for _ in range(15):
        optimizer.step(), scheduler.step(), other.step(), restored.step()
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 1.0
    more = rates_of(
        lambda o: WSDLrScheduler(o, total_steps=50, num_warmup_steps=10, is_continuation_from_checkpoint=True),
        20,
        lr=1.0,
    )
    assert more == [1.0] * 21
    for kwargs in ({"decay_phase_ratio": 0.1}, {"lr_min": 0.0}, {"lr_min": 0.0, "use_inverse_sqrt_decay": False}):
        assert all(map(math.isfinite, rates_of(lambda o, k=kwargs: WSDLrScheduler(o, total_steps=5, **k), 8)))


def test_19_reading_an_unknown_metric_does_not_create_it():
    class Curious(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            trainer.run_history.get_metric_values("train_nothing")

    trainer = make_trainer(callbacks=[Curious(), LogMetricsCallback()])
    train(trainer, eval_dataset=make_data())
    assert "train_nothing" not in trainer.run_history.get_metric_names()


class Recorded(Trainer):
    """Records a metric of given values, one per epoch."""

    values = ()

    def eval_epoch_end(self):
        self.run_history.update_metric("mine", self.values[self.run_history.current_epoch - 1])


def test_20_a_nan_is_never_the_best_and_an_older_file_is_never_loaded(tmp_path):
    path = tmp_path / "best.pt"
    trainer = make_trainer(cls=Recorded, callbacks=[SaveBestModelCallback(path, watch_metric="mine")])
    trainer.values = (math.nan, 0.5, math.nan, 0.7)
    make = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    train(trainer, num_epochs=4, eval_dataset=make_data(), create_scheduler_fn=make)
    content = torch.load(path, weights_only=True)
    assert content["mine"] == 0.5 and "scheduler_state_dict" in content and "optimizer_state_dict" in content
    assert all(torch.equal(v, trainer.model.state_dict()[k]) for k, v in content["model_state_dict"].items())

    class Stops(Recorded):
        def train_epoch_end(self):
            raise StopTrainingError("before anything was saved")

    other = make_trainer(cls=Stops, callbacks=[SaveBestModelCallback(path, watch_metric="mine")])
    train(other, eval_dataset=make_data())
    assert not torch.equal(other.model[0].weight, content["model_state_dict"]["0.weight"])


def test_21_a_limit_above_the_length_changes_nothing_and_schedules_see_the_limited_length():
    assert len(DataLoaderSlice(DataLoader(make_data(40), batch_size=8), 7)) == 5
    seen, counter = [], Updates()

    def make(optimizer, steps):
        seen.append(steps)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    fn = functools.partial(make, steps=P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH)
    settings = {"gradient_accumulation_steps": 4, "create_scheduler_fn": fn}
    train(make_trainer(callbacks=[LimitBatchesCallback(7), counter]), make_data(40), **settings)
    assert counter.count == 2 and seen == [2]
    train(make_trainer(callbacks=[LimitBatchesCallback(3)]), make_data(40), **settings)
    assert seen == [2, 1]


def test_22_nested_limits_restore_the_outer_one():
    batches = []
    with LimitBatches(3):
        with LimitBatches(2):
            trainer = make_trainer()
            train(trainer, make_data(64))
            batches.append(trainer.state.clock.batch)
        trainer = make_trainer()
        train(trainer, make_data(64))
        batches.append(trainer.state.clock.batch)
    trainer = make_trainer()
    train(trainer, make_data(64))
    assert [*batches, trainer.state.clock.batch] == [2, 3, 8]


def test_23_the_average_survives_evaluations_errors_and_integer_buffers(tmp_path):
    class Breaks(Trainer):
        fails = False

        def calculate_eval_batch_loss(self, batch):
            if self.fails and self.run_history.metric_name_prefix:
                raise KeyError("in the average")
            return super().calculate_eval_batch_loss(batch)

    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    ema = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt")
    trainer = make_trainer(model, cls=Breaks, callbacks=[ema, Updates()])
    assert trainer.evaluate(make_data())["evaluation_loss"] > 0
    train(trainer, eval_dataset=make_data())
    assert ema.ema_model.module[1].num_batches_tracked.item() == 3
    attending = trainer.callback_handler.callbacks
    trainer.fails = True
    with pytest.raises(KeyError, match="average"):
        train(trainer, eval_dataset=make_data())
    assert trainer.model is model and trainer.callback_handler.callbacks == attending
    assert trainer.run_history.metric_name_prefix == ""


def test_24_the_run_configuration_becomes_a_dict_without_evaluation_and_with_a_generator():
    trainer = make_trainer()
    generator = torch.Generator().manual_seed(3)
    train(trainer, train_dataloader_kwargs={"generator": generator})
    before = copy.copy(trainer.run_config)
    content = trainer.run_config.to_dict()
    assert content["eval_dl_kwargs"] is None and content["train_dl_kwargs"]["generator"] is generator
    content["train_dl_kwargs"].clear()
    assert trainer.run_config == before and trainer.run_config.train_dl_kwargs


def test_25_batch_samplers_streams_and_loaders_without_a_length_train():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*make_data(20).tensors)

    class Endless:
        def __iter__(self):
            x, y = make_data(20).tensors
            yield from ((x[k : k + 5], y[k : k + 5]) for k in range(0, 20, 5))

    counts = []
    for data, kwargs in (
        (make_data(20), {"batch_sampler": [[0, 1, 2], [3]]}),
        (Stream(), {"num_workers": 0}),
        (Endless(), None),
        (DataLoader(Stream(), batch_size=7), None),
    ):
        trainer = make_trainer()
        history = train(trainer, data, num_epochs=2, train_dataloader_kwargs=kwargs)
        counts.append((trainer.state.clock.batch, trainer.state.clock.sample))
        assert math.isfinite(history.get_latest_metric("train_loss_epoch"))
    assert counts == [(4, 8), (6, 40), (8, 40), (6, 40)]


def test_26_a_step_state_holds_what_follows_the_update_and_names_go_on(tmp_path):
    after = {}

    class Look(TrainerCallback):
        def batch_end(self, state, logger):
            after[state.clock.step] = weights(state.model)

    def saving():
        return SaveTrainingStateCallback(save_dir=tmp_path, save_every_n_steps=2, save_at_end=False)

    train(make_trainer(callbacks=[saving(), Look()]), num_epochs=1)
    other = make_trainer(callbacks=[saving()])
    other.load_training_state(tmp_path / "step_2")
    assert all(map(torch.equal, weights(other.model), after[2]))
    train(other, num_epochs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_4", "step_6"]


class Seeds(torch.utils.data.Dataset):
    """Says which seed the worker that reads a sample has."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        return torch.tensor([info.id, info.seed % 2**31])


def seen_by_workers(seed):
    trainer = make_trainer()
    torch.manual_seed(seed)
    trainer.train_dataset = Seeds()
    loader = trainer.create_train_dataloader(1, {"num_workers": 2, "shuffle": False, "persistent_workers": False})
    return sorted({tuple(row.tolist()) for batch in loader for row in batch})


def test_27_worker_seeds_repeat_for_a_seed_and_differ_between_workers():
    first, again, other = seen_by_workers(1), seen_by_workers(1), seen_by_workers(2)
    assert first == again != other
    assert len({seed for _, seed in first}) == len({worker for worker, _ in first}) == 2


# 28, that a step on a device waits for nothing, is in test_gpu.py.


def test_29_a_metric_that_only_contains_the_word_is_no_training_metric():
    logged = []

    class Keep(LogMetricsCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("constrained", 1.0)
            super().on_train_epoch_end(trainer)
            logged.append("|")

        def log_metrics(self, trainer, metrics):
            logged.extend(metrics)

    train(make_trainer(callbacks=[Keep()]), eval_dataset=make_data())
    assert logged == ["train_loss_epoch", "|", "constrained", "eval_loss_epoch"]


def stop_in_a_step_and_evaluate_unequal_shards():
    import torch.distributed as dist

    seen = []

    class Stops(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
            if dist.get_rank() == 1 and step == 1:
                raise StopTrainingError("rank 1 only")

        def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.extend(batch[0][:, 0].tolist())

    trainer = make_trainer(callbacks=[Stops()], seed=1)
    train(trainer, make_data(64), num_epochs=5, per_device_batch_size=4)
    done = trainer.state.clock.batch
    value = trainer.evaluate(make_data(5), per_device_batch_size=2)["evaluation_loss"]
    rows = trainer.gather(torch.full((1 + dist.get_rank(), 2), float(dist.get_rank())), padding_value=0.0)
    return done, value, weights(trainer.model), rows, type(trainer.model).__name__


def test_30_one_rank_ends_all_and_unequal_shards_neither_hang_nor_repeat(world2):
    (first, loss, model_weights, rows, name), (second, other_loss, _, other_rows, _) = world2(
        stop_in_a_step_and_evaluate_unequal_shards
    )
    assert first == second < 40 and name == "Sequential"
    model = make_model()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), model_weights):
            parameter.copy_(value)
    x, y = make_data(5).tensors
    assert loss == other_loss == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)
    assert torch.equal(rows, other_rows) and rows[:, 0].tolist() == [0.0, 1.0, 1.0]


def test_a_default_device_elsewhere_changes_nothing(tmp_path):
    found = []
    for device in ("cpu", "meta"):  # as torch.set_default_device does; model and data are on the CPU
        trainer, data = make_trainer(seed=1, device="cpu"), make_data()
        with torch.device(device):
            folder = tmp_path / device
            train(trainer, data, eval_dataset=data, num_epochs=2, checkpoint_dir=folder, gradient_clip_norm=1.0)
        found.append((weights(trainer.model), trainer.run_history.get_metric_values("eval_loss_epoch")))
    assert found[0][1] == found[1][1] and all(map(torch.equal, found[0][0], found[1][0]))
