"""Every code block of the README and of the documentation works as a reader would use it.

A Python block runs in an empty namespace. One that begins with `# continues from above` runs after the blocks before it on the
page. A block with a main guard is imported here and run as a program in the slow suite. Shell blocks parse, and name
commands that exist; YAML and JSON blocks are read.
"""

import ast
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drivetrain.experiment.cli.verbs import VERBS
from drivetrain.runtime.seeds import capture_rng, restore_rng

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONTINUES = "# continues from above\n"
LANGUAGES = {"python", "sh", "yaml", "json", "text", "toml", "mermaid"}
EXTRAS = {
    "transformers",
    "timm",
    "torchvision",
    "torchmetrics",
    "sklearn",
    "matplotlib",
    "tensorboard",
    "onnx",
    "onnxscript",
}
PEERS = {"lightning", "accelerate", "pytorch_accelerated", "composer", "pystematic", "atorch", "speechain"}
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)

SLOW = {"guides/huggingface.md", "moving/hf_trainer.md"}
"""Pages whose libraries take many seconds to import."""


def name_of(page):
    return page.relative_to(ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT).as_posix()


def blocks_of(page, language=None):
    """Return the blocks of a page as (language, code), without the indentation of a tab or list."""
    found = []
    for fence in FENCE.finditer(page.read_text()):
        indent, code = fence["indent"], fence["code"]
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        found.append((fence["info"].split(" ")[0], code))
    return [code for kind, code in found if kind == language] if language else found


def imported(code):
    """Return the first part of every module that a block imports."""
    nodes = ast.walk(ast.parse(code))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def missing(code):
    """Return the optional packages that a block needs and that are not installed here."""
    needed = imported(code)
    if "timm" in needed:
        needed.add("torchvision")  # timm imports it when it builds a model
    if "plot(" in code:
        needed.add("matplotlib")  # imported by drivetrain
    return sorted(name for name in (EXTRAS | PEERS) & needed if importlib.util.find_spec(name) is None)


def run_blocks(page, peers):
    """Run the blocks of a page, with or without those of other libraries; return the `losses` that each one computed."""
    above, losses, lacks_package = {"__name__": "documentation"}, [], False
    for number, block in enumerate(blocks_of(page, "python"), 1):
        is_whole = not block.startswith(CONTINUES)
        uses_peer = bool(PEERS & imported(block))
        lacks_package = (lacks_package and not is_whole) or bool(missing(block) and not uses_peer)
        if lacks_package or (uses_peer and not peers):
            continue
        names = {"__name__": "documentation"} if is_whole else above
        exec(compile(block, f"{name_of(page)}, block {number}", "exec"), names)
        losses.append(names.pop("losses", None))
        above |= names
    return losses


def with_marks(page):
    return pytest.param(page, marks=[pytest.mark.slow] * (name_of(page) in SLOW), id=name_of(page))


def is_program(code):
    return 'if __name__ == "__main__":' in code


PYTHON_PAGES = [page for page in PAGES if blocks_of(page, "python")]


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    from drivetrain.strategy.registry import _methods, method_names

    monkeypatch.chdir(tmp_path)
    known = method_names()
    generators = capture_rng()
    yield tmp_path
    restore_rng(generators)
    for name in {*_methods} - {*known}:  # a page registers one of its own
        del _methods[name]


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # torch's own, in torch.onnx
@pytest.mark.parametrize("page", [with_marks(page) for page in PYTHON_PAGES])
def test_the_python_of_a_page_runs(page, empty_folder, capsys):
    ran = run_blocks(page, peers=False)
    if not ran:
        pytest.skip(
            f"needs {', '.join(sorted({name for code in blocks_of(page, 'python') for name in missing(code)}))}"
        )
    if page.parent.name == "moving":
        assert_equal([losses for losses in ran if losses is not None])


def assert_equal(losses):
    """Check that all sides of a page about moving over computed the same losses."""
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # those of the other library
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "moving").glob("*.md")), ids=name_of)
def test_before_and_after_moving_over_have_the_same_losses(page, empty_folder, capsys):
    before = [code for code in blocks_of(page, "python") if (PEERS | {"transformers"}) & imported(code)]
    if not before:
        pytest.skip("no library to compare with")
    if absent := sorted({name for code in before for name in missing(code)}):
        pytest.skip(f"needs {', '.join(absent)}")
    try:
        losses = [values for values in run_blocks(page, peers=True) if values is not None]
    except ImportError as error:
        pytest.skip(f"the other library lacks a package: {error}")
    if not any(losses):
        pytest.skip("the page compares no losses")
    assert len(losses) >= 2, "the page shows one side only"
    assert_equal(losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, id=f"{name_of(page)}-{number}")
        for page in PYTHON_PAGES
        for number, code in enumerate(blocks_of(page, "python"), 1)
        if is_program(code) and not code.startswith(CONTINUES)
    ],
)
def test_a_program_of_a_page_runs_as_a_program(page, code, tmp_path):
    if absent := missing(code):
        pytest.skip(f"needs {', '.join(absent)}")
    (tmp_path / "program.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_name_their_language_and_data_blocks_can_be_read(page):
    for language, code in blocks_of(page):
        assert language in LANGUAGES, f"a block is marked {language!r}; known: {', '.join(sorted(LANGUAGES))}"
        if language == "yaml":
            assert list(yaml.safe_load_all(code))
        elif language == "json":
            json.loads(code)


def test_the_configuration_on_the_page_about_speechain_builds_a_set():
    from drivetrain.optim import OptimSet

    page, names = ROOT / "docs" / "moving" / "speechain.md", {}
    exec(blocks_of(page, "python")[0], names)
    (text,) = blocks_of(page, "yaml")
    with pytest.warns(UserWarning, match="decoder"):  # trainable parameters without an optimizer
        units = OptimSet.from_yaml(io.StringIO(text), names["model"])
    assert list(units) == ["encoder_optim"] and units["encoder_optim"].step_per_update == 2


def test_shell_blocks_parse_and_name_commands_that_exist(tmp_path):
    script = tmp_path / "script.sh"
    for page in PAGES:
        for code in blocks_of(page, "sh"):
            script.write_text(code)
            done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
            assert done.returncode == 0, f"{name_of(page)}: {done.stderr}\n{code}"
            for verb in re.findall(r"^(?:\S*python\S* -m )?drivetrain ([a-z]+)", code, re.MULTILINE):
                assert verb in VERBS, f"{name_of(page)}: drivetrain {verb}"
            for target in re.findall(r"^make ([a-z-]+)", code, re.MULTILINE):
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
            for program in re.findall(r"\bexamples/\w+\.py", code):
                assert (ROOT / program).is_file(), program


def test_a_continued_block_is_marked_and_has_something_to_continue():
    for page in PYTHON_PAGES:
        first, *others = blocks_of(page, "python")
        assert not first.startswith(CONTINUES), name_of(page)
        for code in others:
            assert "continues from" not in code.removeprefix(CONTINUES), name_of(page)


def test_code_lines_fit_the_page():
    """A line of code that is longer than the column is cut off until the reader scrolls."""
    for page in PAGES:
        for language, code in blocks_of(page):
            for line in code.splitlines():
                assert len(line) <= 120 or language == "text", f"{name_of(page)}: {line}"


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert f" {name_of(page)}\n" in text, f"{name_of(page)} is not in mkdocs.yml"
