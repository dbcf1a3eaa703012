"""What people bring from other libraries, or put in the wrong place, is answered before the first step."""

import inspect

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from drivetrain.compat.trainer_arguments import INSTEAD
from drivetrain.core.errors import CheckpointError, ConfigError, ConfigTypeError, DrivetrainWarning
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, make_trainer, train


@pytest.mark.parametrize(
    ("verb", "name", "ours"),
    [
        ("train", "batch_size", "per_device_batch_size"),
        ("train", "accumulate_grad_batches", "gradient_accumulation_steps"),
        ("train", "gradient_accumulation", "gradient_accumulation_steps"),
        ("train", "resume_from_checkpoint", "resume_from"),
        ("train", "ckpt_path", "resume_from"),
        ("train", "scheduler", "create_scheduler_fn"),
        ("train", "lr_scheduler", "create_scheduler_fn"),
        ("train", "num_workers", "train_dataloader_kwargs"),
        ("train", "shuffle", "train_dataloader_kwargs"),
        ("train", "epochs", "num_epochs"),
        ("train", "max_steps", "max_num_train_steps"),
        ("train", "val_dataloaders", "eval_dataset"),
        ("train", "val_check_interval", "eval_interval"),
        ("train", "eval_steps", "eval_interval"),
        ("train", "logging_steps", "log_every"),
        ("train", "predict_with_generate", "generate"),
        ("train", "save_steps", "checkpoint_every"),
        ("train", "data_collator", "collate_fn"),
        ("train", "device_train_batch_size", "per_device_batch_size"),
        ("__init__", "max_epochs", "num_epochs"),
        ("__init__", "gradient_clip_val", "gradient_clip_norm"),
        ("__init__", "max_grad_norm", "gradient_clip_norm"),
        ("__init__", "fp16", "precision"),
        ("__init__", "bf16", "precision"),
        ("__init__", "accelerator", "device"),
        ("__init__", "devices", "torchrun"),
        ("__init__", "args", "per_device_batch_size"),
        ("__init__", "compute_metrics", "metrics"),
        ("__init__", "criterion", "loss_func"),
        ("__init__", "save_folder", "checkpoint_dir"),
        ("__init__", "save_interval", "checkpoint_every"),
        ("evaluate", "batch_size", "per_device_batch_size"),
        ("predict", "dataloaders", "dataset"),
    ],
)
def test_names_of_other_libraries_are_answered(verb, name, ours):
    call = make_trainer if verb == "__init__" else getattr(make_trainer(), verb)
    with pytest.raises(TypeError, match=rf"{name}.*Write instead.*{ours}"):
        call(*([] if verb == "__init__" else [make_data()]), **{name: 1})


def test_the_table_has_only_names_that_some_verb_does_not_take_and_answers_with_real_ones():
    taken = {name: set(inspect.signature(getattr(Trainer, name)).parameters) for name in ("__init__", "train")}
    for name, advice in INSTEAD.items():
        assert not all(name in names for names in taken.values()), name
        for verb, names in (("Trainer(", taken["__init__"]), ("train(", taken["train"])):
            if advice.startswith(verb) and "=" in advice.partition(")")[0]:
                assert advice.removeprefix(verb).partition("=")[0].rpartition(" ")[2] in names, (name, advice)


def lightning(forward=True):
    class Module(nn.Linear):
        def training_step(self, batch, index):
            return None

        def configure_optimizers(self):
            return None

    return Module(6, 3)


