"""A batch that fails names itself, the layer or loss, and what they were given."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import BatchError, BatchOutputError
from drivetrain.train.failures import check_loss_inputs
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, make_trainer, train


def test_a_wrong_shape_names_batch_and_layer():
    with pytest.raises(
        BatchError, match=r"train_dataset: the first batch.*float32\[8, 5\].*layer '0' \(Linear\(in_features=6"
    ):
        train(make_trainer(), make_data(features=5))


def test_a_wrong_shape_inside_the_model_names_the_inner_layer():
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(7, 3)))
    with pytest.raises(RuntimeError, match=r"layer '1\.1' \(Linear\(in_features=7.*called with float32\[8, 8\]"):
        train(make_trainer(model))


def test_targets_of_another_length_name_the_loss_function():
    class Rows(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:3]

    with pytest.raises(ValueError, match=r"in the loss function \(CrossEntropyLoss\)"):
        train(make_trainer(Rows(6, 3)))


@pytest.mark.parametrize("labels", [[0, 1, 10], [0, -1, 2]])
def test_labels_that_are_no_class_are_named_before_the_loss_sees_them(labels):
    data = TensorDataset(torch.randn(3, 6), torch.tensor(labels))
    with pytest.raises(IndexError, match=r"labels of the first batch.*3 classes, numbered 0 to 2.*-100"):
        train(make_trainer(), data)


def test_ignored_labels_and_probabilities_are_fine():
    train(make_trainer(), TensorDataset(torch.randn(3, 6), torch.tensor([0, -100, 2])))
    train(make_trainer(), TensorDataset(torch.randn(3, 6), torch.rand(3, 3)))


class Named(nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x), "hidden": x}


def test_a_dict_of_outputs_with_a_plain_loss_says_how_to_pick():
    with pytest.raises(BatchOutputError, match=r"'logits', 'hidden'.*CrossEntropyLoss.*takes a tensor"):
        train(make_trainer(Named(6, 3)))


def test_an_index_beyond_an_embedding_names_it():
    model = nn.Sequential(nn.Embedding(4, 8), nn.Flatten(), nn.Linear(8, 3))
    data = TensorDataset(torch.tensor([[9], [1]]), torch.tensor([0, 1]))
    with pytest.raises(IndexError, match=r"layer '0' \(Embedding\(4, 8\)\)"):
        train(make_trainer(model), data)


class Fails(Trainer):
    def calculate_train_batch_loss(self, batch):
        if self.state.clock.batch == 1:
            raise self.own_error
        return super().calculate_train_batch_loss(batch)


def test_a_users_own_error_passes_unchanged_with_a_note():
    trainer = make_trainer(cls=Fails)
    trainer.own_error = OSError("a disk")
    with pytest.raises(OSError, match="a disk") as caught:
        train(trainer)
    assert caught.value is trainer.own_error
    assert "batch 2 for train" in caught.value.__notes__[0]


def test_data_that_cannot_be_collated_names_the_dataset():
    with pytest.raises(TypeError) as caught:
        train(make_trainer(), [object(), object()], train_dataloader_kwargs={"num_workers": 0})
    assert "train_dataset" in caught.value.__notes__[0] and "collate_fn" in caught.value.__notes__[0]


def test_evaluation_and_prediction_name_their_data():
    with pytest.raises(BatchError, match=r"eval_dataset.*layer '0'"):
        make_trainer().evaluate(make_data(features=5))
    with pytest.raises(BatchError, match=r"dataset.*prediction.*layer '0'"):
        make_trainer().predict(make_data(features=5))


def test_a_model_that_returns_its_loss_is_not_asked_for_a_tensor():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, x, y):
            return {"loss": nn.functional.cross_entropy(self.inner(x), y)}

    model = Own()
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    assert train(trainer).get_latest_metric("train_loss_epoch") > 0


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (None, "of type NoneType.*return it"),
        (0.5, "of type float.*leave out .item"),
        ((torch.zeros(()), 1), "of type tuple.*by name"),
    ],
)
def test_a_loss_that_is_no_tensor_says_what_went_wrong(value, advice):
    model = nn.Linear(6, 2)
    trainer = Trainer(model, lambda outputs, targets: value, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    with pytest.raises(BatchOutputError, match=advice):
        trainer.train(TensorDataset(torch.randn(8, 6), torch.zeros(8)), num_epochs=1)


def test_a_forgotten_loss_function_is_named():
    model = nn.Linear(6, 2)
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    with pytest.raises(
        BatchError, match=r"Without a loss_func the model gets the whole batch.*Pass Trainer\(model, loss_func=...\)"
    ):
        trainer.train(TensorDataset(torch.randn(8, 6), torch.zeros(8)), num_epochs=1)


def test_negative_labels_are_not_answered_with_a_larger_layer():
    with pytest.raises(BatchError, match=r"from -1 to 0.*numbered 0 to 1. Renumber the labels; labels to skip"):
        check_loss_inputs(nn.CrossEntropyLoss(), torch.randn(2, 2), torch.tensor([-1, 0]))


def test_a_metric_that_fails_is_named_with_what_it_got():
    model = nn.Linear(6, 2)
    metrics = {"fine": lambda outputs, targets: 1.0, "broken": lambda outputs, targets: outputs[:, 5].mean()}
    trainer = Trainer(model, nn.CrossEntropyLoss(), callbacks=(), metrics=metrics)
    with pytest.raises(IndexError) as caught:
        trainer.evaluate(TensorDataset(torch.randn(8, 6), torch.zeros(8, dtype=torch.long)))
    assert "The metric 'broken' was called with outputs float32[8, 2] and targets int64[8]." in caught.value.__notes__
