"""State that no `state_dict` holds: a run that is interrupted and resumed ends as one that was not."""

import contextlib
import random
import tracemalloc
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Trainer, verify_resume
from drivetrain.context.attributes import PlainAttributes
from drivetrain.context.state import State
from drivetrain.core.errors import DrivetrainWarning
from drivetrain.train.callbacks import TrainerCallback


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.mode = 0, "even"

    def value(self, x):
        self.n += 1
        self.mode = "odd" if self.n % 2 else "even"
        return self.n / 10 + (self.mode == "odd")


class Queue(nn.Module):
    """A queue of tensors that are written in place, as attributes."""

    def __init__(self):
        super().__init__()
        self.queue, self.place, self.is_full = torch.zeros(5), 0, False

    def value(self, x):
        self.queue[self.place] = x.mean()
        self.place = (self.place + 1) % 5
        self.is_full = self.is_full or not self.place
        return self.queue.sum() + self.is_full


class Lazy(nn.Module):
    """Statistics that are made in the first step, by the old value."""

    def value(self, x):
        self.mean = x.mean(0) * 0.1 + (self.mean * 0.9 if hasattr(self, "mean") else 0)
        return self.mean.sum()


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.array, self.by_name = deque(maxlen=2), np.zeros(2), {"sum": torch.zeros(())}
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)

    def value(self, x):
        self.last.append(float(x.mean()))
        self.array += self.last[0]
        self.by_name["sum"] += x.sum()
        self.unsaved += 1
        return sum(self.last) + self.array.sum() + self.by_name["sum"] + self.unsaved


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(2)
        self.numpy = np.random.default_rng(3)

    def value(self, x):
        return torch.rand((), generator=self.torch) + self.python.random() + self.numpy.random()


class Meter:
    def __init__(self):
        self.total = 0.0


class Holds(nn.Module):
    """An object of the user's own keeps the number."""

    def __init__(self):
        super().__init__()
        self.meter = Meter()

    def value(self, x):
        self.meter.total += float(x.mean())
        return self.meter.total


KINDS = [Counts, Queue, Lazy, Containers, Draws, Holds]


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.linear = part, nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x) * (1 + 0.1 * torch.as_tensor(self.part.value(x), dtype=torch.float32))


class ModuleLoss(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs * (1 + 0.1 * float(self.part.value(outputs.detach()))), targets)


class CallableLoss:
    def __init__(self):
        self.count = 0

    def __call__(self, outputs, targets):
        self.count += 1
        return nn.functional.cross_entropy(outputs * self.count, targets)


class Decay:
    """A scheduler without `state_dict`."""

    def __init__(self, optimizer):
        self.optimizer, self.step_count = optimizer, 0

    def step(self):
        self.step_count += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.step_count


def data(rows=32):
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 2, (rows,), generator=generator)
    return TensorDataset(torch.randn(rows, 4, generator=generator), labels)


def verdict(make, **kwargs):
    def build():
        model, loss, callbacks = make()
        return Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks)

    return verify_resume(build, data(), per_device_batch_size=4, num_epochs=None, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_of_a_model_that_change_in_training_are_resumed(kind):
    assert verdict(lambda: (Model(kind()), nn.CrossEntropyLoss(), ())).is_exact


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_of_a_loss_that_change_in_training_are_resumed(kind):
    assert verdict(lambda: (nn.Linear(4, 2), ModuleLoss(kind()), ())).is_exact


def test_attributes_of_a_loss_object_and_a_scheduler_are_resumed():
    assert verdict(lambda: (nn.Linear(4, 2), CallableLoss(), ())).is_exact
    assert verdict(lambda: (nn.Linear(4, 2), nn.CrossEntropyLoss(), ()), create_scheduler_fn=Decay).is_exact


class Records(nn.Module):
    """Collects what cannot be saved."""

    def __init__(self):
        super().__init__()
        self.records = []

    def value(self, x):
        self.records.append(object())
        return len(self.records) / 10


def test_what_has_changed_and_cannot_be_saved_is_named_once(tmp_path):
    model = Model(Records())
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    with pytest.warns(DrivetrainWarning, match=r"model\.part\.records of Records has changed .* list") as caught:
        trainer.train(data(), num_epochs=2, checkpoint_dir=tmp_path, checkpoint_every="1ba")
    assert len(caught) == 1


def changed(model, *steps):
    state = State(model=model)
    watched = PlainAttributes()
    watched.watch(state)
    for step in steps:
        step()
    return [f"{path}.{name}" for path, name, _, _ in watched.changed(state)]


class Activations(nn.Module):
    """Keeps results of a pass, its parameters in a list, a function and a cache of the layer's own."""

    def __init__(self):
        super().__init__()
        self.inner, self.activation = nn.Linear(2, 2), torch.relu
        self.everything = [self.inner, self.inner.weight]

    def forward(self, x):
        self.hidden = self.inner(x)
        self.hiddens = [self.hidden]
        self.last_layer = self.inner
        return self.activation(self.hidden)


def ordinary_models():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    yield nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.Dropout(0.1)), (torch.randn(2, 3, 4),)
    yield nn.LSTM(4, 4, batch_first=True), (torch.randn(2, 3, 4),)
    yield nn.TransformerEncoder(layer, 2), (torch.randn(2, 3, 4),)
    yield nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), (torch.randn(2, 4),)
    yield Activations(), (torch.randn(2, 2),)


