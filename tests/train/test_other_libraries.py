"""Models, optimizers, loaders and data of the shapes that other libraries have. None of these is needed: each test has a stand-in."""

from collections import UserDict, UserList

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import Trainer
from drivetrain.core.errors import ConfigTypeError, NonFiniteStateError


def make_data(size=18):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2))


def train(make_optimizer=lambda p: SGD(p, lr=0.1), data=None, model=None, cls=Trainer, **settings):
    model = make_model() if model is None else model
    trainer = cls(model, nn.CrossEntropyLoss(), make_optimizer(model.parameters()), callbacks=())
    settings = {"num_epochs": 2, "per_device_batch_size": 4, **settings}
    trainer.train(make_data() if data is None else data, **settings)
    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten().double() for p in trainer.model.parameters()])


def resumes(folder, make=train, **settings):
    """Return whether a run that is stopped after three updates ends like one that is not."""
    whole = make(**settings)
    make(checkpoint_dir=folder, checkpoint_every="1ba", **{**settings, "max_num_train_steps": 3})
    parts = make(checkpoint_dir=folder, checkpoint_every="1ba", resume_from="auto", **settings)
    return torch.equal(weights(whole), weights(parts))


# ---------------------------------------------------------------------- optimizers


class Plain(Optimizer):
    """Gradient descent, with something of its own to remember."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.prepare()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.change(parameter, parameter.grad), alpha=group["lr"] or 0.1)

    def prepare(self):
        pass

    def change(self, parameter, grad):
        return grad


class Counting(Plain):
    """Its numbers of steps are attributes, as Ranger's are."""

    def __init__(self, params):
        super().__init__(params)
        self.count, self.factor = 0, 1.0

    def prepare(self):
        self.count += 1
        self.factor *= 0.5 if self.count % 2 else 3.0

    def change(self, parameter, grad):
        return grad * self.factor


class Noisy(Plain):
    """Holds a generator, as a differentially private optimizer does."""

    def __init__(self, params):
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(5)

    def change(self, parameter, grad):
        return grad + torch.randn(grad.shape, generator=self.generator)


class Total(Plain):
    """Has a state of no parameter that is a number."""

    def prepare(self):
        self.state["total"] = self.state.get("total", 0) + 1

    def change(self, parameter, grad):
        return grad / self.state["total"]


class Rotating(Plain):
    """Keeps matrices of a decomposition, whose columns are contiguous in memory."""

    def change(self, parameter, grad):
        if grad.dim() < 2:
            return grad
        kept = self.state[parameter]
        basis = kept.get("basis", torch.eye(len(grad)))
        kept["basis"] = torch.linalg.qr(basis @ (grad @ grad.T + torch.eye(len(grad))))[0].mT.contiguous().mT
        return kept["basis"] @ (kept["basis"].T @ grad)


class Wide(Plain):
    """Keeps lists in a wider type than its parameters, and has a method of its own to load them."""

    def change(self, parameter, grad):
        kept = self.state[parameter].setdefault("sums", [torch.zeros(grad.shape, dtype=torch.float64)])
        kept[0] += grad.double() / 3
        return kept[0].to(grad.dtype)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


