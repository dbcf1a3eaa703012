"""The Checkpointer: keeps a Context safe while a loop runs, and brings it back.

    keeper = Checkpointer(ctx, every="200ba", keep=3, dir="runs/a/checkpoints")
    keeper.restore()                      # the newest valid checkpoint, if there is one
    for batch in loader:
        ...
        keeper.step()                     # saves when due; on SIGTERM saves and exits with 143

It decides when to save, in which thread, what a failure means and which checkpoints stay; taking a state apart,
writing it and reading it are in files of their own. All its methods are called on every rank.
"""

import inspect
import logging
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from torch.nn import Module

from drivetrain.checkpoint import layout
from drivetrain.checkpoint.exchange import RankExchange, background_exchange, control_exchange
from drivetrain.checkpoint.folder import WRITER_LOCK, check_folder, device_of, lock_checkpoint_folder
from drivetrain.checkpoint.layout import Best, Manifest
from drivetrain.checkpoint.progress import Progress, Restored, Schedule
from drivetrain.checkpoint.reader import CheckpointPath, CheckpointReader, Loaded, find_checkpoint_path
from drivetrain.checkpoint.snapshot import merges_of, place_of, reading_from, take_snapshot
from drivetrain.checkpoint.store import best_folder, checkpoint_directory, read_file, state_of
from drivetrain.checkpoint.writer import (
    BackgroundJob,
    HostBuffers,
    Snapshot,
    WriteFailedError,
    known_checkpoints,
    remove_folder,
    write_checkpoint,
)
from drivetrain.context.context import Context
from drivetrain.context.loading import walk
from drivetrain.core.arguments import check_count
from drivetrain.core.errors import CheckpointError, ConfigError, NonFiniteStateError, StateError, unknown_name
from drivetrain.core.locking import FolderLock
from drivetrain.core.time import Time, TimeLike, TimeUnit, ensure_time
from drivetrain.module.finite import nonfinite_state
from drivetrain.runtime.codec import unpack
from drivetrain.runtime.ranks import get_num_processes, is_master
from drivetrain.runtime.run import current_run
from drivetrain.runtime.signals import StopSignals, exit_status, is_stop, requeue_under_slurm

logger = logging.getLogger(__name__)

FAILURES_ALLOWED = 2
"""Number of consecutive failed saves that only warn; the next one is an error."""
NEWEST = ("auto", "latest", "newest", layout.LAST)


class Listed(NamedTuple):
    """One checkpoint of a folder."""

    path: Path
    manifest: Manifest


