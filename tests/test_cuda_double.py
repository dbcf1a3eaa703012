"""What needs a CUDA device, on a double of one (tests/cuda_double): numbers, devices, random states, and that no step waits."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import cuda_double

ROOT = Path(__file__).parents[1]
FILES = (
    "tests/test_first_on_gpu.py",
    "tests/train/test_host_waits.py",
    "tests/algorithms/test_gpu.py",
    "tests/record/test_gpu.py",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_double.can_build, reason="needs g++ and a build of torch without CUDA"),
]


@pytest.mark.parametrize("file", FILES)
def test_tests_of_a_gpu_pass_on_its_double(file):
    command = [sys.executable, "-m", "pytest", "-p", "tests.cuda_double.plugin", "-m", "gpu", "--tb=short", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
