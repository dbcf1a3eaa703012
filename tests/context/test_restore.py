"""autotransform: restore, device, distribution, random states."""

import logging

import pytest
import torch
from torch import nn

from drivetrain.context import Context
from drivetrain.core.errors import DeviceError, DistributedError, ExperimentError, ResumeError
from drivetrain.runtime.run import Run, set_current_run
from drivetrain.runtime.seeds import capture_rng


@pytest.fixture
def start(tmp_path):
    """Make a run with given parameters the current one."""

    def begin(origins=None, restore=None, **params):
        run = Run(folder=tmp_path, seed=5, params=params, origins=origins or {})
        run.restore = restore
        set_current_run(run)
        return run

    yield begin
    set_current_run(None)


def test_outside_a_run_only_the_device_is_chosen():
    ctx = Context(model=nn.Linear(2, 1))
    before = torch.get_rng_state()
    assert ctx.autotransform() is ctx
    assert ctx.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.equal(before, torch.get_rng_state()) and type(ctx.model) is nn.Linear


def test_the_run_restores_and_its_random_states_come_last(start):
    torch.manual_seed(3)
    source = Context(model=nn.Linear(2, 1), epoch=4)
    saved, states = source.state_dict(), capture_rng()
    expected = torch.rand(3)

    def restore(context):
        context.load_state_dict(saved)
        torch.rand(100)  # reading draws numbers; that must not matter
        return states

    start(restore=restore, resume="auto")
    ctx = Context(model=nn.Linear(2, 1), epoch=0).autotransform()
    assert ctx.epoch == 4 and torch.equal(ctx.model.weight.cpu(), source.model.weight)
    assert torch.equal(torch.rand(3), expected)


def test_no_random_states_leave_the_generators_alone(start):
    start(restore=lambda context: None, cuda=False)
    before = torch.get_rng_state()
    Context(epoch=0).autotransform()
    assert torch.equal(before, torch.get_rng_state())


def test_a_checkpoint_that_nobody_reads_is_an_error(start):
    start(checkpoint="runs/a")
    with pytest.raises(ExperimentError, match="checkpoint='runs/a'"):
        Context().autotransform()


def test_a_loader_without_state_cannot_be_resumed_but_can_start_from_weights(start):
    loader = torch.utils.data.DataLoader([1])
    start(restore=lambda context: None, resume="auto")
    with pytest.raises(ResumeError, match=r"data\.train: a loader without state"):
        Context(data={"train": loader}).autotransform()
    start_again = Context(data={"train": loader})
    set_current_run(None)
    start(restore=lambda context: None, checkpoint="x", cuda=False)
    assert start_again.autotransform().device.type == "cpu"


def test_the_device_follows_the_parameters_of_the_run(start, caplog):
    start(cuda=False)
    assert Context().autotransform().device.type == "cpu"
    set_current_run(None)
    start(device="cpu", cuda=True, origins={"cuda": "cli"})
    assert Context().autotransform().device.type == "cpu"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_cuda_by_default_falls_back_with_one_line_and_cuda_asked_for_fails(start, caplog):
    start(cuda=True, origins={"cuda": "default"})
    with caplog.at_level(logging.INFO, "drivetrain"):
        assert Context().autotransform().device.type == "cpu"
    assert [record.message for record in caplog.records] == ["No accelerator found: running on the CPU."]
    set_current_run(None)
    start(cuda=True, origins={"cuda": "cli"})
    with pytest.raises(DeviceError):
        Context().autotransform()


def test_distributed_without_a_group_says_what_to_do(start):
    start(distributed=True, cuda=False)
    with pytest.raises(DistributedError, match="torchrun"):
        Context(model=nn.Linear(1, 1)).autotransform()
