"""Composer's modules under this name: replace `composer` by `drivetrain.compat.composer` in the imports of a program.

    from drivetrain.compat.composer.algorithms.mixup import mixup_batch
    from drivetrain.compat.composer import Trainer

The modules are made when they are imported, from one table (`drivetrain.compat.composer_table`): each public name of Composer is ours, or
its ImportError says what to use instead.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from drivetrain.compat.composer_table import composer_modules
from drivetrain.core.errors import did_you_mean

_MODULES = composer_modules()


class ComposerFinder(MetaPathFinder, Loader):
    """Makes the modules of the table, below this package only."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for modules that Composer has."""
        prefix, _, inner = fullname.partition(f"{__name__}.")
        if prefix or inner not in _MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=_MODULES[inner].is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names; each loads on first use."""
        fill(module, module.__name__.removeprefix(f"{__name__}."))


def fill(module: ModuleType, path: str) -> None:
    """Give a module the names that the table has for a path."""
    known = _MODULES[path]
    children = {other[len(path) :].lstrip(".") for other in _MODULES if other.startswith(f"{path}." if path else "")}
    submodules = {name for name in children if name and "." not in name}

    def getattr_(name: str) -> object:
        if name in submodules:
            return importlib.import_module(f"{module.__name__}.{name}")
        if name in known.names:
            home, private = known.names[name]
            value = getattr(importlib.import_module(home), private)
            setattr(module, name, value)
            return value
        title = ".".join(["composer", *filter(None, [path])])
        if name in known.instead:  # an ImportError, because `from ... import` replaces the text of an AttributeError
            raise ImportError(f"{title}.{name} is not supported. Use instead: {known.instead[name]}.")
        hint = did_you_mean(name, known.names) or did_you_mean(name, submodules)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}.{hint}")

    module.__doc__ = module.__doc__ or f"The names of Composer's `{path}`."
    vars(module).update(
        __getattr__=getattr_,
        __dir__=lambda: sorted({*vars(module), *known.names, *submodules}),
        __all__=list(known.names),
    )


fill(sys.modules[__name__], "")
sys.meta_path.append(ComposerFinder())
