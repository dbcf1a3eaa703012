"""`pytest -p tests.cuda_double.plugin` runs on doubles of CUDA devices."""

import pytest

from tests import cuda_double

cuda_double.install()

NOT_HERE = ("recorded", "compile", "graph", "fp8", "two_devices_train", "nccl", "inductor")
"""Parts of names of tests that need what the double does not have."""


def pytest_collection_modifyitems(config, items):
    for item in items:
        if any(part in item.name.lower() for part in NOT_HERE):
            item.add_marker(pytest.mark.skip(reason="the double of CUDA cannot do this"))


@pytest.fixture(autouse=True)
def nothing_is_overwritten_on_its_way():
    before = cuda_double.overwritten()
    yield
    assert cuda_double.overwritten() == before, "page-locked memory was written to while its copy was on its way"