def first_tensor(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else next(iter(outputs))


def test_ordinary_models_have_nothing_that_has_changed():
    for model, inputs in ordinary_models():
        for training in (True, False):
            model.train(training)
            assert changed(model, lambda: first_tensor(model(*inputs)).sum().backward()) == [], type(model)  # noqa: B023


def test_models_of_transformers_have_nothing_that_has_changed():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    configs = [transformers.LlamaConfig(vocab_size=20, **small), transformers.BertConfig(vocab_size=20, **small)]
    configs.append(transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2))
    for config in configs:
        model = transformers.AutoModel.from_config(config)
        ids = torch.arange(8)[None]
        assert changed(model, lambda: model(input_ids=ids)[0].sum().backward()) == [], type(model)  # noqa: B023


def test_models_of_timm_have_nothing_that_has_changed():
    timm = pytest.importorskip("timm")
    for name in ("resnet18", "vit_tiny_patch16_224", "convnext_atto"):
        model = timm.create_model(name)
        assert changed(model, lambda: model(torch.randn(2, 3, 224, 224)).sum().backward()) == [], name  # noqa: B023


class Interrupted(Exception):
    pass


class Interrupts(TrainerCallback):
    def __init__(self, batches):
        self._batches = batches

    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch == self._batches:
            raise Interrupted


def train(folder, part, until=None, **kwargs):
    torch.manual_seed(0)
    model = Model(part)
    callbacks = () if until is None else (Interrupts(until),)
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks)
    with contextlib.suppress(Interrupted):
        trainer.train(
            data(), per_device_batch_size=4, checkpoint_dir=folder, checkpoint_every="1ba", num_epochs=2, **kwargs
        )
    return trainer


def test_an_attribute_that_is_gone_is_named_and_the_run_goes_on(tmp_path):
    train(tmp_path, Counts(), until=3)

    class Counts2(Counts):
        def __init__(self):
            super().__init__()
            del self.n

        def value(self, x):
            return 0.5

    with pytest.warns(DrivetrainWarning, match=r"model\.part\.n was saved and is not there now"):
        train(tmp_path, Counts2(), resume_from="auto")


def on_ranks(folder):
    whole = train(folder / "whole", Queue()).model
    train(folder / "half", Queue(), until=3)
    resumed = train(folder / "half", Queue(), resume_from="auto").model
    pairs = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs), resumed.part.queue


def test_every_rank_resumes_with_its_own_attributes(tmp_path, world2):
    (first, queue), (second, other) = world2(on_ranks, tmp_path)
    assert first
    assert second
    assert not torch.equal(queue, other)


def test_a_checkpoint_without_attributes_loads(tmp_path):
    trainer = train(tmp_path, Counts(), until=3)
    saved = trainer.state.state_dict()
    assert saved.pop("plain_attributes")["model.part"]["n"]["value"] == 3
    other = train(tmp_path / "other", Counts())
    assert other.state.load_state_dict(saved).is_complete


def test_a_count_of_a_callback_is_for_its_own_process(tmp_path):
    class StopsAfter(TrainerCallback):
        """Ends each process after some batches, as a time slice does."""

        def __init__(self, batches):
            self.left = batches

        def on_train_step_end(self, trainer, **kwargs):
            self.left -= 1
            if not self.left:
                trainer.request_stop()

    for done in (5, 10):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[StopsAfter(5)])
        trainer.train(
            data(),
            num_epochs=5,
            per_device_batch_size=4,
            checkpoint_dir=tmp_path,
            checkpoint_every="1ba",
            resume_from="auto",
        )
        assert trainer.state.clock.batch == done


def test_a_large_array_of_a_module_is_not_copied_many_times_to_see_whether_it_changed():
    model = nn.Linear(4, 2)
    model.memory = np.zeros(1 << 22)
    state = State(model=model)
    state._watch()
    tracemalloc.start()
    saved = state.state_dict()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * model.memory.nbytes and not saved.get("plain_attributes")
    model.memory[7] = 1
    assert list(state.state_dict()["plain_attributes"]["model"]) == ["memory"]
