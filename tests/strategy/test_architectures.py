"""Plans on models of transformers, compared with a plain loop parameter by parameter: every cell is right, or rejected with a reason."""

import pytest

from benchmarks import plan_matrix
from tests.strategy import architectures

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def run_cells(world, size, kind, name):
    of = {"single": plan_matrix.singles, "pairs": plan_matrix.pairs}[kind]
    found = {
        plan_matrix.title(layout, changes): plan_matrix.run_cell(
            world, name, plan_matrix.plan_of(size, layout, changes)
        )
        for layout, changes in of(size)
    }
    assert found
    bad = {title: result for title, result in found.items() if not result.startswith(("ok", "warned", "rejected"))}
    assert not bad, bad
    return found


@pytest.mark.parametrize("name", architectures.CONFIGS)
def test_every_method_alone_is_right_or_rejected_on_two(world2, name):
    found = run_cells(world2, 2, "single", name)
    assert all(
        found[plan].startswith("ok") for plan in ("data", "zero1", "zero2", "fsdp", "data, checkpoint", "data, fused")
    )


@pytest.mark.parametrize("name", architectures.CONFIGS)
def test_every_mesh_is_right_or_rejected_on_four(world4, name):
    assert run_cells(world4, 4, "single", name)["zero x data"].startswith("ok")


@pytest.mark.parametrize("name", architectures.CONFIGS)
def test_pairs_of_methods_are_right_or_rejected_on_two(world2, name):
    run_cells(world2, 2, "pairs", name)


@pytest.mark.parametrize("name", architectures.CONFIGS)
def test_pairs_of_methods_are_right_or_rejected_on_four(world4, name):
    run_cells(world4, 4, "pairs", name)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_compiled_blocks_behind_a_split_embedding_leave_it_its_gradient(world4, name):
    for layout in ("tensor x data", "tensor x zero"):
        plan = plan_matrix.plan_of(4, layout, ("compile",))
        assert plan_matrix.run_cell(world4, name, plan).startswith("ok")