class Checkpointer:
    """Save a Context when it is due, keep the right checkpoints, stop cleanly, and restore.

    Times are `"200ba"`, `"1ep"`, `"30m"`; a bare number counts batches. The folder is locked from the first save (with `every`, from
    `restore()` or the first `step()`) until `close()`. While a Trainer or another owner of a `StopSignals` is active, it handles signals.

    Args:
        ctx: the Context to save.
        every: when to save.
        keep: how many of the newest to keep; None keeps all.
        best: the metric whose best checkpoint is kept too.
        mode: whether its smallest (`"min"`) or largest (`"max"`) value is best.
        keep_every: keep one for each such time.
        async_save: write in the background; `"auto"` if the state is on an accelerator.
        verify: how checkpoints are checked when they are read: `"full"`, `"size"` or `"off"`.
        dir: folder; the current run's `checkpoints` by default.
        signals: save and stop at SIGTERM and SIGINT.

    >>> import tempfile
    >>> from drivetrain.context.context import Context
    >>> ctx = Context(epoch=0)
    >>> with Checkpointer(ctx, dir=tempfile.mkdtemp(), signals=False) as keeper:
    ...     path = keeper.save("first")
    >>> path.name
    'checkpoint-first'
    """

    def __init__(
        self,
        ctx: Any,
        every: TimeLike | None = None,
        keep: int | None = 3,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_every: TimeLike | None = None,
        async_save: bool | Literal["auto"] = "auto",
        verify: Literal["full", "size", "off"] = "full",
        dir: str | Path | None = None,
        *,
        signals: bool = True,
    ):
        for method, call in {"state_dict": {}, "load_state_dict": {"strict": True}}.items():
            try:
                inspect.signature(getattr(ctx, method)).bind(*[{}] * len(call), **call)
            except ValueError:
                continue  # a built-in without a signature
            except (AttributeError, TypeError):
                raise ConfigError(
                    f"Checkpointer: a {type(ctx).__name__} has no {method}({'state, strict' if call else ''}). Give a Context; for a "
                    "plain dict use save_checkpoint(state, id)."
                ) from None
        if keep is not None:
            check_count("keep", keep, hint=", or None to keep all")
        if async_save not in (True, False, "auto"):
            raise ConfigError(unknown_name("mode", async_save, ["auto", "True", "False"], where="async_save"))
        self.ctx = ctx
        self.directory = checkpoint_directory(dir)
        self.keep, self.best = keep, None if best is None else Best(best, mode)
        self.async_save, self.verify = async_save, layout.check_verify(verify)
        self.progress = Progress(ctx)
        self.keep_every = self._time(keep_every, "keep_every")
        self._schedule = Schedule(self._time(every, "every"), self.progress)
        self._wants_signals = signals
        self._signals: StopSignals | None = None
        self._job, self._buffers = BackgroundJob(), HostBuffers()
        self._background: RankExchange | None = None
        self.failures_in_a_row = 0
        self.last_failure: WriteFailedError | None = None
        """Why the last save failed, where that was only logged; None after one that worked."""
        self._device = device_of(self.directory)
        self._lock = FolderLock(self.directory, WRITER_LOCK)
        weakref.finalize(self, self._lock.release)
        self._is_prepared = every is None  # one that saves only on demand takes the lock with its first save
        self.last_stall = 0.0
        """Seconds the last save blocked training: the copy of a background save, or the whole save otherwise."""

    def step(self, metrics: Mapping[str, object] | None = None) -> Path | None:
        """Count one step. Save when it is due or SIGUSR1 requests it; on SIGTERM or SIGINT save and exit.

        Returns the folder of the checkpoint when one was saved or begun.
        """
        self.progress.num_calls += 1
        self._prepare_to_save()
        if get_num_processes() == 1:  # several ranks would not learn of it at the same step: their next save raises it
            self._surface_background_error()
        number = self._signal()
        due = self._schedule.is_due()
        if number is None:
            return self.save(metrics=metrics) if due else None
        assert self._signals is not None
        self._signals.clear()
        if is_stop(number):
            try:
                self.save(metrics=metrics, final=True)
            except NonFiniteStateError as error:
                logger.warning("%s", error)
            self.close()
            raise SystemExit(exit_status(number))
        path = self.save(metrics=metrics)
        if is_master():
            requeue_under_slurm()
        return path

    def save(self, id: object = None, metrics: Mapping[str, object] | None = None, *, final: bool = False) -> Path:
        """Save now and return the folder. A background save only starts here.

        A disk failure is a warning and the run continues, up to two times in a row; `final=True` writes in the
        foreground and raises at once. Weights or optimizer states that are not finite are never written: the error names them, and the
        newest checkpoint stays the newest. The id defaults to the moment: `ep3-ba1200`.
        """
        self.wait()
        id = self.progress.checkpoint_id() if id is None else id
        path = self.directory / layout.checkpoint_name(id)
        begun = time.perf_counter()
        exchange = control_exchange()
        try:
            check_folder(self.directory, self._device, path.name, exchange, self._lock)
            self._check_finite(path, exchange)
            snapshot = take_snapshot(
                self.ctx,
                exchange,
                folder=self.directory,
                metrics=self._metrics(metrics),
                progress=self.progress.snapshot(),
            )
            in_background = self.async_save
            if in_background == "auto":
                in_background = any(t.device.type != "cpu" for part in snapshot.parts().values() for t in part.values())
            if in_background and not final:
                self._begin(id, snapshot)
                self.last_stall = time.perf_counter() - begun
                logger.info("%s: training was blocked for %.3f s; a thread writes it", path.name, self.last_stall)
                return path
            self._write(id, snapshot, exchange)
        except WriteFailedError as error:
            self._count_failure(error, final)
        self.last_stall = time.perf_counter() - begun
        return path

    def _check_finite(self, path: Path, exchange: RankExchange) -> None:
        """Raise on all ranks if the state of any of them is not finite."""
        items = dict(getattr(self.ctx, "__dict__", {}))
        if isinstance(self.ctx, Context | Module):
            items = {path or "model": item for path, _, item in walk(self.ctx)}
        found = exchange.gather(nonfinite_state(items))
        names = list(dict.fromkeys(name for of_rank in found for name in of_rank))
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise NonFiniteStateError(
                f"{path.name} was not written: {shown} hold NaN or infinity. Resume from the newest checkpoint in "
                f"{self.directory}."
            )

    def restore(self, which: str | int | Path = "auto") -> Restored | None:
        """Restore a saved state and continue its counters. Random states are applied last.

        `which`: `"auto"` (the newest valid checkpoint; None when there is none yet), `"last"` (the same, but there
        must be one), `"best"`, an id, or a path: a checkpoint, a run folder, or a file of another program.
        """
        self.wait()
        self._prepare_to_save()
        exchange = control_exchange()
        exchange.meet(f"restoring from {which}")
        if which == "auto":
            listed = exchange.attempt(lambda: layout.checkpoint_folders(self.directory) != [])
            if not any(listed.checked(CheckpointError)):
                return None

        def find() -> CheckpointPath:
            return find_checkpoint_path(self._resolve(which))

        place = exchange.first(find)
        if place.kind == "file":
            return Restored(path=place.path, report=self._load(read_file(place.path), exchange))
        live, merges = self.ctx.state_dict, merges_of(self.ctx)
        reader = CheckpointReader(verify=self.verify, exchange=exchange, live=live, merges=merges, resume=True)
        loaded = reader.read_at(find)
        with reading_from(self.ctx, loaded.path.parent):
            report = self._load(state_of(loaded), exchange)
        return self._continue(loaded, report)

    def wait(self) -> None:
        """Wait for the current save. Raise or count its failure."""
        self._job.wait()
        self._surface_background_error()

    def finish(self) -> None:
        """Wait for the last save of a run. Raise if it failed, because then the end of the run is not saved."""
        self.wait()
        failure, self.last_failure = self.last_failure, None
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Wait for the current save without raising, if another error is already being raised."""
        self._job.wait()

    def list(self) -> list[Listed]:
        """Return the checkpoints in the folder that have a valid manifest, oldest first."""
        return [Listed(*item) for item in known_checkpoints(self.directory).items()]

    def export_safetensors(self, path: str | Path, names: tuple[str, ...] = ("model",)) -> Path:
        """Write the named items of the Context as plain safetensors for other programs. See `export_safetensors`."""
        from drivetrain.checkpoint.files import export_safetensors

        return export_safetensors(self.ctx, path, names)

    def close(self) -> None:
        """Wait for the current save and release the signals. Raise if the last save failed."""
        try:
            self.finish()
            self._schedule.finish()
            if self._signals is not None:
                self._signals.finish()
            if self._background is not None:
                self._background.close()
                self._background = None
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        # The error in flight matters more than that of a save, and other ranks may not come to agree on anything.
        self.settle()
        self._release()

    def _release(self) -> None:
        self._lock.release()
        if self._signals is not None:
            self._signals.release()
            self._signals = None

    def _prepare_to_save(self) -> None:
        """Lock the folder before the first step of a run that saves at intervals."""
        if not self._is_prepared:
            self._is_prepared = True
            lock_checkpoint_folder(self.directory, self._lock, control_exchange())

    def _time(self, value: TimeLike | None, where: str) -> Time | None:
        if value is None:
            return None
        wanted = ensure_time(value, TimeUnit.BATCH)
        if wanted.value <= 0:
            raise ConfigError(f"{where}: '{wanted}' is not valid. Expected a positive time, such as '200ba' or '1ep'.")
        self.progress.check_unit(wanted, where)
        return wanted

    def _signal(self) -> int | None:
        if self._signals is None:
            if not self._wants_signals or StopSignals.active() is not None:
                return None  # a Trainer above us acts on them
            self._signals = StopSignals().__enter__()
            # A Checkpointer that is dropped gives the signals back, like one that is closed.
            weakref.finalize(self, self._signals.release)
        return self._signals.agreed()

    def _metrics(self, metrics: Mapping[str, object] | None) -> dict[str, object]:
        found = dict(metrics or {})
        if self.best is not None and self.best.metric not in found:
            for item in getattr(self.ctx, "__dict__", {}).values():  # a Recorder knows the last value of each tag
                if hasattr(type(item), "last") and hasattr(type(item), "scalar"):
                    with suppress(KeyError, ValueError):
                        if (value := item.last(self.best.metric)) is not None:
                            found[self.best.metric] = value
        return found

    def _begin(self, id: object, snapshot: Snapshot) -> None:
        if self._background is None:
            self._background = background_exchange()
        exchange, arrived = self._background, self._buffers.stage(snapshot)

        def job() -> None:
            arrived()
            self._write(id, snapshot, exchange)

        self._job.start(job, layout.checkpoint_name(id))

    def _write(self, id: object, snapshot: Snapshot, exchange: RankExchange) -> None:
        """Write one checkpoint and let old ones go; in the main thread, or in the background."""
        begun = time.perf_counter()
        path = write_checkpoint(self.directory, id, snapshot, exchange, best=self.best)
        self.failures_in_a_row, self.last_failure = 0, None
        self._device = device_of(self.directory)
        if exchange.rank == 0:
            self._prune_old_checkpoints()
            logger.info("%s: written in %.2f s", path, time.perf_counter() - begun)

    def _prune_old_checkpoints(self) -> None:
        pointed = set()
        for pointer in (layout.LAST, layout.BEST):
            try:
                pointed.add(layout.read_pointer(self.directory, pointer))
            except CheckpointError as error:  # one that cannot be read protects nothing
                logger.warning("%s", error)
        known = known_checkpoints(self.directory)
        # A copy, or one that was renamed, belongs to the person who did that.
        known = {folder: one for folder, one in known.items() if folder.name == layout.checkpoint_name(one.id)}
        for folder in layout.to_remove(known, keep=self.keep, best=self.best, keep_every=self.keep_every):
            if folder not in pointed:
                try:
                    remove_folder(folder)
                except OSError as error:
                    logger.warning("the old checkpoint %s cannot be removed: %s", folder, error)

    def _surface_background_error(self) -> None:
        if self._job.is_busy:
            return
        error = self._job.take_error()
        if isinstance(error, WriteFailedError):
            self._count_failure(error, final=False)
        elif error is not None:
            raise error

    def _count_failure(self, error: WriteFailedError, final: bool) -> None:
        self.failures_in_a_row += 1
        self.last_failure = None
        if final or error.is_permanent or self.failures_in_a_row > FAILURES_ALLOWED:
            raise error
        self.last_failure = error
        logger.warning("%s The run continues (%d consecutive failures).", error, self.failures_in_a_row)

    def _resolve(self, which: str | int | Path) -> Path:
        if which in NEWEST:
            return self.directory
        if which == layout.BEST:
            return best_folder(self.directory)
        by_id = self.directory / f"{layout.PREFIX}{which}"
        return by_id if isinstance(which, str | int) and by_id.is_dir() else Path(str(which))

    def _load(self, state: Any, exchange: RankExchange) -> Any:
        """Load on every rank, or on none: a state that does not fit somewhere is an error everywhere."""
        report, problem = None, None
        try:
            report = self.ctx.load_state_dict(state, strict=True)
        except StateError as error:
            problem = error
        for rank, text in enumerate(exchange.gather(None if problem is None else str(problem))):
            if text is not None:
                raise problem or CheckpointError(f"rank {rank} could not load the state, so all ranks stop: {text}")
        return report

    def _continue(self, loaded: Loaded, report: object) -> Restored:
        self.progress.resume(loaded.manifest.progress)
        self._schedule.reset()
        run, saved = current_run(), loaded.run or {}
        if run is not None and saved:
            run.elapsed_before = float(saved["elapsed"])
            run.started = time.monotonic()
            version, words, gauss = saved["random_gen"]
            run.random_gen.setstate((version, tuple(words), gauss))
        logger.info("continued from %s (sequence %d)", loaded.path, loaded.manifest.sequence)
        restored = Restored(
            path=loaded.path,
            manifest=loaded.manifest,
            rejected=tuple(loaded.rejected),
            parameters={name: _unpacked(value) for name, value in saved.get("parameters", {}).items()},
            rng=None if loaded.rank is None else loaded.rank.rng,
            device=place_of(self.ctx),
            report=report,
        )
        restored.apply_rng()
        return restored


def _unpacked(value: object) -> object:
    try:
        return unpack(value)
    except StateError:  # its class is not at hand; the packed form still shows what it was
        return value
