"""`drivetrain sweep`: one experiment, many sets of parameters, and a table that redraws itself on a terminal.

Trials print as well, some of them from processes of their own. While the table is shown, the descriptors of stdout and stderr lead into
a pipe, and what comes out of it is printed above the table, line by line.
"""

import argparse
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from drivetrain.core.display import printable
from drivetrain.core.errors import ParameterError, SweepError
from drivetrain.experiment.cli.output import (
    STATE_STYLES,
    STDERR,
    STDOUT,
    own_command,
    plain_text,
    print_json,
    print_lines,
    print_table,
    prints_to_stderr,
)
from drivetrain.experiment.cli.targets import TARGET_HELP, find_experiment
from drivetrain.experiment.cli.verbs import FAILED, INTERRUPTED
from drivetrain.experiment.command_line import JSON, REPLACED, argument, print_error, split_values

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment
    from drivetrain.experiment.sweeps.result import SweepResult

RANGE = re.compile(r"(log|uniform|int)\(([^,()]+),([^,()]+)\)")
AXES_HELP = (
    "name=1,2,3 (each of these), name=log(1e-4,1e-1), name=uniform(0,1), name=int(1,8), or name=5 for all trials"
)
EXECUTOR_HELP = "inline, pool, submitit or ray (default: inline, or pool with --processes or --gpus-per-trial)"
TIMEOUT_HELP = "end a trial that runs longer, such as 90s, 30m or 2h; implies --executor pool"
DIRECTION_HELP = "which values are good (default: as the objective's name says, such as max for accuracy, else min)"
OBJECTIVE_HELP = "entry of the returned dict or summary to rank by (default: the returned number)"