class Wrapper(Optimizer):
    """Steps another optimizer, and has a state of another form than torch's."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.slow = optimizer, [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        self.defaults, self.param_groups, self.state = optimizer.defaults, optimizer.param_groups, optimizer.state

    def step(self, closure=None):
        self.optimizer.step()
        with torch.no_grad():
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow):
                parameter.copy_(slow.lerp_(parameter, 0.3))

    def state_dict(self):
        return {"slow": self.slow, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        self.slow = [tensor.clone() for tensor in state_dict["slow"]]
        self.optimizer.load_state_dict(state_dict["inner"])


@pytest.mark.parametrize("optimizer", [Counting, Noisy, Total, Rotating, Wide])
def test_an_optimizer_that_remembers_more_than_tensors_like_its_parameters_resumes_exactly(optimizer, tmp_path):
    assert resumes(tmp_path, make_optimizer=optimizer)


def test_a_wrapper_whose_state_has_a_form_of_its_own_resumes_exactly(tmp_path):
    assert resumes(tmp_path, make_optimizer=lambda p: Wrapper(SGD(p, lr=0.1, momentum=0.9)))


def test_an_optimizer_without_a_rate_resumes_exactly(tmp_path):
    assert resumes(tmp_path, make_optimizer=lambda p: Plain(p, lr=None))


class Halves(Tensor):
    """A tensor made of tensors, as a quantized state is: whole steps and the rest."""

    @staticmethod
    def __new__(cls, steps, rest, unit):
        return Tensor._make_wrapper_subclass(cls, steps.shape, dtype=rest.dtype, device=rest.device)

    def __init__(self, steps, rest, unit):
        self.steps, self.rest, self.unit = steps, rest, unit

    def __tensor_flatten__(self):
        return ["steps", "rest"], [self.unit]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["steps"], inner["rest"], *context)

    def dense(self):
        return self.steps * self.unit + self.rest

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].steps.clone(), args[0].rest.clone(), args[0].unit)
        raise NotImplementedError(f"{func} of a {cls.__name__}")


class Quantized(Plain):
    def change(self, parameter, grad):
        kept = self.state[parameter]
        mean = grad + (0.9 * kept["mean"].dense() if "mean" in kept else 0)
        steps = (mean / 0.125).to(torch.int8)
        kept["mean"] = Halves(steps, mean - steps * 0.125, 0.125)
        return kept["mean"].dense()


def test_a_state_of_tensors_made_of_tensors_resumes_exactly(tmp_path):
    with torch.serialization.safe_globals([Halves]):
        assert resumes(tmp_path, make_optimizer=Quantized)


def test_a_state_of_tensors_whose_class_is_not_declared_names_it(tmp_path):
    settings = {"make_optimizer": Quantized, "checkpoint_dir": tmp_path, "resume_from": "auto"}
    train(**settings)
    with pytest.raises(Exception, match=r"Halves.*add_safe_globals"):
        train(**{**settings, "num_epochs": 3})


def test_the_parts_of_a_tensor_made_of_tensors_are_tested_before_a_checkpoint(tmp_path):
    class Bad(Quantized):
        def change(self, parameter, grad):
            change = super().change(parameter, grad)
            self.state[parameter]["unused"] = Halves(
                torch.zeros(2, dtype=torch.int8), torch.tensor([1.0, float("nan")]), 0.5
            )
            return change

    with pytest.raises(NonFiniteStateError, match="unused"):
        train(Bad, num_epochs=1, checkpoint_dir=tmp_path)


class Twice(Plain):
    """Differentiates gradients, as AdaHessian does."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        seconds = torch.autograd.grad(
            [p.grad for p in parameters], parameters, [torch.ones_like(p) for p in parameters]
        )
        with torch.no_grad():
            for parameter, second in zip(parameters, seconds):
                parameter -= 0.1 * parameter.grad / (second.abs() + 1)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_an_optimizer_that_differentiates_gradients_names_the_hook_that_it_needs(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        train(Twice)
    assert "create_graph=True" in caught.value.__notes__[0]

    class Second(Trainer):
        def backward_step(self, loss):
            loss.backward(create_graph=True)

    assert resumes(tmp_path, make_optimizer=Twice, cls=Second)


class Sharp(Plain):
    """Needs a closure, although its default is None, as SAM of several packages does."""

    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("Sharp requires closure.")
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter += 0.05 * parameter.grad
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for parameter, value in zip(parameters, before):
                parameter.copy_(value)
        super().step()


def test_an_optimizer_that_asks_for_a_closure_late_names_the_attribute_that_gives_it_one(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        train(Sharp)
    assert "needs_closure = True" in caught.value.__notes__[0]

    def declared(parameters):
        optimizer = Sharp(parameters)
        optimizer.needs_closure = True
        return optimizer

    assert resumes(tmp_path, make_optimizer=declared)


# ---------------------------------------------------------------------- loaders and data


class StartingLoader:
    """Starts an iteration when it is asked for its state, as torchdata's does; that iteration then ignores a state that is loaded."""

    def __init__(self):
        self.data, self.position, self.loaded, self.started = make_data(), 0, None, False

    def __iter__(self):
        if not self.started:
            self.position, self.loaded = self.loaded or 0, None
        self.started = False
        return self

    def __next__(self):
        if self.position >= len(self.data):
            raise StopIteration
        rows = range(self.position, min(self.position + 4, len(self.data)))
        self.position = rows.stop
        return self.data[rows.start : rows.stop]

    def state_dict(self):
        if not self.position:
            iter(self)
            self.started = True
        return {"position": self.position}

    def load_state_dict(self, state):
        self.loaded = state["position"]


@pytest.mark.filterwarnings("ignore:.*can be read only once")
def test_a_loader_that_is_asked_for_its_state_only_to_save_it_continues_where_it_was(tmp_path):
    def run(**settings):
        return train(data=StartingLoader(), **{"per_device_batch_size": 8, "num_epochs": 1, **settings})

    assert resumes(tmp_path, make=run)


class Pipeline(IterableDataset):
    """A dataset whose first stage is a loader, as webdataset's WebLoader is."""

    def __init__(self, loader):
        self.pipeline = [loader]

    def __iter__(self):
        return iter(self.pipeline[0])


def test_a_pipeline_that_begins_with_a_loader_gives_batches_and_not_samples(tmp_path):
    def run(**settings):
        return train(data=Pipeline(DataLoader(make_data(16), batch_size=4)), **{**settings, "per_device_batch_size": 8})

    plain = train(data=make_data(16), train_dataloader_kwargs={"shuffle": False})
    assert torch.equal(weights(run()), weights(plain))
    assert resumes(tmp_path, make=run)


class Rows(Dataset):
    def __init__(self, size=18):
        self.data = make_data(size)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Augmented(Rows):
    """Holds the generator of its transforms, as albumentations does."""

    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(3)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.random.random(), y


@pytest.mark.parametrize("num_workers", [0, 2])
def test_generators_that_a_dataset_holds_resume_exactly_with_and_without_workers(tmp_path, num_workers):
    def run(**settings):
        return train(data=Augmented(), train_dataloader_kwargs={"num_workers": num_workers}, **settings)

    assert resumes(tmp_path, make=run)


def doubled(samples):
    return torch.stack([2 * x for x, _ in samples]), torch.tensor([y for _, y in samples])


def test_collate_fn_among_the_arguments_of_a_loader_is_the_one_that_is_used():
    kwargs = {"num_workers": 0, "shuffle": False}
    apart = train(data=Rows(), collate_fn=doubled, train_dataloader_kwargs=kwargs)
    inside = train(data=Rows(), train_dataloader_kwargs={**kwargs, "collate_fn": doubled})
    assert torch.equal(weights(apart), weights(inside))
    kwargs = {"num_workers": 0, "collate_fn": doubled}
    outputs = inside.predict(Rows(), dataloader_kwargs=kwargs)
    assert torch.equal(outputs, inside.predict(Rows(), dataloader_kwargs={"num_workers": 0}, collate_fn=doubled))
    assert inside.evaluate(Rows(), dataloader_kwargs=kwargs)


def local_batch(samples):
    class Batch:
        rows = samples

    return Batch()


def graph_batch(samples):
    return torch.stack([x for x, _ in samples]) * torch.ones(1, requires_grad=True), torch.tensor(
        [y for _, y in samples]
    )


@pytest.mark.parametrize(("collate", "reason"), [(local_batch, "top level of a module"), (graph_batch, r"detach\(\)")])
def test_a_batch_that_cannot_leave_its_worker_is_an_error_and_not_a_hang(collate, reason):
    with pytest.raises(TypeError, match=reason):
        train(data=Rows(8), collate_fn=collate, train_dataloader_kwargs={"num_workers": 1})


class Frame:
    """Indexed by column, as a table of polars or pyarrow is."""

    def __dataframe__(self):
        return self

    def __len__(self):
        return 2

    def __getitem__(self, name):
        raise KeyError(name)


class Columns(UserDict):
    """A mapping of tensors that is no dict, as a TensorDict is. It yields rows."""

    def __iter__(self):
        return iter([Tensor(), Tensor()])

    def keys(self):
        return self.data.keys()

    def to_dict(self):
        return self.data


class Matrix:
    shape = (3, 3)

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Frame(), "indexed by column.*to_numpy"),
        (Columns(x=torch.zeros(3)), r"pass train_dataset.to_dict\(\)"),
        ((Matrix(), torch.zeros(3)), "a tuple of Matrix, Tensor.*Convert them"),
    ],
)
def test_tables_and_matrices_of_other_libraries_are_rejected_before_they_are_read(data, words):
    with pytest.raises(ConfigTypeError, match=words):
        train(data=data)


