"""What the Trainer promises to users, subclasses and test doubles, met the way users meet it."""

import functools
import math
import warnings
from collections import UserDict
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain.core.errors import ConfigError, StopTrainingError
from drivetrain.train.callbacks import (
    CallbackHandler,
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from drivetrain.train.schedulers import CosineLrScheduler
from drivetrain.train.settings import TrainerPlaceholderValues
from drivetrain.train.tracking import InMemoryRunHistory
from drivetrain.train.trainer import Trainer
from tests.train.tasks import Losses, make_data, make_model, make_trainer, train, weights


class Trace(TrainerCallback):
    """Keeps the name of every event of the loop."""

    def __init__(self):
        self.events = []

    def run_event(self, event, state, logger):
        self.events.append(event.name)


# ---------------------------------------------------------------------- stopping and failing


def test_a_stop_inside_a_step_still_saves_the_final_state(tmp_path):
    class Stopper(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
            if step == 1:
                raise StopTrainingError("enough")

    trainer = make_trainer(callbacks=[Stopper(), SaveTrainingStateCallback(save_dir=tmp_path)])
    train(trainer)
    assert (tmp_path / "final").exists()


def test_a_state_can_be_saved_by_hand_after_an_error_in_a_step(tmp_path):
    class Broken(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            raise KeyError("mine")

    trainer = make_trainer(callbacks=[Broken()])
    with pytest.raises(KeyError):
        train(trainer)
    trainer.save_training_state(tmp_path / "state")
    assert (tmp_path / "state").exists()


@pytest.mark.parametrize("where", ["hook", "callback"])
def test_a_stop_before_the_first_epoch_ends_the_run_in_good_order(where):
    seen = []

    class Stopper(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            if where == "callback":
                raise StopTrainingError("not today")

        def on_stop_training_error(self, trainer, **kwargs):
            seen.append("stop")

        def on_training_run_end(self, trainer, **kwargs):
            seen.append("end")

        def on_exception(self, trainer, **kwargs):
            seen.append("exception")

    class Mine(Trainer):
        def training_run_start(self):
            if where == "hook":
                raise StopTrainingError("not today")

    trainer = make_trainer(cls=Mine, callbacks=[Stopper()])
    train(trainer)
    assert seen == ["stop", "end"] and trainer.state.clock.batch == 0


def stop_one_rank_before_the_first_epoch():
    import torch.distributed as dist

    seen = []

    class Stopper(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            if dist.get_rank() == 1:
                raise StopTrainingError("not today")

        def on_stop_training_error(self, trainer, **kwargs):
            seen.append("stop")

        def on_training_run_end(self, trainer, **kwargs):
            seen.append("end")

    trainer = make_trainer(callbacks=[Stopper()])
    train(trainer)
    return seen, trainer.state.clock.batch


def fail_on_every_rank_and_go_on():
    class Broken(TrainerCallback):
        is_on = True

        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            if self.is_on:
                raise KeyError("mine")

    broken = Broken()
    trainer = make_trainer(callbacks=[broken], seed=1)
    with pytest.raises(KeyError):
        train(trainer)
    after_error = type(trainer.model).__name__
    broken.is_on = False
    loss = trainer.evaluate(make_data(9))["evaluation_loss"]
    train(trainer, num_epochs=2)
    return after_error, loss, trainer.state.clock.batch


def test_a_trainer_can_go_on_after_an_error_on_all_ranks(world2):
    first, second = world2(fail_on_every_rank_and_go_on)
    assert first == second and first[0] == "Sequential" and first[2] == 4


def test_one_rank_that_stops_before_the_first_epoch_ends_all(world2):
    assert world2(stop_one_rank_before_the_first_epoch) == [(["stop", "end"], 0)] * 2


def test_an_error_in_a_stand_alone_evaluation_is_told_to_guests_and_leaves_modes():
    told = []

    class Listener(TrainerCallback):
        def on_exception(self, trainer, exception, **kwargs):
            told.append(exception)

        def close(self):
            told.append("closed")

    class Broken(Trainer):
        def calculate_eval_batch_loss(self, batch):
            raise KeyError("mine")

        def calculate_predict_batch(self, batch):
            raise KeyError("mine")

    for verb in ("evaluate", "predict"):
        told.clear()
        trainer = make_trainer(cls=Broken, callbacks=[Listener()])
        trainer.model.train()
        with pytest.raises(KeyError, match="mine") as caught:
            getattr(trainer, verb)(make_data(8))
        assert told == [caught.value, "closed"]
        assert all(module.training for module in trainer.model.modules())


def test_request_stop_ends_the_run_after_the_step():
    class Asker(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
            if step == 1:
                trainer.request_stop("enough")

    trainer = make_trainer(callbacks=[Asker()])
    train(trainer, num_epochs=3)
    assert trainer.state.clock.batch == 2


# ---------------------------------------------------------------------- traces

STEP = [
    "AFTER_DATALOADER", "BATCH_START", "{open}", "BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS", "AFTER_LOSS", "STEP_OUTPUT",
    "BEFORE_BACKWARD", "AFTER_BACKWARD", "{update}", "BATCH_END", "BATCH_CHECKPOINT",
]  # fmt: skip
UPDATE = ["AFTER_TRAIN_BATCH", "BEFORE_STEP", "AFTER_STEP"]


def step(opens=True, updates=True):
    events = []
    for name in STEP:
        if name == "{open}":
            events += ["BEFORE_TRAIN_BATCH"] * opens
        elif name == "{update}":
            events += UPDATE if updates else []
        else:
            events.append(name)
    return ["BEFORE_DATALOADER", *events]


def traced(trainer_kwargs=None, **kwargs):
    trace = Trace()
    trainer = make_trainer(callbacks=[trace], **(trainer_kwargs or {}))
    trace.events.clear()
    train(trainer, make_data(16), **kwargs)
    return trace.events


BEGIN = ["BEFORE_LOAD", "AFTER_LOAD", "FIT_START", "EPOCH_START"]
END = ["EPOCH_END", "EPOCH_CHECKPOINT", "FIT_END"]


def test_the_events_of_a_run_without_evaluation():
    assert traced() == [*BEGIN, *step(), *step(), *END]


def test_the_events_of_an_accumulated_run():
    events = traced(gradient_accumulation_steps=2)
    assert events == [*BEGIN, *step(updates=False), *step(opens=False), *END]


def test_the_events_of_a_micro_batched_run():
    micro = ["BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS", "AFTER_LOSS"]
    back = ["BEFORE_BACKWARD", "AFTER_BACKWARD"]
    one = [
        "BEFORE_DATALOADER",
        "AFTER_DATALOADER",
        "BATCH_START",
        "BEFORE_TRAIN_BATCH",
        *micro,
        *back,
        *micro,
        "STEP_OUTPUT",
        *back,
    ]
    one += [*UPDATE, "BATCH_END", "BATCH_CHECKPOINT"]
    assert traced(microbatch_size=4) == [*BEGIN, *one, *one, *END]


def test_the_events_of_a_stopped_and_of_a_failed_run():
    class Ends(Trainer):
        error = None

        def backward_step(self, loss):
            raise self.error

    begin = [*BEGIN, *step()[: step().index("AFTER_BACKWARD")]]
    for error, rest in ((StopTrainingError("enough"), ["STOP", "FIT_END"]), (KeyError("mine"), [])):
        trace = Trace()
        trainer = make_trainer(cls=Ends, callbacks=[trace])
        trainer.error = error
        trace.events.clear()
        try:
            train(trainer)
        except KeyError:
            assert isinstance(error, KeyError)
        assert trace.events == [*begin, *rest]


def test_the_events_of_evaluate_and_predict():
    trace = Trace()
    trainer = make_trainer(callbacks=[trace])
    trace.events.clear()
    trainer.evaluate(make_data(8))
    batch = ["EVAL_BATCH_START", "EVAL_BEFORE_FORWARD", "EVAL_AFTER_FORWARD", "EVAL_BATCH_END"]
    inside = ["EVAL_BEFORE_ALL", "EVAL_START", *batch, "EVAL_END", "EVAL_AFTER_ALL"]
    assert trace.events == ["EVAL_STANDALONE_START", *inside, "EVAL_STANDALONE_END"]
    trace.events.clear()
    trainer.predict(make_data(8))
    batch = ["PREDICT_BATCH_START", "PREDICT_BEFORE_FORWARD", "PREDICT_AFTER_FORWARD", "PREDICT_BATCH_END"]
    assert trace.events == ["PREDICT_START", *batch, "PREDICT_END"]


# ---------------------------------------------------------------------- logging and history


def test_a_value_logged_in_a_loss_hook_is_weighted_by_its_own_batch():
    class Logging(Trainer):
        def calculate_train_batch_loss(self, batch):
            self.log("rows", float(len(batch[1])))
            return super().calculate_train_batch_loss(batch)

        def calculate_eval_batch_loss(self, batch):
            output = super().calculate_eval_batch_loss(batch)
            self.log("rows", torch.tensor(float(len(batch[1]))))
            return output

    history = train(make_trainer(cls=Logging), make_data(11), eval_dataset=make_data(11), num_epochs=2)
    expected = (8 * 8 + 3 * 3) / 11
    assert history.get_metric_values("train_rows_epoch") == pytest.approx([expected] * 2)
    assert history.get_metric_values("eval_rows_epoch") == pytest.approx([expected] * 2)


def test_a_logged_value_may_have_a_weight_of_its_own():
    class Logging(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
            trainer.log("odd", step, weight=1 + step)

    history = train(make_trainer(callbacks=[Logging()]))
    assert history.get_latest_metric("train_odd_epoch") == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)


def test_a_logger_needs_no_more_than_log_metrics():
    class Minimal:
        def __init__(self):
            self.seen = {}

        def log_metrics(self, metrics, step=None):
            self.seen.update(metrics)

    logger = Minimal()
    train(make_trainer(loggers=[logger]), eval_dataset=make_data())
    assert {"train_loss_epoch", "eval_loss_epoch"} <= set(logger.seen)


def test_a_history_of_the_users_own_is_used_even_when_it_is_empty_and_falsy():
    class Falsy(InMemoryRunHistory):
        def __len__(self):
            return len(self._metrics)

    history = Falsy()
    assert make_trainer(run_history=history).run_history is history


def test_an_epoch_without_batches_records_nan_and_warns():
    trainer = make_trainer()
    with pytest.warns(UserWarning, match="no batch"):
        history = trainer.train(DataLoader(TensorDataset(torch.zeros(0, 6), torch.zeros(0))), num_epochs=1)
    assert math.isnan(history.get_latest_metric("train_loss_epoch"))


def test_evaluate_forgets_the_history_unless_told_otherwise():
    trainer = make_trainer()
    train(trainer, eval_dataset=make_data())
    trainer.evaluate(reset_run_history=False)
    assert {"train_loss_epoch", "eval_loss_epoch", "evaluation_loss"} <= set(trainer.run_history.get_metric_names())
    trainer.evaluate()
    assert set(trainer.run_history.get_metric_names()) == {"evaluation_loss"}


def test_evaluate_without_any_dataset_says_what_to_do():
    with pytest.raises(ConfigError, match="eval_dataset"):
        make_trainer().evaluate()


def test_train_without_a_dataset_says_what_to_do():
    with pytest.raises(ConfigError, match="train_dataset"):
        make_trainer().train(num_epochs=1)


# ---------------------------------------------------------------------- schedulers and placeholders


def test_a_plateau_scheduler_waits_for_the_first_evaluation():
    trainer = make_trainer(lr=0.5)
    plateau = functools.partial(
        torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9, threshold_mode="abs"
    )
    train(trainer, num_epochs=4, eval_dataset=make_data(), eval_interval=2, create_scheduler_fn=plateau)
    # Two evaluations, after epochs 2 and 4: the first sets the mark, the second does not beat it.
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_plateau_scheduler_that_watches_what_will_never_be_recorded_is_refused_at_the_start():
    trainer = make_trainer()
    with pytest.raises(ValueError, match="scheduler_metric"):
        train(trainer, create_scheduler_fn=torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert trainer.state.clock.batch == 0


def test_a_scheduler_may_be_stepped_per_epoch():
    trainer = make_trainer(lr=1.0)
    make = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    train(trainer, num_epochs=3, create_scheduler_fn=make, scheduler_interval="epoch")
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.125)


def test_a_duration_in_epochs_tells_schedulers_the_number_of_epochs():
    rates = []

    class Look(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    for kwargs in ({"num_epochs": 4}, {"num_epochs": None, "max_duration": "4ep"}):
        trainer = make_trainer(callbacks=[Look()])
        train(trainer, create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(), **kwargs)
        assert trainer.run_config.num_epochs == 4
    assert len(rates) == 24 and rates[:12] == rates[12:] and rates[0] > rates[11]


def test_a_scheduler_instance_of_the_trainers_optimizer_is_used():
    trainer = make_trainer(lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    train(trainer, create_scheduler_fn=scheduler)
    assert trainer.scheduler is scheduler and trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.125)


def test_a_scheduler_the_user_assigned_stays():
    trainer = make_trainer(lr=1.0)
    trainer.scheduler = scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    train(trainer)
    train(trainer)
    assert trainer.scheduler is scheduler and trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5**6)


def test_an_older_override_of_create_scheduler_receives_the_optimizer():
    given = []

    class Old(Trainer):
        def create_scheduler(self, optimizer):
            given.append(optimizer)
            return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)

    trainer = make_trainer(cls=Old)
    train(trainer, create_scheduler_fn=lambda optimizer: None)
    assert given == [trainer.optimizer]


def test_placeholders_see_limited_loaders():
    P, seen = TrainerPlaceholderValues, {}

    def make(optimizer, first, **numbers):
        seen.update(numbers, first=first)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    fn = functools.partial(
        make,
        first=P.NUM_EPOCHS * P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        train_len=P.TRAIN_DATALOADER_LEN,
        eval_len=P.EVAL_DATALOADER_LEN,
    )
    train(
        make_trainer(),
        make_data(80),
        num_epochs=2,
        eval_dataset=make_data(40),
        limit_train_batches=6,
        limit_eval_batches=0.4,
        gradient_accumulation_steps=4,
        create_scheduler_fn=fn,
    )
    assert seen == {"first": 4, "train_len": 6, "eval_len": 2}


# ---------------------------------------------------------------------- callbacks that watch


def test_an_average_that_is_never_evaluated_is_refused_at_the_start(tmp_path):
    trainer = make_trainer(callbacks=[ModelEmaCallback(save_path=tmp_path / "ema.pt")])
    with pytest.raises(ValueError, match="eval_dataset"):
        train(trainer)
    assert trainer.state.clock.batch == 0
    quiet = ModelEmaCallback(save_path=tmp_path / "ema.pt", evaluate_during_training=False)
    train(make_trainer(callbacks=[quiet]))


def test_a_misspelt_watched_metric_is_answered_after_the_first_epoch_with_the_nearest(tmp_path):
    trainer = make_trainer(callbacks=[SaveBestModelCallback(tmp_path / "b.pt", watch_metric="eval_acuracy_epoch")])
    trainer._eval_metrics = type(trainer._eval_metrics)(
        {"accuracy": lambda out, y: (out.argmax(-1) == y).float().mean()}
    )
    with pytest.raises(ValueError, match="eval_accuracy_epoch"):
        train(trainer, num_epochs=3, eval_dataset=make_data())
    assert trainer.state.clock.epoch == 1


def test_early_stopping_watches_a_metric_of_the_users_own(tmp_path):
    class Mine(Trainer):
        def train_epoch_end(self):
            self.run_history.update_metric("mine", 1.0)

    callback = EarlyStoppingCallback(early_stopping_patience=2, watch_metric="mine", greater_is_better=True)
    trainer = make_trainer(cls=Mine, callbacks=[callback])
    train(trainer, num_epochs=9)
    assert trainer.state.clock.epoch == 3


# ---------------------------------------------------------------------- doubles and seams


def test_a_replaced_handler_is_heard_and_can_grow():
    first, second = Losses(), Trace()
    trainer = make_trainer()
    trainer.callback_handler = CallbackHandler([first])
    trainer.callback_handler.add_callback(second)
    train(trainer)
    assert len(first.values) == 3 and second.events
    trainer.callback_handler._enabled = False
    train(trainer)
    assert len(first.values) == 3


def test_seams_are_called_when_overridden():
    called = []

    def noting(name):
        def method(self, *args, **kwargs):
            called.append(name)
            return getattr(super(Seams, self), name)(*args, **kwargs)

        return method

    names = [
        "_create_accelerator", "_create_callback_handler", "_prepare_model_optimizer_and_dataloaders", "_create_run_config",
        "_check_eval_batch_size", "_run_training", "_run_train_epoch", "_run_eval_epoch", "_run_evaluation",
        "_perform_forward_and_backward_passes", "_update_loss_tracker", "_add_epoch_loss_to_run_history", "_clip_gradients",
    ]  # fmt: skip
    Seams = type("Seams", (Trainer,), {name: noting(name) for name in names})
    trainer = make_trainer(cls=Seams)
    train(trainer, make_data(8), eval_dataset=make_data(8))
    trainer.evaluate(make_data(8))
    assert set(called) == set(names)


def test_a_mock_model_and_a_mock_loader_of_length_zero_train():
    class Mocked(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return mock.MagicMock(__len__=lambda self: 0)

        create_eval_dataloader = create_train_dataloader

    trainer = Mocked(mock.Mock(), mock.Mock(), mock.Mock(), callbacks=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(mock.Mock(), num_epochs=2, eval_dataset=mock.Mock())
    assert trainer.run_history.current_epoch == 3


def test_mocks_train_with_the_default_callbacks_and_a_mock_in_place_of_the_runtime(capsys):
    class Mocked(Trainer):
        updates = 0

        def _create_accelerator(self):
            return mock.Mock(num_processes=1, optimizer_step_was_skipped=False, mixed_precision="no", device="cpu")

        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return [{"number": number} for number in range(6)]

        def _prepare_model_optimizer_and_dataloaders(self):
            pass

        def _perform_forward_and_backward_passes(self, batch, step):
            pass

        def optimizer_step(self):
            self.updates += 1

    trainer = Mocked(mock.Mock(), mock.Mock(), mock.Mock())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(mock.Mock(), num_epochs=2, gradient_accumulation_steps=2)
    assert trainer.updates == 6


def test_the_check_of_the_evaluation_batch_size_knows_the_runs_configuration():
    seen = []

    class Checked(Trainer):
        def _check_eval_batch_size(self):
            seen.append(self.run_config.eval_total_batch_size)

    train(make_trainer(cls=Checked), make_data(8), eval_dataset=make_data(8), per_device_batch_size=2)
    assert seen == [2]


@pytest.mark.parametrize("name", ["optimizer_step", "backward_step", "optimizer_zero_grad", "_update_loss_tracker"])
def test_a_method_that_is_patched_in_the_class_is_called_at_every_step(name):
    with mock.patch.object(Trainer, name, autospec=True, side_effect=getattr(Trainer, name)) as patched:
        trainer = make_trainer()
        train(trainer, make_data(8), per_device_batch_size=4)
    plain = make_trainer()
    train(plain, make_data(8), per_device_batch_size=4)
    assert patched.call_count == 2 and all(map(torch.equal, weights(trainer.model), weights(plain.model)))


def test_training_inside_a_run_of_the_same_trainer_is_an_error_and_the_trainer_works_afterwards():
    class Again(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            trainer.train(make_data(8), num_epochs=1)

    trainer = make_trainer(callbacks=[Again()])
    with pytest.raises(ConfigError, match="during a run of the same Trainer"):
        train(trainer, make_data(8))
    trainer.callback_handler.clear_callbacks()
    assert len(train(trainer, make_data(8), num_epochs=2).get_metric_values("train_loss_epoch")) == 2


def test_a_patched_loader_class_is_the_one_that_is_called():
    trainer = make_trainer()
    with mock.patch("drivetrain.trainer.DataLoader") as patched:
        trainer.train_dataset = data = make_data()
        trainer.create_train_dataloader(4, {"num_workers": 0, "shuffle": False})
    kwargs = patched.call_args.kwargs
    assert kwargs["dataset"] is data and kwargs["batch_size"] == 4 and kwargs["shuffle"] is False
    assert {name: kwargs[name] for name in trainer._train_dl_kwargs} == trainer._train_dl_kwargs


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        ({"sampler": [1, 0]}, {"shuffle"}),
        ({"batch_sampler": [[0], [1]]}, {"shuffle", "batch_size"}),
        ({"batch_size": 3}, set()),
    ],
)
def test_a_users_loader_argument_takes_the_defaults_it_rules_out_with_it(given, absent):
    trainer = make_trainer()
    trainer.train_dataset = make_data()
    trainer.create_train_dataloader(8, given)
    assert not absent & set(trainer._train_dl_kwargs)
    assert {name: trainer._train_dl_kwargs[name] for name in given} == given


def test_iterable_datasets_get_no_shuffle():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*make_data().tensors)

    trainer = make_trainer()
    trainer.train_dataset = Stream()
    trainer.create_train_dataloader(8, {"num_workers": 0})
    assert "shuffle" not in trainer._train_dl_kwargs


def test_a_loader_made_by_an_override_and_a_collate_function_are_used():
    class Mine(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return [(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))] * 3

    trainer = make_trainer(cls=Mine)
    train(trainer)
    assert (trainer.state.clock.batch, trainer.state.clock.sample) == (3, 6)

    def collate(rows):
        return torch.stack([x for x, _ in rows]) * 0, torch.stack([y for _, y in rows])

    look = []

    class Look(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            look.append(batch[0].abs().sum().item())

    train(make_trainer(callbacks=[Look()]), collate_fn=collate)
    assert look == [0.0] * 3


def test_the_users_dictionary_is_not_altered_and_callbacks_see_the_true_loss():
    kept, seen, scaled = [], [], []

    class Mine(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = {**super().calculate_train_batch_loss(batch), "extra": 7}
            kept.append((output, dict(output)))
            return output

        def backward_step(self, loss):
            scaled.append(loss.item())
            super().backward_step(loss)

    class Look(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.append((batch_output["loss"].item(), batch_output["extra"]))

    train(make_trainer(cls=Mine, callbacks=[Look()], lr=0.0), make_data(32), gradient_accumulation_steps=4)
    assert all(output == copy for output, copy in kept)
    assert [loss for loss, _ in seen] == [copy["loss"].item() for _, copy in kept]
    assert scaled == pytest.approx([loss / 4 for loss, _ in seen])


def test_entries_of_the_users_own_survive_micro_batches():
    seen = []

    class Mine(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return {**output, "rows": batch[1], "note": "mine"}

    class Look(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.append(batch_output)

    train(make_trainer(cls=Mine, callbacks=[Look()], lr=0.0), make_data(8), microbatch_size=3)
    whole = nn.functional.cross_entropy(make_model()(make_data(8).tensors[0]), make_data(8).tensors[1])
    assert seen[0]["batch_size"] == 8 and seen[0]["loss"].item() == pytest.approx(whole.item(), rel=1e-6)
    assert torch.equal(seen[0]["rows"], make_data(8).tensors[1]) and seen[0]["note"] == "mine"
    assert seen[0]["model_outputs"].shape == (8, 3) and not seen[0]["model_outputs"].requires_grad


# ---------------------------------------------------------------------- batches and predictions


class Named(UserDict):
    """A mapping that is no dict, as tokenisers return."""


def test_predictions_need_no_targets():
    x = make_data(11).tensors[0]
    trainer = make_trainer()
    expected = trainer.predict(make_data(11), per_device_batch_size=4)
    assert torch.equal(trainer.predict(TensorDataset(x), per_device_batch_size=4), expected)
    rows = list(x)
    kwargs = {"per_device_batch_size": 4, "dataloader_kwargs": {"num_workers": 0}}
    assert torch.equal(trainer.predict(rows, **kwargs), expected)
    train(trainer, make_data(8))  # batches of pairs again: the loss is back
    assert trainer.predict(TensorDataset(x), limit_batches=1, per_device_batch_size=4).shape == (4, 3)


def test_predictions_of_a_mapping_without_targets():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return {"logits": self.layer(x), "pair": (x, x + 1)}

    model, x = Model(), make_data(5).tensors[0]
    trainer = Trainer(model, nn.CrossEntropyLoss(), callbacks=())
    kwargs = {"per_device_batch_size": 2, "dataloader_kwargs": {"num_workers": 0}}
    outputs = trainer.predict([{"x": row} for row in x], **kwargs)
    assert torch.allclose(outputs["logits"], model.layer(x)) and torch.equal(outputs["pair"][1], x + 1)


def test_the_form_follows_the_loss_function():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, labels=None):
            logits = self.layer(x)
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels) * 2
            return {"logits": logits, "loss": loss}

    x, y = make_data(8).tensors
    data, model = [{"x": a, "labels": b} for a, b in zip(x, y)], Model()
    trainer = Trainer(model, nn.CrossEntropyLoss(), callbacks=())
    kwargs = {"dataloader_kwargs": {"num_workers": 0}}
    once = trainer.evaluate(data, **kwargs)["evaluation_loss"]
    trainer.loss_func = None
    assert trainer.evaluate(data, **kwargs)["evaluation_loss"] == pytest.approx(2 * once)


def test_evaluation_metrics_of_a_tuple_batch_use_logits_when_the_model_carries_its_loss():
    class Output:
        def __init__(self, loss, logits):
            self.loss, self.logits = loss, logits

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, y):
            logits = self.layer(x)
            return Output(nn.functional.cross_entropy(logits, y), logits)

    trainer = Trainer(Model(), callbacks=(), metrics={"accuracy": lambda out, y: (out.argmax(-1) == y).float().mean()})
    data = make_data(16)
    expected = (trainer.model.layer(data.tensors[0]).argmax(-1) == data.tensors[1]).float().mean().item()
    assert trainer.evaluate(data)["evaluation_accuracy"] == pytest.approx(expected)


def test_a_mapping_that_is_no_dict_trains_evaluates_and_splits():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

    def collate(rows):
        return Named({"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])})

    results = []
    for size in (None, 3):
        torch.manual_seed(0)
        model = Model()
        trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
        train(trainer, collate_fn=collate, eval_dataset=make_data(), microbatch_size=size)
        results.append(model.layer.weight.detach().clone())
    assert torch.allclose(*results, atol=1e-6)


# ---------------------------------------------------------------------- runs in a row


def test_a_development_run_does_not_stop_later_files(tmp_path):
    trainer = make_trainer()
    train(trainer, fast_dev_run=True)
    trainer.save_checkpoint(tmp_path / "model.pt")
    assert (tmp_path / "model.pt").exists()


def test_a_development_run_needs_no_limit_and_visits_every_hook():
    trace = Trace()
    trainer = make_trainer(callbacks=[trace])
    trainer.train(make_data(), eval_dataset=make_data(), fast_dev_run=2)
    assert trainer.state.clock.batch == 2 and trace.events.count("EVAL_BATCH_END") == 2


def test_train_twice_evaluate_between_and_after():
    trainer = make_trainer()
    train(trainer, num_epochs=2, eval_dataset=make_data())
    before = weights(trainer.model)
    trainer.evaluate(make_data(), per_device_batch_size=5)
    assert all(map(torch.equal, before, weights(trainer.model)))
    history = train(trainer, num_epochs=2, reset_run_history=False)
    assert trainer.state.clock.epoch == 2 and len(history.get_metric_values("train_loss_epoch")) == 2
    reference = make_trainer()
    train(reference, num_epochs=4)
    assert all(map(torch.equal, weights(reference.model), weights(trainer.model)))


def test_a_global_generator_is_not_touched_without_a_seed():
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    trainer = make_trainer(make_model())
    torch.manual_seed(7)
    Trainer(trainer.model, nn.CrossEntropyLoss(), trainer.optimizer, callbacks=())
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_program_of_old_runs_with_its_import_changed(capsys):
    from torch import optim
    from torch.utils.data import random_split

    class MNISTModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(in_features=784, out_features=16), nn.ReLU(), nn.Linear(16, 10))

        def forward(self, input):
            return self.main(input.view(input.shape[0], -1))

    generator = torch.Generator().manual_seed(0)
    images, digits = torch.rand(160, 1, 28, 28, generator=generator), torch.randint(0, 10, (160,), generator=generator)
    train_dataset, validation_dataset = random_split(list(zip(images, digits.tolist())), [120, 40])
    model = MNISTModel()
    optimizer = optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loss_func = nn.CrossEntropyLoss()
    trainer = Trainer(
        model,
        loss_func=loss_func,
        optimizer=optimizer,
    )
    trainer.train(
        train_dataset=train_dataset,
        eval_dataset=validation_dataset,
        num_epochs=2,
        per_device_batch_size=32,
    )
    assert trainer.state.clock.batch == 8
    printed = capsys.readouterr().out
    assert "train_loss_epoch: " in printed and "eval_loss_epoch: " in printed and "Starting epoch 2" in printed


def test_evaluate_brings_its_own_run_configuration():
    trainer = make_trainer()
    train(trainer, eval_dataset=make_data())
    trainer.evaluate(make_data(), per_device_batch_size=3)
    config = trainer.run_config
    assert (config.num_epochs, config.eval_per_device_batch_size, config.eval_total_batch_size) == (1, 3, 3)


def test_limits_of_evaluate_and_predict():
    seen = []

    class Count(TrainerCallback):
        def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.append(len(batch[1]))

    trainer = make_trainer(callbacks=[Count()])
    trainer.evaluate(make_data(40), limit_batches=2)
    trainer.evaluate(make_data(40), limit_batches=0.2)
    assert seen == [8, 8, 8]
    assert trainer.predict(make_data(40), limit_batches=2).shape == (16, 3)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("no", "no"), ("fp32", "no"), ("32", "no"), (32, "no"), ("bf16", "bf16"), ("bf16-mixed", "bf16"), ("amp_bf16", "bf16"),
        ("fp16", "fp16"), ("16-mixed", "fp16"), ("amp_fp16", "fp16"), ("bf16-true", "bf16-true"), ("fp64", "fp64"), ("fp8", "fp8"),
    ],
)  # fmt: skip
def test_every_spelling_of_a_precision_is_understood(given, name):
    assert make_trainer(precision=given)._accelerator.mixed_precision == name


def test_the_launchers_precision_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert make_trainer()._accelerator.mixed_precision == "bf16"
    assert make_trainer(precision="no")._accelerator.mixed_precision == "no"


@pytest.mark.parametrize(("precision", "dtype"), [("fp64", torch.float64), ("bf16-true", torch.bfloat16)])
def test_true_precisions_cast_the_parameters_and_train(precision, dtype):
    trainer = make_trainer(precision=precision)
    rows = [(x.to(dtype), y) for x, y in zip(*make_data(8).tensors)]
    history = train(trainer, rows, train_dataloader_kwargs={"num_workers": 0})
    assert {p.dtype for p in trainer.model.parameters()} == {dtype}
    assert math.isfinite(history.get_latest_metric("train_loss_epoch"))


def test_another_librarys_name_for_clipping_is_accepted():
    results = []
    for name in ("gradient_clip_norm", "max_grad_norm"):
        trainer = make_trainer()
        train(trainer, **{name: 0.01})
        results.append(weights(trainer.model))
    assert all(map(torch.equal, *results))


def test_explain_prints_to_a_file_and_shows_guests():
    import io

    file, trainer = io.StringIO(), make_trainer(callbacks=[Losses()])
    text = trainer.explain(file)
    assert file.getvalue().strip() == text.strip() and "Losses" in text


def test_lr_find_suggests_nothing_where_the_loss_never_falls():
    class Flat(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * 0 + 1}

    trainer = make_trainer(cls=Flat)
    scheduler = trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    trainer.model[0].eval()
    result = trainer.lr_find(make_data(), num_steps=30)
    assert result.suggestion is None and len(result.lrs) == 30
    assert result.lrs[0] == pytest.approx(1e-7) and result.lrs[-1] == pytest.approx(1.0)
    assert trainer.scheduler is scheduler and not trainer.model[0].training and trainer.model[3].training
    assert trainer.settings is None and trainer.run_config is None and trainer.train_dataset is None


def test_resuming_refuses_a_loader_that_cannot_return_to_its_place_and_damaged_checkpoints(tmp_path):
    from drivetrain.core.errors import CheckpointError, ResumeError

    loader = DataLoader(make_data(), batch_size=8)
    train(make_trainer(), loader, num_epochs=None, max_duration="2ba", checkpoint_dir=tmp_path)
    other = DataLoader(make_data(), batch_size=4)
    with pytest.raises(ResumeError, match="batch_size was 8 and is 4"):
        train(make_trainer(), other, num_epochs=2, checkpoint_dir=tmp_path, resume_from="auto")
    for file in tmp_path.glob("*/tensors.safetensors"):
        file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="ba2"):
        train(make_trainer(), num_epochs=2, checkpoint_dir=tmp_path, resume_from="auto")


def test_a_shorter_run_asked_for_by_a_guest_ends_there():
    class Short(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
            if step == 1:
                trainer.state.stop_training()

    trainer = make_trainer(callbacks=[Short()])
    train(trainer, num_epochs=5, eval_dataset=make_data())
    assert trainer.state.clock.batch == 2


@pytest.mark.parametrize("by", ["argument", "algorithm"])
def test_a_run_and_its_schedule_can_be_scaled(by, capsys):
    from drivetrain.algorithms import ScaleSchedule

    if by == "argument":
        trainer = make_trainer(scale_schedule_ratio=0.5)
    else:
        with pytest.warns(DeprecationWarning, match="scale_schedule_ratio"):
            trainer = make_trainer(algorithms=[ScaleSchedule(0.5)])
    make = CosineLrScheduler.create_scheduler_fn()
    train(trainer, num_epochs=4, create_scheduler_fn=make)
    assert trainer.state.clock.epoch == 2 and trainer.run_config.num_epochs == 2
    assert trainer.scheduler.total_iterations == 2 * 3 and "num_epochs 4 → 2" in capsys.readouterr().out
    train(trainer, num_epochs=None, max_duration="12ba")
    assert trainer.state.clock.batch == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sanity_eval_batches": -1}, "sanity_eval_batches"),
        ({"overfit_batches": -1}, "overfit_batches"),
        ({"checkpoint_every": "soon"}, "checkpoint_every"),
        ({"limit_eval_batches": -3}, "limit_eval_batches"),
        ({"microbatch_size": "some"}, "microbatch_size"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"max_num_train_steps": 0}, "max_num_train_steps"),
        ({"gradient_clip_norm": math.nan}, "gradient_clip_norm"),
    ],
)
def test_settings_without_sense_are_refused_before_a_loader_is_made(settings, words):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=words):
        train(trainer, **settings)
    assert trainer._train_dataloader is None


def test_limits_of_evaluate_are_checked():
    with pytest.raises(ConfigError, match="fraction"):
        make_trainer().evaluate(make_data(), limit_batches=1.5)


def test_data_that_can_be_read_once_is_a_warning_for_several_epochs():
    def batches():
        return ((torch.zeros(4, 6), torch.zeros(4, dtype=torch.long)) for _ in range(3))

    with pytest.warns(UserWarning, match="read only once"):
        make_trainer().train(batches(), num_epochs=2)
    trainer = make_trainer()
    trainer.train(batches(), num_epochs=1)
    assert trainer.state.clock.batch == 3


def test_metrics_of_odd_batches_ask_for_their_hook():
    class Odd(Trainer):
        def calculate_eval_batch_loss(self, batch):
            outputs = self.model(batch["a"])
            return {
                "loss": self.loss_func(outputs, batch["b"]),
                "model_outputs": outputs,
                "batch_size": len(batch["b"]),
            }

    class Whole(Odd):
        def get_metric_inputs(self, batch, batch_output):
            return batch_output["model_outputs"], batch["b"]

    rows = [{"a": x, "b": y} for x, y in zip(*make_data(8).tensors)]
    metrics = {"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()}
    with pytest.raises(ConfigError, match="get_metric_inputs"):
        make_trainer(cls=Odd, metrics=metrics).evaluate(rows, dataloader_kwargs={"num_workers": 0})
    result = make_trainer(cls=Whole, metrics=metrics).evaluate(rows, dataloader_kwargs={"num_workers": 0})
    assert 0 <= result["evaluation_accuracy"] <= 1


def test_a_callable_decides_when_to_evaluate():
    seen = []

    class Look(TrainerCallback):
        def on_eval_epoch_start(self, trainer, is_intermediate, **kwargs):
            seen.append((trainer.state.clock.batch, is_intermediate))

    trainer = make_trainer(callbacks=[Look()])
    decide = lambda state, event: event.name == "EPOCH_END" or state.clock.batch == 2
    train(trainer, num_epochs=2, eval_dataset=make_data(), eval_interval=decide)
    assert seen == [(2, True), (3, False), (6, False)]


def test_evaluation_can_be_switched_off_and_always_follows_the_last_epoch_otherwise():
    seen = []

    class Look(TrainerCallback):
        def on_eval_epoch_start(self, trainer, **kwargs):
            seen.append(trainer.state.clock.batch)

    for interval, expected in (("0ep", []), (2, [6, 9]), ("1dur", [9]), ("0.25dur", [2, 4, 6, 8, 9])):
        seen.clear()
        train(make_trainer(callbacks=[Look()]), num_epochs=3, eval_dataset=make_data(), eval_interval=interval)
        assert seen == expected, interval


def test_an_overriding_hook_that_uses_the_model_directly_works():
    class Direct(Trainer):
        def calculate_train_batch_loss(self, batch):
            xb, yb = batch
            outputs = self.model(xb)
            return {"loss": self.loss_func(outputs, yb), "model_outputs": outputs, "batch_size": yb.size(0)}

        calculate_eval_batch_loss = calculate_train_batch_loss

    direct, plain = make_trainer(cls=Direct), make_trainer()
    histories = [train(trainer, eval_dataset=make_data(), num_epochs=2) for trainer in (direct, plain)]
    assert all(map(torch.equal, weights(direct.model), weights(plain.model)))
    first, second = (history.get_metric_values("eval_loss_epoch") for history in histories)
    assert first == second
