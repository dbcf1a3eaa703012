"""Makes a public module and its home one module object, so that patching either reaches the code that runs."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def open_doorway(public: str, home: str) -> None:
    """Make the name `public` mean the module `home`, and `public.x` for every submodule `home.x`.

    Submodules are bound here too: imported through the public name they would otherwise be loaded a second time.
    """
    import pkgutil

    module = importlib.import_module(home)
    sys.modules[public] = module
    for entry in pkgutil.iter_modules(getattr(module, "__path__", ())):
        sys.modules[f"{public}.{entry.name}"] = importlib.import_module(f"{home}.{entry.name}")


class DoorwayFinder:
    """Opens a doorway for each path of a table that has no file of its own.

    It derives from nothing: `importlib.abc` would double the time of `import drivetrain`.
    """

    def __init__(self, homes: Mapping[str, str]):
        self.homes = homes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the paths of the table only."""
        return ModuleSpec(fullname, self) if fullname in self.homes else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the home into the place of the new module, which Python then returns."""
        open_doorway(module.__name__, self.homes[module.__name__])
