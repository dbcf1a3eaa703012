"""Try plans in separate processes, one for each rank, and give all ranks the same result.

The caller's processes run no plan and initialize no device; they start the others, read from them, and agree over their own control
group. A process that fails, hangs or dies is ended on all ranks. One that succeeded takes the next plan, because starting one costs
seconds.

Local classes, lambdas and functions of a notebook cannot be sent to a new process. On the CPU a forked process has them. On other
devices such a task is tried in the caller's process, if its predicted memory is available.
"""

import pickle
import shutil
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from drivetrain.core.errors import ConfigError, warn
from drivetrain.core.plain import plain_text
from drivetrain.runtime.collectives import all_gather_values, broadcast_from_master
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.ranks import get_local_rank, get_num_processes, get_rank, is_distributed, is_master
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.runtime.store import store_variables
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.snapshot import ProcessSettings
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.measuring import Order, failure_of, measure, release_unused_memory
from drivetrain.strategy.trial.process import ChildSettings, TrialProcess, reject_inside_trial
from drivetrain.strategy.trial.report import PLAIN, ReferenceResults, Report, TrialResult, cause_of, merge
from drivetrain.strategy.value import Strategy

SILENCE_SECONDS = 30.0
"""A process that says nothing for so long, or for five predicted steps, hangs."""
START_SECONDS = 120.0
"""How long a process may take to start and to take the task."""
ECHO_SECONDS = 1.5
"""How long to wait for the cause after a rank lost its connection to another."""
RESTART_SECONDS = 15.0
"""What a compilation leaves of the time: enough for a new process and another plan. Half done, it would have been for nothing."""
IN_PROCESS_SHARE = {"cpu": 0.7}
"""A plan is tried in the caller's own process only below this share of the memory budget: all of it where running out is an exception."""
_TICK = 0.1


