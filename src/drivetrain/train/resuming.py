"""How a run begins, is restored, and ends: the state it fills, and what a signal does to it."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from drivetrain.context.codec import unpack
from drivetrain.context.context import Context
from drivetrain.context.state import State
from drivetrain.core.display import printable
from drivetrain.core.errors import ConfigError, DrivetrainWarning, ResumeError
from drivetrain.core.event import Event
from drivetrain.core.foreign import Slot
from drivetrain.module.full_state import gather_on_request
from drivetrain.optim.state import merge_windows
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.ranks import data_rank, get_num_processes, is_distributed, num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import capture_rng, derive_seed, restore_rng
from drivetrain.runtime.signals import exit_status, is_stop, requeue_under_slurm
from drivetrain.train import loaders
from drivetrain.train.evaluation_state import EvaluationState
from drivetrain.train.gradients import merge_partial
from drivetrain.train.keeping import Keeper
from drivetrain.train.settings import TrainSettings
from drivetrain.train.stopping import StopVote
from drivetrain.train.tracking import InMemoryRunHistory, load_sums, of_data_ranks


class ForeignState(Protocol):
    """Continues from a folder that another library wrote."""

    def recognizes(self, folder: Path) -> bool:
        """Return whether a folder was written by that library."""

    def restore(self, trainer: Any, folder: Path) -> None:
        """Load the folder; the next epoch is then the one it names."""


FOREIGN_STATE: Slot[ForeignState] = Slot("train.foreign_state")


def make_state(
    given: Context | None, model: Any, loss_func: Any, optimizer: Any, device: Any, seed: int | None
) -> State:
    """Return the State of a trainer: a new one, or the user's Context with what the constructor was given on top."""
    state = given if isinstance(given, State) else State(seed=seed)
    if given is not None and given is not state:
        for name, value in given._items().items():
            setattr(state, name, value)
        optimizer = optimizer if optimizer is not None else getattr(given, "optimizer", None)
        loss_func = loss_func if loss_func is not None else getattr(given, "loss_func", None)
    state.model = model if model is not None else getattr(given, "model", None)
    state.loss_fn, state.device = loss_func, device
    state.optimizers = () if optimizer is None else optimizer if isinstance(optimizer, tuple) else (optimizer,)
    state.schedulers = ()
    return state


def follow_current_run(settings: TrainSettings) -> TrainSettings:
    """Inside an experiment, keep the run in its folder and resume as the experiment was told to."""
    run = current_run()
    if run is None:
        return settings
    folder = settings.checkpoint_dir if settings.checkpoint_dir is not None else Path(run.folder) / "checkpoints"
    resume = settings.resume_from
    if resume is None and run.params.get("resume", "never") != "never":
        resume = "auto"
    is_own = settings.checkpoint_dir is None  # the experiment has made the folder for this run
    return replace(
        settings,
        checkpoint_dir=folder,
        resume_from=resume,
        overwrite_checkpoints=settings.overwrite_checkpoints or is_own,
    )


def restore(trainer: Any) -> None:
    """Load the state of an earlier run if one is asked for, then wrap the model: after this it is final."""
    state, settings = trainer.state, trainer.settings
    _fill_state(trainer)
    trainer._evaluation_state = EvaluationState(trainer._eval_dataloader)
    trainer._keeper = Keeper(trainer, settings)
    trainer._restored_rng = trainer._saved_evaluations = trainer._eval_interval = None
    trainer._step_losses = trainer._saved_step_losses = None
    trainer._eval_after_epoch = False
    trainer._fire.before_load()
    if settings.resume_from is not None:
        _load(trainer, settings.resume_from)
    trainer._fire.after_load()
    trainer._keeper.start()
    if is_distributed():
        trainer._vote = StopVote()
        trainer._fire = trainer._fire_of_all_ranks()
        if trainer.strategy is None:  # a plan has wrapped the model as its mesh needs it
            trainer.model = trainer._accelerator.prepare_model(trainer.model, **ddp_settings(trainer))
        if trainer._units is not None:
            trainer._units.rebind(trainer.model)
        if trainer._restored_rng is None:
            _reseed_rank(state.seed)


