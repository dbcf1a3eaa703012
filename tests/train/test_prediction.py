"""What `predict` joins, what it counts per batch, and what it cannot join."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, make_trainer, weights


class Several(nn.Module):
    """Returns rows, and values that belong to a whole batch."""

    def __init__(self, wrap=dict):
        super().__init__()
        self.linear, self.wrap, self.calls = nn.Linear(6, 3), wrap, 0

    def forward(self, x):
        self.calls += 1
        rows = self.linear(x)
        return self.wrap({"rows": rows, "loss": rows.mean(), "count": len(x), "name": "a model", "nothing": None})


def predict(model, rows=10, **kwargs):
    return make_trainer(model).predict(make_data(rows), per_device_batch_size=4, **kwargs)


def test_scalars_are_kept_for_every_batch():
    model = Several()
    found = predict(model)
    x = make_data(10).tensors[0]
    with torch.no_grad():
        rows = model.linear(x)
    torch.testing.assert_close(found["rows"], rows)
    torch.testing.assert_close(found["loss"], torch.stack([part.mean() for part in rows.split(4)]))
    assert found["count"].tolist() == [4, 4, 2]
    assert found["name"] == "a model" and found["nothing"] is None


class Pair(NamedTuple):
    rows: torch.Tensor
    loss: torch.Tensor


def test_tuples_stay_what_they_are():
    found = predict(Several(lambda out: Pair(out["rows"], out["loss"])))
    assert type(found) is Pair and found.rows.shape == (10, 3) and found.loss.shape == (3,)


def test_a_model_that_returns_one_number_gives_one_per_batch():
    assert predict(Several(lambda out: out["loss"])).shape == (3,)


def test_what_differs_and_cannot_be_joined_is_named_and_none():
    model = Several()
    model.wrap = lambda out: {"rows": out["rows"], "cache": {"layer": object()}}
    with pytest.warns(DrivetrainWarning, match=r"the output\['cache'\]\['layer'\] \(a value of type object\) differs"):
        found = predict(model)
    assert found["rows"].shape == (10, 3) and found["cache"] == {"layer": None}


@dataclass
class Scores:
    logits: torch.Tensor
    parts: dict[str, torch.Tensor]
    note: object


def test_outputs_that_are_dataclasses_are_joined_and_arrays_in_them_are_named():
    class Model(nn.Module):
        def forward(self, x):
            return Scores(2 * x, {"mean": x.mean(1)}, x.numpy())

    rows = make_data(10).tensors[0]
    with pytest.warns(DrivetrainWarning, match=r"the output.note \(a value of type ndarray\)"):
        scores = Trainer(Model(), callbacks=()).predict(make_data(10), per_device_batch_size=4)
    assert type(scores) is Scores and torch.equal(scores.logits, 2 * rows) and scores.note is None
    assert torch.equal(scores.parts["mean"], rows.mean(1))


@pytest.mark.parametrize("given", [{"dataloader_kwargs": {"drop_last": True}}, {"collate_fn": list}])
def test_settings_of_a_loader_that_is_there_already_are_an_error(given):
    with pytest.raises(ConfigError, match="would have no effect: dataset is a loader"):
        make_trainer().predict(DataLoader(make_data(), batch_size=4), **given)


def test_one_batch_is_joined_with_nothing():
    model = Several()
    model.wrap = lambda out: (out["rows"], object())
    rows, other = predict(model, rows=3)
    assert rows.shape == (3, 3) and type(other) is object


def on_two_ranks():
    return predict(Several(), rows=10)["loss"].shape[0]


def test_each_rank_has_its_own_batches(world2):
    assert set(world2(on_two_ranks)) == {
        4
    }  # 10 rows are two global batches, and each of two ranks has its part of both


def test_hugging_face_outputs_keep_their_class():
    transformers = pytest.importorskip("transformers")

    class Wrapped(Several):
        def forward(self, x):
            out = super().forward(x)
            return transformers.modeling_outputs.SequenceClassifierOutput(loss=out["loss"], logits=out["rows"])

    found = predict(Wrapped())
    assert (
        type(found).__name__ == "SequenceClassifierOutput"
        and found.loss.shape == (3,)
        and found.logits.shape == (10, 3)
    )


class Double(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return {"sequence": x * self.scale, "first": x[:, 0]}


def predict_unequal_lengths(padding_value=None):
    """Batches, and on several processes parts of a batch, have lengths of their own."""
    data = [torch.full((length,), float(length)) for length in (3, 1, 4, 2, 5)]

    def collate(rows):
        return (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),)

    trainer = Trainer(Double(), callbacks=())
    loading = {"num_workers": 0}
    return trainer.predict(data, 1, loading, collate, padding_value=padding_value)


def assert_unequal(outputs):
    assert [row.tolist() for row in outputs["sequence"]] == [[2.0 * n] * n for n in (3, 1, 4, 2, 5)]
    assert outputs["first"].tolist() == [3.0, 1.0, 4.0, 2.0, 5.0]


def test_sequences_of_different_lengths_are_a_list_with_one_tensor_for_each_sample(world2):
    assert_unequal(predict_unequal_lengths())
    for outputs in world2(predict_unequal_lengths):
        assert_unequal(outputs)


def test_sequences_of_different_lengths_are_padded_where_a_value_is_given():
    padded = predict_unequal_lengths(padding_value=-1)["sequence"]
    assert padded.shape == (5, 5)
    assert padded[1].tolist() == [2.0, -1.0, -1.0, -1.0, -1.0]


def test_a_prediction_inside_a_run_leaves_no_trace():
    class Predict(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            trainer.predict(make_data(4))

    trainers = [make_trainer(make_model(dropout=0.5), callbacks=callbacks) for callbacks in ([Predict()], [])]
    for trainer in trainers:
        torch.manual_seed(3)
        trainer.train(DataLoader(make_data(), batch_size=5, shuffle=True), num_epochs=2, gradient_accumulation_steps=2)
    assert all(map(torch.equal, weights(trainers[0].model), weights(trainers[1].model)))
    assert trainers[0].state.clock.sample == trainers[1].state.clock.sample


def test_labels_are_left_out_also_without_a_loss_function():
    model, data = make_model(), make_data(10)
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    found = trainer.predict(data, per_device_batch_size=4)
    with torch.no_grad():
        torch.testing.assert_close(found, model(data.tensors[0]))
