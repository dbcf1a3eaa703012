"""What an event costs: with nobody listening, with one guest, and with five algorithms in every step.

    python -m benchmarks.event_cost [--blocks 120] [--steps 100]

Each cost is the difference between a loop that fires events and the same loop that calls the guest itself (or nothing
at all). Targets: below 1 µs without a guest, below 3 µs with one, below 100 µs per step with five algorithms. The last
line compares with the plain way of doing it: looking up the method by name in every callback at every event.
"""

import argparse
from types import SimpleNamespace
from typing import Any

from benchmarks.timing import Block, compare, environment, write_result
from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Callback, NullLogger

STATE, LOGGER = SimpleNamespace(batch=1, batch_output=2, step=3), NullLogger()


class Act(Algorithm):
    """An algorithm that attends an event and does nothing."""

    events = frozenset({Event.AFTER_LOSS})

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        """Do nothing."""


class Ask(Act):
    """The same in match form: asked each time."""

    def match(self, event: Event, state: Any) -> bool:
        return event is Event.AFTER_LOSS


class Watch(Callback):
    """A trainer callback with the richest event."""

    def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        """Do nothing."""


def five_algorithms() -> list[Algorithm]:
    """Return five algorithms that attend what augmentation, mixing, smoothing, clipping and averaging attend."""
    attended = (
        {Event.AFTER_DATALOADER},
        {Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS},
        {Event.BEFORE_LOSS, Event.AFTER_LOSS},
        {Event.AFTER_TRAIN_BATCH},
        {Event.BATCH_END},
    )
    return [type(f"Act{place}", (Act,), {"events": frozenset(events)})() for place, events in enumerate(attended)]


STEP = tuple(Event)[list(Event).index(Event.BEFORE_DATALOADER) : list(Event).index(Event.BATCH_CHECKPOINT) + 1]


def firing(*plugins: Any, events: tuple[Event, ...]) -> Block:
    """Return a loop that fires the events once per step."""
    fire = Engine(STATE, LOGGER, plugins).fire

    def loop(steps: int) -> None:
        for _ in range(steps):
            for event in events:
                fire(event)

    return loop


def skipping(events: tuple[Event, ...]) -> Block:
    """Return the same loop without the calls."""

    def loop(steps: int) -> None:
        for _ in range(steps):
            for _event in events:
                pass

    return loop


def calling(guest: Act) -> Block:
    """Return the same loop with the guest called directly."""
    apply, events = guest.apply, (Event.AFTER_LOSS,)

    def loop(steps: int) -> None:
        for _ in range(steps):
            for event in events:
                apply(event, STATE, LOGGER)

    return loop


def calling_hook(guest: Watch) -> Block:
    """Return the same loop with the trainer callback called directly."""
    hook, events = guest.on_train_step_end, (Event.STEP_OUTPUT,)

    def loop(steps: int) -> None:
        for _ in range(steps):
            for _event in events:
                hook(None, batch=STATE.batch, batch_output=STATE.batch_output, step=STATE.step)

    return loop


def by_name(callbacks: list[Any], names: tuple[str, ...]) -> Block:
    """Return a loop that asks every callback for a method of the event's name, at every event."""

    def loop(steps: int) -> None:
        for _ in range(steps):
            for name in names:
                for callback in callbacks:
                    method = getattr(callback, name, None)
                    if method is not None:
                        method(STATE, LOGGER)

    return loop


def main(blocks: int = 120, steps: int = 100) -> dict[str, float]:
    """Measure, print and write; return microseconds."""
    act, watch = Act(), Watch()
    idle = [type("Idle", (Callback,), {"epoch_end": lambda self, state, logger: None})() for _ in range(5)]
    seconds = compare(
        {
            "loop": skipping((Event.BATCH_END,)),
            "loop again": skipping((Event.BATCH_END,)),
            "no guest": firing(events=(Event.BATCH_END,)),
            "apply itself": calling(act),
            "one algorithm": firing(act, events=(Event.AFTER_LOSS,)),
            "one algorithm, asked": firing(Ask(), events=(Event.AFTER_LOSS,)),
            "hook itself": calling_hook(watch),
            "one trainer callback": firing(watch, events=(Event.STEP_OUTPUT,)),
            "empty step": skipping(STEP),
            "five algorithms": firing(*five_algorithms(), events=STEP),
            "five idle callbacks": firing(*idle, events=STEP),
            "five idle callbacks, by name": by_name(idle, tuple(event.value for event in STEP)),
        },
        blocks,
        steps,
    )
    micro = {name: value * 1e6 for name, value in seconds.items()}
    costs = {
        "noise (A/A)": abs(micro["loop again"] - micro["loop"]),
        "no guest": micro["no guest"] - micro["loop"],
        "one algorithm, over the call itself": micro["one algorithm"] - micro["apply itself"],
        "one algorithm that is asked, over the call itself": micro["one algorithm, asked"] - micro["apply itself"],
        "one trainer callback, over the call itself": micro["one trainer callback"] - micro["hook itself"],
        f"five algorithms, per step of {len(STEP)} events": micro["five algorithms"] - micro["empty step"],
    }
    for name, cost in costs.items():
        print(f"{name:52} {cost:8.3f} µs")
    ratio = micro["five idle callbacks, by name"] / micro["five idle callbacks"]
    print(f"five callbacks that do not listen: finding methods by name takes {ratio:.1f} times as long")
    result = {"microseconds": costs, "ratio_by_name": ratio, "loops": micro, "blocks": blocks, "steps": steps}
    write_result("event_cost", result | environment(runs=blocks))
    return costs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    main(arguments.blocks, arguments.steps)
