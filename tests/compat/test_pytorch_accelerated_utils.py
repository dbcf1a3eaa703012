"""The small tools."""

import copy
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.compat.pytorch_accelerated_utils import (
    LIMIT_BATCHES_ENV_VAR,
    DataLoaderSlice,
    LimitBatches,
    ModelEma,
    limit_from_environment,
    local_process_zero_first,
    local_process_zero_only,
    remove_padding,
    worker_init_fn,
    world_process_zero_only,
)
from drivetrain.core.errors import ConfigError

OWN = "DRIVETRAIN_LIMIT_BATCHES"


@pytest.fixture(autouse=True)
def _no_limit_outside(monkeypatch):
    monkeypatch.delenv(LIMIT_BATCHES_ENV_VAR, raising=False)
    monkeypatch.delenv(OWN, raising=False)


def test_nested_limits_restore_the_outer_value():
    with LimitBatches(5):
        assert os.environ[LIMIT_BATCHES_ENV_VAR] == "5"
        with LimitBatches(2):
            assert limit_from_environment() == 2
        assert limit_from_environment() == 5
    assert limit_from_environment() is None
    assert LIMIT_BATCHES_ENV_VAR not in os.environ


def test_a_limit_is_lifted_after_an_error_too():
    with pytest.raises(RuntimeError), LimitBatches(5):
        raise RuntimeError
    assert limit_from_environment() is None


def test_the_own_variable_wins_and_none_means_off(monkeypatch):
    monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, "7")
    assert limit_from_environment() == 7
    monkeypatch.setenv(OWN, "3")
    assert limit_from_environment() == 3
    monkeypatch.setenv(OWN, "none")
    assert limit_from_environment() is None
    with LimitBatches(4):
        assert limit_from_environment() == 4
    assert os.environ[OWN] == "none"
    assert os.environ[LIMIT_BATCHES_ENV_VAR] == "7"


def test_none_lifts_an_outer_limit():
    with LimitBatches(5), LimitBatches(None):
        assert limit_from_environment() is None


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_an_unreadable_limit_is_an_error_that_names_the_variable(monkeypatch, text):
    monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, text)
    with pytest.raises(ConfigError, match=LIMIT_BATCHES_ENV_VAR):
        limit_from_environment()
    with pytest.raises(ConfigError, match="num_batches=0"):
        LimitBatches(0)


@pytest.mark.parametrize(("size", "expected"), [(7, 5), (3, 3), (None, 5)])
def test_a_slice_has_the_length_of_what_it_yields(size, expected):
    part = DataLoaderSlice(DataLoader(range(10), batch_size=2), size)
    assert len(part) == expected == len(list(part))
    assert part.batch_size == 2  # everything else is the loader's


def test_a_slice_of_a_loader_without_a_length_has_none():
    with pytest.raises(TypeError):
        len(DataLoaderSlice(iter(()), 3))


def test_a_slice_takes_no_batch_beyond_its_end():
    taken = []

    def batches():
        for index in range(10):
            taken.append(index)
            yield index

    assert list(DataLoaderSlice(batches(), 3)) == [0, 1, 2]
    assert taken == [0, 1, 2]


def test_a_slice_can_be_copied():
    assert len(copy.deepcopy(DataLoaderSlice([1, 2, 3], 2))) == 2


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def perturb(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model(torch.randn(8, 3))


def test_the_average_follows_the_formula_and_counters_are_copied():
    model = make_model()
    ema = ModelEma(model, decay=0.9)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        perturb(model)
        ema.update(model)
        for name, value in model.state_dict().items():
            expected[name] = 0.9 * expected[name] + 0.1 * value if value.is_floating_point() else value.clone()
    for name, value in ema.module.state_dict().items():
        torch.testing.assert_close(value, expected[name])
        assert value.dtype == expected[name].dtype
    assert ema.module[1].num_batches_tracked == 3


def test_set_takes_the_models_weights_over():
    model = make_model()
    ema = ModelEma(model)
    perturb(model)
    ema.set(model)
    for mine, its in zip(ema.module.state_dict().values(), model.state_dict().values()):
        assert torch.equal(mine, its)


def test_the_averaged_module_is_apart_from_the_model_and_not_trained():
    model = make_model().train()
    ema = ModelEma(model)
    assert not ema.module.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    assert ema.module[0].weight is not model[0].weight


def test_another_rule_can_be_written():
    class Latest(ModelEma):
        def update_fn(self, ema_model_weights, updated_model_weights):
            return torch.maximum(ema_model_weights, updated_model_weights)

    model = make_model()
    ema, before = Latest(model), model[0].weight.detach().clone()
    perturb(model)
    ema.update(model)
    assert torch.equal(ema.module[0].weight, torch.maximum(before, model[0].weight))


def test_a_wrapped_model_updates_the_average_of_its_inside():
    model = make_model()
    ema = ModelEma(nn.DataParallel(model), decay=0.0)
    perturb(model)
    ema.update(nn.DataParallel(model))
    assert torch.equal(ema.module[0].weight, model[0].weight)


def test_a_decay_outside_zero_to_one_is_refused():
    with pytest.raises(ConfigError, match=r"decay=1\.5"):
        ModelEma(make_model(), decay=1.5)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 2), (3, 4, 2, 5)])
