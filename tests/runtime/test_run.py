import random
import time
from pathlib import Path

import pytest

from drivetrain.core.errors import ExperimentError
from drivetrain.runtime.run import Run, current_run, set_current_run


@pytest.fixture(autouse=True)
def no_run():
    assert current_run() is None
    yield
    set_current_run(None)


def test_run_is_current_until_it_ends(tmp_path):
    run = Run(folder=str(tmp_path), seed=3, params={"lr": 0.1}, name="digits")
    set_current_run(run)
    set_current_run(run)
    assert current_run() is run and run.folder == Path(tmp_path)
    set_current_run(None)
    assert current_run() is None


def test_second_active_run_is_refused_by_name(tmp_path):
    set_current_run(Run(folder=tmp_path, seed=0, name="first"))
    with pytest.raises(ExperimentError, match="'second': 'first' is still active"):
        set_current_run(Run(folder=tmp_path, seed=0, name="second"))
    assert current_run().name == "first"


def test_run_counts_its_objects_and_draws_seeds_like_a_python_generator(tmp_path):
    run = Run(folder=tmp_path, seed=3)
    assert [run.next_index("loader"), run.next_index("loader"), run.next_index("other")] == [0, 1, 0]
    assert run.random_gen.getrandbits(32) == random.Random(3).getrandbits(32)


def test_resumed_run_counts_the_time_of_its_earlier_parts(tmp_path):
    run = Run(folder=tmp_path, seed=0, elapsed_before=100.0)
    time.sleep(0.01)
    assert 100.01 <= run.elapsed < 400
