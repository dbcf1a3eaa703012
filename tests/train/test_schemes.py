"""Training schemes other than a supervised loss on fixed data, next to the same maths by hand."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler, TensorDataset

from drivetrain import verify_resume
from drivetrain.core.errors import DrivetrainWarning
from drivetrain.optim import ConstantLr, OptimSet
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, weights

DOUBLE = torch.float64


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def run(kind, **settings):
    """Train a scheme at a constant global batch and return its weights."""
    model = make_model(dtype=DOUBLE)
    trainer = kind(model, nn.CrossEntropyLoss(), sgd(model), callbacks=(), count_items=lambda batch: len(batch[0]))
    keep_order = {"train_dataloader_kwargs": {"shuffle": False}}
    trainer.train(make_data(22, dtype=DOUBLE), num_epochs=2, global_batch_size=8, **{**keep_order, **settings})
    return weights(trainer.get_model())


class Contrastive(Trainer):
    """Each row's own code among the codes of the whole batch, of all ranks."""

    def calculate_train_batch_loss(self, batch):
        x, _ = batch
        first, second = self.gather(self.forward(x)), self.gather(self.forward(-x))
        loss = F.cross_entropy(first @ second.T, torch.arange(len(first)))
        return {"loss": loss, "model_outputs": first, "batch_size": len(x)}


class MetaLearning(Trainer):
    """A gradient step inside the loss, through the model's own parameters (second order)."""

    def calculate_train_batch_loss(self, batch):
        x, y = batch
        model, total = self.get_model(), 0.0
        for one, target in zip(x.split(1), y.split(1)):
            parameters = dict(model.named_parameters())
            inner = functional_call(model, parameters, one).pow(2).mean()
            gradients = torch.autograd.grad(inner, tuple(parameters.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients)}
            total = total + F.cross_entropy(functional_call(model, fast, one), target)
        return {"loss": total / len(x), "model_outputs": None, "batch_size": len(x)}


class OwnGradients(Trainer):
    """Gradients that no backward pass wrote, as gradient surgery makes them."""

    def backward_step(self, loss):
        parameters = list(self.get_model().parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Contrastive, {}),
        (MetaLearning, {}),
        (MetaLearning, {"gradient_accumulation_steps": 2}),
        (OwnGradients, {}),
        (OwnGradients, {"gradient_accumulation_steps": 2}),
        (OwnGradients, {"microbatch_size": 2}),
    ],
)
def test_ranks_train_the_weights_of_one_process_whatever_way_the_gradients_come(world2, kind, settings):
    alone = run(kind, **settings)
    for ours in world2(run, kind, **settings):
        for weight, expected in zip(ours, alone, strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)


class Growing(Dataset):
    """Rows that were collected so far, as a replay buffer has them."""

    def __init__(self):
        self.rows = list(zip(*make_data(8, dtype=DOUBLE).tensors))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def state_dict(self):
        return {"rows": [list(row) for row in self.rows]}

    def load_state_dict(self, state):
        self.rows = [tuple(row) for row in state["rows"]]


class Collector(Trainer):
    def train_epoch_start(self):
        super().train_epoch_start()
        if self.state.clock.epoch and self.state.clock.batch_in_epoch == 0:
            self.train_dataset.rows += [(-x, y) for x, y in self.train_dataset.rows]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_that_grows_between_epochs_is_trained_on(num_workers):
    model, expected, data, same = make_model(dtype=DOUBLE), make_model(dtype=DOUBLE), Growing(), Growing()
    trainer = Collector(model, nn.CrossEntropyLoss(), sgd(model), callbacks=())
    settings = {"shuffle": False, "num_workers": num_workers}
    trainer.train(data, num_epochs=3, per_device_batch_size=4, train_dataloader_kwargs=settings)
    optimizer = sgd(expected)
    for epoch in range(3):
        same.rows += [(-x, y) for x, y in same.rows] if epoch else []
        for first in range(0, len(same.rows), 4):
            x, y = map(torch.stack, zip(*same.rows[first : first + 4]))
            optimizer.zero_grad()
            F.cross_entropy(expected(x), y).backward()
            optimizer.step()
    assert trainer.state.clock.batch == 2 + 4 + 8
    assert all(map(torch.equal, weights(model), weights(expected)))