def test_rows_of_padding_are_removed(shape):
    rows = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    rows[-1] = -1
    assert torch.equal(remove_padding(rows, -1), rows[:-1])


def test_a_row_that_only_contains_the_padding_value_somewhere_stays():
    rows = torch.tensor([[-1, 2], [-1, -1]])
    assert remove_padding(rows, -1).tolist() == [[-1, 2]]
    assert remove_padding(rows[:0], -1).shape == (0, 2)


class Seeds(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        import numpy as np

        return torch.initial_seed() % 2**31, random.getrandbits(30), int(np.random.randint(2**30))


def draw_worker_seeds(seed):
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(Seeds(), batch_size=1, num_workers=2, worker_init_fn=worker_init_fn, generator=generator)
    return [tuple(int(column) for column in batch) for batch in loader]


def test_worker_seeds_repeat_for_a_seed_and_differ_between_workers():
    first, again, other = draw_worker_seeds(1), draw_worker_seeds(1), draw_worker_seeds(2)
    assert first == again
    assert first != other
    for column in range(3):  # batches come from workers 0 and 1 in turn
        assert first[0][column] != first[1][column]


@pytest.mark.parametrize("decorate", [local_process_zero_only, world_process_zero_only, local_process_zero_first])
def test_process_decorators_change_nothing_on_one_process(decorate):
    @decorate
    def answer(a, b=1):
        """Say it."""
        return a + b

    assert answer(40, b=2) == 42
    assert answer.__doc__ == "Say it."


def _run_decorated(folder):
    from pathlib import Path

    from drivetrain.runtime.ranks import get_rank

    results = [local_process_zero_only(get_rank)(), world_process_zero_only(get_rank)()]
    marker = Path(folder) / "made"

    @local_process_zero_first
    def make_once():
        existed = marker.exists()
        marker.touch()
        return existed

    results.append(make_once())

    @world_process_zero_only
    def fail():
        raise RuntimeError("only here")

    try:
        results.append(fail())
    except RuntimeError:
        results.append("raised")
    return results


def test_process_decorators_choose_and_order_ranks_and_leave_nobody_waiting(world2, tmp_path):
    assert world2(_run_decorated, str(tmp_path)) == [[0, 0, False, "raised"], [None, None, True, None]]


def _worker_seed_of_rank():
    from drivetrain.runtime.seeds import capture_rng, restore_rng

    before = capture_rng()
    try:
        torch.manual_seed(5)
        return worker_init_fn(0)
    finally:
        restore_rng(before)


def test_worker_seeds_differ_between_ranks(world2):
    first, second = world2(_worker_seed_of_rank)
    assert first != second


FIRST = """
import os
from pathlib import Path
from drivetrain.utils import local_process_zero_first, world_process_zero_only

@local_process_zero_first
def download():
    place = Path("data")
    found = place.exists()
    place.touch()
    return found

@world_process_zero_only
def note():
    Path("note" + os.environ["RANK"]).touch()

Path(f"found{os.environ['RANK']}").write_text(str(download()))
note()
"""


@pytest.mark.slow
def test_one_process_is_first_also_before_there_is_a_trainer(tmp_path):
    (tmp_path / "train.py").write_text(FIRST)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    paths = os.pathsep.join(str(path) for path in sys.path if path)
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"found{rank}").read_text() for rank in (0, 1)] == ["False", "True"]
    assert (tmp_path / "note0").exists() and not (tmp_path / "note1").exists()
