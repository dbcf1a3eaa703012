"""Every argument of the Trainer's constructor and verbs meets junk: it has a meaning, or is rejected by name before the first step."""

import inspect
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model


class Thing:
    """An object of no use to anyone."""


JUNK = {
    "text": "banana",
    "empty-text": "",
    "yes": "yes",
    "false": "false",
    "bytes": b"\x00\xff",
    "zero": 0,
    "minus-one": -1,
    "huge": 10**30,
    "half": 0.5,
    "minus-half": -0.5,
    "nan": math.nan,
    "inf": math.inf,
    "true": True,
    "list": [1, "two"],
    "empty-list": [],
    "dict": {"a": 1},
    "empty-dict": {},
    "set": {1},
    "object": Thing(),
    "class": Thing,
    "complex": 1j,
    "tensor": torch.full((2,), math.nan),
    "function": lambda: None,
    "path": Path("no/such/path"),
    "nul": "a\0b",
    "module": nn.Linear(2, 2),
}
QUICK = ("text", "false", "minus-one", "nan", "empty-list", "object")

# Junk that has a meaning for an argument. Everything else must be rejected.
MEANT = {
    "algorithms": "empty-list",
    "async_checkpoint": "true",
    "callbacks": "empty-list",
    "checkpoint_dir": "text yes false path",
    "count_items": "module",
    "dataloader_kwargs": "empty-dict",
    "deterministic": "true",
    "diverge_ratio": "huge half inf",
    "eval_dataloader": "list tensor",  # any sequence is a dataset; train() is given another
    "eval_dataloader_kwargs": "empty-dict",
    "eval_interval": "zero",
    "fast_dev_run": "zero true",
    "find_unused_parameters": "true",
    "gradient_clip_norm": "huge half inf",
    "gradient_clip_value": "huge half",
    "hang_timeout": "zero half",
    "limit_batches": "zero half",
    "limit_eval_batches": "zero half",
    "limit_train_batches": "zero half",
    "log_every": "zero",
    "loggers": "empty-list",
    "max_grad_norm": "huge half inf",
    "max_lr": "huge half",
    "metrics": "empty-dict",
    "min_lr": "half",
    "overfit_batches": "zero",
    "overwrite_checkpoints": "true",
    "padding_value": "zero minus-one huge half minus-half inf",
    "reset_run_history": "true",
    "sanity_eval_batches": "zero",
    "scheduler_metric": "text yes false nul",
    "seed": "zero minus-one",
    "smoothing": "zero half",
    "static_graph": "true",
    "strategy": "empty-list",
    "strategy_time_limit": "zero huge half inf",
    "strict": "true",
    "to_cpu": "true",
    "train_dataloader": "list tensor",
    "train_dataloader_kwargs": "empty-dict",
    "train_metrics": "empty-dict",
}
SAME_NAME = {"optimizers": "optimizer"}

VERBS = {
    name: [
        parameter.name
        for parameter in inspect.signature(getattr(Trainer, name)).parameters.values()
        if parameter.name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    for name in ("__init__", "train", "evaluate", "predict", "lr_find")
}


def use(verb, argument, value):
    """Build a trainer and call a verb with one argument replaced."""
    model = make_model()
    made = {
        "model": model,
        "loss_func": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "callbacks": (),
    }
    called = {
        "train": {"train_dataset": make_data(), "num_epochs": 1, "eval_dataset": make_data(8)},
        "evaluate": {"dataset": make_data(8)},
        "predict": {"dataset": make_data(8)},
        "lr_find": {"train_dataset": make_data(), "num_steps": 3},
    }
    (made if verb == "__init__" else called[verb])[argument] = value
    trainer = Trainer(**made)
    verb = "train" if verb == "__init__" else verb
    getattr(trainer, verb)(**called[verb])


def check(verb, argument, labels, where, monkeypatch):
    monkeypatch.chdir(where)
    monkeypatch.setattr("drivetrain.train.loaders.usable_cpus", lambda: 0)  # no worker processes
    problems = []
    for label in labels:
        try:
            use(verb, argument, JUNK[label])
        except (ConfigError, TypeError, ValueError, FileNotFoundError) as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if SAME_NAME.get(argument, argument) not in text:
                problems.append(f"{label}: {error!r} does not name {argument}")
        else:
            if label not in MEANT.get(argument, "").split():
                problems.append(f"{argument}={label} was accepted")
    assert not problems


ARGUMENTS = [(verb, argument) for verb, arguments in VERBS.items() for argument in arguments]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("verb", "argument"), ARGUMENTS)
def test_junk_is_rejected_by_name(verb, argument, tmp_path, monkeypatch):
    check(verb, argument, QUICK, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("verb", "argument"), ARGUMENTS)
def test_all_junk_is_rejected_by_name(verb, argument, tmp_path, monkeypatch):
    check(verb, argument, [label for label in JUNK if label not in QUICK], tmp_path, monkeypatch)
