"""The trials of a search: which plans are tried, in which order, and when to stop.

A few plans run three steps each, in order of predicted time and including the plain one. Then those that are close to each other
run ten. Plans without compilation come first; a compilation may then take nearly all the remaining time. Each plan has one
measurement: more steps replace fewer.

The result of a trial changes the predictions of the plans that wait: they are sorted again, and plans that can no longer win are
not tried. Running out of memory rules out every plan that needs as much. Rank 0's clock decides for all ranks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from drivetrain.core.display import format_bytes
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.strategy.search.candidates import Candidate
from drivetrain.strategy.search.decision import Measurement, choose
from drivetrain.strategy.search.ranking import TIE, Scored, are_alike, is_ruled_out
from drivetrain.strategy.search.space import SearchSpace
from drivetrain.strategy.trial.report import TrialResult

if TYPE_CHECKING:
    from drivetrain.strategy.search.knowledge import Knowledge
    from drivetrain.strategy.trial.running import TrialPool

FEW_STEPS, MORE_STEPS = 3, 10
MOST_PLANS = 4
"""Plans measured in the first round."""
PLENTY = 0.5
"""A plan that is predicted to need no more than this share of the memory needs no closer look before it is tried."""
_LOOKED_AT, _MOST_FURTHER, _MUCH_FASTER = 200, 4, 0.8
"""How many candidates are looked at beyond the promising ones, how many of them are tried, and which share of the best measured time makes
one worth it."""
_CLOSE = 0.1
"""Plans this close to the fastest are measured again with more steps."""
_START = {"cuda": 12.0, "cpu": 8.0}
"""Seconds to expect before the first step of a trial, before one has been seen."""
_HOPE = 0.5
"""A plan that may win is begun with this share of the time it is expected to take, when nothing else can be tried any more."""
_END, _END_SHARE = 2.0, 0.05
"""Seconds (or the share of a short limit) that are kept for ending processes and putting the plan together."""
_DOUBT, _LITTLE_DOUBT = 0.6, 0.85
"""How far below its prediction a plan may be, of a kind that was never tried and of one that was tried in this search."""


@dataclass
class SearchTime:
    """The time budget of a search, by this process's monotonic clock."""

    limit: float
    begin: float = field(default_factory=time.monotonic)

    @property
    def last_trial(self) -> float:
        """When the last trial must end, so that the search ends in time."""
        return self.begin + self.limit - min(_END, _END_SHARE * self.limit)

    def left(self) -> float:
        """Return the seconds left for trials."""
        return self.last_trial - time.monotonic()

    def spent(self) -> float:
        """Return the seconds spent."""
        return time.monotonic() - self.begin


