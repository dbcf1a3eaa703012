"""`drivetrain sweep`: one experiment, many sets of parameters, and a table that redraws itself on a terminal.

Trials print as well, some of them from processes of their own. While the table is shown, the descriptors of stdout and stderr lead into
a pipe, and what comes out of it is printed above the table, line by line.
"""

import argparse
import functools
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from drivetrain.core.display import printable
from drivetrain.core.errors import ParameterError, SweepError, first_line
from drivetrain.experiment.cli.output import (
    STATE_STYLES,
    own_command,
    plain_text,
    print_json,
    print_lines,
    print_table,
    prints_to_stderr,
)
from drivetrain.experiment.cli.targets import TARGET_HELP, find_experiment
from drivetrain.experiment.cli.verbs import FAILED, INTERRUPTED
from drivetrain.experiment.command_line import (
    JSON,
    REPLACED,
    STDERR,
    STDOUT,
    argument,
    print_error,
    split_values,
    text_given,
)

if TYPE_CHECKING:
    from rich.console import Group

    from drivetrain.experiment.experiments import Experiment
    from drivetrain.experiment.sweeps.loop import OnChange
    from drivetrain.experiment.sweeps.result import SweepResult
    from drivetrain.experiment.sweeps.samplers import OptunaConfig
    from drivetrain.experiment.sweeps.space import Axis
    from drivetrain.experiment.sweeps.trial import Trial

RANGE = re.compile(r"(log|uniform|int)\(([^,()]+),([^,()]+)\)")
AXES_HELP = (
    "name=1,2,3 (each value), name=log(1e-4,1e-1), name=uniform(0,1), name=int(1,8), or name=5 for all trials; "
    "'momentum=0.8,0.9 if optimizer=sgd' is varied only where another parameter has that value"
)
CONDITION = re.compile(r"\s+if\s+")
EXECUTOR_HELP = "inline, pool, submitit or ray (default: inline, or pool with --processes or --gpus-per-trial)"
TIMEOUT_HELP = "end a trial that runs longer, such as 90s, 30m or 2h; implies --executor pool"
DIRECTION_HELP = (
    "min or max, one for each objective (default: inferred from its name, such as max for accuracy, else min)"
)
OBJECTIVE_HELP = (
    "entry of the returned dict or summary to rank by, or several: loss,latency (default: the returned number)"
)
PRUNER_HELP = "of Optuna: median (default), hyperband, halving, percentile or none; implies --sampler optuna"
STORAGE_HELP = "of Optuna: a file or database that keeps the study, such as study.db or sqlite:///study.db"
STUDY_HELP = "of Optuna: name of the study in the storage; sweeps with one name search together"

REFRESH_PER_SECOND = 4
DRAIN_SECONDS = 2.0
"""How long to wait for the last lines of processes that are ending."""
ORDER = ("running", "failed", "timed out", "finished", "pruned", "asked")

