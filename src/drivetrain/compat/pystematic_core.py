"""`drivetrain.experiment.core` and `.parametric`: the names that pystematic has in its modules of the same names."""

from drivetrain.core.errors import DrivetrainError as Error
from drivetrain.core.errors import ExperimentError
from drivetrain.core.errors import ParameterError as ValidationError
from drivetrain.experiment.experiments import Experiment, ExperimentGroup
from drivetrain.experiment.parameters import Parameter, ParameterGroup
from drivetrain.experiment.plugins import app

__all__ = [
    "Error",
    "Experiment",
    "ExperimentError",
    "ExperimentGroup",
    "Parameter",
    "ParameterGroup",
    "ValidationError",
    "app",
]
