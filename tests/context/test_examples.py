"""The example runs, and the guide shows what `explain` prints."""

import re
from pathlib import Path

import torch

from tests.test_examples import load

ROOT = Path(__file__).parents[2]


def test_the_loop_by_hand_continues_bit_for_bit_after_a_stop(tmp_path):
    context_loop = load("context_loop")
    whole = context_loop.main(epochs=3, file=tmp_path / "whole.pt")
    context_loop.main(epochs=3, file=tmp_path / "part.pt", stop_after=6)  # four batches make an epoch
    rest = context_loop.main(epochs=3, file=tmp_path / "part.pt", resume=True)
    assert rest.losses == whole.losses and len(whole.losses) == 12
    assert all(map(torch.equal, whole.model.parameters(), rest.model.parameters()))
    assert sum(whole.losses[-4:]) < 0.9 * sum(whole.losses[:4])


def test_the_table_in_the_guide_is_what_explain_prints():
    text = (ROOT / "docs" / "context.md").read_text()
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], names)
    for line in names["ctx"].explain().splitlines():
        assert f"    {line}\n" in text, line
