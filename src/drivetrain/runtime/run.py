"""The run this process belongs to, readable by folders below `experiment`.

An experiment sets one `ExperimentRun` at its start and removes it at its end. A Context, a loader, a Recorder or a Checkpointer
calls `current_run()` for seed, folder and parameters. Outside a run it returns None and each of them uses its own default.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.core.errors import ExperimentError
from drivetrain.core.secret import masked
from drivetrain.core.types import Settings


@dataclass(kw_only=True, eq=False)
class ExperimentRun:
    """One run: its folder, seed and parameters, and what was created in it."""

    folder: Path
    seed: int
    params: Settings = field(default_factory=dict, repr=False)
    name: str = ""

    origins: dict[str, str] = field(default_factory=dict)
    """Where each parameter's value came from: `cli`, `run`, `file:line`, `env:NAME`, `defaults`, `default`."""

    secrets: frozenset[str] = frozenset()
    """Names of parameters whose values are masked wherever they are written."""
    public: frozenset[str] = frozenset()
    """Names of parameters that were declared not to be secret."""
    hidden: frozenset[str] = field(default=frozenset(), repr=False)
    """The secret values themselves, so that writers can mask them."""

    bookkeeping: frozenset[str] = frozenset()
    """Names of parameters about where and how the run happens, not about what it computes."""

    recorder: object | None = None
    """The Recorder that metrics of this run go to; None until one is made."""

    random_gen: random.Random = field(default_factory=random.Random)
    """The generator behind `new_seed`; it starts from `seed`, and checkpoints keep its state."""

    started: float = field(default_factory=time.monotonic)
    elapsed_before: float = 0.0
    """Seconds that earlier parts of this run took, when it was resumed."""

    restore: Callable[..., Mapping[str, object] | None] | None = field(default=None, repr=False)
    """Loads a Context from the checkpoint that this run starts from, and returns the random states to continue with, or None."""

    interrupted: bool = False
    """A signal requested a stop, and the run ends cleanly."""

    _counts: Counter[str] = field(default_factory=Counter, repr=False)
    _endings: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.random_gen.seed(self.seed)

    @property
    def elapsed(self) -> float:
        """Seconds spent in this run, including earlier parts."""
        return self.elapsed_before + time.monotonic() - self.started

    @property
    def settings(self) -> Settings:
        """The parameters that determine what the run computes."""
        return {name: value for name, value in self.params.items() if name not in self.bookkeeping}

    def shown(self, values: Mapping[str, object]) -> Settings:
        """Return settings without secrets: this run's parameters as declared, other names by pattern."""
        own = {
            name: masked(value, is_secret=name in self.secrets) for name, value in values.items() if name in self.params
        }
        return masked(values) | own | {name: values[name] for name in self.public & set(values)}

    def next_index(self, kind: str) -> int:
        """Count the objects of one kind in order of creation: 0, 1, 2, ... (seeds of unnamed loaders use it)."""
        self._counts[kind] += 1
        return self._counts[kind] - 1

    def at_end(self, callback: Callable[[], object]) -> None:
        """Call a function when the run ends, with or without an error. The last one registered is called first."""
        self._endings.append(callback)

    def end(self) -> BaseException | None:
        """Call all registered functions and return the first error; Ctrl-C ends only the one that it meets."""
        failure: BaseException | None = None
        while self._endings:
            try:
                self._endings.pop()()
            except BaseException as error:
                failure = failure or error
        return failure


Run = ExperimentRun  # the name in `drivetrain.runtime`

_current: ExperimentRun | None = None


def current_run() -> ExperimentRun | None:
    """Return the active run of this process, or None outside a run."""
    return _current


def set_current_run(run: ExperimentRun | None) -> None:
    """Make `run` the active run, or end the active one with None. A process has at most one."""
    global _current
    if run is not None and _current is not None and run is not _current:
        new, active = run.name or str(run.folder), _current.name or str(_current.folder)
        raise ExperimentError(
            f"cannot start the run {new!r}: {active!r} is still active in this process. Wait until it ends, or "
            "start the new one in its own process with run_in_new_process(...)."
        )
    _current = run
