"""How a run starts, is restored, and ends: the state that it fills, and how it handles signals."""

import signal
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.context.attributes import merge_attributes
from drivetrain.context.context import Context
from drivetrain.context.state import State
from drivetrain.core.display import printable
from drivetrain.core.errors import ConfigError, warn
from drivetrain.core.event import Event
from drivetrain.core.lazy import Slot
from drivetrain.core.types import StateDict
from drivetrain.module.full_state import gather_on_request
from drivetrain.module.stepper import merge_windows
from drivetrain.runtime.codec import unpack
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.ranks import data_rank, get_num_processes, is_distributed, num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import capture_rng, derive_seed, restore_rng
from drivetrain.runtime.signals import StopSignals, exit_status, is_stop, requeue_under_slurm
from drivetrain.train import loaders
from drivetrain.train.agreement import StopVote
from drivetrain.train.checkpoints import CheckpointSchedule, restore_from
from drivetrain.train.closures import merge_memories
from drivetrain.train.logbook import Logbook
from drivetrain.train.run import EvaluationPlan, EvaluationState, LoaderReplay, Measures, Run
from drivetrain.train.settings import AnyPath, TrainSettings
from drivetrain.train.tracking import InMemoryRunHistory, MetricWatch, RunHistory, load_means, load_sums, of_data_ranks

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class ForeignState(Protocol):
    """Continues from a folder that another library wrote."""

    def recognizes(self, folder: Path) -> bool:
        """Return whether a folder was written by that library."""

    def restore(self, state: State, folder: Path) -> None:
        """Load the folder; the next epoch is then the one it names."""


FOREIGN_STATE: Slot[ForeignState] = Slot("train.foreign_state")


def make_state(
    given: Context | None, model: object, loss_func: object, optimizer: object, device: torch.device, seed: int | None
) -> State:
    """Return the State of a trainer: a new one, or the user's Context with the constructor's arguments added."""
    state = given if isinstance(given, State) else State(seed=seed)
    if given is not None and given is not state:
        for name, value in given._items().items():
            setattr(state, name, value)
    if loss_func is None:
        loss_func = getattr(state, "loss_func", None) if state.loss_fn is None else state.loss_fn
    if optimizer is None:
        optimizer = state.optimizers or getattr(state, "optimizer", None)
    state.model = state.model if model is None else model
    state.loss_fn, state.device = loss_func, device
    state.optimizers = () if optimizer is None else optimizer if isinstance(optimizer, tuple) else (optimizer,)
    state.schedulers = ()
    state._watch()
    return state


def follow_current_run(settings: TrainSettings) -> TrainSettings:
    """Inside an experiment, save into its folder and resume as the experiment does."""
    run = current_run()
    if run is None:
        return settings
    if settings.resume_from is None and run.params.get("resume", "never") != "never":
        settings = replace(settings, resume_from="auto")
    if settings.checkpoint_dir is None:  # the experiment has made the folder for this run
        settings = replace(settings, checkpoint_dir=Path(run.folder) / "checkpoints", overwrite_checkpoints=True)
    return settings


def restore(trainer: "Trainer") -> None:
    """Load the state of an earlier run if requested, then wrap the model. After this the model is final."""
    run, state, runtime = trainer.run, trainer.state, trainer.runtime
    settings = run.require_settings()
    fill_state(trainer)
    run.evaluation.state = EvaluationState(run.data.evaluation)
    run.evaluation.plateau = MetricWatch(settings.scheduler_metric, greater_is_better=False)
    length = loaders.length(run.data.train)
    checkpoints = run.checkpoints = CheckpointSchedule(
        state, settings, length, run.stepper.window, run.agreement, runtime.print
    )
    run.fire.before_load()
    if settings.resume_from is not None:
        _load(run, state, trainer.run_history, runtime.print, settings.resume_from)
    run.fire.after_load()
    checkpoints.start()
    if is_distributed():
        run.agreement.vote = StopVote()
        run.fire = trainer.engine.guarded(run.agreement.call)
        if trainer.strategy is None:  # a plan has wrapped the model as its mesh needs it
            state.model = runtime.prepare_model(state.model, **ddp_settings(run, state))
        if run.units is not None:
            run.units.share(distributed=True)  # also those of a module that is not in DDP
            run.units.rebind(state.model)
        if run.restored_rng is None:
            _reseed_rank(state.seed)