def ddp_settings(trainer: Any) -> dict[str, bool]:
    """Return the settings of DDP that the Trainer was given, or that an algorithm needs."""
    unused = any(getattr(plugin, "find_unused_parameters", False) for plugin in trainer.state.algorithms)
    return {**trainer._ddp_settings, **({"find_unused_parameters": True} if unused else {})}


def _fill_state(trainer: Any) -> None:
    """Put everything that makes the next step what it would have been onto the state."""
    state = trainer.state
    state._before_load = partial(_restore_required_algorithms, trainer)
    # An open window's gradients are each rank's own.
    state._rank_local = {"gradients.partial": merge_partial, "optimizers.*.partial": merge_windows}
    if trainer.settings.resume_from is None:
        state.clock.reset()
    state.device = torch.device(trainer.device)
    state.scaler = getattr(trainer._accelerator, "scaler", None)
    state.history = trainer.run_history
    state._side_file = trainer.run_history if isinstance(trainer.run_history, InMemoryRunHistory) else None
    state.epoch_loss = EpochLoss(trainer)
    state.loggers = [logger for logger in trainer.logbook.loggers if hasattr(logger, "state_dict")]
    smart = loaders.smart_loader(trainer._train_dataloader)
    state.train_dataloader = trainer._train_dataloader if smart is None else smart
    state.gradients = trainer._gradients
    state.accumulation_steps = trainer.settings.gradient_accumulation_steps
    if loaders.length(trainer._train_dataloader) is not None:
        state.set_dataloader(trainer._train_dataloader, "train")
    state.custom_entries = None


