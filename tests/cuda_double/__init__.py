"""A double of CUDA for machines without a GPU: `python -m pytest -p tests.cuda_double.plugin -m gpu FILE`.

`device.cpp` gives a build of torch without CUDA two devices whose memory and arithmetic are the host's, and `install` puts doubles into
`torch.cuda`. Branches for CUDA then run, with real numbers. A wait for the device, a mixture of devices or a value that is read before it
has arrived fails as it would there (`device.cpp` lists what is checked). It has no compiler for kernels, no recorded graphs, no 8-bit
products, no NCCL and no speed. Processes that are spawned do not have it. It reaches into torch's internals and is for tests only.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import time
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("device.cpp")
BUILD = Path(__file__).parents[2] / "build"
DEVICES, MEMORY = 2, 8 << 30

can_build = shutil.which("g++") is not None and torch.version.cuda is None and torch.version.hip is None


def build() -> Path:
    """Compile the devices, once for each version of torch, and return the library."""
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = BUILD / f"cuda_double-{digest}.so"
    if not library.exists():
        BUILD.mkdir(exist_ok=True)
        root = Path(torch.__file__).parent
        include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        link = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", *include, str(SOURCE), *link, "-o", str(made)]
        subprocess.run(command, check=True)
        os.replace(made, library)
    return library


def install() -> None:
    """Give this process its devices. There is no way back."""
    lib: Any = ctypes.CDLL(str(build()))
    for name in ("double_stream", "double_new_stream", "double_held", "double_peak", "double_overwritten"):
        getattr(lib, name).restype = ctypes.c_int64
    lib.double_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.double_start()
    torch._C._double = lib  # type: ignore[attr-defined]
    _patch_torch_cuda(lib)
    _patch_storages()


def overwritten() -> int:
    """Return how often page-locked memory was overwritten while its copy was on its way."""
    return int(torch._C._double.double_overwritten())  # type: ignore[attr-defined]


def _patch_torch_cuda(lib: Any) -> None:
    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device if device >= 0 else lib.double_device()
        index = None if device is None else torch.device(device).index
        return lib.double_device() if index is None else index

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, number: int | None = None):
            self.device = torch.device("cuda", index_of(device))
            self.cuda_stream = lib.double_new_stream() if number is None else number

        def synchronize(self) -> None:
            lib.double_flush()

        def wait_event(self, event: object) -> None:
            assert isinstance(event, Event)

        def wait_stream(self, stream: object) -> None:
            assert isinstance(stream, Stream)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

    class Event:
        """Has happened when it was asked about twice, or waited for."""

        def __init__(self, enable_timing: bool = False, **_: object):
            self.enable_timing, self.device, self.time, self._asks = enable_timing, None, None, 0

        def record(self, stream: Any = None) -> None:
            device = (current_stream() if stream is None else stream).device
            assert self.device in (None, device), f"an event of {self.device} was recorded on {device}"
            self.device, self.time, self._asks = device, time.perf_counter(), 2

        def query(self) -> bool:
            self._asks -= 1
            if self._asks >= 0:
                return False
            lib.double_flush()
            return True

        def synchronize(self) -> None:
            self._asks = 0
            lib.double_flush()

        def wait(self, stream: object = None) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            assert self.enable_timing and end.enable_timing and end._asks <= 0, "not timed, or not there yet"
            return (end.time - self.time) * 1000

    def current_stream(device: Any = None) -> Stream:
        index = index_of(device)
        return Stream(index, number=lib.double_stream(index))

    class StreamContext:
        def __init__(self, stream: Any):
            self.stream = stream

        def __enter__(self) -> None:
            self.before = lib.double_device(), None
            if self.stream is not None:
                index = self.stream.device.index
                self.before = lib.double_device(), lib.double_stream(index)
                lib.double_set_device(index)
                lib.double_set_stream(index, self.stream.cuda_stream)

        def __exit__(self, *error: object) -> None:
            device, number = self.before
            if self.stream is not None:
                lib.double_set_stream(self.stream.device.index, number)
            lib.double_set_device(device)

    class Device:
        def __init__(self, device: Any):
            self.index = index_of(device)

        def __enter__(self) -> None:
            self.before = lib.double_device()
            lib.double_set_device(self.index)

        def __exit__(self, *error: object) -> None:
            lib.double_set_device(self.before)

    state = {"is_initialized": False, "mode": 0}

    def start() -> None:
        state["is_initialized"] = True

    def set_sync_debug_mode(mode: int | str) -> None:
        state["mode"] = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore[arg-type]
        lib.double_sync_mode(state["mode"])

    generators = tuple(
        torch.Generator(f"cuda:{index}") for index in range(DEVICES)
    )  # the first of each is the default one

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generators[index_of(None if device == "cuda" else device)].get_state()

    def set_rng_state(new: torch.Tensor, device: Any = None) -> None:
        assert new.device.type == "cpu" and new.dtype == torch.uint8
        generators[index_of(None if device == "cuda" else device)].set_state(new)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32
    )
    doubles: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "StreamContext": StreamContext,
        "_lazy_init": start,
        "_sleep": lambda cycles: None,
        "current_device": lambda: lib.double_device(),
        "current_stream": current_stream,
        "default_generators": generators,
        "default_stream": lambda device=None: Stream(device, number=0),
        "device": Device,
        "device_count": lambda: DEVICES,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": get_rng_state,
        "get_sync_debug_mode": lambda: state["mode"],
        "init": start,
        "ipc_collect": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: state["is_initialized"],
        "manual_seed": lambda seed: generators[lib.double_device()].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "max_memory_allocated": lambda device=None: lib.double_peak(index_of(device)),
        "max_memory_reserved": lambda device=None: lib.double_peak(index_of(device)),
        "mem_get_info": lambda device=None: (MEMORY - lib.double_held(index_of(device)), MEMORY),
        "memory_allocated": lambda device=None: lib.double_held(index_of(device)),
        "memory_reserved": lambda device=None: lib.double_held(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: lib.double_reset_peak(index_of(device)),
        "set_device": lambda device: lib.double_set_device(index_of(device)),
        "set_rng_state": set_rng_state,
        "set_sync_debug_mode": set_sync_debug_mode,
        "stream": StreamContext,
        "synchronize": lambda device=None: lib.double_flush(),
    }
    for name, double in doubles.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, double)
    torch.backends.cuda.is_built = lambda: True


def _patch_storages() -> None:
    """Let storages on the devices be copied and saved, which a build without CUDA cannot do."""

    def as_tensor(storage: Any) -> torch.Tensor:
        held = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return held.set_(storage, 0, (storage.nbytes(),), (1,))

    def patched(inner: Any, change: Any) -> Any:
        return lambda storage: change(as_tensor(storage)).untyped_storage() if storage.is_cuda else inner(storage)

    cls: Any = torch.UntypedStorage
    cls.clone, cls.cpu = patched(cls.clone, torch.Tensor.clone), patched(cls.cpu, torch.Tensor.cpu)
