"""A user's script, as type checkers see it: `make check` runs mypy on it, `test_types.py` looks at what it reveals."""

from typing import reveal_type

from torch import nn

import drivetrain
import drivetrain.functional
from drivetrain import Trainer, auto_accelerate
from drivetrain.algorithms import MixUp
from drivetrain.experiment import Experiment

reveal_type(Trainer(nn.Linear(2, 2)))
reveal_type(drivetrain.Trainer(nn.Linear(2, 2)))
reveal_type(auto_accelerate)
reveal_type(MixUp())
reveal_type(drivetrain.functional.smooth_labels)
reveal_type(Experiment)
reveal_type(drivetrain.Error("text"))


@drivetrain.experiment
def train(lr: float = 0.1) -> None:
    """Train nothing."""
