"""A user's script, as type checkers see it: `make check` runs mypy on it, `test_types.py` looks at what it reveals."""

from typing import Any, reveal_type

from torch import Tensor, nn

import drivetrain
import drivetrain.functional
from drivetrain import Context, Trainer, auto_accelerate
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


reveal_type(train)
reveal_type(drivetrain.experiment(name="other"))


class Distances(Trainer):
    def get_metric_inputs(self, batch: Any, batch_output: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return batch_output["model_outputs"], batch[1]


def last_loss(trainer: Trainer) -> float:
    return float(trainer.run_history.get_metric_values("train_loss_epoch")[-1])


session = Context(epoch=0)
session.model = nn.Linear(2, 2)
session.model(3)
