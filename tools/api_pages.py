"""Fill the pages of the API reference: an mkdocs hook.

A page says `<!-- names of drivetrain.callbacks -->` and gets an entry for each public name of that module, under the path that users
import; `<!-- names of drivetrain.tracking: RunHistory with inherited members -->` chooses some. Where a class is defined does not
matter, so files can move without a change to the pages.
"""

import importlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

MARKER = re.compile(
    r"<!-- names of (?P<module>[\w.]+)(?:: (?P<names>[\w, ]+?))?(?P<inherited> with inherited members)? -->"
)


def public_names(module: str, only: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield each public name of a module that has an entry, and the path of its definition."""
    loaded = importlib.import_module(module)
    for name in only or loaded.__all__:
        value = getattr(loaded, name)
        if not (issubclass(type(value), type) or type(value).__name__ == "function"):
            continue  # a constant, or an object that stands for the current run
        home, own = value.__module__, value.__qualname__
        if home.startswith("drivetrain") and own == name:  # a second name of the same thing has no entry of its own
            yield name, f"{home}.{own}"


def entries(module: str, only: Sequence[str] = (), inherited: bool = False) -> str:
    """Return the directives for the names of a module."""
    lines: list[str] = []
    for name, home in public_names(module, only):
        lines += [f"::: {home}", "    options:", f"      heading: {module}.{name}", f"      toc_label: {name}"]
        lines += ["      inherited_members: true"] * inherited + [""]
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page."""

    def fill(found: re.Match[str]) -> str:
        only = re.split(r",\s*", found["names"]) if found["names"] else ()
        return entries(found["module"], only, inherited=found["inherited"] is not None)

    return MARKER.sub(fill, markdown)
