"""Find the fastest plan that is correct and fits: predict all candidates, simulate the promising ones, measure a few, decide.

The search can stop at any time: when its time is up, it returns the best verified plan so far or, without one, the best
prediction, marked as such. Only arithmetic and shapes run in this process. Models, random states and loaders of the caller do not
change. Every rank calls `find_plan` with the same arguments; rank 0 measures and decides.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from drivetrain.core.display import format_bytes
from drivetrain.core.errors import ConfigError, PlanInfeasible, StrategyError
from drivetrain.runtime.collectives import all_gather_values, broadcast_from_master
from drivetrain.runtime.ranks import get_num_processes, is_master
from drivetrain.strategy.profile.machine import machine_from_spec, profile_machine
from drivetrain.strategy.profile.model import ModelProfiler
from drivetrain.strategy.profile.simulate import Simulation, cache_tensor_plans, simulate_plans
from drivetrain.strategy.profile.values import COMPILED, PARTS, MachineProfile, ModelProfile
from drivetrain.strategy.registry import all_methods
from drivetrain.strategy.search.candidates import Candidate
from drivetrain.strategy.search.constraints import SearchConstraints, budget_bytes
from drivetrain.strategy.search.decision import Comparison, Measurement, choose, summary
from drivetrain.strategy.search.knowledge import Knowledge, likely_mispredicted, run_on_master
from drivetrain.strategy.search.measure import PLENTY, Measuring, SearchTime, measuring_order
from drivetrain.strategy.search.plan_cache import cache_plan, find_cached_plan, plan_file
from drivetrain.strategy.search.ranking import TIE, Scored, order, preferred, promising
from drivetrain.strategy.search.space import SearchScope, SearchSpace, build_space
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.running import TrialPool
from drivetrain.strategy.value import Failure, Strategy

__all__ = ["SearchConstraints", "find_plan"]

_SIMULATED, _SIMULATED_IF_MEASURED = 8, 4
"""Plans that are simulated at most; fewer where most will be measured and none comes near the budget."""
_ENOUGH_SIMULATION = 10.0
"""Seconds after which a search that does not measure simulates no further, once it has a plan: the fastest that fits."""
_NO_PROFILING_BELOW = 15.0
"""With less time than this the machine is not profiled: its cached figures or those of a data sheet serve."""
_UNTIMED = 60.0
"""Seconds for a search that must not measure."""
_PROFILE_SHARE = 0.25
"""Up to which share of a search's time its model is profiled; what is not known by then is predicted in closed form."""
_SIMULATION_SHARE, _LEAST_SIMULATION = 0.3, 0.5
"""Up to which share of its time a search thinks before it measures, and the seconds below which simulating is not begun."""
_COMPLETING = 15.0
"""Seconds that must be left at the end for a closer look at what was chosen."""


def find_plan(
    task: TrainingTask,
    *,
    device: torch.device,
    world: int,
    constraints: SearchConstraints,
    on_progress: Callable[[str], None] | None = None,
) -> Strategy:
    """Return the best plan for training on `world` processes, or one with `failure` set (with `strict`, raise it).

    Only wrong input raises otherwise. What an equal search found before is returned at once, see `plan_cache`.
    """
    search = _Search(task, device, world, constraints, on_progress)
    # Before a search calls what a user wrote, which may keep a count.
    file = plan_file(task, device, world, constraints)
    if (kept := find_cached_plan(file, task, device, world, constraints)) is not None:
        search.log_search_result(kept)
        return kept
    try:
        plan = search.run()
    except ConfigError:
        raise
    except Exception as error:  # a model may do anything, and a training does not depend on a plan
        if constraints.strict:
            raise
        plan = Strategy(failure=Failure(kind="error", message=f"the search failed ({type(error).__name__}: {error})."))
    if constraints.strict and plan.failure is not None:
        raise PlanInfeasible(plan.failure.message)
    if plan.failure is None and (plan.measured is not None or search.reason is not None):
        cache_plan(file, plan, task, device, world)
    search.log_search_result(plan)
    return plan


