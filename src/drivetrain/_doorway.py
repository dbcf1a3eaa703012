"""Makes a public module and its home one module object, so that patching either reaches the code that runs."""

import importlib
import pkgutil
import sys


def open_doorway(public: str, home: str) -> None:
    """Let the name `public` stand for the module `home`, and `public.x` for every submodule `home.x`.

    Submodules are bound here too: imported through the public name they would otherwise be loaded a second time.
    """
    module = importlib.import_module(home)
    sys.modules[public] = module
    for entry in pkgutil.iter_modules(getattr(module, "__path__", ())):
        sys.modules[f"{public}.{entry.name}"] = importlib.import_module(f"{home}.{entry.name}")