@dataclass
class Measuring:
    """One round of trials, with the results so far."""

    space: SearchSpace
    device: torch.device
    clock: SearchTime
    budget: float
    pool: "TrialPool"
    tell: Callable[[str], None]
    known: "Knowledge"
    found: list[Measurement] = field(default_factory=list)
    failed: list[Candidate] = field(default_factory=list)
    late: list[Scored] = field(default_factory=list)
    """Candidates that were skipped for lack of time."""
    left: int = 0
    """How many plans may still be tried in this round, for reports."""
    obstacle: str | None = None
    """Why nothing at all can be tried here."""
    startups: dict[bool, float] = field(default_factory=dict)
    """Seconds before the first step that earlier trials took, without and with compilation."""

    def round(self, ranked: Sequence[Scored], most: int = MOST_PLANS) -> None:
        """Try plans in order until enough of them worked or the time is up."""
        waiting, late = list(ranked), []
        while waiting:
            item = waiting.pop(0)
            usable = sum(one.is_usable for one in self.found)
            if self.obstacle is not None or self._task_fails():
                break
            if (usable >= most or len(self.found) >= 2 * most) and not self._is_better(item):
                continue
            if self._is_known(item) or self._cannot_win(item):
                continue
            if self._has_time(item):
                self.left = max(0, min(len(waiting), most - usable - 1))
                self._try(item)
                waiting = self._rerank(waiting)
            else:
                late.append(item)
        self.left, self.late = 0, late
        if not self._task_fails():
            self._try_late_candidate(late)

    def _task_fails(self) -> bool:
        """Return whether the plain model and another plan failed with the same error, so that every plan would."""
        causes = {(one.result.outcome, one.result.message) for one in self.found}
        is_same = len(self.found) > 1 and len(causes) == 1 and self.found[0].result.outcome == "error"
        return is_same and any(one.candidate == self.space.plain for one in self.found)

    def _is_better(self, item: Scored, share: float = 1 - TIE) -> bool:
        """Return whether a plan is predicted to take less than a share of what the best measured one takes.

        Where a plan of its kind was measured, it is predicted to be as much slower than closed forms say as that one was.
        """
        best = choose(self.found)
        if best is None:
            return False
        alike = self._measured_with_similar_kernels(item)
        slower = min((one.seconds / self.known.corrected(one.scored).seconds for one in alike), default=1.0)
        return max(1.0, slower) * self.known.corrected(item).seconds < share * best.seconds

    def _measured_with_similar_kernels(self, item: Scored) -> list[Measurement]:
        """Return the measured plans with nearly the same kernels."""
        kinds = {item.candidate.kind, *item.candidate.effects.similar_kernel_kinds}
        return [one for one in self.found if one.is_usable and one.candidate.kind in kinds]

    def measure_promising(self, fitting: Sequence[Scored], is_valid: Callable[[Candidate], bool]) -> None:
        """Try further plans as long as one is predicted to be much faster than all measured ones."""
        failed = {one.candidate.kind for one in self.found if not one.is_usable}
        left = _MOST_FURTHER
        for item in fitting[:_LOOKED_AT]:
            if self.obstacle is not None or left == 0:
                return
            if item.candidate.kind in failed or self._is_known(item) or not self._is_better(item, _MUCH_FASTER):
                continue
            is_new = not any(are_alike(item.candidate, one.candidate) for one in self.found)
            if not (is_new and is_valid(item.candidate)):
                continue
            if not self._has_time(item):
                return
            self._try(item)
            left -= 1
            if self.found and not self.found[-1].is_usable:
                failed.add(item.candidate.kind)

    def _try_late_candidate(self, late: Sequence[Scored]) -> None:
        """Try the best of what was too late in the time that is left, if it may win: nothing else needs that time."""
        best = choose(self.found)
        too_slow = {one.candidate.is_compiled for one in self.found if one.result.outcome == "timeout"}
        late = [item for item in late if item.candidate.is_compiled not in too_slow]
        for item in sorted(map(self.known.corrected, late), key=lambda item: item.seconds):
            if self.obstacle is not None or (best is not None and item.seconds > (1 - TIE) * best.seconds):
                return
            if not self._is_known(item) and not self._cannot_win(item) and self._has_time(item, share=_HOPE):
                self._try(item)
                return

    def missed(self) -> str | None:
        """Return the plan that might be better and was not tried because the time limit is too short, or None."""
        best, unfinished = choose(self.found), [one.scored for one in self.found if one.result.outcome == "timeout"]
        late = [*unfinished, *(item for item in self.late if not self._is_known(item))]
        item = min(map(self._as_wrong_as_others, late), key=lambda item: item.seconds, default=None)
        if best is None or item is None:
            return None
        share = item.seconds / self.known.corrected(best.scored).seconds
        if share >= 1 - TIE:
            return None
        limit = self.clock.limit + self._expected(item)
        return (
            f"the time limit of {self.clock.limit:.0f} s is too short to try {item.label}, which is predicted to take {share:.0%} of the "
            f"best plan's time; use about {limit:.0f} s"
        )

    def _as_wrong_as_others(self, item: Scored) -> Scored:
        """Return a plan as predicted now; one of an untried kind is at least as slow as all tried kinds were."""
        item, learnt = self.known.corrected(item), dict[str, float]()
        for one in self.found:
            if one.is_usable:
                slower = self.known.corrected(one.scored).seconds / one.scored.seconds
                learnt[one.candidate.kind] = max(slower, learnt.get(one.candidate.kind, 1.0))
        slower = 1.0 if item.candidate.kind in learnt else min(learnt.values(), default=1.0)
        time = {part: slower * seconds for part, seconds in item.cost.time.items()}
        return replace(item, cost=replace(item.cost, time=time))

    def _is_known(self, item: Scored) -> bool:
        """Return whether a plan was tried, or cannot work because another did not."""
        plan = self.space.plan(item.candidate)
        return any(one.plan == plan for one in self.found) or is_ruled_out(item.candidate, self.failed)

    def _rerank(self, waiting: Sequence[Scored]) -> list[Scored]:
        """Return what is left as it is predicted now.

        The plain plan comes first, then one that needs no compiler, then untried kinds, each from the fastest on.
        """
        plain, tried = self.space.plain, {one.candidate.kind for one in self.found}
        has_quick = any(not one.candidate.is_compiled and one.candidate != plain for one in self.found)

        def place(item: Scored) -> tuple[bool, bool, bool, float, int, float]:
            c = item.candidate
            waits = c.is_compiled and not has_quick
            return (c != plain, waits, c.kind in tried, item.seconds, item.methods, item.peak)

        return sorted(map(self.known.corrected, waiting), key=place)

    def _cannot_win(self, item: Scored) -> bool:
        """Return whether a plan would lose even if its prediction is as wrong as they are; the plain plan is always worth knowing."""
        best = choose(self.found)
        if best is None or item.candidate == self.space.plain:
            return False
        expected = self.known.corrected(best.scored).seconds
        for one in self.found:  # what only records kernels, and is not predicted to gain by it, loses a tie
            is_same = _without_recording(item.candidate) == _without_recording(one.candidate)
            gains = item.seconds < (1 - TIE) * self.known.corrected(one.scored).seconds
            if one.is_usable and is_same and not gains:
                return True
        doubt = _LITTLE_DOUBT if self._measured_with_similar_kernels(item) else _DOUBT
        overestimate = min(1.0, best.seconds / expected) if expected > 0 else 1.0
        return item.seconds * doubt * overestimate > best.seconds

    def refine(self) -> None:
        """Run more steps of the fastest plans, if several are close and there is time."""
        self._measure_without_must_win()
        best = choose(self.found)
        if best is None:
            return
        close = [one for one in self.found if one.is_usable and one.seconds <= best.seconds * (1 + _CLOSE)]
        for one in sorted(close, key=lambda one: one.seconds)[:2]:
            if len(close) > 1 and self._has_time(one.scored, MORE_STEPS):
                self.found.remove(one)
                self._try(one.scored, MORE_STEPS, earlier=one)

    def _measure_without_must_win(self) -> None:
        """Try the fastest plan without methods that must win, such as other threads: it is chosen for them only where they are faster."""
        best = choose(self.found)
        if best is None:
            return
        same = best.candidate.without(method.name for method, _ in best.candidate.steps if method.must_win)
        if same in self.space.candidates and all(one.candidate != same for one in self.found):
            item = self.known.corrected(Scored(same, best.scored.cost))
            if self._has_time(item):
                self._try(item)

    def _has_time(self, item: Scored, steps: int = FEW_STEPS, share: float = 1.0) -> bool:
        """Return whether there is time for a trial, or for a share of what it is expected to take; rank 0's answer counts."""
        return broadcast_from_master(self.clock.left() > share * self._expected(item, steps))

    def _expected(self, item: Scored, steps: int = FEW_STEPS) -> float:
        """Return the seconds that a trial is expected to take."""
        is_compiled = item.candidate.is_compiled
        begin = _START.get(self.device.type, 10.0)
        startup = self.startups.get(is_compiled)
        if startup is None:
            startup = self.startups.get(False, begin) + (self.known.compile_seconds(item) if is_compiled else 0.0)
        elif self.pool.pid is None:  # the last process could not be used again
            startup += begin / 2
        return startup + (steps + 2) * item.seconds

    def _try(self, item: Scored, steps: int = FEW_STEPS, earlier: Measurement | None = None) -> None:
        plan = self.space.plan(item.candidate)
        if item.peak > PLENTY * self.budget:
            item = self.known.completed(item)
        best = choose(self.found)
        others = "" if best is None else f"; best so far {best.scored.label}, {best.seconds * 1e3:.4g} ms"
        others += f"; up to {self.left} more after it" if self.left else ""
        self.tell(f"measuring {item.label}: predicted {item.seconds * 1e3:.4g} ms, {format_bytes(item.peak)}{others}")
        began = time.monotonic()
        result = self.pool.run(
            plan, steps=steps, deadline=self.clock.last_trial, predicted=item.seconds, verify=earlier is None,
            memory_share=item.peak / self.budget,
        )  # fmt: skip
        if result.error_class == "Unsendable":
            self.obstacle = result.message
            return
        if earlier is not None and result.outcome != "ok":
            self.found.append(earlier)  # what was measured before still holds
            return
        peak = result.peak_bytes or 0
        if earlier is not None:
            result = _joined(result, earlier.result)
        elif result.outcome == "ok" and peak > self.budget and self.device.type == "cuda":
            message = f"it needs {format_bytes(peak)} of {format_bytes(self.budget)}"
            result = TrialResult(outcome="oom", message=message, peak_bytes=result.peak_bytes)
        one = Measurement(item, plan, result)
        self.found.append(one)
        self.known.learn(one)
        if result.outcome == "oom":
            self.failed.append(item.candidate)
        elif result.outcome == "ok":
            self.startups[item.candidate.is_compiled] = result.startup_seconds
        elif result.outcome == "timeout":  # whatever is like it will take at least as long
            known = self.startups.get(item.candidate.is_compiled, 0.0)
            self.startups[item.candidate.is_compiled] = max(known, time.monotonic() - began)
        text = f"{result.step_seconds * 1e3:.4g} ms" if result.step_seconds is not None else result.message
        self.tell(f"  {result.outcome}: {text}")