ARGUMENTS = {
    "sweep": [
        argument("target", metavar="TARGET", help=TARGET_HELP),
        argument("axes", nargs="*", metavar="NAME=VALUES", help=AXES_HELP),
        argument("--sampler", help="grid, random or optuna (default: grid, or random where there are ranges)"),
        argument("--trials", type=int, metavar="N", help="number of trials; required unless the sampler is grid"),
        argument("--executor", help=EXECUTOR_HELP),
        argument("--processes", type=int, metavar="N", help="number of parallel trials, each in its own process"),
        argument("--gpus-per-trial", type=int, metavar="N", help="GPUs reserved for each trial"),
        argument("--objective", metavar="NAME", help=OBJECTIVE_HELP),
        argument("--direction", metavar="min|max", help=DIRECTION_HELP),
        argument("--pruner", metavar="NAME", help=PRUNER_HELP),
        argument("--storage", metavar="PLACE", help=STORAGE_HELP),
        argument("--study-name", metavar="NAME", help=STUDY_HELP),
        argument(
            "--retries", type=int, default=0, metavar="N", help="number of retries of a failed trial (default: 0)"
        ),
        argument("--trial-timeout", metavar="TIME", help=TIMEOUT_HELP),
        argument("--seed", type=int, default=0, help="seed of the sampler (default: %(default)s)"),
        argument("--resume", metavar="DIR", help="the folder of a sweep to continue"),
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
    pooled = (arguments.processes, arguments.gpus_per_trial, arguments.trial_timeout)
    start = functools.partial(
        sweeping.sweep,
        experiment,
        space,
        sampler=_sampler(arguments, space),
        executor=arguments.executor or ("inline" if pooled == (None, None, None) else "pool"),
        n_trials=arguments.trials,
        objective=_one_or_several(arguments.objective),
        direction=_one_or_several(arguments.direction),
        params=fixed,
        seed=arguments.seed,
        num_processes=arguments.processes,
        gpus_per_trial=arguments.gpus_per_trial,
        retries=arguments.retries,
        trial_timeout=arguments.trial_timeout,
        resume=arguments.resume,
    )
    return run_sweep(start, arguments.json)


def _one_or_several(text: str | None) -> str | list[str] | None:
    return text if text is None or "," not in text else split_values(text)


def _sampler(arguments: argparse.Namespace, space: Mapping[str, "Axis"]) -> "str | OptunaConfig":
    """Return the sampler by name, or Optuna's configuration where an option of Optuna is given."""
    settings = {name: getattr(arguments, name) for name in ("pruner", "storage", "study_name")}
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        from drivetrain.experiment.sweeps.space import Choice

        return arguments.sampler or ("grid" if all(isinstance(axis, Choice) for axis in space.values()) else "random")
    if arguments.sampler not in (None, "optuna"):
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise ParameterError(
            f"{option} is an option of Optuna, but --sampler is {arguments.sampler}. Remove one of them."
        )
    from drivetrain.experiment.sweeps.samplers import OptunaConfig

    return OptunaConfig(**given)


def run_sweep(start: "Callable[..., SweepResult]", as_json: bool) -> int:
    """Run a sweep, `start(on_change=...)`, with its progress shown, print what it found, also when it is interrupted.

    Returns the exit status.
    """
    seen: deque[SweepResult] = deque(maxlen=1)
    try:
        with _stopping_at_sigterm(), prints_to_stderr() if as_json else show_progress() as show:

            def change(result: "SweepResult") -> None:
                seen.append(result)
                if show is not None:
                    show(result)

            result = start(on_change=change)
    except SweepError as error:
        print_result(cast("SweepResult", error.result), as_json)
        print_error(error)
        return FAILED
    except (KeyboardInterrupt, SystemExit) as stop:
        if not seen or seen[0].folder is None:
            raise
        print_result(seen[0].without_running(), as_json)
        if not as_json:
            print_lines(resume_line(seen[0].folder))
        code = stop.code if isinstance(stop, SystemExit) else INTERRUPTED
        return code if isinstance(code, int) else FAILED
    print_result(result, as_json)
    return 0


@contextmanager
def _stopping_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end a sweep as Ctrl-C does: with its results and a usable terminal. A trial that trains in this process saves first."""
    from drivetrain.runtime.signals import StopSignals, exit_status

    def stop(number: int, frame: object) -> None:
        if StopSignals.active() is None:
            raise SystemExit(exit_status(number))

    is_main = threading.current_thread() is threading.main_thread()
    earlier = (
        signal.signal(signal.SIGTERM, stop) if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else None
    )
    try:
        yield
    finally:
        if earlier is not None:
            signal.signal(signal.SIGTERM, earlier)


def resume_line(folder: Path) -> str:
    """Return the command that continues a sweep."""
    return f"continue it with: {own_command()} resume {shlex.quote(str(folder))}"


def read_space(experiment: "Experiment", axes: list[str]) -> "tuple[dict[str, Axis], dict[str, object]]":
    """Return the axes of a sweep, and the parameters that are the same for all trials."""
    from drivetrain.experiment.sweeps.space import Choice

    space: dict[str, Axis] = {}
    fixed: dict[str, object] = {}
    for word in axes:
        text, *rest = CONDITION.split(word, maxsplit=1)
        name, text = _assigned(experiment, text, word)
        if name in space or name in fixed:
            raise ParameterError(f"{word}: {name} is given twice. Join its values with commas.")
        found = RANGE.fullmatch(text.strip())
        values = [] if found else _values(experiment, name, text, word)
        if len(values) == 1 and not rest:
            fixed[name] = values[0]
            continue
        axis: Axis = _range(found, word) if found else Choice(*values)
        if rest:
            pairs = [_assigned(experiment, condition, word) for condition in re.split(r"\s+and\s+", rest[0])]
            axis = axis.when({other: _values(experiment, other, value, word) for other, value in pairs})
        space[name] = axis
    if not space:
        raise ParameterError(f"a sweep needs at least one parameter with several values. Expected {AXES_HELP}.")
    return space, fixed


def _assigned(experiment: "Experiment", text: str, word: str) -> tuple[str, str]:
    """Return name and text of `name=text`; the name is that of a parameter."""
    name, has_value, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not has_value:
        raise ParameterError(f"{word}: {text!r} is not understood. Expected {AXES_HELP}.")
    from drivetrain.experiment.resolve import groups_of, unknown_parameter

    if name not in experiment.parameters and name not in groups_of(experiment.parameters):
        raise ParameterError(f"{word}: {unknown_parameter(name, experiment.parameters)}")
    return name, value


def _values(experiment: "Experiment", name: str, text: str, word: str) -> list[object]:
    parameter = experiment.parameters.get(name)  # None: a config group, whose choices are words
    items = split_values(text)
    if parameter is None:
        return [*items]
    return [parameter.read(text_given(parameter, item), is_text=True, where=word) for item in items]


def _range(found: re.Match[str], word: str) -> "Axis":
    from drivetrain.experiment.sweeps.space import IntRange, LogUniform, Uniform

    kind, low, high = found.groups()
    read: Callable[[str], float] = int if kind == "int" else float
    try:
        ends = read(low.strip()), read(high.strip())
    except ValueError:
        raise ParameterError(f"{word}: {low} and {high} are not {'whole ' if kind == 'int' else ''}numbers.") from None
    return {"log": LogUniform, "uniform": Uniform, "int": IntRange}[kind](*ends)


def print_result(result: "SweepResult", as_json: bool) -> None:
    rows = result.rows()
    if as_json:
        print_json({"folder": result.folder, "direction": result.direction, "trials": rows})
        return
    hidden = {"attempts", "run"} | (set() if result.failed else {"error"})
    names = [name for name in rows[0] if name not in hidden] if rows else []
    for row in rows:
        row["error"] = first_line(row["error"]) if row["error"] else ""
    print_table(names, [[row[name] for name in names] for row in rows], styles=STATE_STYLES)
    command, folder = own_command(), shlex.quote(str(result.folder))
    print_lines(
        f"sweep folder  {result.folder}", "next:", f"  {command} compare {folder}", f"  {command} report {folder}"
    )


@contextmanager
def show_progress() -> "Iterator[OnChange]":
    """Show a sweep while it runs: as a table on a terminal, else as lines."""
    if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown"):
        with live_table() as show:
            yield show
    else:
        yield status_lines()


def status_lines() -> "OnChange":
    """Return what prints one line whenever a trial begins or ends."""
    shown: dict[int, str] = {}

    def show(result: "SweepResult") -> None:
        for trial in result:
            if shown.get(trial.index) != trial.status:
                shown[trial.index] = trial.status
                value = f" {values_of(trial)}" if trial.objectives else ""
                reason = f": {first_line(trial.error)}" if trial.error else ""
                print_lines(f"trial {trial.index}: {trial.status}{value}{reason}   [{state_of(result)}]")

    return show


def state_of(result: "SweepResult") -> str:
    """Return how many trials run, are done, of how many, and failed, the best value, and how long the rest may take."""
    from drivetrain.experiment.reports.gather import duration

    running = sum(trial.status == "running" for trial in result)
    done = sum(trial.status in ("finished", "pruned") for trial in result)
    first = next((trial for trial in result.ranked if trial.objectives), None)
    parts = [f"{running} running", f"{done}{'' if result.total is None else f' of {result.total}'} done"]
    parts.append(f"{len(result.failed)} failed")
    if first is not None:
        which = "best" if result.goal.is_single else "first of the front"
        parts.append(f"{which} {values_of(first)} (trial {first.index})")
    if result.seconds_left:
        parts.append(f"about {duration(math.ceil(result.seconds_left))} left")
    return ", ".join(parts)


def values_of(trial: "Trial") -> str:
    """Return the objectives of a trial; of one that runs, its last report and the step of it."""
    if trial.values:
        return ", ".join(f"{name}={plain_text(value)}" for name, value in trial.values.items())
    if trial.value is None and trial.reported is not None:
        return f"{plain_text(trial.reported[1])} at {trial.reported[0]}"
    return plain_text(trial.value)


@contextmanager
def live_table() -> "Iterator[OnChange]":
    """Draw trials with their parameters, state, metric and time; what this and other processes print comes above them."""
    from multiprocessing.resource_tracker import ensure_running

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    ensure_running()  # now, because it lives as long as this process and would hold the pipe below open
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in (STDOUT, STDERR)}
    terminal = os.fdopen(os.dup(STDOUT), "w", encoding=sys.stdout.encoding, errors=REPLACED)
    console = Console(file=terminal, markup=False, highlight=False, emoji=False)
    latest: deque[SweepResult] = deque(maxlen=1)
    live = Live(
        console=console,
        get_renderable=lambda: draw(latest[0], console.height) if latest else Text("sweep: no trial has started"),
        refresh_per_second=REFRESH_PER_SECOND,
        transient=True,  # the result table follows
        redirect_stdout=False,
        redirect_stderr=False,
    )
    source, sink = os.pipe()
    for descriptor in kept:
        os.dup2(sink, descriptor)
    os.close(sink)

    def print_above() -> None:
        with os.fdopen(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                console.print(Text.from_ansi(line.rstrip("\r\n")), soft_wrap=True)

    reader = threading.Thread(target=print_above, daemon=True)
    live.start()
    reader.start()
    try:
        yield latest.append
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, before in kept.items():
            os.dup2(before, descriptor)
            os.close(before)
        reader.join(DRAIN_SECONDS)  # a process that outlives the sweep may hold the pipe open forever
        live.stop()
        if not reader.is_alive():
            terminal.close()


def draw(result: "SweepResult", height: int) -> "Group":
    """Return the trials as a table for a terminal of this height."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    room = max(3, height - 8)
    # Sorting is stable: the best comes first within a state.
    trials = sorted(result.ranked, key=lambda trial: ORDER.index(trial.status))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("trial", "parameters", "state", "metric", "time"):
        table.add_column(name, overflow="fold", no_wrap=name in ("trial", "state", "time"))
    names = result.varied
    for trial in trials[:room]:
        shown = result.shown(trial)
        params = Text(printable(", ".join(f"{name}={plain_text(shown.get(name))}" for name in names)))
        status = Text(trial.status, style=STATE_STYLES.get(trial.status, ""))
        table.add_row(str(trial.index), params, status, values_of(trial), f"{trial.elapsed:.1f} s")
    # Above the table and not as its title, which would be broken at the table's width.
    state = Text(f"sweep: {state_of(result)}", style="bold")
    more = [Text(f"… and {len(trials) - room} more")] if len(trials) > room else []
    return Group(state, table, *more)
