"""Sequences that a model generates, in evaluations and predictions."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain.core.errors import ConfigError
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.runtime.collectives import agree_any
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_trainer, train

TOKENS = 8


class Countdown(nn.Module):
    """Counts down to 0 from the last token of a prompt, which it does from the start; batches end at different lengths."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(5 * torch.eye(TOKENS), freeze=False)
        self.block = nn.Sequential(nn.Linear(TOKENS, TOKENS, bias=False))
        with torch.no_grad():
            self.block[0].weight.copy_(5 * torch.eye(TOKENS).roll(-1, 0))
            self.block[0].weight[:, 0] = 5 * torch.eye(TOKENS)[0]  # 0 stays 0
        self.seen = []

    def forward(self, ids):
        return self.block(self.embedding(ids))

    def generate(self, ids, max_new_tokens=TOKENS, synced_gpus=False):
        weight = self.embedding.weight  # read outside of any forward
        self.seen.append((tuple(ids.shape), self.training, torch.is_autocast_enabled("cpu"), is_dtensor(weight)))
        tokens, length = [ids[:, -1:]], None
        while len(tokens) <= max_new_tokens:
            tokens.append(self(tokens[-1]).argmax(-1))
            if length is None and not tokens[-1].any():
                length = len(tokens)
            is_waited_for = agree_any(length is None) if synced_gpus else length is None
            if not is_waited_for:
                break
        return torch.cat(tokens[1:length], dim=1)


class Stuck(Countdown):
    """Cannot generate in step with other ranks."""

    def generate(self, ids):
        return ids


def make_prompts(rows=13):
    last = torch.arange(rows) * 3 % (TOKENS - 1) + 1
    answers = (last[:, None] - torch.arange(1, TOKENS)).clamp(min=0)
    return TensorDataset(torch.stack([torch.full_like(last, 3), last], dim=1), answers)


def next_token_loss(logits, answers):
    return functional.cross_entropy(logits[:, -1], answers[:, 0])


def exact_match(generated, answers):
    return (functional.pad(generated, (0, TOKENS - 1 - generated.shape[1])) == answers).all(1).double().mean()


def num_tokens(generated, answers):
    return (generated > 0).sum(1).double().mean()


def make_counting(model=None, cls=Trainer, **kwargs):
    model = Countdown() if model is None else model
    kwargs = {"metrics": {"exact_match": exact_match, "tokens": num_tokens}, "generate": True, **kwargs}
    return cls(model, next_token_loss, torch.optim.SGD(model.parameters(), lr=1e-3), callbacks=(), seed=0, **kwargs)


def run(strategy=None):
    """Train and evaluate with generation; return what must not depend on the number of processes, and what the model saw."""
    trainer = make_counting(strategy=strategy)
    history = trainer.train(make_prompts(16), num_epochs=1, eval_dataset=make_prompts(), global_batch_size=4)
    values = {
        name: history.get_latest_metric(f"eval_{name}_epoch") for name in ("loss", "exact_match", "tokens")
    } | trainer.evaluate(make_prompts(), per_device_batch_size=2)
    predicted = trainer.predict(make_prompts(), per_device_batch_size=2, generate=True, padding_value=0)
    seen = trainer.get_model().seen
    return values, predicted, {(is_training, is_sharded) for _, is_training, _, is_sharded in seen}


@pytest.fixture(scope="module")
def alone():
    return run()


def test_metrics_compare_what_is_generated_and_the_loss_is_still_that_of_the_outputs(alone):
    values, predicted, seen = alone
    assert values["exact_match"] == values["evaluation_exact_match"] == 1.0
    expected = (make_prompts().tensors[1] > 0).sum(1).double().mean().item()
    assert values["tokens"] == pytest.approx(expected)
    assert torch.equal(functional.pad(predicted, (0, TOKENS - 1 - predicted.shape[1])), make_prompts().tensors[1])
    assert seen == {(False, False)}
    trainer = make_counting(generate=False, metrics=None)
    history = trainer.train(make_prompts(16), num_epochs=1, eval_dataset=make_prompts(), global_batch_size=4)
    assert history.get_latest_metric("eval_loss_epoch") == values["loss"]


@pytest.mark.parametrize("strategy", [None, ["parallel_mode", "fsdp"]])
def test_two_processes_generate_what_one_does(world2, alone, strategy):
    values, predicted, _ = alone
    for ours, our_predicted, seen in world2(run, strategy):
        assert ours == pytest.approx(values, abs=1e-6)
        assert torch.equal(our_predicted, predicted)
        assert seen == {(False, False)}  # in evaluation mode, with whole weights


def run_stuck():
    trainer = make_counting(Stuck(), strategy=["parallel_mode", "fsdp"], metrics=None)
    with pytest.raises(ConfigError, match=r"Stuck.generate has no argument synced_gpus"):
        trainer.train(make_prompts(8), num_epochs=1, eval_dataset=make_prompts(4), global_batch_size=4)
    return True


def test_a_sharded_model_whose_generate_cannot_keep_step_is_rejected(world2):
    assert world2(run_stuck) == [True, True]


