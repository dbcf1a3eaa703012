"""Bad input fails before the first step, and says what to do."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import BatchOutputError, ConfigError, DrivetrainWarning
from drivetrain.train.callbacks import EarlyStoppingCallback, PrintProgressCallback
from drivetrain.train.settings import TrainerPlaceholderValues
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, make_trainer, train


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_epochs": None}, "num_epochs"),
        ({"num_epochs": 0}, "at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"gradient_clip_value": 0}, "gradient_clip_value=0"),
        ({"gradient_clip_value": 1.0, "gradient_clip_norm": 1.0}, "both"),
        ({"per_device_batch_size": 0}, "per_device_batch_size=0"),
        ({"num_epochs": None, "max_duration": "10epp"}, "ep"),
        ({"num_epochs": None, "max_duration": "0.5dur"}, "max_duration"),
        ({"eval_interval": "soon"}, "eval_interval"),
        ({"scheduler_interval": "steps"}, "'step'"),
        ({"limit_train_batches": 1.5}, "fraction"),
        ({"resume_from": "auto"}, "checkpoint_dir"),
        ({"global_batch_size": 0}, "global_batch_size"),
    ],
)
def test_settings_are_checked_at_the_start(settings, words):
    trainer = make_trainer()
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(ConfigError, match=words):
        train(trainer, **settings)
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_unknown_precision_names_the_nearest():
    with pytest.raises(ConfigError, match="bf16"):
        make_trainer(precision="bf61")


@pytest.mark.parametrize(
    ("keyword", "near"), [("num_epoch", "num_epochs"), ("gradient_clipnorm", "gradient_clip_norm")]
)
def test_unknown_keywords_name_the_nearest(keyword, near):
    with pytest.raises(TypeError, match=f"'{near}'"):
        make_trainer().train(make_data(), **{keyword: 1})


def test_an_unknown_keyword_of_the_constructor_names_the_nearest():
    with pytest.raises(TypeError, match="'precision'"):
        make_trainer(precison="bf16")


def test_training_needs_an_optimizer_and_evaluation_does_not():
    trainer = Trainer(make_model(), nn.CrossEntropyLoss(), callbacks=())
    with pytest.raises(ConfigError, match="optimizer"):
        train(trainer)
    assert trainer.evaluate(make_data())["evaluation_loss"] > 0


def test_an_empty_dataset_is_refused():
    empty = TensorDataset(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ConfigError, match="empty"):
        train(make_trainer(), empty)


def test_a_dataset_smaller_than_a_batch_with_drop_last_is_refused():
    with pytest.raises(ConfigError, match="drop_last"):
        train(make_trainer(), make_data(5), train_dataloader_kwargs={"drop_last": True})


def test_a_scheduler_of_another_optimizer_is_refused():
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(make_model().parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="a different optimizer"):
        train(make_trainer(), create_scheduler_fn=other)


def test_what_cannot_make_a_scheduler_is_refused():
    with pytest.raises(TypeError, match="not callable"):
        train(make_trainer(), create_scheduler_fn=3)


def test_a_placeholder_that_needs_a_length_names_itself():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from zip(*make_data().tensors)

    make = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=TrainerPlaceholderValues.TRAIN_DATALOADER_LEN)
    with pytest.raises(ConfigError, match="TRAIN_DATALOADER_LEN"):
        train(make_trainer(), Stream(), create_scheduler_fn=make, train_dataloader_kwargs={"num_workers": 0})


def test_watching_an_evaluation_metric_without_evaluation_is_refused():
    with pytest.raises(ValueError, match="eval_dataset"):
        train(make_trainer(callbacks=[EarlyStoppingCallback()]))


def hook_returning(value):
    class Broken(Trainer):
        def calculate_train_batch_loss(self, batch):
            return value(self, batch)

    return Broken


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda t, b: torch.zeros(()), "dict"),
        (lambda t, b: {"loss": torch.zeros((), requires_grad=True), "batch_size": 3}, "model_outputs"),
        (lambda t, b: {"loss": t.model(b[0]), "model_outputs": 0, "batch_size": 3}, "shape"),
        (lambda t, b: {"loss": torch.zeros(()), "model_outputs": 0, "batch_size": 3}, "no gradient"),
        (lambda t, b: {"loss": 0.5, "model_outputs": 0, "batch_size": 3}, "float"),
    ],
)
def test_what_a_loss_hook_may_not_return(value, words):
    with pytest.raises(BatchOutputError, match=words):
        train(make_trainer(cls=hook_returning(value)))


def test_entries_the_model_does_not_take_are_named():
    class Model(nn.Module):
        def forward(self, x):
            return x

    model = make_model()
    holder = Model()
    holder.inner = model
    x, y = make_data().tensors
    data = [{"x": x[k], "extra": x[k], "labels": y[k]} for k in range(8)]
    trainer = Trainer(holder, nn.CrossEntropyLoss(), torch.optim.SGD(holder.parameters(), lr=0.1), callbacks=())
    with pytest.raises(TypeError, match="extra"):
        trainer.train(data, num_epochs=1, train_dataloader_kwargs={"num_workers": 0})


def test_a_batch_without_obvious_inputs_asks_for_a_hook():
    with pytest.raises(ConfigError, match="calculate_train_batch_loss"):
        train(make_trainer(), make_data().tensors[0])


def test_two_callbacks_of_one_class_are_refused():
    with pytest.raises(ValueError, match="PrintProgressCallback"):
        make_trainer(callbacks=[PrintProgressCallback(), PrintProgressCallback()])


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="but no parameter of the model"):
        train(
            Trainer(
                make_model(), nn.CrossEntropyLoss(), torch.optim.SGD(make_model().parameters(), lr=0.1), callbacks=()
            )
        )


def test_parameters_without_an_optimizer_warn_and_are_an_error_when_strict():
    model = make_model()
    with pytest.warns(UserWarning, match="not in the optimizer"):
        train(make_trainer(model, optimizer=torch.optim.SGD(model[3].parameters(), lr=0.1)))
    with pytest.raises(ConfigError, match="not in the optimizer"):
        train(make_trainer(model, optimizer=torch.optim.SGD(model[3].parameters(), lr=0.1), strict=True))


def test_resuming_from_a_missing_path_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train(make_trainer(), resume_from=tmp_path / "nowhere")


def test_checkpoint_entries_that_cannot_be_loaded_back_are_refused_before_writing(tmp_path):
    with pytest.raises(TypeError, match="thing"):
        make_trainer().save_checkpoint(tmp_path / "c.pt", {"thing": object()})
    assert not (tmp_path / "c.pt").exists()


def test_a_file_with_an_optimizer_needs_one_to_load_into(tmp_path):
    make_trainer().save_checkpoint(tmp_path / "c.pt")
    with pytest.raises(ValueError, match="load_optimizer=False"):
        Trainer(make_model(), nn.CrossEntropyLoss(), callbacks=()).load_checkpoint(tmp_path / "c.pt")


def test_an_algorithm_that_needs_a_hidden_event_is_named():
    from drivetrain.core.event import Event
    from drivetrain.core.plugin import Algorithm

    class Smoother(Algorithm):
        events, writes = frozenset({Event.BEFORE_LOSS}), ("batch",)

        def apply(self, event, state, logger):
            pass

    def direct(trainer, batch):
        outputs = trainer.model(batch[0])
        return {"loss": trainer.loss_func(outputs, batch[1]), "model_outputs": outputs, "batch_size": 8}

    with pytest.raises(ConfigError, match="Smoother"):
        train(make_trainer(cls=hook_returning(direct), algorithms=[Smoother()]))


def test_strict_names_parameters_that_no_loss_reaches():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = make_model(), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    model = Idle()
    with pytest.raises(ConfigError, match=r"unused\.weight"):
        train(make_trainer(model, strict=True))
    train(make_trainer(model))


def test_strict_names_a_callback_that_changes_the_state():
    from drivetrain.train.callbacks import TrainerCallback

    class Meddler(TrainerCallback):
        def after_loss(self, state, logger):
            state.loss = state.loss * 2

    with pytest.raises(RuntimeError, match=r"Meddler.*loss"):
        train(make_trainer(callbacks=[Meddler()], strict=True))
    train(make_trainer(callbacks=[Meddler()]))


def test_a_precision_the_device_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="bf16"):
        train(make_trainer(precision="fp8", device="cpu"))


def test_a_model_without_forward_is_named_before_the_first_step():
    class Mistyped(nn.Linear):
        forward = nn.Module.forward

        def foward(self, x):
            return x

    with pytest.raises(ConfigError, match=r"model=Mistyped has no forward\(\). Did you mean 'foward'"):
        train(make_trainer(Mistyped(6, 3)))


def test_scripted_models_and_models_with_their_own_call_need_no_forward():
    class Called(nn.Linear):
        forward = nn.Module.forward

        def __call__(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, with a category that differs between releases
        scripted = torch.jit.script(nn.Linear(6, 3))
    for model in (Called(6, 3), scripted):
        before = [p.clone() for p in model.parameters()]
        train(make_trainer(model))
        assert not any(map(torch.equal, before, model.parameters()))


def test_a_model_with_its_own_training_step_trains_where_a_hook_calls_it():
    class Lightning(nn.Linear):
        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            raise AssertionError

    class StepTrainer(Trainer):
        def calculate_train_batch_loss(self, batch):
            loss = self.get_model().training_step(batch, 0)
            return {"loss": loss, "model_outputs": None, "batch_size": len(batch[1])}

    losses = []
    for cls in (StepTrainer, Trainer):
        torch.manual_seed(0)
        model = Lightning(6, 3) if cls is StepTrainer else nn.Linear(6, 3)
        loss = None if cls is StepTrainer else nn.CrossEntropyLoss()
        trainer = cls(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
        losses.append(train(trainer).get_metric_values("train_loss_epoch"))
    assert losses[0] == losses[1]


def test_modules_in_a_plain_list_are_named():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = [nn.Linear(6, 3)], nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.layers[0](x))

    with pytest.warns(DrivetrainWarning, match=r"Listed.layers is a list of modules.*nn.ModuleList"):
        train(make_trainer(Listed()))
    frozen = Listed()
    frozen.layers[0].requires_grad_(False)
    train(make_trainer(frozen))
    held = Listed()
    train(make_trainer(held, optimizer=torch.optim.SGD([*held.parameters(), *held.layers[0].parameters()], lr=0.1)))


def test_probabilities_for_a_loss_of_logits_are_named():
    with pytest.warns(DrivetrainWarning, match="the outputs are probabilities, .* remove the softmax"):
        train(make_trainer(nn.Sequential(make_model(), nn.Softmax(-1))))


def test_a_scheduler_that_steps_with_arguments_is_named_before_the_first_step():
    class TimmLike:
        def step(self, epoch, metric=None): ...

        def step_update(self, num_updates): ...

    trainer = make_trainer()
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(ConfigError, match=r"TimmLike.*'epoch'.*use TrainerWithTimmScheduler"):
        train(trainer, create_scheduler_fn=lambda optimizer: TimmLike())
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_function_of_parameters_instead_of_the_model_is_named():
    with pytest.raises(ConfigError, match=r"is called with the model: lambda model: torch.optim.AdamW"):
        train(make_trainer(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)))


def test_a_checkpoint_path_that_is_a_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"'{tmp_path}' is a folder, expected a file such as .*model.pt"):
        make_trainer().save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_argument_that_a_callback_does_not_take_is_answered_with_those_it_takes():
    with pytest.raises(
        TypeError, match=r"EarlyStoppingCallback\(\) got .*'monitor'. Arguments: early.*, watch_metric, "
    ):
        EarlyStoppingCallback(monitor="eval_loss_epoch")
    with pytest.raises(TypeError, match="'watch_metrics'. Did you mean 'watch_metric'"):
        EarlyStoppingCallback(watch_metrics="eval_loss_epoch")
