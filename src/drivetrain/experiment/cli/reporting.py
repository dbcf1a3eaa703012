"""`drivetrain report`: one HTML file about one or several runs."""

import argparse

from drivetrain.experiment.cli.output import add_json_option, print_json, print_lines
from drivetrain.experiment.cli.places import find_all_runs


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders; a folder that holds runs stands for all of them"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="the file to write (default: report.html in the run, or here for several)"
    )
    add_json_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from drivetrain.experiment.reports.page import write_report

    folders = [record.folder for record in find_all_runs(arguments.runs)]
    path = write_report(folders, arguments.output).resolve()
    if arguments.json:
        print_json({"report": str(path), "runs": [str(folder) for folder in folders]})
    else:
        print_lines(str(path))
    return 0
