"""Every public argument, attribute, hook and callback argument, with its default, as people who move over know them."""

import inspect
from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch
from torch import nn

import drivetrain
from drivetrain import utils
from drivetrain.context.context import Context
from drivetrain.context.state import State
from drivetrain.core.errors import StopTrainingError
from drivetrain.train import callbacks, finetuning
from drivetrain.train.callbacks import CallbackHandler, TrainerCallback
from drivetrain.train.schedulers import CosineLrScheduler, SchedulerBase, StatefulSchedulerBase, WSDLrScheduler
from drivetrain.train.settings import TrainerRunConfig
from drivetrain.train.tracking import InMemoryRunHistory, LossTracker, RunHistory
from drivetrain.train.trainer import DEFAULT_CALLBACKS, Trainer, TrainerWithTimmScheduler
from tests.train.tasks import make_data, make_model, make_trainer, train, weights

NONE = inspect.Parameter.empty  # no default


def signature(function):
    """Return names and defaults in order, without `self`, catch-alls and what follows the names asked for."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def positional(function):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds and p.name != "self"]


def expect(function, expected, only_positional=()):
    """Check that `expected` are the first parameters, in order and with their defaults."""
    found = signature(function)
    assert list(found)[: len(expected)] == list(expected)
    for name, default in expected.items():
        assert found[name] is default or found[name] == default, name
    if only_positional:
        assert positional(function)[: len(only_positional)] == list(only_positional)


CONSTRUCTOR = {"model": NONE, "loss_func": None, "optimizer": None, "callbacks": DEFAULT_CALLBACKS, "run_history": None}
CONSTRUCTOR_KEYWORDS = {
    "algorithms": (), "loggers": (), "strategy": None, "precision": None, "metrics": None, "train_metrics": None,
    "count_items": None, "device": None, "seed": None, "deterministic": False, "strict": False,
}  # fmt: skip
TRAIN = {
    "num_epochs": None, "eval_dataset": None, "per_device_batch_size": 8, "max_num_train_steps": None,
    "gradient_accumulation_steps": 1, "gradient_clip_value": None, "create_scheduler_fn": None,
    "train_dataloader_kwargs": None, "eval_dataloader_kwargs": None, "reset_run_history": True, "collate_fn": None,
    "resume_from": None,
}  # fmt: skip
TRAIN_KEYWORDS = {
    "max_duration": None, "gradient_clip_norm": None, "microbatch_size": None, "scheduler_interval": "step",
    "scheduler_metric": "eval_loss_epoch", "checkpoint_dir": None, "checkpoint_every": "1ep", "keep_checkpoints": 3,
    "async_checkpoint": True, "limit_train_batches": None, "limit_eval_batches": None, "sanity_eval_batches": 0,
    "overfit_batches": 0, "fast_dev_run": False,
}  # fmt: skip


def test_the_constructor_keeps_five_places_and_takes_the_rest_by_name():
    assert positional(Trainer.__init__) == list(CONSTRUCTOR)
    found = signature(Trainer.__init__)
    assert {name: found[name] for name in CONSTRUCTOR | CONSTRUCTOR_KEYWORDS} == CONSTRUCTOR | CONSTRUCTOR_KEYWORDS


def test_train_keeps_thirteen_places_and_takes_the_rest_by_name():
    assert positional(Trainer.train) == ["train_dataset", *TRAIN]
    found = signature(Trainer.train)
    assert {name: found[name] for name in TRAIN | TRAIN_KEYWORDS} == TRAIN | TRAIN_KEYWORDS
    assert {"eval_interval", "global_batch_size", "max_grad_norm"} <= set(found)


@pytest.mark.parametrize(
    ("name", "places", "by_name"),
    [
        (
            "evaluate",
            {"dataset": None, "per_device_batch_size": 8, "dataloader_kwargs": None, "collate_fn": None},
            {"reset_run_history": True, "limit_batches": None, "generate": None},
        ),
        (
            "predict",
            {"dataset": NONE, "per_device_batch_size": 8, "dataloader_kwargs": None, "collate_fn": None},
            {"limit_batches": None, "to_cpu": True, "padding_value": None, "generate": False},
        ),
        (
            "lr_find",
            {"train_dataset": NONE},
            {
                "min_lr": 1e-7,
                "max_lr": 1.0,
                "num_steps": 100,
                "per_device_batch_size": 8,
                "smoothing": 0.98,
                "diverge_ratio": 4.0,
            },
        ),
        ("explain", {"file": None}, {}),
        ("gather", {"tensor": NONE, "padding_value": None}, {}),
        ("get_model", {"keep_torch_compile": True}, {}),
        (
            "save_checkpoint",
            {
                "save_path": NONE,
                "checkpoint_kwargs": None,
                "save_optimizer": True,
                "save_scheduler": True,
                "save_per_node": True,
            },
            {},
        ),
        ("load_checkpoint", {"checkpoint_path": NONE, "load_optimizer": True, "load_scheduler": True}, {}),
        ("save_training_state", {"output_dir": NONE, "checkpoint_kwargs": None}, {}),
        ("load_training_state", {"input_dir": NONE}, {}),
        ("log", {"name": NONE, "value": NONE, "weight": None}, {}),
        ("create_train_dataloader", {"batch_size": NONE, "train_dl_kwargs": None}, {}),
        ("create_eval_dataloader", {"batch_size": NONE, "eval_dl_kwargs": None}, {}),
        ("get_default_train_dl_kwargs", {"batch_size": NONE}, {}),
        ("get_default_eval_dl_kwargs", {"batch_size": NONE}, {}),
        ("create_scheduler", {}, {}),
        ("training_run_start", {}, {}),
        ("train_epoch_start", {}, {}),
        ("calculate_train_batch_loss", {"batch": NONE}, {}),
        ("backward_step", {"loss": NONE}, {}),
        ("optimizer_step", {}, {}),
        ("scheduler_step", {}, {}),
        ("optimizer_zero_grad", {}, {}),
        ("train_epoch_end", {}, {}),
        ("eval_epoch_start", {}, {}),
        ("calculate_eval_batch_loss", {"batch": NONE}, {}),
        ("eval_epoch_end", {}, {}),
        ("training_run_epoch_end", {}, {}),
        ("training_run_end", {}, {}),
        ("evaluation_run_start", {}, {}),
        ("evaluation_run_end", {}, {}),
        ("calculate_predict_batch", {"batch": NONE}, {}),
        ("get_metric_inputs", {"batch": NONE, "batch_output": NONE}, {}),
        ("_run_train_epoch", {"train_dl": NONE}, {}),
        ("_run_eval_epoch", {"dl": NONE, "is_training": True, "is_intermediate": False}, {}),
        ("_perform_forward_and_backward_passes", {"batch": NONE, "step": NONE}, {}),
        ("_create_accelerator", {}, {}),
        ("_create_callback_handler", {}, {}),
        ("_prepare_model_optimizer_and_dataloaders", {}, {}),
        ("_check_eval_batch_size", {}, {}),
        ("_run_training", {}, {}),
        ("_run_evaluation", {}, {}),
        ("_clip_gradients", {}, {}),
    ],
)
def test_a_method_of_the_trainer_has_its_arguments(name, places, by_name):
    function = getattr(Trainer, name)
    assert positional(function) == list(places)
    assert signature(function) == places | by_name


def test_attributes_of_a_trainer_are_there_from_the_start():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = InMemoryRunHistory()
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), run_history=history)
    assert trainer.model is model and trainer.optimizer is optimizer and trainer.run_history is history
    for name in ("scheduler", "run_config", "create_scheduler_fn", "collate_fn", "train_dataset", "eval_dataset"):
        assert getattr(trainer, name) is None
    for name in ("_train_dataloader", "_eval_dataloader", "_train_dl_kwargs", "_eval_dl_kwargs", "last_grad_norm"):
        assert getattr(trainer, name) is None
    assert trainer.runtime is trainer._accelerator and torch.device(trainer.device).type
    assert isinstance(trainer._loss_tracker, LossTracker) and isinstance(trainer.callback_handler, CallbackHandler)
    assert trainer._callbacks == ()


def test_trainer_and_state_are_one_storage():
    trainer = make_trainer()
    other = make_model()
    trainer.model = other
    assert trainer.state.model is other
    trainer.state.model = model = make_model()
    assert trainer.model is model
    trainer.state.loss_fn = loss = nn.MSELoss()
    assert trainer.loss_func is loss


def context_of_items(model, loss, optimizer):
    return Context(model=model, loss_func=loss, optimizer=optimizer, note="kept")


def state_of_a_loop(model, loss, optimizer):
    state = State(model, optimizers=optimizer, note="kept")
    state.loss_fn = loss
    return state


@pytest.mark.parametrize("make", [context_of_items, state_of_a_loop])
def test_a_context_brings_its_model_loss_and_optimizer_where_none_are_passed(make):
    reference, model = make_trainer(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(None, state=make(model, nn.CrossEntropyLoss(), optimizer), callbacks=())
    assert trainer.model is model and trainer.optimizer is optimizer and trainer.state.note == "kept"
    for one in (reference, trainer):
        train(one)
    assert all(map(torch.equal, weights(reference.model), weights(model)))
    other, loss = make_model(), nn.MSELoss()
    given = torch.optim.SGD(other.parameters(), lr=0.1)
    trainer = Trainer(other, loss, given, state=make(model, nn.CrossEntropyLoss(), optimizer), callbacks=())
    assert (trainer.model, trainer.loss_func, trainer.optimizer) == (other, loss, given)


CALLBACK_DEFAULTS = {
    "LogMetricsCallback": {},
    "PrintProgressCallback": {},
    "MoveModulesToDeviceCallback": {},
    "ConvertSyncBatchNormCallback": {},
    "ProgressBarCallback": {"refresh_per_second": 4, "plain_interval": 30},
    "TerminateOnNaNCallback": {"action": "raise"},
    "SaveBestModelCallback": {
        "save_path": "best_model.pt", "watch_metric": "eval_loss_epoch", "greater_is_better": False, "reset_on_train": True,
        "save_optimizer": True, "save_scheduler": True, "load_saved_checkpoint": True,
    },
    "EarlyStoppingCallback": {
        "early_stopping_patience": 1, "early_stopping_threshold": 0.01, "watch_metric": "eval_loss_epoch",
        "greater_is_better": False, "reset_on_train": True,
    },
    "LimitBatchesCallback": {"num_batches": NONE},
    "ModelEmaCallback": {
        "decay": 0.99, "evaluate_during_training": True, "save_path": "ema_model.pt",
        "watch_metric": "ema_model_eval_loss_epoch", "greater_is_better": False, "model_ema": utils.ModelEma, "callbacks": (),
        "update_interval": "1st",
    },
    "StepBasedEvaluationCallback": {"eval_every_n_steps": NONE},
    "LimitEvalStepsCallback": {"num_eval_steps": NONE, "limit_intermediate_only": True},
    "SaveTrainingStateCallback": {
        "save_dir": "training_states", "save_every_n_epochs": None, "save_every_n_steps": None, "save_at_end": True,
        "max_checkpoints": None,
    },
    "WSDCheckpointCallback": {
        "save_dir": "checkpoints", "save_optimizer": True, "save_scheduler": True, "initial_checkpoint": None,
    },
    "ThroughputMonitor": {"window_size": 100, "flops_per_sample": "auto", "peak_flops": "auto"},
    "MemoryMonitor": {"interval": "50ba"},
    "LRMonitor": {"interval": "50ba"},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLBACK_DEFAULTS)
def test_a_shipped_callback_has_its_arguments(name):
    cls = getattr(callbacks, name)
    assert issubclass(cls, TrainerCallback)
    own = {} if cls.__init__ is object.__init__ else signature(cls.__init__)
    assert own == CALLBACK_DEFAULTS[name]


def test_callbacks_have_their_aliases_and_relations():
    assert callbacks.SpeedMonitor is callbacks.ThroughputMonitor
    assert callbacks.LearningRateMonitor is callbacks.LRMonitor
    assert issubclass(callbacks.ModelEmaCallback, callbacks.SaveBestModelCallback)
    assert signature(callbacks.TerminateOnNaNCallback.check_for_nan_after_batch) == {"batch_output": NONE, "step": None}
    assert callbacks.TerminateOnNaNCallback().triggered is False


def test_the_default_callbacks_are_five_and_the_bar_can_be_left_out():
    names = [cls.__name__ for cls in DEFAULT_CALLBACKS]
    assert names == [
        "MoveModulesToDeviceCallback",
        "TerminateOnNaNCallback",
        "PrintProgressCallback",
        "ProgressBarCallback",
        "LogMetricsCallback",
    ]
    assert callbacks.get_default_callbacks() == DEFAULT_CALLBACKS
    without = callbacks.get_default_callbacks(progress_bar=False)
    assert [cls.__name__ for cls in without] == [name for name in names if name != "ProgressBarCallback"]


STEP_END = {"trainer": NONE, "batch": NONE, "batch_output": NONE}
CALLBACK_METHODS = {
    **{
        name: {"trainer": NONE}
        for name in (
            "on_init_end", "on_training_run_start", "on_train_epoch_start", "on_train_step_start", "on_train_epoch_end",
            "on_eval_epoch_start", "on_eval_epoch_end", "on_eval_step_start", "on_training_run_epoch_end",
            "on_training_run_end", "on_evaluation_run_start", "on_evaluation_run_end", "on_stop_training_error",
            "on_predict_start", "on_predict_step_start", "on_predict_end", "on_exception",
        )
    },
    **dict.fromkeys(["on_train_step_end", "on_eval_step_end", "on_predict_step_end"], STEP_END),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLBACK_METHODS)
def test_a_callback_method_takes_the_trainer_and_what_its_event_carries(name):
    method = getattr(TrainerCallback, name)
    assert signature(method) == CALLBACK_METHODS[name]
    assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(method).parameters.values())


def raiser(error):
    def raise_it():
        raise error

    return raise_it


def test_every_callback_method_is_called_with_its_arguments():
    calls = {}

    def recorder(name):
        def method(self, trainer, **kwargs):
            calls.setdefault(name, []).append(sorted(kwargs))

        return method

    Everything = type("Everything", (TrainerCallback,), {name: recorder(name) for name in CALLBACK_METHODS})
    trainer = make_trainer(callbacks=[Everything()])
    train(trainer, make_data(16), eval_dataset=make_data(8))
    trainer.evaluate(make_data(8))
    trainer.predict(make_data(8))

    for error in (StopTrainingError("enough"), KeyError("mine")):
        broken = make_trainer(callbacks=[Everything()])
        broken.train_epoch_end = raiser(error)
        with pytest.raises(KeyError, match="mine") if isinstance(error, KeyError) else nullcontext():
            train(broken)
    assert set(calls) == set(CALLBACK_METHODS)
    assert calls["on_exception"] == [["exception"]]
    assert calls["on_train_step_end"][0] == ["batch", "batch_output", "step"]
    assert calls["on_eval_step_end"][0] == calls["on_predict_step_end"][0] == ["batch", "batch_output"]
    assert calls["on_eval_epoch_start"][0] == calls["on_eval_epoch_end"][0] == ["is_intermediate"]
    assert calls["on_train_epoch_end"][0] == calls["on_training_run_start"][0] == []


def test_a_method_without_catch_all_gets_only_what_it_names():
    seen = []

    class Terse(TrainerCallback):
        def on_train_step_end(self, trainer, batch):
            seen.append(len(batch))

        def on_eval_epoch_end(self, trainer):
            seen.append("eval")

    train(make_trainer(callbacks=[Terse()]), make_data(8), eval_dataset=make_data(8))
    assert seen == [2, "eval"]


RUN_CONFIG = [
    "num_epochs", "train_per_device_batch_size", "train_dl_kwargs", "eval_per_device_batch_size", "eval_dl_kwargs",
    "gradient_accumulation_steps", "gradient_clip_value", "train_total_batch_size", "eval_total_batch_size",
    "num_update_steps_per_epoch", "num_local_update_steps_per_epoch", "max_num_train_steps", "is_local_process_zero",
    "is_world_process_zero", "is_distributed", "mixed_precision", "num_processes",
]  # fmt: skip
RUN_CONFIG_NEW = ["gradient_clip_norm", "max_duration", "microbatch_size", "precision", "seed"]


def test_the_run_configuration_has_its_fields_in_order_and_new_ones_have_defaults():
    names = [field.name for field in fields(TrainerRunConfig)]
    assert names == RUN_CONFIG + RUN_CONFIG_NEW
    assert all(field.default is None for field in fields(TrainerRunConfig)[len(RUN_CONFIG) :])


def test_the_run_configuration_holds_the_numbers_of_the_run():
    trainer = make_trainer(seed=9)
    train(
        trainer,
        make_data(44),
        num_epochs=3,
        eval_dataset=make_data(10),
        per_device_batch_size=8,
        gradient_accumulation_steps=4,
        gradient_clip_norm=2.0,
        eval_dataloader_kwargs={"batch_size": 5},
    )
    config = trainer.run_config
    assert (config.num_epochs, config.train_per_device_batch_size, config.eval_per_device_batch_size) == (3, 8, 5)
    assert (config.train_total_batch_size, config.eval_total_batch_size) == (32, 5)
    assert (config.num_update_steps_per_epoch, config.num_local_update_steps_per_epoch) == (2, 2)
    assert config.max_num_train_steps == 3 * 2 + 1
    assert (config.gradient_accumulation_steps, config.gradient_clip_value, config.gradient_clip_norm) == (4, None, 2.0)
    assert (config.is_local_process_zero, config.is_world_process_zero, config.is_distributed) == (True, True, False)
    assert (config.mixed_precision, config.num_processes, config.seed) == ("no", 1, 9)
    assert config.train_dl_kwargs == trainer._train_dl_kwargs and config.train_dl_kwargs["batch_size"] == 8
    assert config.eval_dl_kwargs["batch_size"] == 5 and config.eval_dl_kwargs["shuffle"] is False
    assert config.to_dict()["num_epochs"] == 3


def test_the_history_has_its_methods():
    expect(RunHistory.set_metric_name_prefix, {"prefix": ""})
    expect(RunHistory.update_metric, {"metric_name": NONE, "metric_value": NONE})
    expect(LossTracker.update, {"loss_batch_value": NONE, "batch_size": 1})
    for name in ("get_metric_names", "get_metric_values", "get_latest_metric", "metric_name_prefix", "delete_metric"):
        assert name in RunHistory.__abstractmethods__
    for name in ("current_epoch", "_increment_epoch", "reset"):
        assert name in RunHistory.__abstractmethods__
    assert callable(RunHistory._set_epoch)


def test_schedulers_have_their_arguments():
    expect(SchedulerBase.__init__, {"optimizer": NONE, "param_group_field": "lr"})
    expect(SchedulerBase.step_update, {"num_updates": NONE})
    expect(SchedulerBase.get_updated_values, {"num_updates": NONE})
    assert callable(StatefulSchedulerBase.step)
    curve = {
        "k_decay": 1.0, "lr_min": 1e-6, "min_lr_ratio": None, "num_warmup_epochs": 0, "warmup_starting_lr": 1e-6,
        "warmup_starting_lr_ratio": None, "num_cooldown_epochs": 0,
    }  # fmt: skip
    lengths = {"total_num_epochs": NONE, "num_update_steps_per_epoch": NONE}
    assert signature(CosineLrScheduler.__init__) == {"optimizer": NONE, **lengths, **curve}
    P = drivetrain.TrainerPlaceholderValues
    defaults = {
        "total_num_epochs": P.NUM_EPOCHS,
        "num_update_steps_per_epoch": P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
    }
    assert signature(CosineLrScheduler.create_scheduler_fn) == {**defaults, **curve}
    rest = {
        "decay_phase_ratio": 0.1, "lr_min": 1e-6, "warmup_starting_lr": 1e-6, "use_inverse_sqrt_decay": True,
        "num_checkpoints": 1, "is_continuation_from_checkpoint": False,
    }  # fmt: skip
    length = {"num_epochs": None, "num_update_steps_per_epoch": None, "total_steps": None, "num_warmup_steps": 0}
    assert signature(WSDLrScheduler.__init__) == {"optimizer": NONE, **length, **rest}
    assert signature(WSDLrScheduler.create_scheduler_fn) == {**defaults, "num_warmup_epochs": None, **rest}
    for name in (
        "get_checkpoint_steps",
        "get_decay_info",
        "get_phase_info",
        "get_current_step",
        "get_current_phase_info",
    ):
        assert callable(getattr(WSDLrScheduler, name))
    assert callable(WSDLrScheduler._get_checkpoint_info.cache_clear)


def test_utilities_and_the_freezer_have_their_arguments():
    expect(utils.LimitBatches.__init__, {"num_batches": NONE})
    expect(utils.DataLoaderSlice.__init__, {"dl": NONE, "slice_size": NONE})
    expect(utils.ModelEma.__init__, {"model": NONE, "decay": 0.9999})
    expect(utils.remove_padding, {"padded_tensor": NONE, "pad_value": NONE})
    expect(utils.worker_init_fn, {"worker_id": NONE})
    assert utils.LIMIT_BATCHES_ENV_VAR == "PT_ACC_LIMIT_BATCHES"
    expect(drivetrain.set_seed, {"seed": NONE, "device_specific": False, "deterministic": False})
    launcher = {
        "function": NONE, "args": (), "num_processes": None, "mixed_precision": "no", "use_port": "29500",
        "master_addr": "127.0.0.1", "node_rank": 0, "num_nodes": 1,
    }  # fmt: skip
    expect(drivetrain.notebook_launcher, launcher)
    expect(finetuning.ModelFreezer.__init__, {"model": NONE, "freeze_batch_norms": False})
    expect(finetuning.ModelFreezer.freeze, {"from_index": 0, "to_index": -2, "set_modules_as_eval": False})
    expect(finetuning.ModelFreezer.unfreeze, {"from_index": -1, "to_index": 0, "set_modules_as_training": True})
    expect(finetuning.ModelFreezer._convert_idxs, {"from_idx": NONE, "to_idx": NONE})
    assert callable(finetuning._module_is_batch_norm)


ACCELERATOR = [
    "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process", "mixed_precision",
    "distributed_type", "device", "optimizer_step_was_skipped", "backward", "unwrap_model", "prepare", "free_memory",
    "no_sync", "join_uneven_inputs", "autocast", "gather", "pad_across_processes", "clip_grad_value_", "clip_grad_norm_",
    "wait_for_everyone", "print", "save", "save_state", "load_state", "register_for_checkpointing",
]  # fmt: skip


@pytest.mark.parametrize("name", ACCELERATOR)
def test_the_runtime_has_the_members_people_call(name):
    assert hasattr(make_trainer()._accelerator, name)


def test_the_timm_trainer_counts_updates_and_is_a_trainer():
    assert issubclass(TrainerWithTimmScheduler, Trainer)
    assert make_trainer(cls=TrainerWithTimmScheduler).num_updates is None


def test_a_state_of_an_earlier_trainer_brings_no_scheduler():
    model = make_model()
    earlier = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    earlier.scheduler = torch.optim.lr_scheduler.StepLR(earlier.optimizer, 1)
    later = Trainer(None, state=earlier.state, callbacks=())
    assert later.scheduler is None and later.optimizer is earlier.optimizer