def run(model=None, loss=nn.CrossEntropyLoss(), optimizer=None, data=None, **settings):  # noqa: B008
    model = make_model() if model is None else model
    optimizer = optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    trainer = Trainer(model, loss, optimizer, callbacks=())
    return trainer.train(make_data() if data is None else data, num_epochs=1, per_device_batch_size=8, **settings)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: run(optimizer=optim.Adam), r"optimizer=Adam is a class.*Adam\(model\.parameters"),
        (lambda: run(loss=nn.CrossEntropyLoss), r"loss_func=CrossEntropyLoss is a class.*CrossEntropyLoss\(\)"),
        (lambda: run(nn.Linear, optimizer=optim.SGD(make_model().parameters(), lr=1.0)), r"model=Linear is a class"),
        (lambda: run(optimizer=[optim.SGD(make_model().parameters(), lr=1.0)] * 2), r"list of SGD, SGD.*one optimizer"),
        (
            lambda: run(loss=optim.SGD(make_model().parameters(), lr=1.0), optimizer=nn.CrossEntropyLoss()),
            "swapped",
        ),
        (lambda: run(data="data/train"), r"train_dataset='data/train' is a path"),
        (lambda: run(data={"train": [1], "test": [2]}), r"keys 'train', 'test'"),
        (lambda: run(eval_dataset="data/val"), r"eval_dataset='data/val' is a path"),
        (lambda: run(nn.Linear(6, 3, device="meta")), r"meta device.*'weight'.*to_empty"),
        (lambda: run(lightning(), loss=None), r"LightningModule.*training_step"),
        (lambda: run(optimizer=optim.SGD(make_model().parameters(), lr=0.1)), "but no parameter of the model"),
        (
            lambda: run(data=DataLoader(make_data(), batch_size=8), train_dataloader_kwargs={"shuffle": True}),
            r"\['shuffle'\]=True would have no effect",
        ),
        (lambda: run(data=DataLoader(make_data(), batch_size=8), collate_fn=list), "collate_fn would have no effect"),
        (lambda: run(train_dataloader_kwargs={"nun_workers": 2}), r"train_dataloader_kwargs.*num_workers"),
        (lambda: run(create_scheduler_fn=optim.lr_scheduler.StepLR), r"create_scheduler_fn.*step_size.*partial"),
        (lambda: run(create_scheduler_fn=lambda optimizer: None), "returned None"),
        (lambda: run(eval_dataset=[]), "eval_dataset is empty"),
        (lambda: run(checkpoint_every=0, checkpoint_dir="x"), "checkpoint_every=0"),
        (lambda: run(checkpoint_every="-1ba", checkpoint_dir="x"), "checkpoint_every='-1ba'"),
        (lambda: run(eval_interval=-1), "eval_interval=-1"),
        (lambda: run(async_checkpoint="false"), "async_checkpoint='false'"),
    ],
)
def test_a_mistake_is_answered_before_the_first_step(mistake, words):
    with pytest.raises(ConfigError, match=words):
        mistake()


def test_a_rate_that_is_not_finite_is_rejected():
    model = make_model()
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\(lr=inf\)"):
        run(model, optimizer=optim.SGD(model.parameters(), lr=float("inf")))


def test_a_lightning_module_with_a_loss_trains_with_a_warning():
    with pytest.warns(DrivetrainWarning, match="does not call its training_step and configure_optimizers"):
        run(lightning())


def test_a_loader_that_does_what_is_asked_is_fine():
    loader = DataLoader(make_data(), batch_size=8)
    train(make_trainer(), loader, train_dataloader_kwargs={"shuffle": False, "num_workers": 0})


@pytest.mark.parametrize("content", [b"e\x00junk", b"", b"hello world", b"\x80\x04K\x01."])
def test_a_junk_file_is_not_a_checkpoint(tmp_path, content):
    (tmp_path / "junk.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"junk\.pt (cannot be read|holds more)"):
        make_trainer().load_checkpoint(tmp_path / "junk.pt")


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(2), {"model_state_dict": 3}, {"other": 1}])
def test_a_file_of_another_form_is_not_a_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises((CheckpointError, ValueError), match=r"other\.pt"):
        make_trainer().load_checkpoint(tmp_path / "other.pt")


@pytest.mark.parametrize("columns", [tuple, lambda tensors: dict(zip(("x", "y"), tensors))])
def test_tensors_with_a_row_for_each_sample_are_data_for_training_and_evaluation(columns):
    class Named(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    results = []
    for data in (make_data(), columns(make_data().tensors)):
        torch.manual_seed(0)
        model = Named(6, 3)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), callbacks=(), seed=0)
        history = trainer.train(data, num_epochs=1, eval_dataset=data)
        results.append([history.get_metric_values("eval_loss_epoch"), model.weight.detach()])
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def test_a_batch_size_that_a_loader_ignores_warns():
    loader, settings = DataLoader(make_data(), batch_size=4), {"num_epochs": 1, "per_device_batch_size": 16}
    with pytest.warns(
        DrivetrainWarning, match="per_device_batch_size=16 has no effect: the data is a loader, whose batches have 4"
    ):
        make_trainer().train(loader, **settings)
    make_trainer().train(loader, eval_dataset=make_data(), **settings)  # the evaluation's loader has it


@pytest.mark.parametrize("name", ["adam", "AdamW"])
def test_the_name_of_an_optimizer_is_not_taken_for_a_file(name):
    model = nn.Linear(4, 2)
    with pytest.raises(ConfigTypeError, match=f"optimizer='{name}' is a name.*torch.optim.AdamW"):
        Trainer(model, nn.CrossEntropyLoss(), name, callbacks=()).train(make_data(), num_epochs=1)


def test_an_unknown_precision_is_not_reported_as_a_device():
    with pytest.raises(ConfigError, match="^precision: unknown precision 'float8'"):
        Trainer(nn.Linear(4, 2), precision="float8")
