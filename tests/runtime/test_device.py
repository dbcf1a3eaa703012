import os
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import DeviceError
from drivetrain.runtime.device import as_current, choose_device, device_memory, is_out_of_memory, usable_cpus

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@pytest.fixture(autouse=True)
def no_accelerate_variables(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)


@without_cuda
@pytest.mark.parametrize("spec", ["auto", None, "cpu", torch.device("cpu")])
def test_without_an_accelerator_the_device_is_the_cpu(spec):
    if not torch.accelerator.is_available():
        assert choose_device(spec) == torch.device("cpu")


@without_cuda
@pytest.mark.parametrize("spec", ["cuda", "gpu", "cuda:1", torch.device("cuda", 0)])
def test_cuda_that_is_asked_for_and_absent_is_an_error_that_says_what_to_do(spec):
    with pytest.raises(DeviceError, match=r"device 'cuda' was requested.*'auto' or 'cpu'"):
        choose_device(spec)


@pytest.mark.parametrize(("spec", "nearest"), [("cud", "cuda"), ("cpuu", "cpu"), ("cuda:x", "cuda"), ("gpus", "gpu")])
def test_unknown_device_names_the_nearest(spec, nearest):
    with pytest.raises(DeviceError, match=f"Did you mean '{nearest}'"):
        choose_device(spec)


@pytest.mark.parametrize(("name", "value"), [("ACCELERATE_USE_CPU", "true"), ("ACCELERATE_TORCH_DEVICE", "cpu")])
def test_accelerate_launch_can_choose_the_cpu(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_usable_cpus_follow_the_affinity_of_the_process():
    allowed = os.sched_getaffinity(0)
    assert 1 <= usable_cpus() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_memory_of_the_host_is_free_within_total():
    free, total = device_memory("cpu")
    assert 0 < free <= total


def test_memory_of_the_host_is_at_most_what_its_container_leaves(monkeypatch):
    files = {"/sys/fs/cgroup/memory.max": "3000\n", "/sys/fs/cgroup/memory.current": "1000\n"}
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *rest: files.get(str(path)) or read(path, *rest))
    assert device_memory("cpu") == (2000, 3000)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert device_memory("cpu")[1] > 3000


@pytest.mark.gpu
def test_cuda_device_memory_counts_the_cache_as_free():
    torch.cuda.empty_cache()
    free, total = device_memory("cuda")
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    held = device_memory("cuda")[0]
    del block
    assert held <= free - 2**27 and device_memory("gpu") == (pytest.approx(free, abs=2**26), total)


@pytest.mark.gpu
def test_cuda_device_follows_the_local_rank(monkeypatch):
    count = torch.cuda.device_count()
    for name, value in {"RANK": count - 1, "WORLD_SIZE": 2 * count, "LOCAL_RANK": count - 1}.items():
        monkeypatch.setenv(name, str(value))
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", count - 1)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", str(count))
    with pytest.raises(DeviceError, match=f"local rank {count} has no cuda device:"):
        choose_device("auto")


@pytest.mark.gpu
def test_cuda_device_number_beyond_the_last_is_refused():
    with pytest.raises(DeviceError, match="this process sees"):
        choose_device("cuda:64")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("the word list ran out of memory verses"), False),
    ],
)
def test_what_means_that_memory_ran_out(error, is_memory):
    assert is_out_of_memory(error) is is_memory


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "meta", "mps", None])
def test_a_device_without_a_number_leaves_the_current_one(device):
    with as_current(device):
        pass