class TrialPool(AbstractContextManager["TrialPool"]):
    """Tries one plan after another on one task. As a context manager it ends all its processes.

    All methods are collective, except `start` and `close`.
    """

    def __init__(self, task: TrainingTask, *, device: torch.device, patience: float = SILENCE_SECONDS):
        reject_inside_trial("a trial of a plan")
        if task.loss_func is None or task.samples is None:
            raise ConfigError("a trial needs the task's loss_func and samples.")
        self.task, self.device, self.patience = task, device, patience
        self._process: TrialProcess | None = None
        self._obstacle: TrialResult | None = None
        self._yardsticks: dict[int, ReferenceResults] = {}
        self._plain_fits = True
        self._store: Any = None
        self._meeting: dict[str, str] | None = None
        """The variables by which the processes of all ranks find each other."""
        self._generation = 0
        self._forked: str | None = None
        """Why processes are forked, None where they are not."""

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End this rank's process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    @property
    def pid(self) -> int | None:
        """The id of this rank's process, None if there is none now."""
        return None if self._process is None else self._process.pid

    # The process of this rank.

    def start(self) -> None:
        """Start this rank's process without waiting for it, if there is only one rank."""
        if self._process is None and self._obstacle is None and not is_distributed():
            self._start()

    def obstacle(self, deadline: float | None = None) -> TrialResult | None:
        """Return why no process can try a plan, None if the processes of all ranks have accepted the task.

        The error class is "Unsendable" if there will never be one. A start that took too long may do better another time.
        """
        if all(all_gather_values(self._process is not None and self._process.is_waiting)):
            return None
        if self._process is not None and self._process.is_received:
            self.close()  # this one, or another rank's, has died since
        if self._obstacle is not None:
            return self._obstacle
        report = Report()
        try:
            self._send_task(report, time.monotonic() + START_SECONDS if deadline is None else deadline)
        except BaseException:
            self.close()
            raise
        reports = all_gather_values(report)
        if (rank := cause_of(reports)) is None:
            return None
        self.close()
        cause = reports[rank]
        message = f"rank {rank}: {cause.message}" if len(reports) > 1 else cause.message
        result = TrialResult(outcome=cause.kind, message=message)
        if cause.error_class not in ("Unsendable", "Start", "NoGuard"):
            return result
        if cause.error_class == "NoGuard" and is_master():
            warn(f"Plans cannot be tried in new processes: {cause.message}")
        if self._can_fork():
            self._forked = cause.message
            return self.obstacle(deadline)
        self._obstacle = replace(result, error_class="Unsendable")
        return self._obstacle

    def _can_fork(self) -> bool:
        """Return whether a process that cannot be started again can be forked: no device and no process group is lost by that."""
        is_free = self._forked is None and not is_distributed() and not torch.cuda.is_initialized()
        return is_free and self.device.type == "cpu" and sys.platform == "linux"

    def _send_task(self, report: Report, deadline: float) -> None:
        """Start a process and give it the task; all ranks go through this together."""
        self._agree_on_address()
        payload = _payload(self.task) if self._forked is None else pickle.dumps(None)
        if isinstance(payload, str):
            report.fail("error", payload, "Unsendable")
        elif self._process is None:
            try:
                self._start()
            except (AssertionError, OSError) as error:  # in a daemonic process, or not allowed by the system
                report.fail("error", f"no process can be started here ({error})", "Start")
        limit = max(deadline - time.monotonic(), 1.0)
        check_time = partial(report.check_time, deadline, limit, limit)
        self._watch(report, check_time, lambda: self._process is not None and self._process.is_ready)
        if report.state == "running" and self._process is not None and isinstance(payload, bytes):
            self._process.send(payload)
        del payload
        self._watch(report, check_time)

    def _start(self) -> None:
        self._generation += 1
        self._process = TrialProcess(
            ChildSettings(
                device=str(self.device),
                settings=ProcessSettings.capture(),
                environment=self._environment(),
                joins_group=is_distributed(),
                timeout=2 * self.patience + 30,  # later than the parents' own verdict
            ),
            None if self._forked is None else self.task,
        )

    def _agree_on_address(self) -> None:
        """Let rank 0 open the place where the processes meet: a folder on one machine, else a port that the system chooses."""
        if not is_distributed() or self._meeting is not None:
            return
        made = None
        if get_rank() == 0:
            made = tempfile.mkdtemp(prefix="drivetrain-trial-")
            weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        folder = Path(broadcast_from_master(made))
        hosts = all_gather_values(socket.gethostname() if folder.is_dir() else None)
        if len(set(hosts)) == 1:
            self._meeting = store_variables(folder)
            return
        world = launched_world()
        host = str(hosts[0]) if world is None or world.master_addr is None else world.master_addr
        if get_rank() == 0:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = broadcast_from_master(None if self._store is None else self._store.port)
        # The store is in a parent, as it is under torch's agent.
        self._meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def _environment(self) -> dict[str, str]:
        if self._meeting is None:
            return {}
        world, size = launched_world(), get_num_processes()
        local = get_local_rank() if self.device.type == "cpu" or self.device.index is None else self.device.index
        around = size if world is None or world.local_world_size is None else world.local_world_size
        values = {
            "RANK": get_rank(),
            "WORLD_SIZE": size,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": max(around, local + 1),
            "TORCHELASTIC_RESTART_COUNT": self._generation,  # each generation of processes meets again
        }
        return {name: str(value) for name, value in values.items()} | self._meeting

    def _watch(self, report: Report, check_time: Callable[[], None], is_over: Callable[[], bool] | None = None) -> None:
        """Read from this rank's process until all ranks are done, or one has failed; all ranks return together."""
        echo_ends: float | None = None
        while True:
            if self._process is not None and report.state == "running" and not (is_over is not None and is_over()):
                self._process.read(report, _TICK)
                check_time()
            else:
                time.sleep(_TICK / 2)  # another rank is not through yet
            is_through = report.state in ("over", "cut") or (is_over is not None and is_over())
            states = all_gather_values("over" if is_through and report.state not in ("failed", "cut") else report.state)
            if "failed" in states or "cut" in states or all(state == "over" for state in states):
                return
            if "echo" in states:
                now = time.monotonic()
                echo_ends = now + ECHO_SECONDS if echo_ends is None else echo_ends
                if any(all_gather_values(now > echo_ends)):
                    return

    # Trials.

    def run(
        self,
        plan: Strategy,
        *,
        steps: int,
        deadline: float,
        predicted: float | None = None,
        verify: bool = True,
        memory_share: float | None = None,
    ) -> TrialResult:
        """Try one plan. Every rank calls it with the same arguments and gets the same result. The plain model is run once for all plans.

        `deadline` is a time of `time.monotonic()`; `predicted` the expected seconds of a step; `memory_share` the predicted part of the
        memory budget, without which a task that cannot be sent to another process is not tried.
        """
        began = time.monotonic()
        order = self._order(plan, steps, verify)
        if (unsendable := _unsendable(order)) is not None and self._can_fork():
            self.close()
            self._forked = unsendable.message
        if self._forked is not None:
            order = replace(order, methods=())  # a forked process knows them
        obstacle = _unsendable(order) or self.obstacle(min(deadline, began + START_SECONDS))
        if obstacle is not None:
            may_help = obstacle.error_class == "Unsendable"
            return self._run_here(order, deadline, obstacle.message, memory_share) if may_help else obstacle
        assert self._process is not None
        report = Report(began=began)
        silence = max(self.patience, 5 * (predicted or 0.0))
        compiling = max(silence, deadline - time.monotonic() - RESTART_SECONDS)
        try:
            self._process.send(pickle.dumps(order))
            self._watch(report, partial(report.check_time, deadline, silence, compiling))
            reports = all_gather_values(report)
        except BaseException:
            self.close()
            raise
        result = merge(reports, steps, self.device.type)
        if result.outcome != "ok" or not all(other.is_clean for other in reports):
            self.close()
        self._store_reference_results(result)
        if self._forked is not None:
            result = replace(result, notes=(*result.notes, f"tried in a forked process: {self._forked}"))
        return result

    def _order(self, plan: Strategy, steps: int, verify: bool) -> Order:
        methods = map(find_method, dict.fromkeys(plan.opt_names()))
        return Order(
            plan=Strategy(plan.opt_list, batch=plan.batch),
            methods=tuple(method for method in methods if not type(method).__module__.startswith("drivetrain.")),
            steps=steps,
            verify=verify,
            yardsticks=tuple(self._yardsticks.values()),
            plain_fits=self._plain_fits,
        )

    def _store_reference_results(self, result: TrialResult) -> None:
        """Keep the plain model's numbers for the next plans; where it does not fit, those of the first plan that does."""
        found = result.yardstick
        if found is not None and result.outcome == "ok":
            self._plain_fits = self._plain_fits and found.source == PLAIN
            known = self._yardsticks.get(found.samples)
            if known is None or known.is_steady is None:
                self._yardsticks[found.samples] = found

    def _run_here(self, order: Order, deadline: float, obstacle: str, memory_share: float | None) -> TrialResult:
        """Try a plan in this process, if that is safe enough; otherwise return why it was not tried."""
        reason = None
        if get_num_processes() > 1:
            reason = "with several processes a plan is never tried in the process of the caller"
        elif memory_share is None or memory_share >= IN_PROCESS_SHARE.get(self.device.type, 1.0):
            share = "an unknown share" if memory_share is None else f"{memory_share:.0%}"
            reason = f"a plan that needs {share} of the memory budget is not tried in the process of the caller"
        if reason is not None:
            return TrialResult(
                outcome="error",
                message=f"not tried: {obstacle} Also, {reason}. Pass model_fn, and define the model and functions in a module.",
                error_class="Unsendable",
            )
        report, settings, random_state = Report(), ProcessSettings.capture(), capture_rng()

        def tell(event: str, **values: object) -> None:
            report.take({"event": event, **values})
            report.check_time(deadline, float("inf"), float("inf"))
            if report.state != "running":
                raise _DeadlineReached

        try:
            measure(order, self.task, self.device, tell, may_reset=False)
            report.state = "over"
        except _DeadlineReached:
            pass
        except Exception as error:  # whatever goes wrong in the user's model or a kernel is the outcome of the trial
            report.fail(*failure_of(error), type(error).__name__)
        finally:
            settings.restore()
            release_unused_memory(self.device)
            restore_rng(random_state)
        result = merge([report], order.steps, self.device.type)
        self._store_reference_results(result)
        note = f"tried in the process of the caller: {obstacle}"
        return replace(result, is_in_process=True, notes=(*result.notes, note))


class _DeadlineReached(Exception):
    """Ends a trial in this process between two steps."""


def _unsendable(order: Order) -> TrialResult | None:
    try:
        pickle.dumps(order)
    except Exception as error:  # a registered method may hold anything
        message = f"the plan cannot be sent to another process ({type(error).__name__}: {error})."
        return TrialResult(outcome="error", message=message, error_class="Unsendable")
    return None


def _payload(task: TrainingTask) -> bytes | str:
    """Return the task as it travels: with the function that makes the model, else with the model; or why it cannot."""
    reasons = []
    for attempt in (replace(task, model=None), replace(task, model_fn=None)):
        if attempt.model is None and attempt.model_fn is None:
            continue
        try:  # by value: torch's own way would move the caller's weights to shared memory
            return pickle.dumps(attempt)
        except Exception as error:  # a model may hold anything
            reasons.append(f"{type(error).__name__}: {plain_text(error)}")
    return f"the task cannot be sent to another process ({'; '.join(reasons)})."
