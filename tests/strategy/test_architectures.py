"""Plans on models of transformers, compared with a plain loop parameter by parameter: every cell is right, or rejected with a reason.

The cells are those of `benchmarks.plan_matrix`, which can also run them in several shards and writes `docs/plan_matrix.md`. All of them
take about two hours on two cores.
"""

from itertools import combinations

import pytest

from benchmarks import plan_matrix
from tests.strategy import architectures

pytestmark = pytest.mark.filterwarnings("ignore")
ALWAYS = ("data", "zero1", "fsdp", "data, micro-batches", "data, checkpoint", "data, fused")
"""Plans that every architecture can have."""
INTERNAL = ("_ValueProxy", "NameError", "AttributeError", "KeyError", "AssertionError")


@pytest.fixture(scope="module")
def ranks():
    """Ranks by their number, which serve all tests of this file; a rejection on one does not make the others wait."""
    pytest.importorskip("transformers")
    worlds = {size: plan_matrix.Ranks(size) for size in plan_matrix.LAYOUTS}
    yield worlds
    for world in worlds.values():
        world.close()


def run_cells(world, name, plans):
    return {
        plan_matrix.title(*plan): plan_matrix.run_cell(world, name, plan_matrix.plan_of(world.size, *plan))
        for plan in plans
    }


def check(found):
    bad = {title: result for title, result in found.items() if plan_matrix.kind_of(result) in ("wrong", "crash")}
    assert found and not bad, bad
    internal = {title: result for title, result in found.items() if any(word in result for word in INTERNAL)}
    assert not internal, internal


@pytest.mark.slow
@pytest.mark.parametrize("world", plan_matrix.LAYOUTS)
@pytest.mark.parametrize("name", architectures.CONFIGS)
def test_every_plan_is_right_or_rejected_with_a_reason(ranks, name, world):
    found = run_cells(ranks[world], name, [cell[2:] for cell in plan_matrix.cells() if cell[:2] == (world, name)])
    check(found)
    if name not in architectures.SINGLES:
        assert all(found[title].startswith("ok") for title in ALWAYS), found
    else:
        assert found["data"].startswith("warned") and "relative error" in found["data"]
    if name == "llama" and world == 4:  # an embedding that is split, in front of compiled blocks, keeps its gradient
        assert all(found[f"{mesh}, compile"].startswith("ok") for mesh in ("tensor x data", "tensor x zero"))


@pytest.mark.parametrize("world", plan_matrix.LAYOUTS)
@pytest.mark.parametrize("offset", range(4))
def test_covering_rows_hold_every_pair(world, offset):
    changes = [name for name in plan_matrix.CHANGES if offset < 2 or name != "channels last"]
    rows = plan_matrix.covering(world, changes, offset)
    assert all(plan_matrix.are_compatible(row[1]) for row in rows)
    met = {frozenset(two) for _, own in rows for two in combinations(own, 2)}
    assert met >= {frozenset(two) for two in combinations(changes, 2) if plan_matrix.are_compatible(two)}
    assert {(layout, one) for layout, own in rows for one in own} == {
        (layout, one) for layout in plan_matrix.LAYOUTS[world] for one in changes
    }


def test_a_row_that_is_rejected_is_divided_and_the_worst_rank_counts():
    assert plan_matrix.smaller("data", ("a", "b")) == [("data", ("b",)), ("data", ("a",))]
    assert plan_matrix.smaller("data", ("a",)) == []
    assert plan_matrix.combined(["ok (1e-6)", "wrong: x"]) == "wrong: x [rank 1]"
