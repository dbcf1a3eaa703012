"""Finding an experiment again in another process, by module and attribute or by file and attribute.

A process that is started fresh receives names, not functions: it imports the module, or loads the file, and takes the experiment
from there. Whether that can work is checked here, before anything is started.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ExperimentError


@dataclass(frozen=True)
class Reference:
    """Where an experiment is defined."""

    module: str
    file: str | None
    """Set where the module cannot be imported by its name."""
    attribute: str

    def load(self) -> Any:
        """Return the experiment, importing its module if that has not happened yet."""
        module = sys.modules.get(self.module)
        if module is None and self.file is None:
            module = importlib.import_module(self.module)
        elif module is None:
            module = load_file(str(self.file), self.module)
        return getattr(module, self.attribute)


def load_file(file: str, name: str) -> Any:
    """Load a Python file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ExperimentError(f"{file} cannot be loaded as a Python file. Give a path that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    spec.loader.exec_module(module)
    return module


def reference_to(experiment: Any) -> Reference:
    """Return how another process finds the experiment, or say why it cannot."""
    name = experiment.main_function.__module__
    module = sys.modules.get(name)
    attribute = _attribute(experiment, vars(module)) if module is not None else None
    way_out = "Define it at the top level of a module or script."
    if attribute is None:
        raise ExperimentError(
            f"the experiment {experiment.name!r} cannot be found by a new process: it is no attribute of its module {name!r} "
            f"(it was defined inside a function?). {way_out}"
        )
    file = getattr(module, "__file__", None)
    if name == "__main__":
        if file is None or not Path(file).is_file():
            raise ExperimentError(
                f"the experiment {experiment.name!r} was defined in a notebook or at a prompt, where a new process cannot "
                f"find it. {way_out}"
            )
        return Reference(name, None, attribute)
    if _is_importable(name, file):
        return Reference(name, None, attribute)
    if file is None or not Path(file).is_file():
        raise ExperimentError(f"the module {name!r} of experiment {experiment.name!r} has no file to load. {way_out}")
    return Reference(name, str(Path(file).resolve()), attribute)


def _attribute(experiment: Any, names: dict[str, Any]) -> str | None:
    likely = experiment.main_function.__name__
    if names.get(likely) is experiment:
        return str(likely)
    return next((name for name, value in names.items() if value is experiment), None)


def _is_importable(name: str, file: str | None) -> bool:
    """Say whether importing the name gives this very file; a module loaded by hand may share its name with another."""
    try:
        top = importlib.util.find_spec(name.partition(".")[0])
        spec = importlib.util.find_spec(name) if top is not None else None
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None or (file is not None and spec.origin is not None and Path(spec.origin) != Path(file)):
        return False
    # find_spec answers from sys.modules first, so the search path is asked as well.
    return importlib.machinery.PathFinder.find_spec(name, _search_path(name)) is not None


def _search_path(name: str) -> Any:
    parent = name.rpartition(".")[0]
    return getattr(sys.modules[parent], "__path__", None) if parent else None
