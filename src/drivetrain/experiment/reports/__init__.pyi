# Written by `make stubs` from the lazy exports of this module.
from drivetrain.experiment.reports.page import write_report as write_report
from drivetrain.experiment.reports.page import make_page as make_page
from drivetrain.experiment.reports.gather import RunData as RunData
from drivetrain.experiment.reports.gather import gather_run as gather_run
from drivetrain.experiment.reports.live import Board as Board
from drivetrain.experiment.reports.live import serve as serve

__all__ = [
    "write_report",
    "make_page",
    "RunData",
    "gather_run",
    "Board",
    "serve",
]
