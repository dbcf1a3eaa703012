"""FastDefaults: what it sets, that it says so, and that the process is as before."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.fast_defaults import FastDefaults
from drivetrain.core.errors import NoEffectWarning
from drivetrain.core.event import Event
from drivetrain.module.convolutions import is_worth_channels_last
from drivetrain.module.optimizers import use_fused_kernels
from drivetrain.train.trainer import Trainer
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import ConvNet, Watch, image_data, train, weights
from tests.train.tasks import make_data, make_model
from tests.train.tasks import train as train_plain


@pytest.fixture(autouse=True)
def process_is_as_before():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == before


def test_switches_hold_during_the_run_and_every_change_is_listed():
    during = Watch(
        Event.BATCH_START, lambda state: (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)
    )
    fast = FastDefaults()
    trainer = conv_run(fast, callbacks=[during])
    train(trainer, image_data())
    assert set(during.values) == {("high", True)} and len(fast.changes) == 4
    assert trainer.optimizer.param_groups[0]["fused"] is True
    assert trainer.model.features[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_the_maths_stays():
    results = []
    for algorithms in ((FastDefaults(),), ()):
        trainer = conv_run(*algorithms)
        trainer.model.features[3].p = 0.0  # dropout draws in the order of memory
        train(trainer, image_data())
        results.append(weights(trainer.model))
    for ours, plain in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_an_error_restores_the_process():
    trainer = conv_run(FastDefaults())
    trainer.loss_func = lambda outputs, targets: 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(trainer, image_data())


def test_deterministic_mode_keeps_low_bits():
    torch.use_deterministic_algorithms(True)
    try:
        fast = FastDefaults()
        conv_run(fast)
        assert not any("TF32" in change or "cuDNN" in change for change in fast.changes)
    finally:
        torch.use_deterministic_algorithms(False)


def test_optimizers_that_chose_a_kernel_or_have_none_are_left_alone():
    weight = nn.Parameter(torch.ones(2))
    assert use_fused_kernels(torch.optim.AdamW([weight]))
    assert not use_fused_kernels(torch.optim.AdamW([weight], fused=False))
    assert not use_fused_kernels(torch.optim.AdamW([weight], foreach=True))
    # torch's fused SGD leaves 16-bit parameters on the CPU as they are
    assert not use_fused_kernels(torch.optim.SGD([nn.Parameter(weight.detach().bfloat16())], lr=0.1))
    assert not use_fused_kernels(torch.optim.RMSprop([weight]))
    begun = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    begun.step()
    assert not use_fused_kernels(begun)


def test_convolutions_decide_by_their_share_of_the_parameters():
    assert is_worth_channels_last(ConvNet()) and not is_worth_channels_last(make_model())
    with pytest.raises(ValueError, match="channels_last"):
        FastDefaults(channels_last="yes")


@pytest.mark.skipif(
    not hasattr(nn.functional, "linear_cross_entropy"), reason="needs a torch with linear_cross_entropy"
)
def test_the_fused_loss_trains_and_evaluates_as_the_plain_one():
    settings = {"tf32": False, "cudnn_benchmark": False, "fused_optimizer": False, "channels_last": False}
    histories = []
    for algorithms in ((FastDefaults(**settings, fused_loss=True),), ()):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, (), algorithms=algorithms)
        train_plain(trainer, make_data(), num_epochs=3, eval_dataset=make_data())
        histories.append(
            [list(trainer.run_history.get_metric_values(f"{one}_loss_epoch")) for one in ("train", "eval")]
        )
    assert histories[0][0] == pytest.approx(histories[1][0], rel=1e-5)
    assert histories[0][1] == pytest.approx(histories[1][1], rel=1e-5)


def test_a_fused_loss_that_cannot_be_warns():
    model = make_model()
    fast = FastDefaults(fused_loss=True)
    with pytest.warns(NoEffectWarning, match="fused_loss"):
        trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), (), algorithms=[fast])
    fast.close(trainer.state, trainer.logbook)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_fused_sgd_takes_parameters_whose_first_gradients_come_in_different_steps(is_loaded):
    def train(is_fused):
        early, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = torch.optim.SGD([early, late], lr=0.1, momentum=0.9)
        if is_fused:
            assert use_fused_kernels(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            (early.sum() + (2 * late.sum() if step else 0)).backward()
            optimizer.step()
            if is_loaded:
                optimizer.load_state_dict(optimizer.state_dict())
        return torch.cat([early, late])

    assert torch.equal(train(is_fused=True), train(is_fused=False))