class EpochLoss:
    """The epoch's loss so far, of all data ranks: exact on as many of them, and the right sum on any other number.

    How many evaluations have been made inside epochs is kept with it, so that a resumed run makes the next one where it was due.
    With it go what the run was about to do, the evaluation that a signal cut short or the end of the epoch, and the means that
    loggers get next.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of every data rank; all ranks must call this."""
        interval, steps = self._trainer._eval_interval, self._trainer._step_losses
        self._trainer.logbook.wait_for_steps()
        return {
            "ranks": of_data_ranks(self._trainer._loss_tracker.state_dict()),
            "evaluations": None if interval is None else interval.state_dict(),
            "evaluates_after_epoch": self._trainer._eval_after_epoch,
            "evaluation": self._trainer._evaluation_state.state_dict(),
            "unfinished": self._trainer._unfinished,
            "step_losses": None if steps is None else steps.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's sums back; on another number of data ranks, the first takes them all."""
        self._trainer._saved_evaluations = state.get("evaluations")
        self._trainer._eval_after_epoch = state.get("evaluates_after_epoch", False)
        self._trainer._unfinished = state.get("unfinished", "")
        if "evaluation" in state:  # not in checkpoints of earlier versions
            self._trainer._evaluation_state.load_state_dict(state["evaluation"])
        self._trainer._saved_step_losses = state.get("step_losses")
        load_sums(self._trainer._loss_tracker, state["ranks"])


def _restore_required_algorithms(trainer: Any, saved: dict[str, Any]) -> None:
    """Add algorithms that the saved model cannot be loaded without, by registry name, and let them do their surgery."""
    entries = [entry for entry in saved.get("algorithms") or () if entry.get("required")]
    live = {type(plugin).__name__ for plugin in trainer.state.algorithms}
    if all(entry["name"] in live for entry in entries):
        return
    from drivetrain.algorithms.registry import restore_required

    entries = [{**entry, "config": unpack(entry["config"], None)} for entry in entries]
    added = restore_required(entries, trainer.state.algorithms)
    for plugin in added:
        warnings.warn(
            f"the checkpoint adds the algorithm {printable(repr(plugin))}, which this Trainer was not given: the saved model "
            "cannot be loaded without it. Put it into algorithms=[...] to keep it, or load another checkpoint.",
            DrivetrainWarning,
            stacklevel=2,
        )
    trainer._algorithms = (*trainer._algorithms, *added)
    trainer.engine.set_plugins(trainer._plugins())
    for plugin in added:
        if plugin.match(Event.INIT, trainer.state):
            plugin.apply(Event.INIT, trainer.state, trainer.logbook)


def _load(trainer: Any, source: Any) -> None:
    keeper = trainer._keeper
    if source in ("auto", "latest"):
        if keeper.checkpointer is None:
            raise ConfigError(
                f"resume_from={source!r} needs checkpoint_dir=..., the folder the run's checkpoints are in."
            )
        restored = keeper.checkpointer.restore("auto")
        if restored is None:
            trainer.print(f"No checkpoint under {keeper.checkpointer.directory}: starting afresh.")
            return
    elif broadcast_from_master(FOREIGN_STATE.load().recognizes(Path(source))):
        restored = None  # nothing of the kind a checkpoint brings with it
        FOREIGN_STATE.load().restore(trainer, Path(source))
    else:
        from drivetrain.train.saving import restore_from

        restored = restore_from(trainer, source)
    trainer._restored_rng = _shared_rng(getattr(restored, "rng", None))
    clock = trainer.state.clock
    trainer.run_history._set_epoch(clock.epoch if trainer._unfinished == "epoch" else clock.epoch + 1)
    if clock.batch_in_epoch:
        _refuse_unknown_place(trainer.state.train_dataloader, clock.batch_in_epoch)
    trainer.last_checkpoint = getattr(restored, "path", source)
    trainer.print(
        f"Resumed {trainer.last_checkpoint}: epoch {clock.epoch + 1}, batch {clock.batch_in_epoch}, {clock.step} updates done."
    )


def _shared_rng(rng: Any) -> Any:
    """Return the random state to go on with; ranks that share samples take one, also when the saved run had other ranks."""
    if rng is None or num_data_ranks() == get_num_processes():
        return rng
    return of_data_ranks(rng)[data_rank()]


def _refuse_unknown_place(loader: Any, batches: int) -> None:
    """Refuse to guess where inside an epoch a loader stands."""
    if callable(getattr(type(loader), "load_state_dict", None)):
        return
    raise ResumeError(
        f"the checkpoint was taken {batches} batches into an epoch, and the training loader ({type(loader).__name__}) cannot return to its "
        "place: it has no load_state_dict. Give train() the dataset instead of the loader, use drivetrain.SmartDataLoader, or resume from "
        "a checkpoint taken at an epoch's end."
    )


def apply_restored_rng(trainer: Any) -> None:
    """Set the generators as they were, just before the first resumed step."""
    rng, trainer._restored_rng = trainer._restored_rng, None
    if rng is not None:
        restore_rng(rng)


def _reseed_rank(seed: int | None) -> None:
    """Give every data rank but the first its own random numbers, so that dropout masks differ; weights are already equal.

    Ranks that share samples draw the same, because what they compute together is one function. Rank 0 goes on with its own numbers, and
    those who share its samples go on with them too.
    """
    is_shared = num_data_ranks() != get_num_processes()
    base, first, numbers = broadcast_from_master(
        (torch.initial_seed() if seed is None else seed, data_rank(), capture_rng() if is_shared else None)
    )
    if data_rank() != first:
        torch.manual_seed(derive_seed(base, "rank", data_rank()))
    elif is_shared:
        restore_rng(numbers)


def obey_signal(trainer: Any, number: int) -> None:
    """Save; then end the process as the signal asks, or go on after SIGUSR1."""
    signals = trainer._signals
    if is_stop(number):
        signals.request(number)  # also where another rank was told
    if is_stop(number) or not is_stop(signals.requested):  # a save does not answer a stop that has come since
        signals.clear()
    trainer._keeper.save(final=is_stop(number))
    trainer._keeper.wait()
    if not is_stop(number):
        requeue_under_slurm()
        return
    run = current_run()
    if run is not None and hasattr(run, "interrupted"):
        run.interrupted = True
    if number == 2:  # SIGINT: what Ctrl-C has always raised
        raise KeyboardInterrupt
    raise SystemExit(exit_status(number))


def finish(trainer: Any) -> None:
    """After the last event: wait for files, stop the clock, let ranks part."""
    trainer.logbook.flush()
    trainer._keeper.finish()
    trainer.state.clock.stop()
    if isinstance(trainer.model, nn.Module):
        gather_on_request(trainer.model)
    if trainer._units is not None:
        trainer._units.end_run()
    if trainer._vote is not None:
        trainer._vote.close()
        trainer._vote, trainer._fire = None, trainer.engine.on
