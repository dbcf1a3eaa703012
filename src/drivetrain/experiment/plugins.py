"""Plugins: other packages that add parameters to every experiment, or act before and after each run.

A package names a function under the entry point `drivetrain.plugins`; it is called once with `app`, on which it hangs its
callbacks. Nothing is loaded before the first experiment is declared, and a plugin that fails is reported and ignored.
"""

import logging
from bisect import insort
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from drivetrain.core.types import Settings

logger = logging.getLogger("drivetrain")

ENTRY_POINTS = "drivetrain.plugins"
PRIORITY = itemgetter(0)


class App:
    """Where plugins leave their callbacks; a lower priority is called earlier."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[tuple[int, Callable[..., Any]]]] = {"created": [], "before": [], "after": []}
        self._loaded = False

    def on_experiment_created(self, callback: Callable[[Any], Any], priority: int = 50) -> None:
        """Call `callback(experiment)` for every experiment declared from now on; it may return another in its place."""
        insort(self._callbacks["created"], (priority, callback), key=PRIORITY)

    def on_before_experiment(self, callback: Callable[[Any, Settings], Any], priority: int = 50) -> None:
        """Call `callback(experiment, params)` before the main function of each run."""
        insort(self._callbacks["before"], (priority, callback), key=PRIORITY)

    def on_after_experiment(self, callback: Callable[[BaseException | None], Any], priority: int = 50) -> None:
        """Call `callback(error)` after the main function of each run; None is a good end."""
        insort(self._callbacks["after"], (priority, callback), key=PRIORITY)

    def get_api_object(self) -> object:
        """Return the package that plugins may extend with names of their own."""
        import drivetrain.experiment

        return drivetrain.experiment

    def load_all_plugins(self) -> None:
        """Load the installed plugins, the first time this is called."""
        if self._loaded:
            return
        self._loaded = True
        from importlib.metadata import entry_points

        for entry in entry_points(group=ENTRY_POINTS):
            try:
                entry.load()(self)
            except Exception as error:
                logger.warning("the plugin %r (%s) cannot be loaded and is ignored: %r", entry.name, entry.value, error)

    def experiment_created(self, experiment: Any) -> Any:
        """Let the installed plugins see, change or replace a new experiment."""
        self.load_all_plugins()
        for _, callback in self._callbacks["created"]:
            experiment = callback(experiment) or experiment
        return experiment

    def before_experiment(self, experiment: Any, params: Settings) -> None:
        """Call the callbacks of a run's start."""
        for _, callback in self._callbacks["before"]:
            callback(experiment, params)

    def after_experiment(self, error: BaseException | None) -> None:
        """Call the callbacks of a run's end, all of them, and then raise the first error among them."""
        failure: Exception | None = None
        for _, callback in self._callbacks["after"]:
            try:
                callback(error)
            except Exception as problem:
                failure = failure or problem
        if failure is not None:
            raise failure


app = App()
