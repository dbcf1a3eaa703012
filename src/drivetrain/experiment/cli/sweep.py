"""`drivetrain sweep`: one experiment, many sets of parameters, a table that grows while they run."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from drivetrain.core.errors import ParameterError, SweepError
from drivetrain.experiment.cli.live_table import show_progress
from drivetrain.experiment.cli.output import (
    STATE_STYLES,
    print_json,
    print_lines,
    print_table,
    prints_to_stderr,
)
from drivetrain.experiment.cli.targets import TARGET_HELP, find_experiment
from drivetrain.experiment.cli.verbs import FAILED
from drivetrain.experiment.command_line import JSON, argument, print_error

RANGE = re.compile(r"(log|uniform|int)\(([^,()]+),([^,()]+)\)")
AXES_HELP = (
    "name=1,2,3 (each of these), name=log(1e-4,1e-1), name=uniform(0,1), name=int(1,8), or name=5 for all trials"
)
EXECUTOR_HELP = "inline, pool, submitit or ray (default: inline, or pool with --processes or --gpus-per-trial)"
TIMEOUT_HELP = "end a trial that runs longer, such as 90s, 30m or 2h; implies --executor pool"
OBJECTIVE_HELP = "entry of the returned dict or summary to rank by (default: the returned number)"


ARGUMENTS = {
    "sweep": [
        argument("target", metavar="TARGET", help=TARGET_HELP),
        argument("axes", nargs="*", metavar="NAME=VALUES", help=AXES_HELP),
        argument("--sampler", help="grid, random or optuna (default: grid, or random where there are ranges)"),
        argument("--trials", type=int, metavar="N", help="how many trials; needed unless the sampler is grid"),
        argument("--executor", help=EXECUTOR_HELP),
        argument("--processes", type=int, metavar="N", help="trials at a time, each in a process of its own"),
        argument("--gpus-per-trial", type=int, metavar="N", help="GPUs that each trial has for itself"),
        argument("--objective", metavar="NAME", help=OBJECTIVE_HELP),
        argument("--direction", choices=("min", "max"), default="min", help="which values are good (default: min)"),
        argument(
            "--retries", type=int, default=0, metavar="N", help="how often a failed trial is tried again (default: 0)"
        ),
        argument("--trial-timeout", metavar="TIME", help=TIMEOUT_HELP),
        argument("--seed", type=int, default=0, help="seed of the sampler (default: %(default)s)"),
        argument("--resume", metavar="DIR", help="the folder of a sweep to take up again"),
        JSON,
    ]
}


def sweep(arguments: argparse.Namespace) -> int:
    """Run a sweep; failed trials make the exit status 1."""
    from drivetrain.experiment.sweeps import sweeping

    words = [word for word in arguments.axes if "=" not in word]
    experiment, rest = find_experiment(arguments.target, words)
    if rest:
        raise ParameterError(f"{rest[0]!r} is not understood. Expected {AXES_HELP}.")
    axes = [word for word in arguments.axes if "=" in word]
    space, fixed = read_space(experiment, axes)
    has_ranges = any(not isinstance(axis, list) for axis in space.values())
    in_pool = any(
        value is not None for value in (arguments.processes, arguments.gpus_per_trial, arguments.trial_timeout)
    )
    try:
        with prints_to_stderr() if arguments.json else show_progress() as show:
            result = sweeping.sweep(
                experiment,
                space,
                sampler=arguments.sampler or ("random" if has_ranges else "grid"),
                executor=arguments.executor or ("pool" if in_pool else "inline"),
                n_trials=arguments.trials,
                objective=arguments.objective,
                direction=arguments.direction,
                params=fixed,
                seed=arguments.seed,
                num_processes=arguments.processes,
                gpus_per_trial=arguments.gpus_per_trial,
                retries=arguments.retries,
                trial_timeout=arguments.trial_timeout,
                resume=arguments.resume,
                on_change=show,
            )
    except SweepError as error:
        _print_result(error.result, arguments.json)
        print_error(error)
        return FAILED
    _print_result(result, arguments.json)
    return 0


def read_space(experiment: Any, axes: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the axes of a sweep, and the parameters that are the same for all trials."""
    space: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for word in axes:
        name, _, text = word.partition("=")
        name = name.strip().replace("-", "_")
        parameter = experiment.parameters.get(name)
        if parameter is None:
            from drivetrain.experiment.resolve import unknown_parameter

            raise ParameterError(f"{word}: {unknown_parameter(name, experiment.parameters)}")
        if name in space or name in fixed:
            raise ParameterError(f"{word}: {name} is given twice. Join its values with commas.")
        found = RANGE.fullmatch(text.strip())
        if found:
            space[name] = _range(found, word)
            continue
        values = [parameter.read(item, is_text=True, where=word) for item in split_values(text)]
        if len(values) == 1:
            fixed[name] = values[0]
        else:
            space[name] = values
    if not space:
        raise ParameterError(f"a sweep needs at least one parameter with several values. Expected {AXES_HELP}.")
    return space, fixed


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets.

    >>> split_values("[1,2],[3]")
    ['[1,2]', '[3]']
    """
    return [item.strip() for item in re.split(r",(?![^\[({]*[\])}])", text)]


def _range(found: re.Match[str], word: str) -> Any:
    from drivetrain.experiment.sweeps.space import IntRange, LogUniform, Uniform

    kind, low, high = found.groups()
    read: Callable[[str], float] = int if kind == "int" else float
    try:
        ends = read(low.strip()), read(high.strip())
    except ValueError:
        raise ParameterError(f"{word}: {low} and {high} are not {'whole ' if kind == 'int' else ''}numbers.") from None
    return {"log": LogUniform, "uniform": Uniform, "int": IntRange}[kind](*ends)


def _print_result(result: Any, as_json: bool) -> None:
    rows = result.rows()
    if as_json:
        print_json(
            {
                "folder": None if result.folder is None else str(result.folder),
                "direction": result.direction,
                "trials": rows,
            }
        )
        return
    hidden = {"attempts", "run"} | (set() if result.failed else {"error"})
    names = [name for name in rows[0] if name not in hidden] if rows else []
    print_table(
        names,
        [[str(row[name] or "").partition("\n")[0] if name == "error" else row[name] for name in names] for row in rows],
        styles=STATE_STYLES,
    )
    print_lines(
        f"sweep folder  {result.folder}", f"next: drivetrain compare {result.folder}, drivetrain report {result.folder}"
    )
