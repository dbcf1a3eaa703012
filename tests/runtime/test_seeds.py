import hashlib
import io
import os
import random
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain.core.errors import ConfigError, StateError
from drivetrain.runtime import seeds
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.seeds import (
    capture_rng,
    derive_seed,
    preserve_rng_state,
    reseed_rank,
    restore_rng,
    same_state,
    seed_worker,
    set_deterministic,
    set_seed,
)


@pytest.fixture
def kept_rng():
    state = capture_rng()
    yield
    restore_rng(state)


def draws() -> tuple[float, ...]:
    """One draw of each shared generator, the normal ones too: those keep a second value for the next call."""
    return (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "shuffle", 3), "drivetrain:0:shuffle:3"),
        ((42, "rank"), "drivetrain:42:rank"),
        ((2**70, "fetch", 1, -2), f"drivetrain:{2**70}:fetch:1:-2"),
    ],
)
def test_derived_seed_is_the_first_63_bits_of_a_sha256(arguments, text):
    digest = hashlib.sha256(text.encode()).digest()
    assert derive_seed(*arguments) == int.from_bytes(digest[:8], "big") // 2 < 2**63


def test_derived_seeds_never_change():
    assert derive_seed(0, "shuffle", 3) == 3479638028671884636
    assert derive_seed(42, "rank", 0) == 5895968024377670304
    assert derive_seed(42, "rank", 1) == 8249996159024375283


def test_equal_seeds_give_equal_draws_of_all_generators(kept_rng):
    set_seed(7)
    first = draws()
    set_seed(8)
    second = draws()
    set_seed(7)
    assert draws() == first
    assert all(a != b for a, b in zip(first, second))


def test_seed_equals_seeding_each_generator_by_hand(kept_rng):
    seed = 2**40 + 5
    set_seed(np.int64(seed))
    ours = draws()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    assert draws() == ours


@pytest.mark.parametrize("seed", [1.5, "7", None, 2**64])
def test_seed_that_is_no_64_bit_number_is_refused(seed, kept_rng):
    with pytest.raises(ConfigError, match="seed"):
        set_seed(seed)


def test_captured_generators_continue_exactly_also_through_a_file(kept_rng):
    random.gauss(0, 1), np.random.randn()  # each keeps its second normal for later
    file = io.BytesIO()
    torch.save(capture_rng(), file)
    expected = draws() + draws()
    file.seek(0)
    restore_rng(torch.load(file, weights_only=True))
    assert draws() + draws() == expected


@pytest.mark.gpu
def test_cuda_generator_is_captured_once_in_use_and_continues_exactly(kept_rng):
    torch.rand(3, device="cuda")
    state = capture_rng()
    expected = torch.rand(5, device="cuda")
    restore_rng(state)
    assert state["accelerator"]["type"] == "cuda"
    assert torch.equal(torch.rand(5, device="cuda"), expected)


def test_restoring_something_else_is_refused_before_anything_changes(kept_rng):
    before = torch.get_rng_state()
    with pytest.raises(StateError, match=r"\['python'\] missing"):
        restore_rng({"torch": torch.zeros(3)})
    assert torch.equal(torch.get_rng_state(), before)


def _seeded_model_and_mask(seed):
    set_seed(seed)
    weight = torch.nn.Linear(4, 4).weight.detach()
    used = reseed_rank(seed)
    return weight, torch.nn.functional.dropout(torch.ones(64)), used, random.random(), np.random.rand()


def test_ranks_share_weights_and_not_dropout_masks(world2):
    (weight0, mask0, used0, *drawn0), (weight1, mask1, used1, *drawn1) = world2(_seeded_model_and_mask, 5)
    assert torch.equal(weight0, weight1)
    assert not torch.equal(mask0, mask1)
    assert (used0, used1) == (derive_seed(5, "rank", 0), derive_seed(5, "rank", 1))
    assert all(a != b for a, b in zip(drawn0, drawn1))


def _device_specific_seed():
    set_seed(100, device_specific=True)
    return torch.initial_seed() - get_rank()


def test_device_specific_seed_adds_the_rank(world2):
    assert world2(_device_specific_seed) == [100, 100]


