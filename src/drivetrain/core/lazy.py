"""Exports that load on first use, so that importing a package costs nothing until a name is asked for."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drivetrain.core.foreign import Exports, provider, set_provider

TABLES: dict[str, tuple[dict[str, tuple[str, str]], frozenset[str]]] = {}
"""The exports of every package that was imported: the module and name behind each public name, and its submodules."""


def lazy_exports(
    package: str,
    exports: Mapping[str, Iterable[str]],
    modules: Iterable[str] = (),
    unlisted: Mapping[str, Iterable[str]] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of `package`, whose names are defined in the given modules.

    `exports` maps a module, relative (`".engine"`) or absolute, to the names it provides; `"public=private"` renames. `modules`
    names submodules that are attributes too, so that `import package` is enough to reach them. Names of `unlisted` are offered as well,
    and left out of `dir()`: second names, and what few people need. Names and submodules that `drivetrain.compat` adds come last.
    Type checkers and editors cannot follow `__getattr__`: they read the stub that `make stubs` writes from the same table.
    """
    added = provider()
    seconds = () if added is None else [path.rpartition(".") for path in added.MODULES]
    submodules = frozenset([*modules, *(name for parent, _, name in seconds if parent == package)])
    quiet = _homes(unlisted or {})
    home = {**_homes(exports), **quiet, **_homes(added.EXPORTS.get(package, {}) if added else {})}

    def getattr_(name: str) -> object:
        if name in submodules:
            return importlib.import_module(f".{name}", package)
        if name not in home:
            from drivetrain.core.errors import did_you_mean

            hint = did_you_mean(name, home) or did_you_mean(name, submodules)
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        module, private = home[name]
        value = getattr(importlib.import_module(module, package), private)
        setattr(sys.modules[package], name, value)
        return value

    names = list(home)
    listed = [name for name in names if name not in quiet]

    def dir_() -> list[str]:
        return [*listed, *sorted(submodules), *(name for name in vars(sys.modules[package]) if name.startswith("__"))]

    TABLES[package] = (home, submodules)
    return getattr_, dir_, names


def use_provider(module: str) -> None:
    """Name the module that adds names of other libraries; to packages that were imported before, they are added unlisted."""
    set_provider(module)
    added = provider()
    for package, (home, _) in TABLES.items():
        home.update(_homes(added.EXPORTS.get(package, {}) if added else {}))


def _homes(exports: Exports) -> dict[str, tuple[str, str]]:
    """Return the module and the name behind each public name."""
    homes = {}
    for module, names in exports.items():
        for entry in names:
            public, _, private = entry.partition("=")
            homes[public] = (module, private or public)
    return homes
