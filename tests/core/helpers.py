"""Small plugins and states that several tests of the engine share."""

from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm
from drivetrain.core.time import Clock


class Notes(Algorithm):
    """An algorithm that writes its name into `state.notes` at its events."""

    def __init__(self, name, *events, **declarations):
        self.name = name
        self.events = frozenset(events)
        vars(self).update(declarations)

    def apply(self, event, state, logger):
        state.notes.append(self.name)

    def __str__(self):
        return self.name


class NoteState:
    """A state that collects notes and owns generators and a clock, as the real one does."""

    def __init__(self, seed=0):
        self.notes = []
        self.clock = Clock()
        self.seed = seed
        self._generators = {}

    def rng(self, name):
        import torch

        if name not in self._generators:
            self._generators[name] = torch.Generator().manual_seed(self.seed + sum(map(ord, name)))
        return self._generators[name]


def fired(engine, event):
    """Fire `event` and return who wrote a note."""
    engine.state.notes.clear()
    engine.fire(Event(event))
    return list(engine.state.notes)
