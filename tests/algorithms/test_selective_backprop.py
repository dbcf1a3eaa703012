"""Selective backprop: when, which samples, and that the scoring pass leaves no trace."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drivetrain.algorithms.cutout import CutOut
from drivetrain.algorithms.schedule_free import ScheduleFree
from drivetrain.algorithms.selective_backprop import (
    SelectiveBackprop,
    draw_ranks,
    select_using_loss,
    should_selective_backprop,
)
from drivetrain.algorithms.swa import SWA
from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from drivetrain.train.trainer import Trainer
from tests.algorithms.tasks import ConvNet, Watch, conv_trainer, image_data, make_state, same, train, weights


@pytest.mark.parametrize(
    ("moment", "batch", "interrupt", "expected"),
    [
        (0.49, 0, 2, False),
        (0.5, 0, 2, True),
        (0.5, 1, 2, False),
        (0.5, 1, 0, True),
        (0.89, 2, 3, False),
        (0.9, 0, 2, False),
    ],
)
def test_when(moment, batch, interrupt, expected):
    assert should_selective_backprop(moment, batch, interrupt=interrupt) is expected


def test_the_chosen_are_drawn_by_rank_of_their_loss():
    x, y = torch.randn(10, 3), torch.arange(10)
    losses = torch.tensor([5.0, 1, 9, 3, 7, 2, 8, 0, 6, 4])

    def loss(outputs, targets, reduction="mean"):
        assert reduction == "none"
        return losses

    chosen_x, chosen_y = select_using_loss(x, y, lambda x: x, loss, 0.4, generator=torch.Generator().manual_seed(0))
    ranks = draw_ranks(10, 0.4, torch.Generator().manual_seed(0))
    assert torch.equal(chosen_y, losses.argsort()[ranks]) and torch.equal(chosen_x, x[chosen_y])
    assert len(set(chosen_y.tolist())) == 4


def test_ranks_are_drawn_with_the_weights_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[draw_ranks(4, 0.25, generator)] += 1  # one of four, so the weights are the probabilities
    expected = ((torch.arange(4) + 0.5) / 4) ** 3
    torch.testing.assert_close(counts / 4000, expected / expected.sum(), rtol=0, atol=0.03)


def test_at_least_one_sample_is_kept():
    x, _ = select_using_loss(torch.randn(1, 3), torch.tensor([0]), nn.Linear(3, 2), nn.CrossEntropyLoss(), keep=0.5)
    assert len(x) == 1


def test_losses_of_several_values_per_sample_are_averaged():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    x[2] += 100  # by far the largest loss
    kept = [
        select_using_loss(x, y, lambda x: x, F.mse_loss, 0.25, generator=torch.Generator().manual_seed(s))[0]
        for s in range(20)
    ]
    assert sum(torch.equal(one[0], x[2]) for one in kept) > 8


def test_scoring_may_use_smaller_images():
    seen = []

    def model(x):
        seen.append(x)
        return x.mean((2, 3))

    x = torch.randn(4, 3, 8, 8)
    kept, _ = select_using_loss(x, torch.arange(4) % 3, model, F.cross_entropy, scale_factor=0.5)
    torch.testing.assert_close(seen[0], F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False))
    assert kept.shape == (2, 3, 8, 8)


def test_bad_arguments_are_refused():
    x, y = torch.randn(4, 3), torch.arange(4)
    with pytest.raises(TypeError, match="reduction"):
        select_using_loss(x, y, nn.Linear(3, 4), lambda outputs, targets: 0)
    with pytest.raises(ValueError, match="scale_factor"):
        select_using_loss(x, y, nn.Linear(3, 4), F.cross_entropy, scale_factor=1.5)
    with pytest.raises(ValueError, match="dimensions"):
        select_using_loss(x, y, nn.Linear(3, 4), F.cross_entropy, scale_factor=0.5)
    for arguments in ({"keep": 0}, {"keep": 1.2}, {"start": -1}, {"start": 0.9, "end": 0.1}, {"interrupt": -1}):
        with pytest.raises(ValueError, match="SelectiveBackprop"):
            SelectiveBackprop(**arguments)


def test_a_loss_without_reduction_is_refused_when_the_trainer_is_built():
    with pytest.raises(TypeError, match="reduction='none'"):
        conv_trainer(SelectiveBackprop(), loss=lambda outputs, targets: outputs.sum())


def test_a_module_loss_keeps_its_reduction():
    loss = nn.CrossEntropyLoss(reduction="sum")
    select_using_loss(torch.randn(4, 3), torch.arange(4) % 3, nn.Linear(3, 3), loss)
    assert loss.reduction == "sum"


def test_the_scoring_pass_leaves_buffers_and_generators_as_they_were():
    model, (x, y) = ConvNet().train(), image_data(8).tensors
    state = make_state([x, y], model=model, loss_fn=nn.CrossEntropyLoss(), max_duration="10ba")
    for _ in range(6):
        state.clock.next_batch()
    before, generator = weights(model), torch.get_rng_state()
    Engine(state, plugins=[SelectiveBackprop()]).fire(Event.AFTER_DATALOADER)
    assert len(state.batch[0]) == 4
    assert same(weights(model), before) and torch.equal(torch.get_rng_state(), generator)


def test_in_a_run_it_acts_between_start_and_end_on_every_other_batch():
    sizes = Watch(Event.BATCH_START, lambda state: len(state.batch[0]))
    train(
        conv_trainer(SelectiveBackprop(), callbacks=[sizes]),
        image_data(40),
        num_epochs=None,
        max_duration="20ba",
        per_device_batch_size=4,
    )
    assert sizes.values == [4] * 10 + [2, 4] * 4 + [4, 4]


def test_it_runs_before_augmentations_whatever_the_users_order():
    trainer = conv_trainer(CutOut(), SelectiveBackprop(), CutOut(num_holes=2))
    names = [str(plugin) for plugin in trainer.engine.listeners(Event.AFTER_DATALOADER)]
    assert names == ["SelectiveBackprop", "CutOut", "CutOut"]


def test_mapping_batches_are_scored_by_their_logits():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = ConvNet()

        def forward(self, image):
            return {"logits": self.net(image)}

    x, y = image_data(8).tensors
    state = make_state({"image": x, "labels": y}, model=Named(), loss_fn=nn.CrossEntropyLoss(), max_duration="10ba")
    for _ in range(6):
        state.clock.next_batch()
    Engine(state, plugins=[SelectiveBackprop(input_key="image", target_key="labels", scale_factor=0.5)]).fire(
        Event.AFTER_DATALOADER
    )
    assert len(state.batch["image"]) == len(state.batch["labels"]) == 4


class OwnLoss(nn.Module):
    """A model in Composer's form: it takes the whole batch and computes its loss from outputs and batch."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or ConvNet()

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch, reduction="mean"):
        return F.cross_entropy(outputs, batch[1], reduction=reduction)