OnChange = Callable[["SweepResult"], object]
"""Gets the result so far whenever a trial begins or ends."""
REFRESH_PER_SECOND = 4
DRAIN_SECONDS = 2.0
"""How long to wait for the last lines of processes that are ending."""
ORDER = ("running", "failed", "timed out", "finished", "pruned", "asked")

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
        argument("--direction", choices=("min", "max"), help=DIRECTION_HELP),
        argument(
            "--retries", type=int, default=0, metavar="N", help="how often a failed trial is tried again (default: 0)"
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
    has_ranges = any(not isinstance(axis, list) for axis in space.values())
    in_pool = any(
        value is not None for value in (arguments.processes, arguments.gpus_per_trial, arguments.trial_timeout)
    )

    def start(on_change: OnChange) -> "SweepResult":
        return sweeping.sweep(
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
            on_change=on_change,
        )

    return run_sweep(start, arguments.json)


def run_sweep(start: "Callable[[OnChange], SweepResult]", as_json: bool) -> int:
    """Run a sweep with its progress shown, print what it found, also when it is interrupted, and return the exit status."""
    seen: list[SweepResult] = []
    try:
        with prints_to_stderr() if as_json else show_progress() as show:

            def change(result: "SweepResult") -> None:
                seen[:] = [result]
                if show is not None:
                    show(result)

            result = start(change)
    except SweepError as error:
        print_result(cast("SweepResult", error.result), as_json)
        print_error(error)
        return FAILED
    except (KeyboardInterrupt, SystemExit) as stop:
        if not seen or seen[-1].folder is None:
            raise
        print_result(seen[-1].without_running(), as_json)
        if not as_json:
            print_lines(resume_line(seen[-1].folder))
        code = stop.code if isinstance(stop, SystemExit) else INTERRUPTED
        return code if isinstance(code, int) else FAILED
    print_result(result, as_json)
    return 0


def resume_line(folder: Path) -> str:
    """Return the command that continues a sweep."""
    return f"continue it with: {own_command()} resume {shlex.quote(str(folder))}"


def read_space(experiment: "Experiment", axes: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
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


def _range(found: re.Match[str], word: str) -> Any:
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
    command, folder = own_command(), shlex.quote(str(result.folder))
    print_lines(
        f"sweep folder  {result.folder}", "next:", f"  {command} compare {folder}", f"  {command} report {folder}"
    )


@contextmanager
def show_progress() -> Iterator[OnChange]:
    """Show a sweep while it runs: as a table on a terminal, else as lines."""
    if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown"):
        with LiveTable() as table:
            yield table
    else:
        yield status_lines()


def status_lines() -> OnChange:
    """Return what prints one line whenever a trial begins or ends."""
    shown: dict[int, str] = {}

    def show(result: "SweepResult") -> None:
        for trial in result:
            if shown.get(trial.index) != trial.status:
                shown[trial.index] = trial.status
                value = "" if trial.value is None else f" {plain_text(trial.value)}"
                print_lines(f"trial {trial.index}: {trial.status}{value}   [{state_of(result)}]")

    return show


def state_of(result: "SweepResult") -> str:
    """Return how many trials run, are done and failed, and the best value."""
    counts = {state: sum(trial.status == state for trial in result) for state in ("running", "finished")}
    values = [trial for trial in result.ranked if trial.value is not None]
    best = f", best {plain_text(values[0].value)} (trial {values[0].index})" if values else ""
    return f"{counts['running']} running, {counts['finished']} done, {len(result.failed)} failed{best}"


class LiveTable:
    """Draws trials with their parameters, state, metric and time; use it as a context manager and call it with each result."""

    def __init__(self) -> None:
        self._result: SweepResult | None = None
        self._began: dict[int, float] = {}
        self._terminal: Any = None
        self._live: Any = None
        self._reader: threading.Thread | None = None
        self._kept: dict[int, int] = {}

    def __enter__(self) -> Self:
        from multiprocessing.resource_tracker import ensure_running

        from rich.console import Console
        from rich.live import Live

        ensure_running()  # now, because it lives as long as this process and would hold the pipe below open
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._kept = {descriptor: os.dup(descriptor) for descriptor in (STDOUT, STDERR)}
        self._terminal = os.fdopen(os.dup(STDOUT), "w", encoding=sys.stdout.encoding, errors=REPLACED)
        console = Console(file=self._terminal, markup=False, highlight=False, emoji=False)
        self._live = Live(
            console=console,
            get_renderable=self.draw,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,  # the result table follows
            redirect_stdout=False,
            redirect_stderr=False,
        )
        source, sink = os.pipe()
        for descriptor in self._kept:
            os.dup2(sink, descriptor)
        os.close(sink)
        self._reader = threading.Thread(target=self._print_above, args=(source,), daemon=True)
        self._live.start()
        self._reader.start()
        return self

    def __call__(self, result: "SweepResult") -> None:
        """Take the result so far."""
        now = time.monotonic()
        for trial in result:
            if trial.status == "running":
                self._began.setdefault(trial.index, now)
            else:
                self._began.pop(trial.index, None)
        self._result = result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor, kept in self._kept.items():
            os.dup2(kept, descriptor)
            os.close(kept)
        assert self._reader is not None
        self._reader.join(DRAIN_SECONDS)  # a process that outlives the sweep may hold the pipe open for ever
        self._live.stop()
        if not self._reader.is_alive():
            self._terminal.close()

    def _print_above(self, source: int) -> None:
        from rich.text import Text

        with os.fdopen(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._live.console.print(Text.from_ansi(line.rstrip("\r\n")), soft_wrap=True)

    def draw(self) -> Any:
        """Return the table as it is now."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if self._result is None:
            return Text("sweep: no trial has begun")
        room = max(3, self._live.console.height - 8)
        trials = sorted(
            self._result.ranked, key=lambda trial: ORDER.index(trial.status)
        )  # stable: best first within a state
        hidden = len(trials) - room
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("trial", "parameters", "state", "metric", "time"):
            table.add_column(name, overflow="fold", no_wrap=name in ("trial", "state", "time"))
        now, names = time.monotonic(), self._result.varied
        for trial in trials[:room]:
            began = self._began.get(trial.index)
            seconds = trial.seconds + (0.0 if began is None else now - began)
            table.add_row(
                str(trial.index),
                Text(
                    printable(", ".join(f"{name}={plain_text(self._result.shown(trial).get(name))}" for name in names))
                ),
                Text(trial.status, style=STATE_STYLES.get(trial.status, "")),
                plain_text(trial.value),
                f"{seconds:.1f} s",
            )
        # Above the table and not as its title, which would be broken at the table's width.
        state, more = Text(f"sweep: {state_of(self._result)}", style="bold"), Text(f"… and {hidden} more")
        return Group(state, table, more) if hidden > 0 else Group(state, table)