def ddp_settings(run: Run, state: State) -> dict[str, bool]:
    """Return the DDP settings that the Trainer was given or an algorithm needs."""
    unused = any(getattr(plugin, "find_unused_parameters", False) for plugin in state.algorithms)
    return {**run.shared.options.ddp, **({"find_unused_parameters": True} if unused else {})}


def fill_state(trainer: "Trainer") -> None:
    """Put everything that determines the next step into the state."""
    run, state, history = trainer.run, trainer.state, trainer.run_history
    settings, loader = run.require_settings(), run.data.train
    state._before_load = partial(_add_required_algorithms, weakref.ref(trainer))
    # An open window's gradients and batches are each rank's own.
    state._rank_local = {
        "gradients.partial": merge_windows,
        "optimizers.*.partial": partial(merge_windows, counted="weight"),
        "window_batches.memories": merge_memories,
        "plain_attributes": merge_attributes,
    }
    if settings.resume_from is None:
        state.clock.reset()
    state.device = torch.device(trainer.device)
    state.scaler = getattr(trainer.runtime, "scaler", None)
    state.history = history
    state._side_file = history if isinstance(history, InMemoryRunHistory) else None
    state.loggers = [logger for logger in trainer.logbook.loggers if hasattr(logger, "state_dict")]
    smart = loaders.smart_loader(loader)
    state.train_dataloader = loader if smart is None else smart
    restores = callable(getattr(type(state.train_dataloader), "load_state_dict", None))
    run.data.replay = None if restores else LoaderReplay(loader)
    if not restores:
        state._needs_no_warning("train_dataloader")  # the replay is saved instead
    state.epoch_loss = EpochLoss(run.measures, run.evaluation, trainer.logbook, run.data.replay)
    state.gradients = run.stepper
    state._watch(run.stepper.parameters_apart())
    state.accumulation_steps = settings.gradient_accumulation_steps
    if loaders.length(loader) is not None:
        state.set_dataloader(loader, "train")
    state.custom_entries = None