class OwnLossByKeywords(OwnLoss):
    def loss(self, outputs, batch, *args, **kwargs):
        return {"loss": F.cross_entropy(outputs, batch[1], *args, **kwargs)}


class OwnLossWithoutReduction(OwnLoss):
    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("model", [OwnLoss, OwnLossByKeywords])
def test_a_models_own_loss_selects_what_a_loss_function_does(model, scale):
    chosen = []
    for own in (True, False):
        torch.manual_seed(0)
        net, rows = ConvNet(), Watch(Event.BATCH_START, lambda state: state.batch[0].clone())
        trained, loss = (model(net), None) if own else (net, nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        plugin = SelectiveBackprop(0, 1, scale_factor=scale)
        train(Trainer(trained, loss, optimizer, [rows], algorithms=[plugin], seed=3), image_data(), num_epochs=1)
        chosen.append([*rows.values, *weights(net)])
    assert chosen[0][0].shape[0] == 3 and same(*chosen)


def test_a_model_that_gives_no_loss_for_each_sample_is_rejected():
    for model, text in (
        (OwnLossWithoutReduction(), r"OwnLossWithoutReduction.loss has no `reduction`"),
        (ConvNet(), "computes its loss in"),
    ):
        with pytest.raises(TypeError, match=text):
            Trainer(model, None, None, callbacks=(), algorithms=[SelectiveBackprop()])


@pytest.mark.parametrize("form", [tuple, list, dict])
def test_what_else_belongs_to_a_sample_is_selected_with_it(form):
    x, y = image_data(8).tensors
    entries = {"image": x, "labels": y, "weights": torch.arange(8), "scale": torch.tensor(2.0)}
    batch = entries if form is dict else form(entries.values())
    keys = ("image", "labels") if form is dict else (0, 1)

    class Named(ConvNet):
        def forward(self, image):
            return {"logits": super().forward(image)} if form is dict else super().forward(image)

    state = make_state(batch, model=Named(), loss_fn=nn.CrossEntropyLoss(), max_duration="10ba")
    run_algorithm = Engine(state, plugins=[SelectiveBackprop(0, 1, input_key=keys[0], target_key=keys[1])])
    run_algorithm.fire(Event.AFTER_DATALOADER)
    images, labels, numbers, scale = state.batch.values() if form is dict else state.batch
    assert len(images) == 4 and scale == 2
    assert torch.equal(images, x[numbers]) and torch.equal(labels, y[numbers])


class TwoInputs(nn.Module):
    """A model whose `forward` requires two arguments, with a batch norm."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(3, 4), nn.Linear(2, 4), nn.BatchNorm1d(4)

    def forward(self, left, right):
        return self.norm(self.left(left) + self.right(right))


EXTRA_PASSES = {
    "selection": lambda: SelectiveBackprop(0, 1, input_key=[0, 1], target_key=2),
    "batch norms of a mean": lambda: SWA("0.1dur", "0.9dur", "1ba"),
    "batch norms in evaluation": lambda: ScheduleFree("sgd", 0.1),
}


@pytest.mark.parametrize("make", EXTRA_PASSES.values(), ids=EXTRA_PASSES)
def test_an_extra_pass_gives_the_model_all_of_its_inputs(make):
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 2), torch.arange(8) % 4)
    model = TwoInputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=[make()])
    train(trainer, data, per_device_batch_size=4, eval_dataset=data)
    assert trainer.state.clock.batch == 4