def test_columns_of_lists_name_what_makes_tensors_of_them():
    class Lists(Rows):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x.tolist(), y

    with pytest.raises(Exception, match=r"with_format\('torch'\)"):
        train(data=Lists(), train_dataloader_kwargs={"num_workers": 0})


# ---------------------------------------------------------------------- models and arguments


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(4, 4))])
def test_scripted_and_traced_models_train_and_resume(make, tmp_path):
    def run(**settings):
        return train(model=make(make_model()), **settings)

    torch.testing.assert_close(weights(run()), weights(train()))
    assert resumes(tmp_path, make=run)


def test_a_strategy_in_the_containers_of_a_configuration_library_is_one_of_lists():
    def planned(strategy):
        model = make_model()
        trainer = Trainer(
            model, nn.CrossEntropyLoss(), SGD(model.parameters(), lr=0.1), callbacks=(), strategy=strategy
        )
        trainer.train(make_data(), num_epochs=1, per_device_batch_size=4)
        return weights(trainer)

    assert torch.equal(planned(UserList(["checkpoint"])), planned(["checkpoint"]))
    assert torch.equal(planned(UserList([UserList(["amp_native", "bf16"])])), planned([("amp_native", "bf16")]))


def test_a_tracker_of_another_library_names_the_recorder_that_writes_to_it():
    class SummaryWriter:
        def add_scalar(self, tag, value, step):
            pass

    with pytest.raises(ConfigTypeError, match=r"Recorder\('runs/a', sinks=\('wandb',\)\)"):
        Trainer(make_model(), nn.CrossEntropyLoss(), loggers=[SummaryWriter()])
