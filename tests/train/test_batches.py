"""How batches meet models."""

import collections
import cProfile
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.core.errors import BatchOutputError, DrivetrainWarning
from drivetrain.train.batches import (
    PairForm,
    SeveralInputsForm,
    find_form,
    join_batch_outputs,
    num_inputs,
    slice_rows,
    split_batch,
)
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer


class Similarity(nn.Module):
    """Compares two inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, left, right, scale=1.0):
        return (self.left(left) * self.right(right)).sum(-1) * scale


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(10, *shape, generator=generator) for shape in ((3,), (2,), ())))


def test_a_model_of_two_inputs_gets_both_and_the_loss_function_the_third_entry():
    model, reference = Similarity(), Similarity()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    trainer.train(pairs(), num_epochs=2, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False})
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    left, right, target = pairs().tensors
    for _ in range(2):
        for start in range(0, 10, 4):
            rows = slice(start, start + 4)
            optimizer.zero_grad()
            nn.functional.mse_loss(reference(left[rows], right[rows]), target[rows]).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    expected = nn.functional.mse_loss(reference(left, right), target).item()
    assert trainer.evaluate(pairs(), per_device_batch_size=4)["evaluation_loss"] == pytest.approx(expected)
    torch.testing.assert_close(trainer.predict(pairs(), per_device_batch_size=4), reference(left, right).detach())
    inputs_only = TensorDataset(left, right)
    torch.testing.assert_close(trainer.predict(inputs_only, per_device_batch_size=4), reference(left, right).detach())


def test_two_inputs_work_in_micro_batches_and_with_metrics_of_targets():
    model, whole = Similarity(), Similarity()
    metric = {"error": lambda outputs, targets: (outputs - targets).abs().mean()}
    for one, settings in ((model, {"microbatch_size": 3}), (whole, {})):
        trainer = Trainer(
            one, nn.MSELoss(), torch.optim.SGD(one.parameters(), lr=0.1), callbacks=(), train_metrics=metric
        )
        loading = {"shuffle": False}
        history = trainer.train(
            pairs(), num_epochs=1, per_device_batch_size=10, train_dataloader_kwargs=loading, **settings
        )
        assert history.get_latest_metric("train_error_epoch") > 0
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_model_of_one_input_still_gets_the_first_entry_with_a_warning():
    batch = (torch.zeros(2, 3), torch.zeros(2), torch.zeros(2))
    with pytest.warns(DrivetrainWarning, match="the model gets the first, the loss function the next"):
        form = find_form(batch, nn.Linear(3, 1), has_loss_func=True)
    assert type(form) is PairForm
    with pytest.warns(DrivetrainWarning, match="the model gets the first 2, the loss function the next"):
        form = find_form((*batch, torch.zeros(2)), Similarity(), has_loss_func=True)
    assert isinstance(form, SeveralInputsForm) and form.targets((1, 2, 3, 4)) == 3


def test_what_a_plan_puts_around_forward_does_not_hide_its_arguments():
    model = Similarity()
    plain = type(model).forward

    class Changed(Similarity):
        def forward(self, *args, **kwargs):
            return plain(self, *args, **kwargs)

    assert num_inputs(Changed()) == 2
    assert num_inputs(torch.compile(Similarity(), backend="eager")) == 2


@dataclass
class Pair:
    """A batch, and the outputs of a model, that are neither a tuple nor a mapping."""

    x: torch.Tensor
    y: torch.Tensor
    names: list[str]


class PairTrainer(Trainer):
    sizes: list[tuple[int, int]]

    def calculate_train_batch_loss(self, batch):
        self.sizes.append((len(batch.y), len(batch.names)))
        batch.x = 2 * batch.x  # the hook may change its batch
        outputs = self.forward(batch.x)
        loss = self.compute_loss(outputs, batch.y)
        return {"loss": loss, "model_outputs": Pair(outputs, batch.y, batch.names), "batch_size": len(batch.y)}


def as_pair(samples):
    x, y = (torch.stack(column) for column in zip(*samples))
    return Pair(x, y, [str(index) for index in range(len(y))])


def train_pairs(cls, make_optimizer, factor=1, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    trainer = cls(model, nn.CrossEntropyLoss(), make_optimizer(model.parameters()), callbacks=(), count_items=len_of)
    trainer.sizes = []
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(factor * x, (x.sum(1) > 0).long())
    loading = {"shuffle": False}
    trainer.train(data, num_epochs=2, per_device_batch_size=8, train_dataloader_kwargs=loading, **settings)
    return trainer


def len_of(batch):
    return len(batch.y if isinstance(batch, Pair) else batch[1])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("size", [None, 3])
def test_a_dataclass_as_batch_is_split_and_evaluated_again_like_a_tuple(optimizer, size):
    make = lambda parameters: optimizer(parameters, lr=0.1)
    own = train_pairs(PairTrainer, make, collate_fn=as_pair, microbatch_size=size)
    plain = train_pairs(Trainer, make, factor=2, microbatch_size=size)
    for ours, theirs in zip(own.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert set(own.sizes) == ({(8, 8)} if size is None else {(3, 3), (2, 2)})
    assert own.run_history.get_metric_values("train_loss_epoch") == pytest.approx(
        plain.run_history.get_metric_values("train_loss_epoch")
    )


def test_outputs_of_micro_batches_that_are_dataclasses_are_joined():
    seen = []

    class Watch(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.append((batch_output["model_outputs"], batch_output["batch_size"]))

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = PairTrainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[Watch()], count_items=len_of)
    trainer.sizes = []
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    trainer.train(data, num_epochs=1, microbatch_size=3, collate_fn=as_pair, train_dataloader_kwargs={"num_workers": 0})
    ((outputs, size),) = seen
    assert type(outputs) is Pair and outputs.x.shape == (8, 2) and outputs.y.shape == (8,) and size == 8


def own_losses(rows, make_output):
    """Train a model that returns its own loss in some form, and return the losses of two epochs."""

    class Auto(nn.Linear):
        def forward(self, x, *targets):
            reconstructed = super().forward(x)
            return make_output(reconstructed, (reconstructed - x).square().mean())

    torch.manual_seed(0)
    model = Auto(4, 4)
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    history = trainer.train(rows, num_epochs=2, eval_dataset=rows, train_dataloader_kwargs={"shuffle": False})
    return history.get_metric_values("train_loss_epoch") + history.get_metric_values("eval_loss_epoch")


def test_a_batch_that_is_one_tensor_goes_to_a_model_that_computes_its_loss():
    x = torch.randn(24, 4)
    expected = own_losses(TensorDataset(x, x), lambda outputs, loss: {"loss": loss})
    assert own_losses(x, lambda outputs, loss: loss) == expected


def test_a_tuple_with_one_scalar_carries_the_loss_wherever_it_stands():
    x = torch.randn(24, 4)
    expected = own_losses(x, lambda outputs, loss: (loss, loss / 2))
    assert own_losses(x, lambda outputs, loss: (outputs, loss)) == expected
    with pytest.raises(BatchOutputError, match="or a tuple with one"):
        own_losses(x, lambda outputs, loss: (outputs, loss, loss / 2))


NamedPair = collections.namedtuple("NamedPair", "x y")
ROWS = torch.arange(10.0).reshape(5, 2)
FORMS = {
    "tuple": (ROWS, ROWS + 1),
    "list": [ROWS, {"y": ROWS, "names": list("abcde"), "scale": torch.tensor(2.0)}],
    "nested": {"x": (ROWS, torch.ones(3)), "none": None, "more": {"y": ROWS}, "empty": ()},
    "namedtuple": NamedPair(ROWS, [ROWS, 3]),
    "tuple of so many numbers": (ROWS, (1, 2, 3, 4, 5)),
    "tuple of so many tensors": (ROWS, ROWS, ROWS, ROWS, ROWS),
    "ordered": collections.OrderedDict(x=ROWS, y=(ROWS,)),
    "tensor": ROWS,
}


@pytest.mark.parametrize("form", FORMS)
def test_all_parts_of_a_batch_are_those_that_one_would_cut_out_one_by_one(form):
    batch = FORMS[form]
    parts = split_batch(batch, 2)
    expected = [slice_rows(batch, start, min(start + 2, 5), 5) for start in (0, 2, 4)]
    assert repr(parts) == repr(expected)
    assert split_batch(batch, 5)[0] is batch


@pytest.mark.parametrize("is_sum", [False, True])
def test_the_loss_of_a_batch_is_that_of_its_parts_by_weight_and_holds_no_graph(is_sum):
    losses = [torch.tensor(value, requires_grad=True) * 2 for value in (1.5, 0.25)]
    outputs = [{"loss": loss, "batch_size": size, "model_outputs": 0} for loss, size in zip(losses, (6, 2))]
    whole = join_batch_outputs(outputs, is_sum, joins=False)
    assert whole["loss"].item() == pytest.approx(3.0 * 6 + 0.5 * 2 if is_sum else (3.0 * 6 + 0.5 * 2) / 8)
    assert whole["loss"].dtype is torch.float32 and not whole["loss"].requires_grad
    assert (whole["batch_size"], whole["model_outputs"]) == (8, None)


def test_a_micro_batch_calls_few_functions_more_than_its_loss_needs():
    def calls(size):
        model = nn.Linear(2, 3)
        trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=())
        batches = [(torch.ones(16, 2), torch.zeros(16, dtype=torch.long))] * 40
        trainer.train(DataLoader(batches[:2], batch_size=None), num_epochs=1, microbatch_size=size)
        loader = DataLoader(batches, batch_size=None)
        with cProfile.Profile() as profile:
            trainer.train(loader, num_epochs=1, microbatch_size=size)
        return sum(entry.callcount for entry in profile.getstats())

    # 8 parts against 4; about 30 of these calls are of model, loss and backward.
    assert (calls(2) - calls(4)) / 40 / 4 < 110
