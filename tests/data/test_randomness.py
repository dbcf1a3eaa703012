"""The shared generators around a fetch: seeded for it, and put back exactly."""

import random
import sys

import numpy as np
import pytest
import torch

from drivetrain.data import randomness
from drivetrain.data.randomness import SeededGenerators
from drivetrain.runtime import seeds


def draw():
    return torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


def seed_all(seed):
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="the memory of CPython's generator")
def test_pythons_state_is_saved_as_memory_and_not_as_625_numbers(monkeypatch):
    assert seeds.PYTHON_MEMORY is not None, "CPython stores the words of its generator as expected"
    monkeypatch.delattr(random, "getstate")
    monkeypatch.delattr(random, "setstate")
    test_a_fetch_inside_a_fetch_disturbs_neither()
    before = random._inst.getstate()
    with SeededGenerators(1):
        draw()
    assert random._inst.getstate() == before


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="the memory of CPython's generator")
def test_a_generator_with_another_layout_is_not_read_as_memory():
    class Other(random.Random):
        def getstate(self):
            version, words, gauss = super().getstate()
            return version, words[1:] + words[:1], gauss

    assert seeds._memory_of(Other(1)) is None
    assert seeds._memory_of(random.Random(1)) is not None


@pytest.mark.parametrize("is_memory", [True, False])
def test_the_callers_numbers_do_not_notice_a_fetch(monkeypatch, is_memory):
    if not is_memory:
        monkeypatch.setattr(randomness, "PYTHON_MEMORY", None)
    seed_all(1)
    expected = [draw() for _ in range(4)]
    seed_all(1)
    seen = []
    for seed in range(4):
        with SeededGenerators(seed):
            draw()
        seen.append(draw())
    assert seen == expected


@pytest.mark.parametrize("normals", [1, 2, 3])
def test_the_second_half_of_numpys_pair_of_normals_survives(normals):
    np.random.seed(3)
    expected = np.random.randn(normals + 3).tolist()
    np.random.seed(3)
    seen = [np.random.randn() for _ in range(normals)]
    for _ in range(3):
        with SeededGenerators(9):
            np.random.randn()
        with SeededGenerators(8):
            pass
        seen.append(np.random.randn())
    assert seen == expected


def test_a_fetch_repeats_from_its_seed_and_equals_plain_seeding():
    with SeededGenerators(5):
        first = draw()
    draw()
    with SeededGenerators(5):
        assert draw() == first
    seed_all(5)
    assert draw() == first
    with SeededGenerators(5, restores=False):
        pass
    assert draw() == first, "a worker's generators are left as the fetch leaves them"


def test_a_fetch_inside_a_fetch_disturbs_neither():
    with SeededGenerators(1):
        expected = draw(), draw()
    with SeededGenerators(1):
        first = draw()
        with SeededGenerators(2):
            draw()
            with SeededGenerators(3):
                draw()
        assert (first, draw()) == expected


def test_an_error_in_a_fetch_still_puts_the_generators_back():
    seed_all(2)
    expected = draw()
    seed_all(2)

    def fetch():
        with SeededGenerators(4):
            raise KeyError(draw())

    with pytest.raises(KeyError):
        fetch()
    assert draw() == expected


def test_another_kind_of_numpy_generator_survives():
    ours = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        expected = [np.random.randn() for _ in range(3)]
        np.random.set_bit_generator(np.random.PCG64(1))
        seen = []
        for _ in range(3):
            with SeededGenerators(1):
                np.random.randn()
            seen.append(np.random.randn())
        assert seen == expected
    finally:
        np.random.set_bit_generator(ours)
