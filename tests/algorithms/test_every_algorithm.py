"""What holds for every algorithm, alone and next to those that run extra passes through the model."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import algorithms as a
from drivetrain.algorithms import registry
from drivetrain.context.state import State
from drivetrain.core.engine import Engine
from drivetrain.core.errors import NoEffectWarning, PluginConflictError
from drivetrain.core.event import Event
from drivetrain.core.one_of import OneOf
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.algorithms import surgery_models
from tests.algorithms.tasks import CARDS, Documents, TinyTransformer, TokenData, image_data


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction=reduction)


@dataclass(frozen=True)
class Task:
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Any
    keys: tuple[Any, Any] = (0, 1)

    def inputs(self) -> Any:
        """Return data without targets, to predict for."""
        data = self.data()
        return [{"input_ids": data[i]["input_ids"][:3]} for i in range(4)] if isinstance(self.keys[0], str) else data


def colour_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 54, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(54, 3))


IMAGES = Task(surgery_models.ConvNet, lambda: surgery_models.images(16), nn.CrossEntropyLoss())
COLOURS = Task(colour_net, lambda: image_data(16), nn.CrossEntropyLoss())
TEXTS = Task(surgery_models.TextNet, lambda: surgery_models.texts(16), nn.CrossEntropyLoss())
TOKENS = Task(TinyTransformer, lambda: TokenData(16, 8), token_loss, ("input_ids", "labels"))
DOCUMENTS = Task(TinyTransformer, lambda: Documents(24), token_loss, ("input_ids", "labels"))


@dataclass(frozen=True)
class Entry:
    """An algorithm with settings under which it acts, and the task it acts on."""

    make: Callable[[], Any]
    task: Task = IMAGES
    precision: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()


EVERY = {
    "AGC": Entry(a.AGC),
    "Alibi": Entry(lambda: a.Alibi(32, 0.5), TEXTS),
    "AlternatingFlip": Entry(a.AlternatingFlip),
    "AugMix": Entry(lambda: a.AugMix(augmentation_set=[lambda image, level: image * 0.9]), COLOURS),
    "BatchSizeWarmup": Entry(lambda: a.BatchSizeWarmup(0.5, "0.8dur"), settings=(("gradient_accumulation_steps", 2),)),
    "BlurPool": Entry(lambda: a.BlurPool(min_channels=8)),
    "Cautious": Entry(a.Cautious),
    "ChannelsLast": Entry(a.ChannelsLast),
    "ColOut": Entry(a.ColOut),
    "CutMix": Entry(a.CutMix),
    "CutOut": Entry(a.CutOut),
    "DeviceResidentData": Entry(a.DeviceResidentData),
    "EMA": Entry(lambda: a.EMA("4ba", update_interval="2ba")),
    "FP8Linear": Entry(a.FP8Linear),
    "Factorize": Entry(lambda: a.Factorize(min_channels=8, latent_channels=2)),
    "FastDefaults": Entry(lambda: a.FastDefaults(channels_last=False)),
    "GatedLinearUnits": Entry(a.GatedLinearUnits, TEXTS),
    "GhostBatchNorm": Entry(lambda: a.GhostBatchNorm(2)),
    "GradientClipping": Entry(lambda: a.GradientClipping("norm", 0.1)),
    "GyroDropout": Entry(lambda: a.GyroDropout(sigma=6, tau=3)),
    "KernelNorm": Entry(a.KernelNorm),
    "LabelSmoothing": Entry(a.LabelSmoothing),
    "LayerFreezing": Entry(lambda: a.LayerFreezing(0.2)),
    "Lookahead": Entry(lambda: a.Lookahead(2)),
    "LowPrecisionGroupNorm": Entry(a.LowPrecisionGroupNorm, precision="bf16"),
    "LowPrecisionLayerNorm": Entry(a.LowPrecisionLayerNorm, TEXTS, precision="bf16"),
    "MixUp": Entry(lambda: a.MixUp(0.5)),
    "Muon": Entry(a.Muon),
    "NoOpModel": Entry(a.NoOpModel),
    "ProgressiveResizing": Entry(lambda: a.ProgressiveResizing("crop", delay_fraction=0.1, size_increment=1)),
    "RandAugment": Entry(lambda: a.RandAugment(augmentation_set=[lambda image, level: image * 0.9]), COLOURS),
    "RandomTranslation": Entry(a.RandomTranslation),
    "Resolution": Entry(lambda: a.Resolution(6, 9, 8)),
    "SAM": Entry(lambda: a.SAM(0.1)),
    "SOAP": Entry(lambda: a.SOAP(precondition_frequency=2)),
    "SWA": Entry(lambda: a.SWA("0.2dur", "0.9dur", "1ba")),
    "ScaleSchedule": Entry(lambda: a.ScaleSchedule(1.0)),
    "ScheduleFree": Entry(lambda: a.ScheduleFree("sgd", 0.1)),
    "SelectiveBackprop": Entry(lambda: a.SelectiveBackprop(0, 1, interrupt=3)),
    "SeqLengthWarmup": Entry(lambda: a.SeqLengthWarmup(0.8, 4, 8, 2), TOKENS),
    "SequencePacking": Entry(lambda: a.SequencePacking(16), DOCUMENTS),
    "SqueezeExcite": Entry(lambda: a.SqueezeExcite(min_channels=8, latent_channels=2)),
    "StochasticDepth": Entry(lambda: a.StochasticDepth(drop_rate=0.5, drop_warmup="1dur")),
    "TestTimeFlip": Entry(a.TestTimeFlip),
    "TorchCompile": Entry(lambda: a.TorchCompile(backend="eager")),
    "WeightStandardization": Entry(a.WeightStandardization),
    "Whitening": Entry(lambda: a.Whitening(num_images=8), COLOURS),
}
QUICK = ("EMA", "GyroDropout", "SeqLengthWarmup", "SequencePacking", "StochasticDepth")
"""Those that count on the host or keep something next to the model: the quick sample of long walks."""
SAMPLED = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in EVERY]


def test_every_listed_algorithm_has_an_entry():
    listed = {name for names in registry.ALGORITHMS.values() for name in names if "=" not in name}
    assert set(EVERY) == listed


class Halt(TrainerCallback):
    """Ends a run at an event, as far as the trainer can tell by a failure."""

    def __init__(self, event: Event, at: int):
        setattr(self, event.value, lambda state, logger: self.end() if state.clock.batch == at else None)

    def end(self) -> None:
        raise InterruptedError


def build(*names: str, task: Task | None = None, halt: Halt | None = None, **kwargs: Any) -> Trainer:
    task = task or task_of(names)
    torch.manual_seed(0)
    model = task.model()
    plugins = [EVERY[name].make() for name in names]
    for one in plugins:
        if isinstance(one, a.SelectiveBackprop):
            one.input_key, one.target_key = task.keys
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    precision = next((EVERY[name].precision for name in names if EVERY[name].precision), None)
    callbacks = [] if halt is None else [halt]
    with warnings.catch_warnings():
        if "FP8Linear" in names:
            warnings.simplefilter("ignore", NoEffectWarning)  # there is no device for it
        if "ScaleSchedule" in names:
            warnings.simplefilter("ignore", DeprecationWarning)
        return Trainer(
            model, task.loss, optimizer, callbacks, algorithms=plugins, seed=7, precision=precision, **kwargs
        )


def task_of(names: tuple[str, ...]) -> Task:
    return next((EVERY[name].task for name in names if EVERY[name].task is not IMAGES), IMAGES)


def train(trainer: Trainer, names: tuple[str, ...], folder: Any = None, **kwargs: Any) -> Trainer:
    """Train six batches in two epochs, the last one of an epoch smaller."""
    keeping = {"checkpoint_dir": folder, "checkpoint_every": "2ba", "async_checkpoint": False} if folder else {}
    settings = {"per_device_batch_size": 6, "num_epochs": 2, "train_dataloader_kwargs": {"num_workers": 0}}
    for name in names:
        settings.update(EVERY[name].settings)
    trainer.train(task_of(names).data(), **settings, **keeping, **kwargs)
    return trainer


def everything(trainer: Trainer) -> dict[str, Tensor]:
    found = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    for number, state in enumerate(trainer.optimizer.state_dict()["state"].values()):
        found.update({f"optimizer.{number}.{key}": value for key, value in state.items() if isinstance(value, Tensor)})
    return {**found, "random numbers": torch.get_rng_state()}


def outputs(trainer: Trainer, task: Task) -> list[Tensor]:
    found = trainer.predict(task.inputs(), per_device_batch_size=4)
    return [found["logits"] if isinstance(found, dict) else found]


def check_resume(names: tuple[str, ...], folder: Any) -> None:
    """Compare a run with one that broke off after the second batch: at once in evaluation, and at the end in everything."""
    task = task_of(names)
    whole = everything(train(build(*names), names))
    broken = build(*names, halt=Halt(Event.BEFORE_DATALOADER, 2))
    with pytest.raises(InterruptedError):
        train(broken, names, folder)
    looked = outputs(broken, task)
    torch.manual_seed(999)
    resumed = build(*names, halt=Halt(Event.FIT_START, 2))
    with pytest.raises(InterruptedError):
        train(resumed, names, folder, resume_from="auto")
    for seen, expected in zip(outputs(resumed, task), looked, strict=True):
        assert torch.equal(seen, expected), "evaluation after the resume differs"
    torch.manual_seed(998)
    end = everything(train(build(*names), names, folder, resume_from="auto"))
    assert end.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(whole[name], end[name])] == []


@pytest.mark.parametrize("name", SAMPLED)
def test_alone_it_resumes_and_evaluates_as_if_nothing_had_happened(name, tmp_path):
    check_resume((name,), tmp_path)


@pytest.mark.parametrize("other", ["SAM", pytest.param("SelectiveBackprop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SAMPLED)
def test_next_to_an_extra_pass_it_resumes_exactly(name, other, tmp_path):
    if name != other:
        check_resume((name, other), tmp_path)


REPEATABLE = {"AGC", "AugMix", "ColOut", "CutOut", "GradientClipping", "RandAugment", "RandomTranslation"}


@pytest.mark.parametrize("name", EVERY)
def test_two_of_a_kind_are_rejected_unless_their_card_allows_it(name):
    pair = [EVERY[name].make(), EVERY[name].make()]
    card = (CARDS / "index.md").read_text()
    if name in REPEATABLE:
        Engine(State(), plugins=pair)
        assert f"`{name}`" in card.partition("**Several of one kind.**")[2].partition("\n\n")[0]
        return
    with pytest.raises(PluginConflictError, match=name):
        Engine(State(), plugins=pair)
    with pytest.raises(PluginConflictError, match=name):
        Engine(State(), plugins=[OneOf(pair[0], a.CutOut()), pair[1]])
