"""What `drivetrain.compat` provides to the folders below it, which never import it.

A folder that can use another library's file or object defines a `Slot`: a name, and the type of what is called. The root package names
one module, the provider, which maps every slot to its implementation as text. Nothing of it is loaded before a slot is used.
"""

import importlib
from collections.abc import Iterable, Mapping
from typing import Generic, Protocol, TypeVar, cast

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


def set_provider(module: str) -> None:
    """Name the provider; the root package does so when it is imported, before any folder is."""
    global _provider
    _provider = module


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
