"""The README is short, its links lead somewhere, and a run of its code can be interrupted."""

import re
from pathlib import Path

import torch

from drivetrain.runtime.seeds import capture_rng, restore_rng
from tests.test_documentation import blocks_of

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def test_links_and_pictures_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README.read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_two_commands_are_on_the_first_screen():
    head = README.read_text().splitlines()[:12]
    assert any("make demo" in line for line in head) and any("make test" in line for line in head)


def test_the_program_of_the_readme_ends_bit_for_bit_the_same_after_an_interruption(tmp_path, monkeypatch):
    """A second start of a program continues what the first has left."""
    (program,) = blocks_of(README, "python")
    assert "num_epochs=5" in program

    def run(folder, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        names = {"__name__": "__main__"}
        exec(compile(text, "README.md", "exec"), names)
        return names["model"].state_dict()

    generators = capture_rng()
    whole = run("whole", program)
    run("parts", program.replace("num_epochs=5", "num_epochs=5, max_num_train_steps=37"))
    parts = run("parts", program)
    restore_rng(generators)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (tmp_path / "whole" / "runs" / "first" / "last").exists()
