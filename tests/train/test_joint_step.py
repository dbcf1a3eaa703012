"""Model and loss function as one compiled graph: the same training, unless something acts between them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Event, Trainer
from drivetrain.algorithms import LabelSmoothing
from drivetrain.core.plugin import Algorithm, Callback
from drivetrain.train.joint_step import JointForm, loss_graph_of
from tests.train.tasks import make_data, make_model

PLAN = [("native_dynamo", "aot_eager")]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Named(nn.Module):
    """A model with several outputs, by name."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs):
        hidden = self.inner(inputs)
        return {"logits": hidden, "extra": (hidden.square(), None)}


class Dictionaries(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, labels = self.data[index]
        return {"inputs": inputs, "labels": labels}


def fitted(strategy=PLAN, loss=F.cross_entropy, model=None, cls=Trainer, data=None, **settings):
    torch.manual_seed(0)
    model = make_model() if model is None else copy.deepcopy(model)
    options = {name: settings.pop(name) for name in ("callbacks", "algorithms", "precision") if name in settings}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = cls(model, loss, optimizer, strategy=strategy, seed=1, **{"callbacks": (), **options})
    data = make_data(40) if data is None else data
    trainer.train(data, eval_dataset=data, num_epochs=2, per_device_batch_size=8, **settings)
    return trainer


def assert_same_training(trainer, other):
    for ours, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        values = [one.run_history.get_metric_values(name) for one in (trainer, other)]
        assert values[0] == values[1]


def is_joint(trainer):
    return isinstance(trainer.run.loss.form, JointForm)


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_accumulation_steps": 2, "microbatch_size": 3}, {"precision": "bf16"}]
)
def test_training_is_that_of_the_plain_model_bit_by_bit(settings):
    trainer = fitted(**settings)
    assert is_joint(trainer)
    assert_same_training(trainer, fitted(None, **settings))


def test_a_second_run_compiles_nothing_again():
    from torch._dynamo.utils import counters

    trainer = fitted([("native_dynamo", {"backend": "aot_eager", "fullgraph": True})])
    counters.clear()
    trainer.train(make_data(40), eval_dataset=make_data(40), num_epochs=1, per_device_batch_size=8)
    assert is_joint(trainer) and counters["stats"]["unique_graphs"] == 0


def test_outputs_by_name_and_losses_by_name_arrive():
    seen = []

    class Looks(Callback):
        def on_train_step_end(self, trainer, batch, batch_output):
            outputs = batch_output["model_outputs"]
            seen.append((outputs["logits"].requires_grad, outputs["extra"][1], set(trainer.state.losses)))

    def losses(logits, labels):
        return {"ce": F.cross_entropy(logits, labels), "size": 0.01 * logits.square().mean()}

    arguments = {"model": Named(), "loss": losses, "data": Dictionaries(make_data(40)), "callbacks": [Looks()]}
    trainer = fitted(**arguments)
    assert is_joint(trainer) and seen == [(False, None, {"ce", "size"})] * 10
    assert_same_training(trainer, fitted(None, **arguments))


def test_outputs_are_returned_only_where_something_may_read_them():
    class Undeclared(Callback):
        def batch_end(self, state, logger):
            found.append(state.outputs)

    class Declared(Undeclared):
        reads = ("timestamp",)

    for callback, is_kept in ((Undeclared(), True), (Declared(), False)):
        found = []
        trainer = fitted(callbacks=[callback])
        assert is_joint(trainer) and len(found) == 10
        assert all((outputs is not None) is is_kept for outputs in found)
    own = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    assert loss_graph_of(Trainer(trainer.model, F.cross_entropy, own)) == "loss", "the default callbacks read none"


class OwnLoss(Trainer):
    def compute_loss(self, outputs, targets=None):
        return 2 * super().compute_loss(outputs, targets)


class ReadsOutputs(Algorithm):
    """Adds a penalty of the outputs to the loss."""

    events = frozenset({Event.AFTER_LOSS})
    reads, writes = ("outputs", "loss"), ("loss",)

    def apply(self, event, state, logger):
        state.loss = state.loss + state.outputs.square().mean()


@pytest.mark.parametrize(
    "options", [{"algorithms": [LabelSmoothing(0.1)]}, {"algorithms": [ReadsOutputs()]}, {"cls": OwnLoss}]
)
def test_what_acts_between_model_and_loss_keeps_them_apart(options):
    trainer = fitted(**options)
    assert not is_joint(trainer)
    assert_same_training(trainer, fitted(None, **options))


def test_another_loss_function_is_used_from_the_next_run_on():
    trained = []
    for strategy in (PLAN, None):
        trainer = fitted(strategy)
        trainer.loss_func = lambda outputs, targets: 3 * F.cross_entropy(outputs, targets)
        trainer.train(make_data(40), num_epochs=1, per_device_batch_size=8)
        trained.append(trainer)
    assert not is_joint(trained[0])
    assert all(map(torch.equal, trained[0].model.parameters(), trained[1].model.parameters()))


@pytest.mark.parametrize("plan", [PLAN, [("chunked_cross_entropy", 4)]])
def test_checkpoints_expect_no_state_of_a_planned_loss_function(plan, tmp_path):
    fitted(plan, checkpoint_dir=tmp_path)  # warnings are errors
    assert list(tmp_path.glob("checkpoint-*"))
