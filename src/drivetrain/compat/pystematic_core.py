"""`drivetrain.experiment.core`: the names that pystematic has in its module of the same name."""

from drivetrain.core.errors import DrivetrainError as Error
from drivetrain.core.errors import ExperimentError
from drivetrain.experiment.experiments import Experiment, ExperimentGroup
from drivetrain.experiment.parameters import Parameter, ParameterGroup
from drivetrain.experiment.plugins import app

__all__ = ["Error", "ExperimentError", "Experiment", "ExperimentGroup", "Parameter", "ParameterGroup", "app"]
