"""Continuing a run: which one, with which parameters, from which checkpoint.

Two starts are the same run when everything that changes the computation is the same; where it runs and how it is launched does
not count. A run that is continued stays in its own folder and keeps its seed.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ParameterError, ResumeError
from drivetrain.core.locking import is_locked
from drivetrain.core.plain import plain
from drivetrain.experiment.parameters import BOOKKEEPING, ParameterSet
from drivetrain.experiment.records import RunRecord, find_runs, locate, read_run, run_around
from drivetrain.experiment.resolve import AUTO, NEVER, Resolved, check_required, holds_mask, masked_value
from drivetrain.experiment.run_folder import PARAMETERS

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

logger = logging.getLogger("drivetrain")

SEED = "random_seed"


@dataclass
class RunStart:
    """How a run begins: new, or as the continuation of an existing one."""

    record: RunRecord | None = None
    """The run that is continued, None for a new one."""
    checkpoint: Path | None = None
    """One checkpoint of that run to continue from; None is the newest valid one."""
    is_finished: bool = False
    """The run has already finished."""
    notes: list[str] = field(default_factory=list)


def identity(resolved: Resolved, parameters: ParameterSet) -> str:
    """Return a hash of the parameters that make a run this run."""
    compared = {
        name: plain(resolved.shown_value(name, value))
        for name, value in resolved.values.items()
        if name not in BOOKKEEPING | resolved.secrets  # a key that was renewed makes no other run
        and not parameters[name].resumable
        and (name != SEED or resolved.is_declared(SEED))
    }
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


def choose_run_start(
    experiment: "Experiment", resolved: Resolved, *, force: bool = False, restarted: bool = False
) -> RunStart:
    """Decide how a run begins; `resolved` takes over what the continued run knows better."""
    parameters = experiment.parameters
    wanted = resolved.values["resume"]
    if restarted and wanted == NEVER:
        wanted = AUTO
    if wanted == NEVER:
        return _new_run(resolved)
    if wanted != AUTO:
        return _continue_path(wanted, resolved, parameters, force)
    place = Path(resolved.values["output_dir"]).resolve() / experiment.name
    own_hash = identity(resolved, parameters)
    same = [
        record
        for record in find_runs(place, depth=1)
        if record.manifest.get("identity") == own_hash and _is_program_of(record, experiment)
    ]
    if resolved.values["run_name"] is not None:
        same = [record for record in same if record.folder.name == resolved.values["run_name"]]
    unfinished = [record for record in same if not record.has_ended]
    if not same:
        note = f"resume: no earlier run of {experiment.name!r} with these parameters in {place}; starting a new one."
        return _new_run(resolved, note)
    return continue_run((unfinished or same)[-1], resolved, parameters, force=force)


def _new_run(resolved: Resolved, *notes: str) -> RunStart:
    checkpoint = resolved.values["checkpoint"]
    if checkpoint is not None and not checkpoint.exists():
        raise ParameterError(
            f"checkpoint: {checkpoint} does not exist. Give a checkpoint, or --resume to continue a run."
        )
    return RunStart(notes=list(notes))


def look_ahead(experiment: "Experiment", resolved: Resolved, *, force: bool) -> RunStart:
    """Return how a run would begin, without a change to what it is given."""
    copy = replace(resolved, values=dict(resolved.values), origins=dict(resolved.origins))
    return choose_run_start(experiment, copy, force=force)


def _is_program_of(record: RunRecord, experiment: "Experiment") -> bool:
    """Return whether a run is one of this function; two groups or files may have experiments of one name, with one folder."""
    function, source = record.manifest.get("function"), experiment.source
    if function is not None and function != experiment.function_name:
        return False
    # A cell of a notebook has no file, and the name it has instead changes with its text.
    named = record.manifest.get("source")
    return source is None or named is None or not source.is_file() or Path(named).name == source.name


def _continue_path(given: str, resolved: Resolved, parameters: ParameterSet, force: bool) -> RunStart:
    path = Path(os.path.abspath(locate(given, resolved.values["output_dir"])))  # the program may change its folder
    if (folder := run_around(path)) is not None:
        beginning = continue_run(read_run(folder), resolved, parameters, force=force)
        inside = folder != path and path != folder / "checkpoints"
        if inside:
            beginning = replace(beginning, checkpoint=path, is_finished=False)
        return beginning
    raise ResumeError(
        f"resume: {given} is neither the folder of a run nor a checkpoint in one. Use --resume auto, the folder or short id of a run, or "
        "--checkpoint to start a new run from a saved state."
    )


def continue_run(record: RunRecord, resolved: Resolved, parameters: ParameterSet, *, force: bool = False) -> RunStart:
    """Continue one run: use its seed and the values that were not set now, and raise for values that contradict it."""
    # Patiently: a process on another machine may have died just now.
    if record.is_live and is_locked(record.folder, assume_alive=True):
        raise ResumeError(
            f"the run {record.folder} is still running in another process, which holds its lock. Wait until it ends, or "
            "start another run with --resume never."
        )
    if not record.parameters:
        raise ResumeError(
            f"{record.folder / PARAMETERS} is damaged, so the values of this run are not known. Restore the file, or start a new run "
            "from a checkpoint with --checkpoint."
        )
    changed, differing = list[str](), list[str]()
    for name, parameter in parameters.items():
        if name in BOOKKEEPING or name not in record.parameters:
            continue
        stored = record.manifest.get("seed") if name == SEED else record.parameters[name]
        now, is_given = plain(resolved.shown_value(name, resolved.values[name])), resolved.is_declared(name)
        if not is_given and holds_mask(parameter, stored):
            raise ResumeError(masked_value(parameter, f"the parameters of {record.folder}"))
        if now == stored or (is_given and parameter.is_secret):
            continue
        if is_given:
            (changed if parameter.resumable else differing).append(f"{name}: {stored!r} in the run, {now!r} now")
            continue
        resolved.origins[name] = record.origins.get(name, "default")
        if stored is not None:
            try:
                resolved.values[name] = parameter.read(stored, is_text=False, where="parameters.yaml")
            except ParameterError as error:
                raise ResumeError(f"the run's own parameters cannot be read: {error}") from error
        elif not (parameter.is_secret or parameter.optional_within):  # those are stored as None without being it
            resolved.values[name] = None
    check_required(parameters, resolved)
    if differing and not force:
        raise ResumeError(
            f"the run {record.folder} was started with other parameters, so it cannot be resumed:\n  "
            + "\n  ".join(differing)
            + "\nGive the same values, mark the parameter resumable, accept the change with --force, or start a new run."
        )
    notes = [f"changed on resume: {line}" for line in changed + differing]
    return RunStart(record, is_finished=record.has_ended and not notes, notes=notes)


def restorer_for(folder: Path, which: Path | None) -> Callable[[Any], Mapping[str, object] | None]:
    """Return what loads a Context from this run's checkpoint and returns its random states, None without a checkpoint."""

    def restore(context: object) -> Mapping[str, object] | None:
        from drivetrain.checkpoint.checkpointer import Checkpointer

        keeper = Checkpointer(context, dir=folder / "checkpoints", signals=False)
        restored = keeper.restore("auto" if which is None else which)
        if restored is None:
            logger.info("no checkpoint in %s yet: the run starts from the beginning.", folder)
            return None
        logger.info("continued from %s", restored.path)
        return restored.rng

    return restore


def loader_of(checkpoint: Path) -> Callable[[Any], None]:
    """Return what loads a Context from any checkpoint, for a new run that begins with its state."""

    def load(context: Any) -> None:
        from drivetrain.checkpoint.store import load_checkpoint

        context.load_state_dict(load_checkpoint(checkpoint))
        logger.info("a new run from the state in %s", checkpoint)

    return load
