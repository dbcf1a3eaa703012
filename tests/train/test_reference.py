"""Side by side with the installed pytorch-accelerated: equal where it is right, different where it is known to be wrong."""

import pytest
import torch
from torch import nn

from drivetrain.schedulers import CosineLrScheduler
from drivetrain.trainer import Trainer
from tests.train.tasks import make_data, make_model

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
reference = pytest.importorskip("pytorch_accelerated")


def losses_of(trainer_class, callback_class, epochs=2, rows=32, callbacks=(), **kwargs):
    """Train the same model on the same unshuffled data with either library; return step losses, history and weights."""
    seen = []

    class Keep(callback_class):
        def on_train_step_end(self, trainer, batch, batch_output, **rest):
            seen.append(float(batch_output["loss"].detach()))

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    trainer = trainer_class(model, nn.CrossEntropyLoss(), optimizer, callbacks=(Keep(), *callbacks))
    trainer.train(
        make_data(rows),
        num_epochs=epochs,
        eval_dataset=make_data(16),
        per_device_batch_size=8,
        train_dataloader_kwargs={"shuffle": False, "num_workers": 0},
        eval_dataloader_kwargs={"num_workers": 0},
        **kwargs,
    )
    history = {
        name: list(trainer.run_history.get_metric_values(name)) for name in ("train_loss_epoch", "eval_loss_epoch")
    }
    return seen, history, [p.detach().clone() for p in model.parameters()]


def both(**kwargs):
    from pytorch_accelerated.callbacks import TrainerCallback as TheirCallback
    from pytorch_accelerated.trainer import Trainer as TheirTrainer

    from drivetrain.callbacks import TrainerCallback as OurCallback

    return losses_of(Trainer, OurCallback, **kwargs), losses_of(TheirTrainer, TheirCallback, **kwargs)


def test_plain_training_is_the_same_step_by_step():
    (ours, our_history, our_weights), (theirs, their_history, their_weights) = both()
    assert ours == theirs
    assert all(map(torch.equal, our_weights, their_weights))
    for name, values in their_history.items():
        assert our_history[name] == pytest.approx([float(v) for v in values], rel=1e-6)


def test_clipping_by_value_is_the_same():
    (ours, _, our_weights), (theirs, _, their_weights) = both(gradient_clip_value=0.01)
    assert ours == theirs and all(map(torch.equal, our_weights, their_weights))


def test_accumulation_gives_the_same_weights_and_the_true_epoch_loss():
    (_, our_history, our_weights), (_, their_history, their_weights) = both(gradient_accumulation_steps=4)
    for a, b in zip(our_weights, their_weights):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    # Its tracked loss is the one divided for accumulation; ours is the mean loss.
    assert float(their_history["train_loss_epoch"][0]) == pytest.approx(
        our_history["train_loss_epoch"][0] / 4, rel=1e-4
    )


def test_a_scheduler_of_torch_gives_the_same_rates():
    make = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    (ours, _, our_weights), (theirs, _, their_weights) = both(create_scheduler_fn=make)
    assert ours == theirs and all(map(torch.equal, our_weights, their_weights))


def test_the_cosine_schedule_agrees_where_the_reference_has_no_warm_up():
    from pytorch_accelerated.schedulers import CosineLrScheduler as Theirs

    rates = []
    for scheduler_class in (CosineLrScheduler, Theirs):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = scheduler_class(optimizer, total_num_epochs=4, num_update_steps_per_epoch=5)
        rates.append([])
        for _ in range(20):
            optimizer.step()
            scheduler.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(rates[1])


def test_fewer_steps_than_the_limit_stop_at_the_epochs_end():
    (ours, _, _), (theirs, _, _) = both(epochs=1, rows=64, max_num_train_steps=20)
    assert len(ours) == 8
    assert len(theirs) != 8  # it goes on to 20: the first limit does not win there


def test_a_checkpoint_file_of_the_reference_loads(tmp_path):
    from pytorch_accelerated.trainer import Trainer as TheirTrainer

    model = make_model()
    theirs = TheirTrainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2), callbacks=())
    theirs.train(make_data(), num_epochs=1, per_device_batch_size=8, train_dataloader_kwargs={"num_workers": 0})
    theirs.save_checkpoint(tmp_path / "theirs.pt", {"note": 3})
    other = make_model()
    ours = Trainer(other, nn.CrossEntropyLoss(), torch.optim.AdamW(other.parameters(), lr=1e-2), callbacks=())
    assert ours.load_checkpoint(tmp_path / "theirs.pt")["note"] == 3
    assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_a_callback_and_a_subclass_written_for_the_reference_run_after_changing_the_import():
    source = """
import torch
from torch import nn
from {package}.trainer import Trainer
from {package}.callbacks import TrainerCallback, EarlyStoppingCallback, get_default_callbacks, LogMetricsCallback
from {package}.run_config import TrainerRunConfig
from {package}.tracking import RunHistory
from {package}.utils import LimitBatches
from {package}.finetuning import ModelFreezer

calls = []

class Keep(TrainerCallback):
    def on_training_run_start(self, trainer, **kwargs): calls.append("start")
    def on_train_epoch_end(self, trainer, **kwargs): calls.append(("train", trainer.run_history.current_epoch))
    def on_eval_epoch_end(self, trainer, **kwargs): calls.append("eval")
    def on_training_run_end(self, trainer, **kwargs): calls.append("end")

class Mine(Trainer):
    def calculate_train_batch_loss(self, batch):
        x, y = batch
        out = self.model(x)
        return {{"loss": self.loss_func(out, y), "model_outputs": out, "batch_size": len(y)}}
    def train_epoch_end(self):
        self.run_history.update_metric("mine", float(self.run_config.gradient_accumulation_steps))
    def create_scheduler(self):
        return torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5)

def run(model, data):
    trainer = Mine(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(Keep,))
    trainer.train(data, num_epochs=2, eval_dataset=data, per_device_batch_size=8,
                  train_dataloader_kwargs={{"shuffle": False, "num_workers": 0}}, eval_dataloader_kwargs={{"num_workers": 0}})
    return calls, trainer.run_history.get_metric_values("mine"), trainer.evaluate(data, dataloader_kwargs={{"num_workers": 0}})
"""
    results = []
    for package in ("drivetrain", "pytorch_accelerated"):
        namespace = {}
        exec(source.format(package=package), namespace)
        results.append(namespace["run"](make_model(), make_data())[:2])
    assert results[0][0] == results[1][0]
    assert list(results[0][1]) == list(results[1][1]) == [1.0, 1.0]