def _joined(more: TrialResult, fewer: TrialResult) -> TrialResult:
    """Return the longer of two measurements of one plan, with what only the first one checked."""
    checked = ("loss", "plain_loss", "gradient_norm")
    kept = {name: getattr(fewer, name) for name in checked if getattr(more, name) is None}
    is_verified = more.is_verified or fewer.is_verified
    return replace(more, is_verified=is_verified, startup_seconds=fewer.startup_seconds, **kept)


def _without_recording(candidate: Candidate) -> Candidate:
    return candidate.without(method.name for method, _ in candidate.steps if method.records_kernels)


def measuring_order(ranked: Sequence[Scored], plain: Scored | None, plain_first: bool = False) -> list[Scored]:
    """Return what to try: the best without compilation, the plain plan (or before it), the best of all, of each kind, and the rest."""
    if not ranked:
        return [] if plain is None else [plain]
    kinds: dict[str, Scored] = {}
    for item in ranked:
        kinds.setdefault(item.candidate.kind, item)
    quick = next((item for item in ranked if not item.candidate.is_compiled), ranked[0])
    first = [quick, *([] if plain is None else [plain])]
    order = [*(first[::-1] if plain_first else first), ranked[0], *kinds.values(), *ranked]
    found: dict[Candidate, Scored] = {}
    for item in order:
        found.setdefault(item.candidate, item)
    return list(found.values())
