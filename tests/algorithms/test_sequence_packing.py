"""Sequence packing: documents share a row and do not notice."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain.algorithms.selective_backprop import SelectiveBackprop
from drivetrain.algorithms.seq_length_warmup import SeqLengthWarmup
from drivetrain.algorithms.sequence_packing import RealTokens, SequencePacking, additive_mask
from drivetrain.core.errors import NotIntendedUseWarning
from drivetrain.core.event import Event
from drivetrain.data.packing import PackedDataset
from drivetrain.train.trainer import Trainer
from tests.algorithms.tasks import Documents, TinyTransformer, Watch, text_trainer, train


def test_packed_rows_give_each_document_the_logits_it_has_alone():
    torch.manual_seed(0)
    model, documents = TinyTransformer().double().eval(), Documents(12)
    packed = PackedDataset(documents, 24)
    for row in range(len(packed)):
        batch = {name: value.unsqueeze(0) for name, value in packed[row].items()}
        mask = additive_mask(batch["document_ids"], True, torch.float64)
        together = model(batch["input_ids"], None, mask, batch["position_ids"])["logits"][0]
        for number in range(int(batch["document_ids"].max()) + 1):
            places = batch["document_ids"][0] == number
            alone = model(batch["input_ids"][:, places])["logits"][0]
            torch.testing.assert_close(together[places], alone)


def test_the_training_loss_is_the_mean_over_the_targets_of_all_documents():
    documents, losses = Documents(12), Watch(Event.STEP_OUTPUT, lambda state: state.batch_output["loss"].item())
    trainer = text_trainer(SequencePacking(24), callbacks=[losses])
    model = TinyTransformer()
    model.load_state_dict(trainer.model.state_dict())
    train(trainer, documents, num_epochs=1, per_device_batch_size=100)
    total, count = 0.0, 0
    for index in range(len(documents)):
        ids = documents[index]["input_ids"]
        logits = model(ids.unsqueeze(0))["logits"][0, :-1]
        total += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += len(ids) - 1
    assert losses.values == pytest.approx([total / count], rel=1e-5)


def test_rows_count_by_their_targets_when_gradients_accumulate():
    def gradient(batch_size, accumulation):
        grads = Watch(Event.AFTER_TRAIN_BATCH, lambda state: state.model.head.weight.grad.clone())
        trainer = text_trainer(SequencePacking(16), callbacks=[grads])
        train(
            trainer,
            Documents(14),
            num_epochs=1,
            per_device_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            train_dataloader_kwargs={"shuffle": False},
        )
        return grads.values[0]

    whole = gradient(100, 1)
    torch.testing.assert_close(gradient(1, 100), whole, rtol=1e-4, atol=1e-6)


def test_the_loader_has_the_packed_length_and_the_model_gets_what_it_takes():
    batches = Watch(Event.AFTER_FORWARD, lambda state: sorted(state.batch))
    trainer = text_trainer(SequencePacking(24), callbacks=[batches])
    train(trainer, Documents(40), num_epochs=2, per_device_batch_size=4)
    rows = len(PackedDataset(Documents(40), 24))
    assert rows < 40 and trainer.state.clock.batch == 2 * -(-rows // 4)
    assert batches.values[0] == ["attention_mask", "input_ids", "labels", "position_ids"]


def test_padding_in_the_documents_is_removed():
    documents = RealTokens(
        [{"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [1, 2, 3, 4, 5]}, [1, 2]]
    )
    assert documents[0]["input_ids"].tolist() == [5, 6, 7] and documents[0]["labels"].tolist() == [1, 2, 3]
    assert documents[1] == [1, 2]


class Maskless(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = TinyTransformer()

    def forward(self, input_ids, labels):
        return self.net(input_ids, labels)


def test_a_model_without_a_mask_is_refused_and_without_positions_is_warned_about():
    def trainer(**arguments):
        model = Maskless()
        return Trainer(
            model, None, torch.optim.SGD(model.parameters(), lr=0.1), (), algorithms=[SequencePacking(16, **arguments)]
        )

    with pytest.raises(ValueError, match=r"Maskless.forward takes no attention_mask"):
        train(trainer(), Documents(8))
    with pytest.warns(NotIntendedUseWarning, match="position_ids"):
        train(trainer(document_mask=False), Documents(8), num_epochs=1)


class MaskNeeded(TinyTransformer):
    """A model that cannot be called without the mask that packing adds."""

    def forward(self, input_ids, attention_mask, position_ids):
        assert attention_mask.shape == (len(input_ids), 1, input_ids.shape[1], input_ids.shape[1])
        return {"logits": self.logits(input_ids, attention_mask, position_ids)}


def token_loss(logits, labels, reduction="mean"):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction=reduction)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["packing first", "packing last"])
@pytest.mark.parametrize("name", ["SeqLengthWarmup", "SelectiveBackprop"])
def test_extra_passes_of_other_algorithms_get_the_mask_too(name, order):
    other = {
        "SeqLengthWarmup": lambda: SeqLengthWarmup(1.0, 8, 24, 8),
        "SelectiveBackprop": lambda: SelectiveBackprop(0, 1, 0.5, 1, 0, "input_ids", "labels"),
    }[name]()
    torch.manual_seed(0)
    model, sizes = MaskNeeded(), Watch(Event.BEFORE_LOSS, lambda state: tuple(state.outputs["logits"].shape[:2]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugins = [SequencePacking(24), other][order]
    trainer = Trainer(model, token_loss, optimizer, [sizes], algorithms=plugins, seed=1)
    train(trainer, Documents(32), num_epochs=1, per_device_batch_size=4, train_dataloader_kwargs={"drop_last": True})
    assert sizes.values == {"SeqLengthWarmup": [(4, 8), (4, 16)], "SelectiveBackprop": [(2, 24)] * 2}[name]


def test_loaders_and_data_that_cannot_be_packed_are_refused():
    with pytest.raises(ValueError, match="SmartDataLoader"):
        text_trainer(SequencePacking(16)).train(DataLoader(Documents(8), batch_size=1), num_epochs=1)
    with pytest.raises(TypeError, match="documents"):
        train(text_trainer(SequencePacking(16)), {"input_ids": torch.zeros(4, 8, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0,), "max_length"), ((8, "bestfit"), "Did you mean 'best_fit'"), ((8, "best_fit", 0), "buffer")],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        SequencePacking(*arguments)


def test_a_label_for_the_whole_document_is_rejected_as_such():
    documents = [{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0], "labels": 1}]
    with pytest.raises(ValueError, match="labels"):
        PackedDataset(RealTokens(documents), 8)[0]
