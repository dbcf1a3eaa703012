"""Every numeric argument of every optimizer and schedule rejects what cannot be a rate, a factor or a count, by name."""

import inspect
import math

import pytest
import torch
from torch import nn

import drivetrain.optim as optim
from drivetrain.compat.registry import EXPORTS
from drivetrain.optim import optimizers
from drivetrain.optim.units import SCHEDULES
from drivetrain.train.schedulers import CosineLrScheduler, WSDLrScheduler

COMPOSER_NAMES = EXPORTS["drivetrain.optim"]["drivetrain.compat.composer_schedulers"]
NONSENSE = {"nan": math.nan, "inf": math.inf, "negative": -1.0, "text": "0.1", "list": [0.1]}


def sgd(lr=0.1):
    return torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=lr)


def make_optimizer(cls, **settings):
    if "base_optimizer" in inspect.signature(cls).parameters:
        return cls(sgd(), **settings)
    return cls([("weight", nn.Parameter(torch.zeros(2, 2)))] if getattr(cls, "takes_names", False) else
               [nn.Parameter(torch.zeros(2, 2))], **{"lr": 0.1, **settings})  # fmt: skip


REQUIRED = {"step_size": 10, "first_cycle": 10, "milestones": [1, 2], "fn": lambda step: 1.0, "total_steps": 100}
COMPOSER_REQUIRED = {
    "step_size": "1ep", "milestones": ["1ep"], "gamma": 0.5, "t_0": "1ep", "power": 1.0, "t_warmup": "1ba",
}  # fmt: skip


def make_schedule(cls, **settings):
    parameters = inspect.signature(cls.sche_init).parameters
    needed = {name: value for name, value in REQUIRED.items() if name in parameters}
    return cls("SGD", {"lr": 0.1}, nn.Linear(2, 2), **{**needed, **settings})


def make_composer(cls, **settings):
    parameters = inspect.signature(cls).parameters.values()
    return cls(**{**{p.name: COMPOSER_REQUIRED[p.name] for p in parameters if p.default is p.empty}, **settings})


def make_trainer_schedule(cls, **settings):
    length = {"total_num_epochs": 2} if cls is CosineLrScheduler else {"num_epochs": 2}
    return cls(sgd(), **{**length, "num_update_steps_per_epoch": 10, **settings})


def walk():
    """Yield every (maker, class, the function whose arguments count) of the registries."""
    families = [
        (make_optimizer, [getattr(optim, name) for name in optimizers.__all__], lambda cls: cls),
        (make_schedule, [cls for classes in SCHEDULES.values() for cls in classes.values()], lambda cls: cls.sche_init),
        (make_composer, [getattr(optim, n) for n in COMPOSER_NAMES if n.endswith("Scheduler")][1:], lambda cls: cls),
        (make_trainer_schedule, [CosineLrScheduler, WSDLrScheduler], lambda cls: cls),
    ]
    for make, classes, signature in families:
        for cls in dict.fromkeys(classes):
            yield pytest.param(make, cls, signature(cls), id=cls.__name__)


def nonsense_for(parameter):
    """Return the values that an argument must reject, by kind."""
    kind = type(parameter.default)
    if kind in (int, float) or (parameter.default is parameter.empty and parameter.annotation is float):
        return NONSENSE
    return {"flag": "false"} if kind is bool else {}


def refusal_of(make, cls, name, value):
    """Return what is said to an argument, nothing where it is accepted."""
    try:
        make(cls, **{name: value})
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("make", "cls", "function"), list(walk()))
def test_nonsense_is_rejected_by_name(make, cls, function):
    make(cls)  # without the nonsense it works
    for name, parameter in inspect.signature(function).parameters.items():
        for label, value in nonsense_for(parameter).items():
            assert name.replace("adam_", "") in refusal_of(make, cls, name, value), f"{name}={label}"


def test_every_kind_of_argument_is_walked_over():
    met = [nonsense_for(p) for case in walk() for p in inspect.signature(case.values[2]).parameters.values()]
    assert len([kind for kind in met if kind]) > 100 and {"flag": "false"} in met


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
def test_a_unit_rejects_a_rate_that_is_not_one(value):
    with pytest.raises(ValueError, match=r"lr|learning rate"):
        optim.ConstantLr("SGD", {"lr": value}, nn.Linear(2, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, "1.0"])
@pytest.mark.parametrize("name", ["ft_factor", "grad_clip", "step_per_update", "accum_grad"])
def test_a_unit_rejects_shared_arguments_that_are_nonsense(name, value):
    with pytest.raises(ValueError, match=name):
        optim.ConstantLr("SGD", {"lr": 0.1}, nn.Linear(2, 2), **{name: value})
