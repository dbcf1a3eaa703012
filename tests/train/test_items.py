"""Losses over tokens: parts of a batch, several processes and evaluations equal a hand-written loop over whole batches."""

import functools
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.module.chunked_loss import linear_cross_entropy
from drivetrain.optim import ConstantLr
from drivetrain.train.batches import carried_loss
from drivetrain.train.callbacks import TerminateOnNaNCallback
from drivetrain.train.trainer import Trainer

CLASSES, LENGTH, FEATURES, ROWS, BATCH = 5, 6, 4, 14, 8
DOUBLE = torch.float64


def rows(one_label: bool = False) -> list[dict]:
    """Sequences with unequal numbers of labels; one of them has none at all."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for index in range(ROWS):
        x = torch.randn(LENGTH, FEATURES, generator=generator, dtype=DOUBLE)
        labels = torch.randint(1, CLASSES, (LENGTH,), generator=generator)
        labels[LENGTH - (5 * index) % (LENGTH + 1) :] = -100
        data.append({"x": x[0], "labels": labels[0]} if one_label else {"x": x, "labels": labels})
    return data


class Tagger(nn.Module):
    """Scores each position: (rows, length, features) to (rows, classes, length)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, 7, dtype=DOUBLE)
        self.head = nn.Linear(7, CLASSES, dtype=DOUBLE)

    def forward(self, x):
        scores = self.head(torch.tanh(self.body(x)))
        return scores.transpose(1, 2) if scores.ndim == 3 else scores


class CarriesLoss(Tagger):
    """Returns its own loss, as models of Hugging Face do; causal ones shift their labels and accept the number of items."""

    is_causal = True

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        logits = super().forward(x).transpose(1, 2)
        loss = None
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous() if self.is_causal else labels
            reduction = "mean" if num_items_in_batch is None else "sum"
            loss = F.cross_entropy(logits.reshape(-1, CLASSES), shifted.view(-1), reduction=reduction)
            loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return types.SimpleNamespace(loss=loss, logits=logits)


class CarriesUnshiftedLoss(CarriesLoss):
    is_causal = False


class CarriesMaskedMean(CarriesLoss):
    """Computes the same mean by hand, so nobody can see over which labels."""

    def forward(self, x, labels=None):
        logits = Tagger.forward(self, x)
        targets = F.pad(labels, (0, 1), value=-100)[..., 1:] if self.is_causal and labels is not None else labels
        return types.SimpleNamespace(loss=None if labels is None else Scores()(logits, targets), logits=logits)


class EncodesAndDecodes(CarriesMaskedMean):
    is_causal, config = False, types.SimpleNamespace(is_encoder_decoder=True)


class CarriesLossInDict(CarriesLoss):
    """DDP returns copies of the tensors of such an output."""

    def forward(self, x, labels=None):
        result = super().forward(x, labels)
        return {"loss": result.loss, "logits": result.logits} if labels is not None else result.logits


class OwnLoss(nn.Module):
    def forward(self, outputs, targets):
        return 0.5 * F.cross_entropy(outputs.permute(0, 2, 1).flatten(0, 1), targets.flatten())


class Scores(nn.Module):
    """A masked mean that nobody can see through."""

    def forward(self, outputs, targets):
        kept = targets != -100
        losses = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
        return (losses * kept).sum() / kept.sum().clamp(min=1)


class OwnHook(Trainer):
    def calculate_train_batch_loss(self, batch):
        outputs = self.model(**batch)
        return {"loss": outputs.loss, "model_outputs": outputs.logits, "batch_size": len(batch["x"])}


class NormalisedHook(Trainer):
    """Divides by the labels of the batch on all ranks itself, and reports that."""

    def calculate_train_batch_loss(self, batch):
        outputs, labels = self.model(batch["x"]), batch["labels"]
        number = (labels != -100).sum()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(number)
        loss = F.cross_entropy(outputs, labels, reduction="sum") / number
        size = len(labels)
        return {"loss": loss, "model_outputs": outputs, "batch_size": size, "num_items_in_batch": number}


def with_number_of_items(data: list[dict]) -> dict:
    """A collate function, as programs write it whose models divide by the items of all parts."""
    return {**joined(data), "num_items_in_batch": torch.tensor(29.0)}


CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 2.5, 0.7, 4.0], dtype=DOUBLE)
CASES: dict[str, dict] = {
    "cross entropy": {"loss": nn.CrossEntropyLoss()},
    "cross entropy that ignores class 2": {"loss": nn.CrossEntropyLoss(ignore_index=2), "fill": 2},
    "negative log likelihood": {"loss": lambda o, y: nn.NLLLoss()(o.log_softmax(1), y)},
    "class weights": {"loss": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)},
    "class weights and smoothing": {"loss": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)},
    "one label a row": {"loss": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), "one": True},
    "one label a row, ignored ones": {"loss": nn.CrossEntropyLoss(), "one": True},
    "torch's function": {"loss": functools.partial(F.cross_entropy, ignore_index=-100)},
    "a lambda": {"loss": lambda o, y: F.cross_entropy(o.transpose(1, 2).reshape(-1, CLASSES), y.view(-1))},
    "a module": {"loss": OwnLoss()},
    "a sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
    "a sum over rows": {"loss": lambda o, y: F.cross_entropy(o, y.clamp(min=0), reduction="sum") / len(y)},
    "counted by a function": {"loss": Scores(), "count_items": lambda batch: (batch["labels"] != -100).sum()},
    "causal model": {"model": CarriesLoss},
    "masked model": {"model": CarriesUnshiftedLoss},
    "masked model, labels asked for": {"model": CarriesUnshiftedLoss, "count_items": "labels"},
    "causal model with a mean by hand": {"model": CarriesMaskedMean, "count_items": "labels"},
    "encoder and decoder with a mean by hand": {"model": EncodesAndDecodes, "count_items": "labels"},
    "causal model in a hook": {"model": CarriesLoss, "trainer": OwnHook},
    "causal model that DDP passes on": {"model": CarriesLossInDict, "ddp": {"find_unused_parameters": True}},
    "a sum over the number in the batch": {"model": CarriesLoss, "collate": with_number_of_items},
    "units": {"loss": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), "units": True},
    "units with a sum": {"loss": nn.CrossEntropyLoss(reduction="sum"), "units": True},
}  # fmt: skip


def data_of(case: dict) -> list[dict]:
    data = rows(case.get("one", False))
    if "fill" in case:
        for row in data:
            row["labels"] = row["labels"].masked_fill(row["labels"] == -100, case["fill"])
    return data


def joined(data: list[dict]) -> dict:
    return {name: torch.stack([row[name] for row in data]) for name in data[0]}


def loss_of(model: nn.Module, case: dict, batch: dict) -> torch.Tensor:
    return case["loss"](model(batch["x"]), batch["labels"]) if "loss" in case else carried_loss(model(**batch))


