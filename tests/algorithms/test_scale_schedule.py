"""ScaleSchedule asks for a shorter or longer run."""

import pytest

from drivetrain.algorithms.scale_schedule import ScaleSchedule
from drivetrain.core.event import Event
from tests.algorithms.tasks import make_state, run


def test_it_leaves_the_ratio_on_the_state_and_says_what_is_preferred():
    state = make_state()
    with pytest.warns(DeprecationWarning, match="scale_schedule_ratio"):
        run(ScaleSchedule(0.5), state, Event.INIT)
    assert state.scale_schedule_ratio == 0.5
    for ratio in (0, -1, "half", True):
        with pytest.raises(ValueError, match="above 0"):
            ScaleSchedule(ratio)
