"""A batch that fails names itself, the layer or loss, and what they were given."""

import errno
import gc

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import BatchError, BatchOutputError, DrivetrainWarning, PlanInfeasible
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
    with pytest.raises(IndexError, match=r"labels of the first batch.*3 classes, numbered 0 to 2.*ignore_index"):
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
    notes = " ".join(caught.value.__notes__)
    assert "samples 0, 1 of list" in notes and "train_dataset" in notes and "convert the samples" in notes


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
    with pytest.raises(BatchError, match=r"from -1 to 0.*numbered 0 to 1. Renumber the labels; if one label"):
        check_loss_inputs(nn.CrossEntropyLoss(), torch.randn(2, 2), torch.tensor([-1, 0]))


def test_a_metric_that_fails_is_named_with_what_it_got():
    model = nn.Linear(6, 2)
    metrics = {"fine": lambda outputs, targets: 1.0, "broken": lambda outputs, targets: outputs[:, 5].mean()}
    trainer = Trainer(model, nn.CrossEntropyLoss(), callbacks=(), metrics=metrics)
    with pytest.raises(IndexError) as caught:
        trainer.evaluate(TensorDataset(torch.randn(8, 6), torch.zeros(8, dtype=torch.long)))
    assert "The metric 'broken' was called with outputs float32[8, 2] and targets int64[8]." in caught.value.__notes__


CLASSES = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("outputs", "targets", "advice"),
    [
        (torch.randn(4, 3), CLASSES.float(), r"float32, expected whole numbers.*targets.long\(\)"),
        (torch.randn(4, 3), CLASSES.int(), r"int32, expected.*int64.*targets.long\(\)"),
        (torch.randn(4, 3), CLASSES[:, None], r"a dimension too many.*targets.squeeze\(1\)"),
        (torch.randn(4, 3, 5, 5), torch.zeros(4, 1, 5, 5).long(), r"targets.squeeze\(1\)"),
        (torch.randn(4, 3), torch.eye(4, 3).long(), r"one-hot.*targets.argmax\(1\)"),
        (torch.randn(4, 7, 30), torch.full((4, 7), 20), r"classes last, expected \(batch, classes"),
        (
            torch.randn(4, 3),
            torch.tensor([0, 1, 2, 255]),
            r"255, means .no label., pass it to the loss as ignore_index",
        ),
    ],
)
def test_labels_in_a_wrong_form_are_answered_with_the_conversion(outputs, targets, advice):
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        nn.functional.cross_entropy(outputs, targets)
    for loss in (nn.CrossEntropyLoss(), nn.functional.cross_entropy):
        with pytest.raises(BatchError, match=advice):
            check_loss_inputs(loss, outputs, targets)


def test_probabilities_warn_and_log_probabilities_do_not():
    with pytest.warns(DrivetrainWarning, match="remove the softmax"):
        check_loss_inputs(nn.CrossEntropyLoss(), torch.randn(40, 3).softmax(1), torch.zeros(40).long())
    check_loss_inputs(nn.CrossEntropyLoss(), torch.randn(40, 3).log_softmax(1), torch.zeros(40).long())


def test_workers_without_shared_memory_are_answered_with_how_to_get_more(monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", fail)
    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__del__", lambda self: None)
    with pytest.raises(OSError) as caught:
        train(make_trainer(), list(make_data()), train_dataloader_kwargs={"num_workers": 1})
    notes = caught.value.__notes__
    del caught
    gc.collect()  # torch's iterator without its workers cannot end in good order
    assert any("--shm-size" in note and "num_workers" in note for note in notes)


def test_a_layer_that_fails_for_another_reason_than_its_dtype_gets_no_advice_about_it():
    class Tokens(nn.Linear):
        def forward(self, x):
            return torch.zeros(2)[x]

    with pytest.raises(IndexError) as caught:
        train(make_trainer(Tokens(6, 3)), TensorDataset(torch.full((8, 6), 7), torch.zeros(8).long()))
    assert ".float()" not in str(caught.value) + " ".join(getattr(caught.value, "__notes__", ()))


def test_inputs_of_another_type_and_indices_out_of_range_say_what_the_layer_takes():
    data = TensorDataset(torch.randn(8, 6).double(), torch.zeros(8, dtype=torch.long))
    with pytest.raises(BatchError, match=r"Its weights are float32: convert the input with .float\(\)"):
        train(make_trainer(), data)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten())
    with pytest.raises(BatchError, match=r"4 rows have the indices 0 to 3, and those given go from 1 to 9"):
        train(make_trainer(model), TensorDataset(torch.tensor([[9], [1]]), torch.tensor([0, 1])))


def test_a_hidden_state_that_keeps_its_graph_is_named():
    class Keeps(nn.Linear):
        last = 0.0

        def forward(self, x):
            self.last = super().forward(x) + self.last
            return self.last

    with pytest.raises(RuntimeError, match="second time") as caught:
        train(make_trainer(Keeps(6, 3)))
    assert "detach() it" in caught.value.__notes__[0]


def test_a_failing_evaluation_is_not_numbered_by_training_and_asks_for_its_hook():
    class OnlyTrains(Trainer):
        def calculate_train_batch_loss(self, batch):
            outputs = self.forward(batch[0])
            return {"loss": outputs.square().mean(), "model_outputs": outputs, "batch_size": len(outputs)}

    model = make_model()
    trainer = OnlyTrains(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    with pytest.raises(TypeError) as caught:
        train(trainer, eval_dataset=make_data())
    assert "a batch for evaluation" in caught.value.__notes__[0]
    assert "override calculate_eval_batch_loss" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("words", "is_of_workers"),
    [
        ("It is possible that dataloader's workers are out of shared memory.", True),
        ("unable to open shared memory object </torch_1> in read-write mode", True),
        ("out of resource: shared memory, Required: 114688, Hardware limit: 101376.", False),
    ],
)
def test_the_shared_memory_of_a_gpu_is_not_taken_for_that_of_workers(words, is_of_workers):
    class Fails(nn.Linear):
        def forward(self, x):
            raise RuntimeError(words)

    with pytest.raises(RuntimeError) as caught:
        train(make_trainer(Fails(6, 3)))
    assert any("--shm-size" in note for note in caught.value.__notes__) is is_of_workers


class Unprintable(RuntimeError):
    def __str__(self):
        raise ValueError("no text")


class RaisesUnprintable(nn.Linear):
    def forward(self, x):
        raise Unprintable


def test_an_error_without_a_text_is_raised_as_it_is():
    with pytest.raises(Unprintable):
        train(make_trainer(RaisesUnprintable(6, 3)))
    with pytest.raises(PlanInfeasible, match="Unprintable"):
        train(make_trainer(RaisesUnprintable(6, 3), strategy=["amp_native"]))