@pytest.mark.parametrize("batches", [1, 4, 6, 9])
def test_a_run_whose_data_grows_resumes_if_the_data_is_an_item_of_the_state(tmp_path, batches):
    def train(**settings):
        model, data = make_model(dtype=DOUBLE), Growing()
        trainer = Collector(model, nn.CrossEntropyLoss(), sgd(model), callbacks=(), seed=1)
        trainer.state.buffer = data
        settings = {"num_epochs": 3, "resume_from": "auto", "checkpoint_every": "1ba", **settings}
        loader = {"num_workers": 0}
        trainer.train(data, per_device_batch_size=4, train_dataloader_kwargs=loader, **settings)
        return weights(model)

    train(checkpoint_dir=tmp_path / "parts", num_epochs=None, max_duration=f"{batches}ba")
    whole, parts = train(checkpoint_dir=tmp_path / "whole"), train(checkpoint_dir=tmp_path / "parts")
    assert all(map(torch.equal, parts, whole))


class Curriculum(Sampler):
    """The first rows in the first epoch, more in each one after it."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4 * (self.epoch + 1)

    def __iter__(self):
        return iter(range(len(self)))


def test_a_sampler_whose_length_follows_the_epoch_is_read_whole_and_resumes():
    data = make_data(16, dtype=DOUBLE)

    def build():
        model = make_model(dtype=DOUBLE)
        return Trainer(model, nn.CrossEntropyLoss(), sgd(model), callbacks=())

    def settings():
        return {"num_epochs": 4, "per_device_batch_size": 2, "train_dataloader_kwargs": {"sampler": Curriculum()}}

    trainer, expected = build(), make_model(dtype=DOUBLE)
    trainer.train(data, **settings())
    optimizer, (x, y) = sgd(expected), data.tensors
    for epoch in range(4):
        for first in range(0, 4 * (epoch + 1), 2):
            optimizer.zero_grad()
            F.cross_entropy(expected(x[first : first + 2]), y[first : first + 2]).backward()
            optimizer.step()
    assert trainer.state.clock.batch == 2 + 4 + 6 + 8
    assert all(map(torch.equal, weights(trainer.model), weights(expected)))
    assert verify_resume(build, data, num_steps=14, **settings()).is_exact


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.disc = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()


class Gan(Trainer):
    def calculate_train_batch_loss(self, batch):
        real, _ = batch
        model = self.get_model()
        fake = model.gen(real)
        self.optimizer.step_now("disc", {"d": model.disc(fake.detach()).mean() - model.disc(real).mean()})
        loss = -model.disc(fake).mean()
        return {"loss": loss, "losses": {"g": loss}, "model_outputs": fake, "batch_size": len(real)}


def test_micro_batches_of_a_unit_that_steps_at_once_are_reported():
    model = Adversaries()
    units = OptimSet(
        disc=ConstantLr("SGD", {"lr": 0.1}, model, optim_loss="d", updated_modules="disc", manual=True),
        gen=ConstantLr("SGD", {"lr": 0.1}, model, optim_loss="g", updated_modules="gen"),
    )
    trainer = Gan(model, optimizer=units, callbacks=())
    settings = {"num_epochs": 1, "per_device_batch_size": 4, "microbatch_size": 2}
    with pytest.warns(DrivetrainWarning, match="step_now updates 'disc'"):
        trainer.train(make_data(8, dtype=DOUBLE), **settings)


class InputGradients(Trainer):
    def calculate_eval_batch_loss(self, batch):
        x = batch[0].requires_grad_()
        outputs = self.forward(x)
        slope = torch.autograd.grad(outputs.sum(), x, create_graph=True)[0]
        return {"loss": slope.pow(2).mean(), "model_outputs": outputs, "batch_size": len(x)}


def test_an_evaluation_that_needs_gradients_is_told_how_to_get_them():
    trainer = InputGradients(make_model(), nn.CrossEntropyLoss(), callbacks=())
    with pytest.raises(RuntimeError) as caught:
        trainer.evaluate(TensorDataset(*make_data(4).tensors))
    assert "torch.enable_grad()" in str(caught.value) + " ".join(getattr(caught.value, "__notes__", ()))
