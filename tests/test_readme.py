"""The README's code runs as it stands, and names what exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert (tmp_path / "runs" / "first" / "last").exists()


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_two_commands_are_on_the_first_screen():
    head = (ROOT / "README.md").read_text().splitlines()[:20]
    assert any("make demo" in line for line in head) and any("make test" in line for line in head)
