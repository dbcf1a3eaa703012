"""What loads on first use: the exports of packages, and what `drivetrain.compat` provides to the folders below it, which never import it.

Importing a package costs nothing until a name is asked for. A folder that can use another library's file or object defines a `Slot`: a
name, and the type of what is called. The root package names one module, the provider, which maps every slot to its implementation as text.
Nothing of it is loaded before a slot is used.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

T = TypeVar("T")

Exports = Mapping[str, Iterable[str]]


class Provider(Protocol):
    """The module that says where things are; it loads nothing heavy itself."""

    SLOTS: Mapping[str, str]
    """The implementation of each slot, as `"package.module:name"`, or a module alone."""
    EXPORTS: Mapping[str, Exports]
    """Names that a package offers for people who come from another library, in the form that `lazy_exports` takes."""
    MODULES: Mapping[str, str]
    """Second paths of modules, each with its home."""


_provider: str | None = None


def provider() -> Provider | None:
    """Return the provider, or None while the root package is still being imported."""
    return None if _provider is None else cast(Provider, importlib.import_module(_provider))


class Slot(Generic[T]):
    """Something that is implemented above this folder.

    >>> read_plan: Slot[type[int]] = Slot("an unknown name")
    >>> read_plan.load()
    Traceback (most recent call last):
    LookupError: nothing is registered for 'an unknown name' in drivetrain.compat.registry.SLOTS.
    """

    def __init__(self, name: str):
        self.name = name

    def load(self) -> T:
        """Import the implementation and return it."""
        known = provider()
        if known is None or self.name not in known.SLOTS:
            raise LookupError(f"nothing is registered for {self.name!r} in {_provider}.SLOTS.")
        module, _, name = known.SLOTS[self.name].partition(":")
        loaded = importlib.import_module(module)
        return cast(T, getattr(loaded, name) if name else loaded)


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
    listed = [name for name in home if name not in quiet]

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

    def dir_() -> list[str]:
        return [*listed, *sorted(submodules), *(name for name in vars(sys.modules[package]) if name.startswith("__"))]

    TABLES[package] = (home, submodules)
    return getattr_, dir_, list(home)


def use_provider(module: str) -> None:
    """Name the provider; the root package does so first. To packages that were imported before, its names are added unlisted."""
    global _provider
    _provider = module
    added = provider()
    for package, (home, _) in TABLES.items():
        home.update(_homes(added.EXPORTS.get(package, {}) if added else {}))


def _homes(exports: Exports) -> dict[str, tuple[str, str]]:
    """Return the module and the name behind each public name."""
    entries = [(module, *entry.partition("=")) for module, names in exports.items() for entry in names]
    return {public: (module, private or public) for module, public, _, private in entries}