@dataclass
class _Search:
    task: TrainingTask
    device: torch.device
    world: int
    constraints: SearchConstraints
    on_progress: Callable[[str], None] | None
    known: Knowledge = field(init=False)
    """Model and machine."""
    space: SearchSpace = field(init=False)
    budget: float = field(init=False)
    """Bytes that a plan may need."""
    compared: Comparison = field(init=False)

    def __post_init__(self) -> None:
        self.clock = SearchTime(self.constraints.time_limit)
        self.thinking = SearchTime(self.constraints.time_limit or _UNTIMED)
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self._rejected = ""
        self._validity: dict[Strategy, bool] = {}
        self.reason = self._why_nothing_is_measured()
        self._on_progress: Callable[[str], None] = lambda text: None
        if self.on_progress is not None and is_master():
            self._on_progress = self.on_progress
        self._profiler: ModelProfiler | None = None
        self._profile_limit = max(1.0, _PROFILE_SHARE * self.thinking.limit)
        self._profile_took = 0.0

    def run(self) -> Strategy:
        with cache_tensor_plans(), self._trials() as trials:  # their process starts while the model is profiled
            return self._found(trials)

    def _found(self, trials: TrialPool | None) -> Strategy:
        with self._timed("profile"):
            self.known = known = self._known()
        self.budget = budget = budget_bytes(self.constraints.memory_budget, known.machine.free)
        with self._timed("predict"):
            self.space = space = build_space(self._scope())
            scored = known.predicted(space.candidates)
        scored, top = self._select_promising(scored)
        self.notes += space.scope.notes
        self.compared = compared = Comparison(space, budget, scored)
        self._tell(f"{len(scored)} candidates, {len(compared.fitting)} fit into {format_bytes(budget)}")
        if top:
            with self._timed("simulate"):
                ranked = self._simulate(top) or top[-1:]
            with self._timed("measure"):
                compared.measurements = self._measure(ranked, trials)
        compared.seconds = broadcast_from_master(self.seconds)
        if not compared.fitting:
            return compared.infeasible_plan()
        if not top:
            message = f"none of {len(compared.fitting)} plans can be applied to this model: {self._rejected}"
            return Strategy(failure=Failure(kind="error", message=message), search=compared.report())
        notes = [*(f"profile: {note}" for note in known.profile.notes), *self.notes]
        best = choose(compared.measurements, tie=TIE if self.constraints.start is None else 0.0)
        if best is None and compared.all_failed():
            return compared.failed_plan()
        if best is not None:
            best, more = self._completed(best)
            return compared.chosen_plan(best.scored, best, notes + more)
        too_large = {item.candidate for item in compared.simulated if item.peak > budget}
        others = [item for item in compared.fitting if item.candidate not in too_large]
        chosen = self._unmeasured([*ranked, *others], compared.plain or ranked[0], compared.measurements)
        if outcomes := {one.result.outcome for one in compared.measurements}:
            if outcomes - {"oom", "timeout"}:  # after errors nothing is trusted that was not tried
                chosen = compared.plain or chosen
            shown = "a prediction" if chosen.methods else "the plain model"
            notes.append(f"search: no trial succeeded, so {shown} is used")
        return compared.chosen_plan(chosen, None, notes)

    def _completed(self, best: Measurement) -> tuple[Measurement, list[str]]:
        """Return the best with all that its prediction reads, if there is time for it: it is shown next to what was measured."""
        if not self.known.missing([best.scored]):
            return best, []
        if broadcast_from_master(self.clock.left() > _COMPLETING):
            return replace(best, scored=self.known.completed(best.scored)), []
        text = "predicted memory is that of eager mode, which fits easily; a compiled graph keeps less"
        return best, [f"profile: {text}"]

    # What is known.

    def _known(self) -> Knowledge:
        """Return what rank 0 finds out about model and machine, with the least free memory of all ranks."""
        profile, machine = run_on_master(self._profiled)
        if self.constraints.spec is None:
            free = machine.free
            if self.device.type == "cpu":  # processes of one machine share its memory
                free //= max(1, min(self.world, get_num_processes()))
            else:  # no context is made for this: a device that this rank does not use has what the profile says
                if self.device.type == "cuda" and torch.cuda.memory_reserved(self.device) > 0:
                    free = int(torch.cuda.mem_get_info(self.device)[0])
                free = int(min(all_gather_values(free)))
            machine = replace(machine, free=free)
        slow = {part for part in PARTS if part.endswith(COMPILED)}
        excluded = slow if self.thinking.limit < _NO_PROFILING_BELOW else set[str]()
        left = self._profile_limit - self._profile_took
        return Knowledge(profile, machine, self.thinking, left, self._profiler, frozenset(excluded))

    def _profiled(self) -> tuple[ModelProfile, MachineProfile]:
        """Profile model and machine: at once where the machine is not the processor that shapes are computed on."""
        if self.device.type == "cpu":
            return self._profile_model(), self._profile_machine()
        with ThreadPoolExecutor(1, "drivetrain-machine") as background:
            machine = background.submit(self._profile_machine)  # it waits for processes of its own
            return self._profile_model(), machine.result()

    def _profile_model(self) -> ModelProfile:
        self._tell("profiling the model")
        self._profiler = ModelProfiler(self.task)
        begin = time.monotonic()
        profile = self._profiler.profile(time_limit=self._profile_limit)
        self._profile_took = time.monotonic() - begin
        return profile

    def _profile_machine(self) -> MachineProfile:
        if self.constraints.spec is not None:
            return machine_from_spec(self.constraints.spec)
        limit = self.clock.limit
        patience = min(10.0, limit / 6) if limit >= _NO_PROFILING_BELOW else 0.0
        self._tell("profiling the machine")
        return profile_machine(self.device, time_limit=patience)

    def _scope(self) -> SearchScope:
        return SearchScope(
            task=self.task, constraints=self.constraints, profile=self.known.profile, machine=self.known.machine,
            device=self.device, world=self.world, local=broadcast_from_master(self._local_candidates()),
        )  # fmt: skip

    def _local_candidates(self) -> dict[str, tuple[Any, ...]]:
        """Return what this process offers for methods whose configurations depend on it, on a machine at hand."""
        if self.constraints.spec is not None:
            return {}
        found = ((method.name, method.local_candidates(self.device, self.world)) for method in all_methods())
        return {name: configs for name, configs in found if configs}

    def _is_valid(self, candidate: Candidate) -> bool:
        """Return whether a plan can be applied: what its methods reject together is known only to them."""
        plan = self.space.plan(candidate)
        if plan not in self._validity:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what would be dropped is reported when a plan is applied
                try:
                    plan.validate(self.task.model, self.device, self.world)
                    self._validity[plan] = True
                except StrategyError as error:
                    self._rejected, self._validity[plan] = str(error), False
        return self._validity[plan]

    def _select_promising(self, scored: list[Scored]) -> tuple[list[Scored], list[Scored]]:
        """Return all candidates and the promising ones, after finding out what the predictions of those that matter read."""
        known, budget = self.known, self.budget
        while True:
            fitting = [item for item in scored if item.peak <= budget]
            pool = fitting if self.reason is None else self._trusted(fitting) or fitting
            top = promising(pool, _SIMULATED, self._is_valid) if pool else []
            first = top if self.reason is not None else top[:_SIMULATED_IF_MEASURED]  # others when they are tried
            if self.reason is None:  # what fits easily is measured soon
                first = [item for item in first if item.peak > PLENTY * budget]
            missing = known.missing([*first, *likely_mispredicted(scored, top, budget)])
            if not missing:
                return scored, top
            self._tell(f"profiling the model further: {', '.join(sorted(missing))}")
            with self._timed("profile"):
                known.find_out(missing)
            with self._timed("predict"):
                scored = known.again(scored, missing)

    # What is simulated.

    def _close(self, top: Sequence[Scored]) -> tuple[list[Scored], list[Scored]]:
        """Return the candidates to look at closely before anything is measured, and the others.

        Without a measurement the first is what would be chosen by prediction, which may be simpler than what is promising.
        """
        if self.reason is not None:
            likely = [self._unmeasured(self.compared.fitting, top[0], ()), *preferred(top)]
            return list({item.candidate: item for item in likely}.values())[:_SIMULATED], []
        fits_easily = self.world == 1 and all(item.peak <= PLENTY * self.budget for item in top)
        count = _SIMULATED_IF_MEASURED if fits_easily else len(top)
        return list(top[:count]), list(top[count:])

    def _simulate(self, top: Sequence[Scored]) -> list[Scored]:
        """Return the promising candidates that still fit after a run on fake tensors."""
        share = _SIMULATION_SHARE if self.reason is None else 1.0
        left = broadcast_from_master(self.thinking.limit * share - self.thinking.spent())
        if self.clock.limit == 0:
            left = _UNTIMED  # no time was promised, and a simulation was
        if left < _LEAST_SIMULATION:
            self.notes.append("simulation: skipped, because the time limit is too short for it")
            return list(top)
        close, rest = self._close(top)
        self._tell(f"simulating {len(close)} of them")
        outcomes = run_on_master(lambda: self._outcomes(close, left))
        close, rest = close[: len(outcomes)], close[len(outcomes) :] + rest
        ranked: list[Scored] = []
        simulated: list[Scored] = []
        failures: dict[str, list[str]] = {}
        for item, found in zip(close, outcomes):
            if found.failure is None:
                item = self.known.with_simulated(item, found.memory)
                simulated.append(item)
            else:
                failures.setdefault(found.failure, []).append(item.label)
            if item.peak <= self.budget:
                ranked.append(item)
        for failure, labels in failures.items():
            others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
            self.notes.append(f"simulation: {labels[0]}{others}: {failure}")
        self.compared.simulated = simulated
        return order([*ranked, *rest])

    def _outcomes(self, top: Sequence[Scored], limit: float) -> list[Simulation]:
        """Simulate plans from the fastest on; where nothing is measured, not beyond the one that will be chosen, if that takes long.

        A simulation changes what is known of a plan's memory, not of its time.
        """

        def simulated(items: Sequence[Scored]) -> list[Simulation]:
            plans, left = [self.space.plan(item.candidate) for item in items], end - time.monotonic()
            kind = self.known.machine.kind
            return simulate_plans(self.task, plans, world=self.world, device_kind=kind, time_limit=left)

        end = time.monotonic() + limit
        if self.reason is None:
            return simulated(top)
        outcomes: list[Simulation] = []
        is_settled = False
        for item in top:  # in the order of preference
            if is_settled and end - time.monotonic() < limit - _ENOUGH_SIMULATION:
                break
            outcomes += simulated([item])
            found = outcomes[-1]
            is_settled |= found.failure is None and self.known.with_simulated(item, found.memory).peak <= self.budget
        return outcomes

    # What is measured.

    @contextmanager
    def _trials(self) -> Iterator[TrialPool | None]:
        """Have processes for trials, where there are any."""
        if self.reason is not None:
            yield None
            return
        with TrialPool(self.task, device=self.device) as trials:
            if self.clock.limit >= _NO_PROFILING_BELOW:
                trials.start()
            yield trials

    def _measure(self, ranked: Sequence[Scored], trials: TrialPool | None) -> list[Measurement]:
        if trials is None:
            self.notes.append(f"search: nothing was measured, because {self.reason}")
            return []
        measuring = Measuring(self.space, self.device, self.clock, self.budget, trials, self._tell, self.known)
        measuring.round(measuring_order(ranked, self.compared.plain, plain_first=self.constraints.start is not None))
        measuring.measure_promising(self.compared.fitting, self._is_valid)
        measuring.refine()
        if not measuring.found:
            reason = measuring.obstacle or "the time limit left no time for it"
            self.notes.append(f"search: nothing was measured, because {reason}")
        elif (missed := broadcast_from_master(measuring.missed())) is not None:
            self.notes.append(f"search: {missed}")
        return measuring.found

    def _why_nothing_is_measured(self) -> str | None:
        if self.constraints.plan_only or self.constraints.spec is not None or self.world != get_num_processes():
            return "the plan is for another machine"
        if self.clock.limit == 0:
            return "time_limit is 0"
        return self.task.missing()

    def _unmeasured(self, fitting: Sequence[Scored], last: Scored, found: Sequence[Measurement]) -> Scored:
        """Return the best prediction that can be applied, needs no proof and is not of a kind that failed; else the last resort."""
        failed = {one.candidate.kind for one in found if one.result.outcome != "timeout"}
        left = preferred(self._trusted([item for item in fitting if item.candidate.kind not in failed]))
        return next((item for item in left if self._is_valid(item.candidate)), last)

    def _trusted(self, scored: Sequence[Scored]) -> list[Scored]:
        """Return what may be used without a trial: nothing that pays only sometimes on this kind of device."""
        if self.constraints.spec is not None:
            return list(scored)
        start = self.constraints.start
        asked = set().union(*self.constraints.wanted(), () if start is None else start.opt_names())
        unproved = {method.name for method in all_methods() if self.device.type in method.unproved_on} - asked
        return [item for item in scored if not unproved & set(item.candidate.names())]

    # Progress.

    def log_search_result(self, plan: Strategy) -> None:
        """Report what was found, in a few lines."""
        for line in summary(plan):
            self._on_progress(line)

    def _tell(self, text: str) -> None:
        self._on_progress(f"[{self.clock.spent():5.1f} s] {text}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin
