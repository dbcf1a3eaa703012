"""`drivetrain plan`: find a plan for a training without starting it, for this machine or for one that is not here; show and compare plans.

A factory gives what is to be trained: a Trainer, or the arguments of `auto_accelerate` as a dict. A Trainer's plan is the one that its
own `strategy="auto"` would find. Status 0 comes with a plan, 3 means that nothing fits; the output gives the missing memory.
"""

import argparse
import json
import os
import shutil
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from drivetrain.core.display import format_bytes
from drivetrain.core.errors import ExperimentError
from drivetrain.core.types import Settings
from drivetrain.experiment.cli.output import print_either, print_lines, prints_to_stderr
from drivetrain.experiment.cli.targets import find_target
from drivetrain.experiment.command_line import JSON, argument

if TYPE_CHECKING:
    from drivetrain.strategy.device_spec import DeviceSpec
    from drivetrain.strategy.value import Strategy
    from drivetrain.train.trainer import Trainer

INFEASIBLE = 3
HERE = ("auto", "cpu", "cuda")
"""Devices that are looked for on this machine; every other name is a preset or a file."""
USAGE = (
    "drivetrain plan package.module:factory [options]\n       drivetrain plan show FILE\n       drivetrain plan diff FILE FILE\n"
    "       drivetrain plan --list | --clear"
)
WHAT_HELP = (
    "package.module:factory or file.py:factory, a function that returns a Trainer (made with train_dataloader=) or a dict of "
    "auto_accelerate's arguments; or `show FILE`, or `diff FILE FILE`"
)
DEVICE_HELP = "auto, cpu, cuda, the name of a preset such as h100-80g, or a JSON file (default: auto)"

ARGUMENTS = {
    "plan": [
        argument("what", nargs="*", metavar="WHAT", help=WHAT_HELP),
        argument("--list", action="store_true", help="list the cached plans of earlier searches"),
        argument("--clear", action="store_true", help="remove the cached plans, so that the next run searches again"),
        argument("--world-size", type=int, metavar="N", help="processes to plan for (default: 1)"),
        argument("--device", default="auto", help=DEVICE_HELP),
        argument("--batch-size", type=int, metavar="N", help="samples of one update over all processes"),
        argument(
            "--memory-budget", metavar="M", help="fraction of the free memory such as 0.8, or a size such as 70GiB"
        ),
        argument("--time-limit", type=float, metavar="SECONDS", help="for the whole search (default: 120)"),
        argument("--numerics", choices=("exact", "mixed", "low"), help="how far precision may change (default: mixed)"),
        argument("--out", metavar="FILE", help="write the plan as JSON"),
        argument("--picture", metavar="FILE", help="write a plot of the compared plans, as a PNG"),
        JSON,
    ]
}


def plan(arguments: argparse.Namespace) -> int:
    """Find, show or compare plans."""
    if arguments.list or arguments.clear:
        _list_or_clear(arguments)
        return 0
    word, *files = arguments.what or ("",)
    if word == "show" and len(files) == 1:
        _print_plan(_read(files[0]), arguments.json)
        return 0
    if word == "diff" and len(files) == 2:
        lines = _read(files[0]).diff(_read(files[1])).splitlines()
        print_either(arguments.json, {"differences": lines}, *(lines or ["the plans are equivalent"]))
        return 0
    if files or word in ("", "show", "diff"):
        raise ExperimentError(
            f"{' '.join(('plan', *arguments.what))}: expected one factory such as package.module:factory, `show FILE`, or `diff FILE FILE`."
        )
    return _plan(word, arguments)


def _plan(target: str, arguments: argparse.Namespace) -> int:
    if ":" not in target:
        raise ExperimentError(f"{target}: no function given. Name the one that returns the Trainer: {target}:factory.")
    with prints_to_stderr() if arguments.json else nullcontext():  # a factory may print what it likes
        factory = find_target(target)
        if not callable(factory):
            raise ExperimentError(f"{target} is a {type(factory).__name__}; expected a function without arguments.")
        plan = _find(target, factory(), arguments)
    failure = plan.failure
    if arguments.out is not None and failure is None:
        plan.save(arguments.out)
    if arguments.picture is not None:
        from drivetrain.strategy.explain import draw

        draw(plan, arguments.picture)
    _print_plan(plan, arguments.json)
    if failure is not None and failure.shortfall_bytes is not None and not arguments.json:
        print_lines(f"short by {format_bytes(failure.shortfall_bytes)} on each device", style="red")
    elif arguments.out is not None and failure is None and not arguments.json:
        print_lines(f"written to {arguments.out}")
    return 0 if failure is None else INFEASIBLE


def _find(target: str, made: object, arguments: argparse.Namespace) -> "Strategy":
    from drivetrain.strategy.device_spec import DeviceSpec
    from drivetrain.train.auto import auto_accelerate
    from drivetrain.train.trainer import Trainer

    device: str | DeviceSpec = arguments.device
    if arguments.device.partition(":")[0] not in HERE:
        device = DeviceSpec.load(arguments.device)
    requests = {name: getattr(arguments, name) for name in ("numerics", "time_limit", "memory_budget")}
    requests = {name: value for name, value in requests.items() if value is not None}
    with suppress(KeyError, ValueError):  # a share is a number, everything else is passed as it was written
        requests["memory_budget"] = float(requests["memory_budget"])
    world = 1 if arguments.world_size is None else arguments.world_size
    if world < 1 or (arguments.batch_size is not None and arguments.batch_size < 1):
        raise ExperimentError(
            f"--world-size {world}, --batch-size {arguments.batch_size}: expected whole numbers of at least 1."
        )
    size = arguments.batch_size
    if isinstance(made, Trainer):
        return _for_trainer(target, made, device, world, size, requests)
    if not isinstance(made, dict):
        raise ExperimentError(
            f"{target} returned a {type(made).__name__}; expected a Trainer, or a dict of auto_accelerate's arguments with 'model' in it."
        )
    settings = {**made, **requests, "plan_only": True, "world_size": world, "device": device}
    if size is not None and settings.get("dataset") is not None:
        settings["dataloader_args"] = {**(settings.get("dataloader_args") or {}), "batch_size": size}
    elif size is not None:
        settings["batch_size"] = size
    try:
        found: Strategy = auto_accelerate(**settings)[2]
        return found
    except TypeError as error:  # a wrong name among the arguments, or something else than a model
        raise ExperimentError(f"{target}: {error}") from error


def _for_trainer(
    target: str, trainer: "Trainer", device: "str | DeviceSpec", world: int, size: int | None, requests: Settings
) -> "Strategy":
    """Return the plan that the Trainer's automatic mode would find in another place."""
    from dataclasses import replace

    from drivetrain.runtime.device import choose_device
    from drivetrain.strategy.device_spec import DeviceSpec
    from drivetrain.strategy.search.find import find_plan
    from drivetrain.strategy.value import fingerprint
    from drivetrain.train.planning import constraints_of, make_task, request_of
    from drivetrain.train.settings import TrainSettings

    source = trainer.run.shared.options.train_dataset
    if source is None:
        raise ExperimentError(
            f"{target} returned a Trainer without data. Make it with train_dataloader=, or return a dict of auto_accelerate's arguments."
        )
    per_process = getattr(source, "batch_size", None) or 8  # train()'s default
    settings = TrainSettings(num_epochs=1, global_batch_size=size or per_process * world)
    request = replace(request_of(trainer), settings=settings, dataset=source, loader=source)
    task, _ = make_task(request)
    spec = device if isinstance(device, DeviceSpec) else None
    place = choose_device("cpu" if isinstance(device, DeviceSpec) else device)
    asked = replace(constraints_of(request), plan_only=True, spec=spec, **requests)
    plan = find_plan(task, device=place, world=world, constraints=asked)
    return replace(plan, fingerprint=fingerprint(trainer.model, place, world, task.global_batch_size))


def _list_or_clear(arguments: argparse.Namespace) -> None:
    """List or remove the plans that searches have kept."""
    from drivetrain.strategy.search.plan_cache import cached_plans, clear_plans

    if arguments.what:
        raise ExperimentError(f"plan --list and --clear take no names, got {' '.join(arguments.what)}.")
    if arguments.clear:
        count = clear_plans()
        print_either(arguments.json, {"removed": count}, f"{count} cached plans removed")
        return
    names = ("made", "model", "device", "world", "batch", "path")
    rows = [{name: getattr(one, name) for name in names} for one in cached_plans()]
    lines = ["{made}  {model}, batch {batch}, {world} x {device}: {path}".format(**row) for row in rows]
    print_either(arguments.json, {"plans": rows}, *(lines or ["no cached plans"]))


def _read(file: str) -> "Strategy":
    from drivetrain.strategy.value import Strategy

    if not os.path.isfile(file):
        raise ExperimentError(
            f"there is no file {file}. Expected a plan as JSON, as --out and save_strategy_to_file write it."
        )
    return Strategy.load(os.path.abspath(file))


def _print_plan(plan: "Strategy", as_json: bool) -> None:
    names = ("kind", "message", "shortfall_bytes")
    failure = None if plan.failure is None else {name: getattr(plan.failure, name) for name in names}
    width = max(80, min(140, shutil.get_terminal_size((100, 24)).columns))
    print_either(as_json, {"plan": json.loads(plan.to_json()), "failure": failure}, *plan.explain(width).splitlines())