class Noise(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def worker_noise(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat(list(DataLoader(Noise(), num_workers=2, worker_init_fn=seed_worker, generator=generator)))


def test_workers_do_not_share_random_numbers_and_repeat_them_for_a_seed():
    noise = worker_noise(3)
    assert noise.flatten().unique().numel() == noise.numel()
    assert torch.equal(worker_noise(3), noise)
    assert not torch.equal(worker_noise(4), noise)


def test_seeding_a_worker_does_not_rewind_torch(kept_rng):
    torch.manual_seed(1)
    torch.rand(3)
    before = torch.get_rng_state()
    assert seed_worker(0) == 1
    assert torch.equal(torch.get_rng_state(), before)


def _worker_seed():
    torch.manual_seed(9)  # ranks that are seeded equally
    seed = seed_worker(0)
    return seed, random.random(), np.random.rand(), torch.rand(()).item()


def test_workers_of_equally_seeded_ranks_differ(world2):
    first, second = world2(_worker_seed)
    assert first[0] == 9
    assert all(a != b for a, b in zip(first, second))
    assert world2(_worker_seed) == [first, second]


def settings() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_deterministic_modes_and_the_way_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    late = pytest.warns(UserWarning, match="after CUDA has started") if torch.cuda.is_initialized() else nullcontext()
    try:
        with late:
            set_deterministic("warn")
        assert settings() == (True, True, False, ":4096:8")
        set_deterministic("strict")
        assert settings() == (True, False, False, ":4096:8")
    finally:
        set_deterministic("off")
    assert settings() == before


def test_deterministic_off_keeps_the_programs_own_settings():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        set_deterministic("off")
        assert settings()[:2] == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_users_own_cublas_setting_is_kept(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    try:
        set_seed(0, deterministic=True)
        assert settings() == (True, False, False, ":16:8")
    finally:
        set_deterministic("off")


def test_unknown_deterministic_mode_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'strict'"):
        set_deterministic("strickt")


def test_a_block_may_draw_without_changing_the_generators():
    with preserve_rng_state():
        inside = torch.rand(3).tolist(), np.random.rand(), random.random()
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == inside


@pytest.mark.skipif(
    sys.implementation.name != "cpython"
    or not hasattr(random, "_inst")
    or not hasattr(np.random.standard_normal, "__self__"),
    reason="generators that cannot be looked at are copied each time",
)
def test_generators_that_nobody_has_used_are_neither_copied_nor_set_again(kept_rng, monkeypatch):
    set_seed(3)
    calls = []
    for owner, name in (
        (seeds, "random_state"),
        (seeds, "set_random_state"),
        (np.random, "get_state"),
        (np.random, "set_state"),
    ):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _m=method, _n=name, **k: calls.append(_n) or _m(*a, **k))
    first = capture_rng()
    assert sorted(calls) == ["get_state", "random_state"]
    torch.randn(3)
    again = capture_rng()
    restore_rng(first)
    assert sorted(calls) == ["get_state", "random_state"] and not same_state(first, again)
    for draw in (random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn):
        before = capture_rng()
        numbers = [draw() for _ in range(5)]
        assert not same_state(before, capture_rng())
        restore_rng(before)
        assert same_state(before, capture_rng()) and [draw() for _ in range(5)] == numbers


def test_generators_whose_memory_is_not_known_continue_exactly(kept_rng, monkeypatch):
    monkeypatch.setattr(seeds, "PYTHON_MEMORY", seeds._memory_of(None))
    module = SimpleNamespace(
        **(vars(np.random) | {"standard_normal": lambda: None})
    )  # which does not show its generator
    monkeypatch.setitem(sys.modules, "numpy.random", module)
    monkeypatch.setattr(seeds, "_normal_memory", seeds._normal_memory.__wrapped__)
    assert seeds._normal_memory() is None and seeds._python_memory() is None and seeds._numpy_memory() is None
    set_seed(3)
    draws()
    assert seeds.held_normal() is not None
    before = capture_rng()
    numbers = draws()
    assert seeds.held_normal() is None and not same_state(before, capture_rng())
    restore_rng(before)
    assert same_state(before, capture_rng()) and draws() == numbers


def test_a_normal_that_is_held_belongs_to_the_state_also_where_the_words_are_the_same(kept_rng):
    np.random.seed(1), np.random.randn()
    held = capture_rng()
    user = np.random.get_state()
    second = np.random.randn()  # takes the held one, and no word
    used = capture_rng()
    third = np.random.randn()
    restore_rng(held)
    assert same_state(held, capture_rng()) and (np.random.randn(), np.random.randn()) == (second, third)
    restore_rng(used)
    assert same_state(used, capture_rng()) and np.random.randn() == third
    restore_rng(used)
    capture_rng()
    np.random.set_state(user)
    assert same_state(held, capture_rng()) and np.random.randn() == second


def test_random_states_are_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        state = capture_rng()
        restore_rng(state)
    assert state["python"]["words"].device.type == "cpu"


class TwoDevices:
    """Stands for `torch.cuda` of a machine with two devices, each with its generator."""

    def __init__(self):
        self.generators, self.current = [torch.Generator().manual_seed(index) for index in range(2)], 0

    def is_initialized(self):
        return True

    def get_rng_state(self):
        return self.generators[self.current].get_state()

    def set_rng_state(self, state):
        self.generators[self.current].set_state(state)

    @contextmanager
    def device_index(self, index):
        before, self.current = self.current, self.current if index is None else index
        yield
        self.current = before


def test_the_random_state_of_a_named_device_is_saved_and_restored(kept_rng, monkeypatch):
    cuda = TwoDevices()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_index", cuda.device_index)
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    second = torch.device("cuda", 1)
    state = capture_rng(second)
    expected = torch.rand(3, generator=cuda.generators[1])
    restore_rng(state, second)
    assert torch.equal(torch.rand(3, generator=cuda.generators[1]), expected)
    assert cuda.generators[0].initial_seed() == 0 and cuda.current == 0
    restore_rng(state)  # on another machine the run may have another device
    assert torch.equal(torch.rand(3, generator=cuda.generators[0]), expected)