class EpochLoss:
    """The epoch's loss so far over all data ranks: exact on the same number of ranks, the correct sum on any other number.

    With it are saved how many evaluations have been made inside epochs, what the run was about to do (the evaluation that a signal cut
    short, or the end of the epoch), the means that loggers get next, and how the epoch of a loader without a position began.
    """

    def __init__(self, measures: Measures, evaluation: EvaluationPlan, logbook: Logbook, replay: LoaderReplay | None):
        self._measures, self._evaluation, self._logbook, self._replay = measures, evaluation, logbook, replay

    def state_dict(self) -> StateDict:
        """Return the sums of every data rank. All ranks must call this."""
        evaluation, measures, steps = self._evaluation, self._measures, self._measures.step_losses
        self._logbook.wait_for_steps()
        logged = {name: mean.state_dict() for name, mean in measures.logged.items()}
        return {
            "ranks": of_data_ranks(measures.tracker.state_dict()),
            "logged": of_data_ranks(logged),
            "train_metrics": of_data_ranks(measures.train_metrics.state_dict()),
            "evaluations": None if evaluation.interval is None else evaluation.interval.state_dict(),
            "evaluates_after_epoch": evaluation.after_epoch,
            "evaluation": evaluation.state.state_dict(),
            "unfinished": evaluation.unfinished,
            "plateau": evaluation.plateau.state_dict(),
            "step_losses": None if steps is None else steps.state_dict(),
            "replay": None if self._replay is None else self._replay.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore this rank's sums. On another number of data ranks, the first takes them all."""
        evaluation, measures = self._evaluation, self._measures
        evaluation.restored_interval = state.get("evaluations")
        evaluation.after_epoch = state.get("evaluates_after_epoch", False)
        evaluation.unfinished = state.get("unfinished", "")
        if "evaluation" in state:  # not in checkpoints of earlier versions
            evaluation.state.load_state_dict(state["evaluation"])
        evaluation.plateau.load_state_dict(state.get("plateau", {"best": None}))
        if "logged" in state:
            measures.logged.update(load_means(state["logged"]))
            measures.train_metrics.load_state_dict(state["train_metrics"])
        measures.restored_steps = state.get("step_losses")
        if self._replay is not None:
            self._replay.load_state_dict(state.get("replay") or [])
        load_sums(measures.tracker, state["ranks"])


def _add_required_algorithms(find_trainer: "weakref.ref[Trainer]", saved: StateDict) -> None:
    """Add algorithms that the saved model cannot be loaded without, by registry name, and let them do their surgery."""
    trainer = find_trainer()  # the state holds this function, and must not keep the Trainer alive
    if trainer is None:
        return
    state, live = trainer.state, {type(plugin).__name__ for plugin in trainer.state.algorithms}
    entries = [entry for entry in saved.get("algorithms") or () if entry.get("required")]
    if all(entry["name"] in live for entry in entries):
        return
    from drivetrain.algorithms.registry import restore_required

    entries = [{**entry, "config": unpack(entry["config"], None)} for entry in entries]
    added = restore_required(entries, state.algorithms)
    for plugin in added:
        warn(
            f"the checkpoint adds the algorithm {printable(repr(plugin))}, which this Trainer was not given: the saved model "
            "cannot be loaded without it. Put it into algorithms=[...] to keep it, or load another checkpoint."
        )
    trainer.add_algorithms(added)
    for plugin in added:
        if plugin.match(Event.INIT, state):
            plugin.apply(Event.INIT, state, trainer.logbook)


def _load(run: Run, state: State, history: RunHistory, report: Callable[[str], None], source: AnyPath) -> None:
    checkpoints = run.checkpoints
    assert checkpoints is not None
    sets_rates = bool(state.schedulers)
    given = _settings_of(() if run.units is not None else state.optimizers, sets_rates)  # units set their own rates
    if source in ("auto", "latest"):
        if checkpoints.checkpointer is None:
            raise ConfigError(
                f"resume_from={source!r} needs checkpoint_dir=..., the folder with the run's checkpoints."
            )
        restored = checkpoints.checkpointer.restore("auto")
        if restored is None:
            report(f"No checkpoint under {checkpoints.checkpointer.directory}: starting a new run.")
            return
    elif broadcast_from_master(FOREIGN_STATE.load().recognizes(Path(source))):
        restored = None  # nothing of the kind a checkpoint brings with it
        FOREIGN_STATE.load().restore(state, Path(source))
    else:
        restored = restore_from(state, source)
    rng, clock = getattr(restored, "rng", None), state.clock
    if rng is not None and num_data_ranks() != get_num_processes():
        rng = of_data_ranks(rng)[data_rank()]  # ranks that share samples take one, also of a run with other ranks
    run.restored_rng = rng
    history._set_epoch(clock.epoch if run.evaluation.unfinished == "epoch" else clock.epoch + 1)
    replayed = "" if run.data.replay is None else run.data.replay.go_on_after(clock.batch_in_epoch)
    checkpoints.last = getattr(restored, "path", source)
    report(
        f"Resumed {checkpoints.last}: epoch {clock.epoch + 1}, batch {clock.batch_in_epoch}, {clock.step} updates "
        f"done.{replayed}"
    )
    _report_replaced(given, _settings_of(state.optimizers, sets_rates), report)


def _settings_of(optimizers: Iterable[Optimizer], sets_rates: bool) -> list[dict[str, float]]:
    """Return what an edited program may have changed in each parameter group: the rate that a schedule starts from, and the decay.

    A schedule that does not keep the rate that it started from changes the present one: that says nothing.
    """
    return [  # a rate may be None: some optimizers determine it themselves
        {
            "lr": float(group.get("initial_lr", None if sets_rates else group.get("lr")) or 0.0),
            "weight_decay": float(group.get("weight_decay") or 0.0),
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _report_replaced(
    given: list[dict[str, float]], loaded: list[dict[str, float]], report: Callable[[str], None]
) -> None:
    """Report settings of the program that the checkpoint's replaced: they are a part of the optimizer's state."""
    replaced = [(index, old, new) for index, (old, new) in enumerate(zip(given, loaded)) if old != new]
    if not replaced:
        return
    index, old, new = replaced[0]
    names = [name for name in old if old[name] != new[name]]
    saved, own = (", ".join(f"{name}={values[name]:g}" for name in names) for values in (new, old))
    others = f" {len(replaced) - 1} more groups differ, too." if len(replaced) > 1 else ""
    report(
        f"Parameter group {index} continues with {saved} from the checkpoint, not with the given {own}.{others} To change it, set it in "
        "trainer.optimizer.param_groups from a callback, or start a new run from the weights."
    )


def apply_restored_rng(run: Run, before_first_step: bool = False) -> None:
    """Restore the generators just before the first resumed step, or for a checkpoint that is taken earlier."""
    if run.restored_rng is not None:
        restore_rng(run.restored_rng)
        run.restored_rng = run.restored_rng if before_first_step else None


def _reseed_rank(seed: int | None) -> None:
    """Give every data rank but the first its own random numbers, so that dropout masks differ. Ranks that share samples draw the same."""
    is_shared = num_data_ranks() != get_num_processes()
    base, first, numbers = broadcast_from_master(
        (torch.initial_seed() if seed is None else seed, data_rank(), capture_rng() if is_shared else None)
    )
    if data_rank() != first:
        torch.manual_seed(derive_seed(base, "rank", data_rank()))
    elif is_shared:
        restore_rng(numbers)


def handle_signal(number: int, signals: StopSignals, checkpoints: CheckpointSchedule) -> None:
    """Save. Then end the process as the signal requests, or continue after SIGUSR1."""
    if is_stop(number):
        signals.request(number)  # also where another rank got the signal
    if is_stop(number) or not is_stop(signals.requested):  # a save does not answer a stop that has come since
        signals.clear()
    checkpoints.save(final=is_stop(number))
    checkpoints.wait()
    if not is_stop(number):
        requeue_under_slurm()
        return
    run = current_run()
    if run is not None and hasattr(run, "interrupted"):
        run.interrupted = True
    if number == signal.SIGINT:  # what Ctrl-C has always raised
        if checkpoints.checkpointer is None or checkpoints.last is None:
            raise KeyboardInterrupt
        raise KeyboardInterrupt(f"the newest checkpoint is {checkpoints.last}; resume_from='auto' continues from it")
    raise SystemExit(exit_status(number))


def finish(run: Run, state: State, logbook: Logbook) -> None:
    """After the last event: wait for files, stop the clock, end the votes."""
    logbook.flush()
    if run.checkpoints is not None:
        run.checkpoints.finish()
    state.clock.stop()
    if isinstance(state.model, nn.Module):
        gather_on_request(state.model)
    if run.units is not None:
        run.units.end_run()
    run.agreement.close()


def make_optimizer(name: str, groups: object, **settings: object) -> Optimizer:
    """Return a new optimizer by name, from torch or Drivetrain, over parameters or groups. A wrapper takes an optimizer instead.

    >>> import torch
    >>> make_optimizer("Lion", [torch.nn.Parameter(torch.zeros(1))], lr=1e-3).defaults["lr"]
    0.001
    """
    from drivetrain.optim.building import find_optimizer

    try:
        return find_optimizer(name)(groups, **settings)
    except TypeError as problem:
        raise ConfigError(f"the optimizer {name!r} rejects its settings {sorted(settings)}: {problem}") from problem
