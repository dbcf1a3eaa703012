"""Batches on their way: what travels, and on an accelerator that nobody waits and nothing is overwritten."""

import io
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from drivetrain.core.containers import leaves
from drivetrain.data import prefetch
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.prefetch import to_device

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: torch.Tensor
    more: dict


class MovesItself:
    def __init__(self):
        self.device = "cpu"

    def to(self, device):
        self.device = str(device)
        return self


def test_all_tensors_of_a_batch_are_found():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(leaves([Pair(a, "text"), {"b": Record(b, {"c": (c, 1)})}], torch.Tensor))
    assert [tensor is other for tensor, other in zip(found, (a, b, c))] == [True] * 3
    assert list(leaves(["text", MovesItself()], torch.Tensor)) == []


def test_batches_for_the_cpu_move_and_keep_their_types():
    pairs = iter([("info", Pair(torch.zeros(1), MovesItself()))])
    ((info, batch),) = to_device(pairs, torch.device("cpu"), 1)
    assert info == "info" and type(batch) is Pair and batch.y.device == "cpu"


class Numbers(Dataset):
    def __init__(self, length=64):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return Pair(torch.full((64, 64), float(index)), index)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_arrive_whole_while_the_device_is_busy(prefetch, workers):
    loader = SmartDataLoader(Numbers(), True, 3, batch_size=4, prefetch=prefetch, num_workers=workers).to("cuda")
    work = torch.randn(2048, 2048, device="cuda")
    sums, expected = [], []
    for batch in loader:
        assert type(batch) is Pair and batch.x.device.type == batch.y.device.type == "cuda"
        for _ in range(20):
            work = torch.tanh(work @ work)  # keeps the consumer's stream behind the copies
        sums.append((batch.x[:, 0, 0] + work[0, 0] * 0).clone())
        expected.append(loader.sample_index)
        assert loader.position == 4 * len(sums)
        del batch
    assert torch.equal(torch.cat(sums).cpu(), torch.cat(expected).float())


@pytest.mark.gpu
def test_a_batch_is_not_used_before_its_copy_has_arrived():
    data = TensorDataset(torch.arange(1.0, 257.0).view(-1, 1).expand(256, 65536).contiguous())
    loader = SmartDataLoader(data, batch_size=64, resident=False, prefetch=1).to("cuda")
    for _ in range(
        3
    ):  # large copies, and a consumer that is idle: nothing but the event keeps it from reading too early
        sums = [batch[0][:, -1].clone() for batch in loader]
        assert torch.equal(torch.cat(sums).cpu(), torch.arange(1.0, 257.0))


@pytest.mark.gpu
@pytest.mark.parametrize("resident", ["auto", False])
def test_no_batch_makes_the_host_wait(resident):
    data = TensorDataset(torch.randn(512, 32), torch.arange(512))
    loader = SmartDataLoader(data, True, 1, batch_size=32, resident=resident).to("cuda")
    seen = []
    for x, y in loader:
        if not seen:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        seen.append((x * 2, y, loader.sample_index))
    torch.cuda.set_sync_debug_mode("default")
    assert (seen[0][2].device.type == "cuda") == (resident == "auto")
    rows = torch.cat([index.cpu() for _, _, index in seen])
    assert torch.equal(torch.cat([y for _, y, _ in seen]).cpu(), rows)
    assert torch.equal(torch.cat([x for x, _, _ in seen]).cpu(), data.tensors[0][rows] * 2)


@pytest.mark.gpu
def test_data_that_lives_on_the_device_already_is_gathered_there():
    data = TensorDataset(torch.arange(20, device="cuda"))
    loader = SmartDataLoader(data, True, 1, batch_size=8)
    host = SmartDataLoader(TensorDataset(torch.arange(20)), True, 1, batch_size=8)
    for (on_device,), (on_host,) in zip(loader, host):
        assert on_device.device.type == "cuda" and torch.equal(on_device.cpu(), on_host)
    batches = SmartDataLoader(data, batch_sampler=[[1, 2], [3]])
    assert [batch[0].tolist() for batch in batches] == [[1, 2], [3]]
    assert next(iter(SmartDataLoader(data, batch_size=4).to("cpu")))[0].device.type == "cpu"


@pytest.mark.gpu
def test_pinned_memory_is_used_when_asked_for():
    for workers in (0, 2):
        loader = SmartDataLoader(Numbers(8), batch_size=4, pin_memory=True, num_workers=workers)
        assert all(batch.x.is_pinned() for batch in loader)
    data = TensorDataset(torch.randn(10, 3), torch.arange(10))
    for part in (data, Subset(data, [5, 1, 2, 7])):
        for shuffle in (True, False):
            loader = SmartDataLoader(part, shuffle, 1, batch_size=3, pin_memory=True)
            plain = SmartDataLoader(part, shuffle, 1, batch_size=3)
            for batch, other in zip(loader, plain):
                assert all(mine.is_pinned() and torch.equal(mine, theirs) for mine, theirs in zip(batch, other))


@pytest.mark.gpu
def test_objects_that_move_themselves_arrive_whole():
    collate = lambda samples: MovesItself()
    for depth in (0, 2):
        loader = SmartDataLoader(Numbers(8), batch_size=4, collate_fn=collate, prefetch=depth).to("cuda")
        assert [batch.device for batch in loader] == ["cuda:0", "cuda:0"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    def open_terminal():
        screen = Terminal()
        monkeypatch.setattr("sys.stdout", screen)  # within the test: pytest changes it between setup and call
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(prefetch, "REFRESH_SECONDS", 0.0)
        return screen

    return open_terminal


def test_without_a_terminal_there_is_no_bar(capsys):
    list(SmartDataLoader(torch.zeros(4)))
    assert capsys.readouterr().out == ""


def test_the_bar_counts_from_the_restored_place_and_can_be_turned_off(open_terminal):
    terminal = open_terminal()
    loader = SmartDataLoader(torch.zeros(8), batch_size=2, random_seed=1, name="digits")
    loader.load_state_dict({"seed": 1, "epoch": 0, "position": 4, "length": 8, "version": 1})
    assert len(list(loader)) == 2
    text = terminal.getvalue()
    assert "digits" in text and "2/4" in text and "4/4" in text and "1/4" not in text
    loader.loading_bar = False
    list(loader)
    assert terminal.getvalue() == text


def test_only_rank_0_shows_it(open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setattr(prefetch, "is_master", lambda: False)
    list(SmartDataLoader(torch.zeros(4)))
    assert terminal.getvalue() == ""


def test_a_loop_inside_a_loop_goes_without_and_a_break_clears_the_bar(open_terminal):
    terminal = open_terminal()
    loader = SmartDataLoader(torch.zeros(4), batch_size=2, name="outer")
    inner = SmartDataLoader(torch.zeros(4), batch_size=2, name="inner")
    for _ in loader:
        list(inner)
        break
    assert "outer" in terminal.getvalue() and "inner" not in terminal.getvalue()
    list(inner)
    assert "inner" in terminal.getvalue(), "the bar of the broken loop is gone"


@pytest.mark.parametrize(("kind", "pins"), [("cuda", True), ("xpu", True), ("mps", False), (None, False)])
def test_batches_are_pinned_only_for_devices_that_copy_from_pinned_memory(kind, pins, monkeypatch):
    accelerator = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    loader = SmartDataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2, pin_memory=True)
    assert loader._pins(accelerator) is pins