def expected(name: str, step: int = BATCH) -> tuple[list[torch.Tensor], float, float]:
    """Two epochs of a plain loop over whole batches; its weights, the loss of the last epoch and that of all rows afterwards."""
    case = CASES[name]
    model, data = case.get("model", Tagger)(), data_of(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        losses, counts = [], []
        for start in range(0, ROWS, step):
            batch = case.get("collate", joined)(data[start : start + step])
            loss = loss_of(model, case, batch)
            losses.append(loss.item())
            counts.append(count_of(case, batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    mean = (
        sum(losses)
        if "sum" in name and "rows" not in name
        else torch.tensor(losses, dtype=DOUBLE) @ torch.tensor(counts, dtype=DOUBLE)
    )
    mean = mean if "sum" in name and "rows" not in name else (mean / sum(counts)).item()
    return (
        [p.detach() for p in model.parameters()],
        mean,
        loss_of(model, case, case.get("collate", joined)(data)).item(),
    )


def count_of(case: dict, batch: dict) -> float:
    """What a loss is a mean over, written down once more by hand."""
    labels, loss = batch["labels"], case.get("loss")
    if issubclass(case.get("model", Tagger), CarriesLoss) and case["model"].is_causal:
        labels = labels[:, 1:]
    if callable(loss) and "rows" in next(name for name, other in CASES.items() if other is case) and "one" not in case:
        return len(labels)
    kept = labels[labels != case.get("fill", -100)]
    return CLASS_WEIGHTS[kept].sum().item() if getattr(loss, "weight", None) is not None else kept.numel()


def trained(name: str, **settings) -> tuple[list[torch.Tensor], float, float]:
    case = CASES[name]
    model, data = case.get("model", Tagger)(), data_of(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if case.get("units"):
        optimizer = {
            "head": ConstantLr("SGD", {"lr": 0.05}, model, updated_modules="head", grad_clip=None),
            "body": ConstantLr("SGD", {"lr": 0.05}, model, updated_modules="body", grad_clip=None),
        }
    cls = case.get("trainer", Trainer)
    options = {"callbacks": (TerminateOnNaNCallback(),), "count_items": case.get("count_items"), **case.get("ddp", {})}
    trainer = cls(model, case.get("loss"), optimizer, **options)
    loading, collate = {"num_workers": 0, "shuffle": False}, case.get("collate")
    history = trainer.train(data, num_epochs=2, train_dataloader_kwargs=loading, collate_fn=collate, **settings)
    mean = history.get_latest_metric("train_loss_epoch")
    loading = {"num_workers": 0}
    whole = trainer.evaluate(data, per_device_batch_size=3, dataloader_kwargs=loading, collate_fn=collate)
    whole = whole["evaluation_loss"]
    return [p.detach() for p in model.parameters()], mean, whole


def assert_same(ours, reference):
    for mine, theirs in zip(ours[0], reference[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert ours[1] == pytest.approx(reference[1], abs=1e-12)
    assert ours[2] == pytest.approx(reference[2], abs=1e-12)


SPLITS = {
    "whole batches": {"per_device_batch_size": BATCH},
    "accumulation": {"per_device_batch_size": 1, "gradient_accumulation_steps": BATCH},
    "micro-batches": {"per_device_batch_size": BATCH, "microbatch_size": 3},
    "both": {"per_device_batch_size": BATCH // 2, "gradient_accumulation_steps": 2, "microbatch_size": 2},
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings(
    "ignore:gradient_accumulation_steps=8. it is not known"
)  # one row does not show what a sum is divided by
def test_parts_of_a_batch_train_as_the_whole_batch_does(name, split):
    assert_same(trained(name, **SPLITS[split]), expected(name))


def all_on_ranks() -> dict:
    """Every case on two processes: one batch, accumulated, in micro-batches."""
    found = {}
    splits = {
        "batches": {"global_batch_size": BATCH},
        "accumulation": {"global_batch_size": BATCH // 2, "gradient_accumulation_steps": 2},
        "micro-batches": {"global_batch_size": BATCH, "microbatch_size": 3},
    }
    for index, name in enumerate(CASES):
        for split, settings in splits.items():
            if split == "batches" or index % 6 == 0 or "sum" in name or "DDP" in name:
                found[name, split] = trained(name, **settings)
    return found


def test_two_processes_train_as_one_does_whatever_the_loss_is_a_mean_over(world2):
    for found in world2(all_on_ranks, timeout=240):
        assert {name for name, _ in found} == set(CASES)
        for (name, split), ours in found.items():
            try:
                assert_same(ours, expected(name))
            except AssertionError as error:
                raise AssertionError(f"{name}, {split}: {error}") from error


def normalised(settings: dict) -> list[torch.Tensor]:
    model = Tagger()
    trainer = NormalisedHook(model, None, torch.optim.SGD(model.parameters(), lr=0.05), callbacks=())
    loading = {"num_workers": 0, "shuffle": False}
    trainer.train(rows(), num_epochs=2, train_dataloader_kwargs=loading, **settings)
    return [p.detach() for p in model.parameters()]


def test_batches_that_a_hook_has_normalised_over_all_ranks_count_alike_in_their_window(world2):
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for window in ((range(4), range(4, 8)), (range(8, 12), range(12, 14))):
            batches = [joined([rows()[index] for index in indices]) for indices in window]
            losses = [F.cross_entropy(model(batch["x"]), batch["labels"]) for batch in batches]
            optimizer.zero_grad()
            (sum(losses) / 2).backward()
            optimizer.step()
    settings = {"global_batch_size": 4, "gradient_accumulation_steps": 2}
    for ours in (normalised(settings), *world2(normalised, settings)):
        for mine, theirs in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def warnings_of(settings: dict, count_items=None) -> list[str]:
    model = Tagger()
    trainer = Trainer(
        model, Scores(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), count_items=count_items
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(rows(), num_epochs=2, train_dataloader_kwargs={"num_workers": 0}, **settings)
    return [str(one.message) for one in caught if issubclass(one.category, DrivetrainWarning)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"per_device_batch_size": 4, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2: "),
        ({"microbatch_size": 3}, "microbatch_size=3: "),
    ],
)
def test_a_loss_that_cannot_be_seen_through_warns_once_when_its_parts_are_joined(settings, reason):
    (message,) = warnings_of(settings)
    assert message.startswith(reason) and "count_items" in message
    assert warnings_of(settings, lambda batch: (batch["labels"] != -100).sum()) == []
    assert warnings_of({"per_device_batch_size": 4}) == []


def test_a_loss_that_cannot_be_seen_through_warns_on_two_processes(world2):
    for (message,) in world2(warnings_of, {"global_batch_size": 8}):
        assert message.startswith("2 processes: ")


@pytest.mark.parametrize("name", ["causal model", "class weights", "a sum"])
@pytest.mark.parametrize("shell", [False, True])
def test_what_a_compiled_model_averages_over_is_found_without_compiling_it_again(name, shell, monkeypatch):
    case = CASES[name]
    made = []

    def compiled():
        model = case.get("model", Tagger)()
        made.append(model)
        if shell:
            return torch.compile(model, backend="eager")
        model.compile(backend="eager")
        return model

    monkeypatch.setitem(CASES, name, {**case, "model": compiled})
    ours = trained(name, per_device_batch_size=BATCH // 4, gradient_accumulation_steps=4)
    monkeypatch.setitem(CASES, name, case)
    assert_same(ours, expected(name))


class Positioned(nn.Module):
    """Multiplies by a buffer, which the backward pass needs, and carries its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("scale", torch.full((FEATURES,), 2.0))

    def forward(self, x):
        return {"loss": (self.layer(x) * self.scale).square().mean()}


def test_a_compiled_model_is_looked_at_without_writing_to_its_buffers():
    """Its first backward pass follows, and torch rejects one whose saved tensors were written to."""
    model = Positioned()
    model.compile(backend="aot_eager")
    data = [{"x": torch.ones(FEATURES)} for _ in range(4)]
    Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=()).train(data, num_epochs=1)
    assert model.scale.eq(2.0).all()


def test_an_unknown_way_to_count_is_refused():
    with pytest.raises(ConfigError, match="count_items='tokens'"):
        Trainer(Tagger(), count_items="tokens")


def test_a_chunked_loss_over_no_labels_leaves_zero_gradients():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    assert loss.isnan()
    torch.nan_to_num(loss).backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_an_evaluation_of_uneven_lengths_is_the_loss_over_all_elements():
    """A mean over elements, with batches that are padded to different lengths."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(length, FEATURES, generator=generator, dtype=DOUBLE) for length in (2, 3, 5, 7, 1)]
    model = nn.Linear(FEATURES, FEATURES, dtype=DOUBLE)
    trainer = Trainer(model, nn.MSELoss(), callbacks=())

    def collate(items):
        joined = torch.cat(items).unsqueeze(0)
        return joined, joined.roll(1, -1)

    found = trainer.evaluate(data, per_device_batch_size=2, dataloader_kwargs={"num_workers": 0}, collate_fn=collate)
    whole = torch.cat(data)
    reference = F.mse_loss(model(whole), whole.roll(1, -1)).item()
    assert found["evaluation_loss"] == pytest.approx(reference, abs=1e-12)


@pytest.mark.parametrize("kind", ["GPT2", "T5", "Bert"])
def test_models_of_hugging_face_accumulate_over_tokens(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 31}
    make = {
        "GPT2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **small,
                n_embd=8,
                n_layer=1,
                n_head=2,
                n_positions=16,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        ),
        "T5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                **small,
                d_model=8,
                d_kv=4,
                d_ff=8,
                num_layers=1,
                num_heads=2,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        "Bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                **small,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        ),
    }[kind]
    data = [{"input_ids": row["labels"].clamp(min=0), "labels": row["labels"]} for row in rows()]
    found = []
    for settings in (
        {"per_device_batch_size": 8},
        {"per_device_batch_size": 2, "gradient_accumulation_steps": 4},
        {"microbatch_size": 3},
    ):
        torch.manual_seed(0)
        model = make().double()
        trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
        trainer.train(data, num_epochs=1, train_dataloader_kwargs={"num_workers": 0, "shuffle": False}, **settings)
        found.append([p.detach() for p in model.parameters()])
    for split in found[1:]:
        for ours, theirs in zip(split, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # their loss is computed in float32