def test_evaluate_takes_arguments_of_its_own():
    trainer = make_counting(generate=False, metrics={"shape": lambda outputs, _: float(outputs.shape[-1])})
    data = make_prompts(4)
    assert trainer.evaluate(data, generate={"max_new_tokens": 2})["evaluation_shape"] == 2
    assert trainer.evaluate(data)["evaluation_shape"] == TOKENS
    assert trainer.evaluate(data, generate=True)["evaluation_shape"] == 7
    trainer = make_counting(generate={"max_new_tokens": 3}, metrics={"shape": lambda outputs, _: outputs.shape[-1]})
    assert trainer.evaluate(data)["evaluation_shape"] == 3
    assert trainer.evaluate(data, generate=False)["evaluation_shape"] == TOKENS
    assert trainer.predict(data, generate=True).shape == (4, 3)
    assert trainer.predict(data).shape == (4, 2, TOKENS)


def test_predictions_of_different_lengths_are_a_list_or_padded():
    trainer, prompts = make_counting(), torch.tensor([[3, 1], [3, 2], [3, 5]])
    rows = trainer.predict(TensorDataset(prompts), per_device_batch_size=1, generate=True)
    assert [row.tolist() for row in rows] == [[0], [1, 0], [4, 3, 2, 1, 0]]
    trainer.model.config = SimpleNamespace(pad_token_id=7)
    padded = trainer.predict(TensorDataset(prompts), per_device_batch_size=1, generate=True)
    assert padded.tolist() == [[0, 7, 7, 7, 7], [1, 0, 7, 7, 7], [4, 3, 2, 1, 0]]


def test_callbacks_and_an_own_hook_see_what_is_generated():
    class Own(Trainer):
        def calculate_generation_batch(self, batch):
            return self.generate(batch[0][:, -1:], max_new_tokens=1)

    seen = []

    class See(TrainerCallback):
        def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.append(batch_output["generated"])

    trainer = make_counting(cls=Own, metrics=None)
    trainer.callback_handler.add_callback(See())
    trainer.evaluate(make_prompts(5), per_device_batch_size=5)
    assert torch.equal(seen[0][:, 0], make_prompts(5).tensors[1][:, 0])
    assert trainer.model.seen[0][0] == (5, 1)


def test_generation_computes_in_the_precision_of_the_run():
    trainer = make_counting(precision="bf16")
    assert trainer.evaluate(make_prompts())["evaluation_exact_match"] == 1.0
    assert all(is_autocast for _, _, is_autocast, _ in trainer.model.seen)


def test_random_numbers_that_generation_draws_do_not_change_training():
    class Dice(Countdown):
        def generate(self, ids):
            return ids[:, :1] + torch.randint(0, 5, (len(ids), 1))

    def trained(generate):
        model = Dice()
        trainer = make_counting(model, generate=generate, metrics=None)
        trainer.train(make_prompts(16), num_epochs=3, eval_dataset=make_prompts(4), per_device_batch_size=4)
        return model.block[0].weight

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize(
    "use",
    [
        lambda: train(make_trainer(generate={"max_new_tokens": 2}), eval_dataset=make_data(8)),
        lambda: make_trainer().evaluate(make_data(8), generate=True),
        lambda: make_trainer().predict(make_data(8), generate=True),
    ],
)
def test_a_model_that_cannot_generate_is_rejected_first(use):
    with pytest.raises(ConfigError, match=r"Sequential has no method generate.*calculate_generation_batch"):
        use()


def make_t5():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    )
    ids = torch.randint(2, 12, (6, 5))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.flip(0)} for row in ids]
    return model, rows


def tokens_of_t5(generated, labels):
    assert labels.shape[1] == 5
    return float(generated.shape[1])


def run_t5(strategy=None):
    model, rows = make_t5()
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        callbacks=(),
        metrics={"tokens": tokens_of_t5},
        generate={"max_new_tokens": 4, "do_sample": False},
        strategy=strategy,
    )
    history = trainer.train(rows, num_epochs=1, eval_dataset=rows, global_batch_size=2)
    values = {name: history.get_latest_metric(f"eval_{name}_epoch") for name in ("tokens", "loss")}
    predicted = trainer.predict(rows, per_device_batch_size=2, generate=True)
    return values, predicted, trainer, rows


def test_hugging_face_models_generate_from_inputs_without_labels():
    values, predicted, trainer, rows = run_t5()
    assert values["tokens"] == 5  # with the start token
    assert values["loss"] > 0
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        expected = trainer.model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
    assert torch.equal(predicted, expected)
    shifted = [{**row, "decoder_input_ids": row["labels"]} for row in rows]  # the labels in another guise
    assert torch.equal(trainer.predict(shifted, per_device_batch_size=4, generate=True), expected)


def run_sharded_t5():
    return run_t5(["parallel_mode", "fsdp"])[:2]


@pytest.mark.slow
def test_a_sharded_hugging_face_model_generates_what_a_whole_one_does(world2):
    values, predicted, *_ = run_t5()
    for ours, our_predicted in world2(run_sharded_t5):
        assert ours == pytest.approx(values, abs=1e-5)
        assert torch.equal(our_predicted, predicted)
