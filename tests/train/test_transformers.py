"""The Trainer with models of transformers, which return their own loss. Skipped where transformers is not installed."""

import pytest
import torch
from torch import nn

from drivetrain.train.trainer import Trainer
from tests.train.tasks import Losses, weights

transformers = pytest.importorskip("transformers")


def tiny_gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=31, n_positions=16, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config).double()


def texts(count=8, length=10):
    """Sequences with unequal numbers of labels, as padded text has."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for index in range(count):
        ids = torch.randint(0, 31, (length,), generator=generator)
        labels = ids.clone()
        labels[length - index % 5 :] = -100
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def language_trainer(**kwargs):
    model = tiny_gpt2()
    return Trainer(
        model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=kwargs.pop("callbacks", ()), **kwargs
    )


LOADING = {
    "train_dataloader_kwargs": {"num_workers": 0, "shuffle": False},
    "eval_dataloader_kwargs": {"num_workers": 0},
}


def test_a_language_model_with_its_own_loss_equals_a_hand_written_loop():
    rows, trainer = texts(), language_trainer()
    losses = Losses()
    trainer.callback_handler.add_callback(losses)
    trainer.train(rows, num_epochs=2, eval_dataset=rows, per_device_batch_size=4, **LOADING)
    model = tiny_gpt2().train()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        for start in (0, 4):
            batch = {name: torch.stack([row[name] for row in rows[start : start + 4]]) for name in rows[0]}
            loss = model(**batch).loss
            expected.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses.values == expected
    assert trainer.state.clock.token == 2 * 8 * 10


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 4, "per_device_batch_size": 2},
        {"microbatch_size": 3, "per_device_batch_size": 8},
    ],
)
@pytest.mark.parametrize("count", ["labels", None])
def test_counted_labels_make_accumulation_token_true(settings, count):
    rows = texts()
    whole = language_trainer(count_items=count)
    whole.train(rows, num_epochs=2, per_device_batch_size=8, **LOADING)
    split = language_trainer(count_items=count)
    split.train(rows, num_epochs=2, **settings, **LOADING)
    for a, b in zip(weights(whole.model), weights(split.model)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)  # the model computes its loss in float32


def test_a_classifier_works_with_and_without_a_loss_function_and_with_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics")
    generator = torch.Generator().manual_seed(3)
    rows = [
        {
            "input_ids": torch.randint(0, 31, (7,), generator=generator),
            "attention_mask": torch.ones(7, dtype=torch.long),
            "labels": torch.randint(0, 3, (), generator=generator),
        }
        for _ in range(10)
    ]
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=31, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    histories, trainers = [], []
    for loss_func in (None, nn.CrossEntropyLoss()):
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config)
        metrics = {"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3)}
        trainer = Trainer(
            model,
            loss_func,
            torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=(),
            metrics=metrics,
            train_metrics=metrics,
        )
        histories.append(trainer.train(rows, num_epochs=2, eval_dataset=rows, per_device_batch_size=4, **LOADING))
        trainers.append(trainer)
    first, second = histories
    for name in ("train_loss_epoch", "eval_loss_epoch", "eval_accuracy_epoch", "train_accuracy_epoch"):
        assert first.get_metric_values(name) == pytest.approx(second.get_metric_values(name), rel=1e-5)
    outputs = trainers[1].predict(rows, per_device_batch_size=4, dataloader_kwargs={"num_workers": 0})
    labels = torch.stack([row["labels"] for row in rows])
    accuracy = (outputs.logits.argmax(-1) == labels).float().mean().item()
    assert second.get_latest_metric("eval_accuracy_epoch") == pytest.approx(accuracy)
    unlabelled = [{name: value for name, value in row.items() if name != "labels"} for row in rows]
    again = trainers[1].predict(unlabelled, per_device_batch_size=4, dataloader_kwargs={"num_workers": 0})
    assert torch.equal(again.logits, outputs.logits)


def test_a_tokenisers_batch_is_understood():
    def collate(rows):
        return transformers.BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    plain, encoded = language_trainer(), language_trainer()
    plain.train(texts(), num_epochs=1, **LOADING)
    encoded.train(texts(), num_epochs=1, collate_fn=collate, **LOADING)
    assert all(map(torch.equal, weights(plain.model), weights(encoded.model)))


def test_a_language_model_in_bfloat16_trains_and_checkpoints(tmp_path):
    model = tiny_gpt2().float()
    trainer = Trainer(model, None, torch.optim.AdamW(model.parameters(), lr=1e-2), callbacks=(), precision="bf16")
    history = trainer.train(texts(), num_epochs=3, per_device_batch_size=4, checkpoint_dir=tmp_path / "run", **LOADING)
    values = history.get_metric_values("train_loss_epoch")
    assert values[-1] < values[0] and trainer.run_config.mixed_precision == "bf16"
    trainer.save_checkpoint(tmp_path / "model.pt")
    other = Trainer(tiny_gpt2().float(), None, None, callbacks=())
    other.load_checkpoint(tmp_path / "model.pt", load_optimizer=False)
    assert all(map(torch.equal, weights(other.model), weights(model)))
