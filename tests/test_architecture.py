"""The architecture, as a test: which folder may import which."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "drivetrain"

# From the ground up; folders on one row do not import each other.
ROWS = (
    ("core",),
    ("runtime",),
    ("module",),
    ("context",),
    ("optim", "data", "checkpoint", "record"),
    ("strategy", "algorithms"),
    ("train",),
    ("experiment",),
    ("compat",),
)
ROW_OF = {folder: row for row, folders in enumerate(ROWS) for folder in folders}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file; it is parsed once for all tests."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _forget():
    """Release the parsed tree when these tests are done."""
    yield
    nodes.cache_clear()


def imported_folders(path: Path) -> set[str]:
    """Return the folders of the package that a file imports, also inside functions."""
    found = set()
    for node in nodes(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path.name == "__init__.py", f"{path}: relative import"
            names = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "drivetrain" and len(parts) > 1 and parts[1] != "__version__":
                found.add(parts[1])
    return found


@pytest.mark.parametrize("folder", ROW_OF)
def test_imports_point_down(folder):
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for other in sorted(imported_folders(path))
        if other != folder and ROW_OF.get(other, len(ROWS)) >= ROW_OF[folder]
    ]
    assert not wrong, "\n".join(wrong)


def test_only_doorways_at_the_root_import_other_libraries_names():
    importing = {path.name for path in PACKAGE.glob("*.py") if "compat" in imported_folders(path)}
    assert importing == {path.name for path in PACKAGE.glob("*.py") if "open_doorway(" in path.read_text()}


def test_nothing_below_the_root_names_a_module_of_compat():
    """Not even as text for importlib: a lower folder has a `core.lazy.Slot`, and the table is in compat."""
    wrong = [
        f"{path.relative_to(PACKAGE)}: {node.value!r}"
        for folder in ROW_OF.keys() - {"compat"}
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Constant) and re.fullmatch(r"(drivetrain)?\.compat[\w.:]*", str(node.value))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_its_place():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROW_OF)


def test_no_submodule_shadows_a_public_name_of_its_package():
    import importlib

    for folder in ROW_OF:
        package = importlib.import_module(f"drivetrain.{folder}")
        modules = {path.stem for path in (PACKAGE / folder).glob("*.py")}
        for name in modules & set(package.__dir__()):
            value = getattr(package, name)
            assert type(value).__name__ == "module", f"drivetrain.{folder}.{name} is both a module and a public name"


def test_core_never_imports_torch():
    for path in (PACKAGE / "core").glob("*.py"):
        for node in nodes(path)[0].body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), path


def imported_modules(path: Path) -> set[str]:
    """Return the modules that a file imports when it runs, also inside functions, but not those for type checkers alone."""
    found = set()
    for_types = {
        id(inner)
        for node in nodes(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("folder", sorted(ROW_OF))
def test_modules_of_a_folder_do_not_import_each_other_in_a_circle(folder):
    paths = (PACKAGE / folder).rglob("*.py")
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in paths}
    left = {name: imported_modules(path) & files.keys() - {name} for name, path in files.items()}
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    assert not left, {name: sorted(needed & left.keys()) for name, needed in left.items()}


# Measures of the whole tree. Each ceiling is what was measured when it was last lowered: lower it with your change, never raise it.
ANY_CEILING = 1069
"""Annotations with `Any`."""
WRITES_CEILING = 585
"""Attributes that are written from outside their class."""
LONGEST = {"train/trainer.py": 600}
"""Files that may have more than 500 lines, and how many."""

_DATA = frozenset(
    {"grad", "data", "requires_grad", "state", "args", "_metadata", "__name__", "__qualname__", "__doc__"}
)
"""Attributes that are data of their objects, and are there to be written."""

# An algorithm or a strategy method has the name of the idea, and so has the class that carries it out; Composer's names are Composer's.
SHARED_NAMES = frozenset({"Cautious", "ChannelsLast", "Lookahead", "ScheduleFree", "SOAP", "Precision", "Trainer"})
"""Names that two classes may have."""


@cache
def sources() -> dict[str, str]:
    """Return the text of every module, by its path in the package."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_private_name_is_imported_from_another_folder():
    wrong = [
        f"{path} imports {alias.name} from {node.module}"
        for path in sources()
        for node in nodes(PACKAGE / path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drivetrain.")
        for alias in node.names
        if alias.name.startswith("_")
        and not alias.name.startswith("__")
        and node.module.split(".")[1] != path.split("/")[0]
    ]
    assert not wrong, "\n".join(wrong)


def test_annotations_with_any_become_fewer():
    found = sum(len(re.findall(r"[:>\[,|] *Any\b", text)) for text in sources().values())
    assert found <= ANY_CEILING, (
        f"{found} annotations with Any. Use object, a Protocol, a TypeVar or a name of core.types."
    )


def test_attributes_written_from_outside_their_class_become_fewer():
    found = 0
    for path in sources():
        for node in nodes(PACKAGE / path):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else ():
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute) and part.attr not in _DATA:
                        found += ast.unparse(part.value) not in ("self", "cls")
    assert found <= WRITES_CEILING, f"{found} assignments to attributes of other objects. Give their class a method."


def test_no_file_is_longer_than_a_reader_can_hold():
    lengths = {path: text.count("\n") for path, text in sources().items()}
    assert not {path: length for path, length in lengths.items() if length > LONGEST.get(path, 500)}


def test_no_two_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path in sources():
        for node in nodes(PACKAGE / path)[0].body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(path)
    assert {name for name, paths in homes.items() if len(paths) > 1} <= SHARED_NAMES


def test_no_module_gives_one_name_to_two_things():
    """Joining two files can do that, and the second silently replaces the first."""
    wrong = []
    for path, text in sources().items():
        names = []
        for node in ast.parse(text).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign):
                names += [target.id for target in targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and "overload" not in map(
                ast.unparse, node.decorator_list
            ):
                names.append(node.name)
        wrong += [f"{path}: {name}" for name in set(names) if names.count(name) > 1]
    assert not wrong, "\n".join(wrong)
