"""Write the stubs of packages whose names load on first use, so that type checkers and editors see what they are.

`make stubs` writes them; `tests/test_types.py` checks that they are up to date.
"""

import importlib
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
HEADER = "# Written by `make stubs` from the lazy exports of this module.\n"
CALLABLE = {"drivetrain.experiment": "drivetrain.experiment.experiments"}
"""Packages that are also a decorator of the same name; as attributes of their parent, type checkers see the decorator."""


def lazy_modules() -> list[str]:
    """Return the names of all modules that consist of lazy exports."""
    files = [path for path in SOURCE.rglob("*.py") if "__all__ = lazy_exports(" in path.read_text()]
    parts = [path.relative_to(SOURCE).with_suffix("").parts for path in files]
    return sorted(".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts)


def stub_path(module: str) -> Path:
    """Return where the stub of a module belongs."""
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")


def stub_text(module: str) -> str:
    """Return the stub of a module: one import per public name."""
    from drivetrain.compat.registry import MODULES
    from drivetrain.core.lazy import TABLES

    loaded = importlib.import_module(module)
    homes, submodules = TABLES[module]
    package = module if hasattr(loaded, "__path__") else module.rpartition(".")[0]
    lines = []
    for name, (home, private) in homes.items():
        lines.append(f"from {package + home if home.startswith('.') else home} import {private} as {name}\n")
    for name in sorted(submodules):
        second = MODULES.get(f"{module}.{name}")
        if second is not None:
            home, _, private = second.rpartition(".")
        else:
            home, private = CALLABLE.get(f"{module}.{name}", module), name
        lines.append(f"from {home} import {private} as {name}\n")
    if hasattr(loaded, "__version__"):
        lines.append("\n__version__: str\n")
    names = "".join(f'    "{name}",\n' for name in loaded.__all__)
    return f"{HEADER}{''.join(lines)}\n__all__ = [\n{names}]\n"


def main() -> None:
    """Write all stubs."""
    for module in lazy_modules():
        stub_path(module).write_text(stub_text(module))
        print(stub_path(module).relative_to(SOURCE.parent))


if __name__ == "__main__":
    main()
