"""What every test shares: one torch thread, real multi-process worlds, and a check that nothing leaks."""

import gc
import importlib.util
import os
import signal

import pytest
import torch

from tests.workers import World

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

torch.set_num_threads(1)
os.environ["DRIVETRAIN_PLAN_CACHE"] = "0"  # a search of one test is none of another's
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job; tests interrupt themselves and their children
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("drivetrain", deadline=None, database=None)
    settings.load_profile("drivetrain")


@pytest.fixture(scope="session")
def world2():
    """Call a module-level function on two gloo ranks: `results = world2(function, *args)`."""
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world4():
    """Call a module-level function on four gloo ranks: `results = world4(function, *args)`."""
    world = World(4)
    yield world
    world.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Divide the tests of `make test` as `tests/scheduling.py` describes."""
    if config.getoption("dist") != "loadscope":
        return None
    from tests.scheduling import ByWorld

    return ByWorld(config, log)


def pytest_collection_finish():
    """Keep the collector away from torch and the tests themselves: a full collection then costs a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaves a launcher's variables or a process group behind; the next ones would try to join it."""
    before = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    yield
    changed = [name for name in LAUNCH_VARIABLES if os.environ.get(name) != before[name]]
    if torch.cuda.is_initialized():
        torch.cuda.set_sync_debug_mode("default")  # a test that failed may have left it on
    group_left = torch.distributed.is_available() and torch.distributed.is_initialized()
    for name in changed:
        if before[name] is None:
            del os.environ[name]
        else:
            os.environ[name] = before[name]
    if group_left:
        torch.distributed.destroy_process_group()
    assert not changed, f"the test left {', '.join(changed)} changed: use monkeypatch.setenv"
    assert not group_left, "the test left a process group: call destroy_group() at its end"
