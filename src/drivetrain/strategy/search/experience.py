"""What the trials of a search say about the predictions for the plans that were not tried yet; rank 0 keeps it for the next search."""

from dataclasses import dataclass, replace

from drivetrain.runtime.ranks import is_master
from drivetrain.strategy.profile.machine import Prediction, learn, learnt
from drivetrain.strategy.profile.values import MachineProfile, ModelProfile
from drivetrain.strategy.search.cost import Cost
from drivetrain.strategy.search.decision import Measurement
from drivetrain.strategy.search.ranking import Scored, predict

_LEARNT_FROM = 5e-3
"""Steps that are predicted to be shorter than this many seconds teach nothing: what they take is not the device's."""


@dataclass
class Experience:
    """A model and a machine, which is known better after every trial. All ranks learn the same from the same results."""

    profile: ModelProfile
    machine: MachineProfile

    def learn(self, one: Measurement) -> None:
        """Take what a trial showed."""
        if not one.is_usable:
            return
        candidate = one.scored.candidate
        expected = predict(candidate, self.profile, replace(self.machine, corrections={}))
        if expected.seconds < _LEARNT_FROM:
            return
        peak = one.scored.peak - one.scored.cost.memory.get("reserve", 0.0)
        prediction = Prediction(kind=candidate.kind, step_seconds=expected.seconds, peak_bytes=peak)
        self.machine = (learn if is_master() else learnt)(self.machine, prediction, one.result)

    def corrected(self, item: Scored) -> Scored:
        """Return a candidate with its time predicted again; its memory, which may be simulated, stays."""
        return replace(item, cost=Cost(item.cost.memory, predict(item.candidate, self.profile, self.machine).cost.time))
