"""What holds for every batch method: when it acts, that it trains, that it resumes, and whose random numbers it uses."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.algorithms.alternating_flip import AlternatingFlip
from drivetrain.algorithms.augmix import AugMix
from drivetrain.algorithms.batch_size_warmup import BatchSizeWarmup
from drivetrain.algorithms.colout import ColOut
from drivetrain.algorithms.cutmix import CutMix
from drivetrain.algorithms.cutout import CutOut
from drivetrain.algorithms.device_resident import DeviceResidentData
from drivetrain.algorithms.label_smoothing import LabelSmoothing
from drivetrain.algorithms.mixup import MixUp
from drivetrain.algorithms.progressive_resizing import ProgressiveResizing
from drivetrain.algorithms.randaugment import RandAugment
from drivetrain.algorithms.resolution import Resolution
from drivetrain.algorithms.selective_backprop import SelectiveBackprop
from drivetrain.algorithms.seq_length_warmup import SeqLengthWarmup
from drivetrain.algorithms.sequence_packing import SequencePacking
from drivetrain.core.event import Event
from drivetrain.core.one_of import OneOf
from tests.algorithms.tasks import (
    ConvNet,
    Documents,
    PullPlug,
    TokenData,
    Watch,
    conv_trainer,
    image_data,
    make_state,
    same,
    text_trainer,
    train,
    weights,
)

E = Event


@dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[[], Any]
    events: set[Event]
    trainer: Callable[..., Any] = conv_trainer
    data: Callable[[], Any] = image_data
    settings: tuple[tuple[str, Any], ...] = ()


SOFT, INTERPOLATED = {E.BEFORE_FORWARD, E.BEFORE_LOSS, E.AFTER_LOSS}, {E.BEFORE_FORWARD, E.AFTER_LOSS}
CASES = {
    "AlternatingFlip": Case(make=AlternatingFlip, events={E.AFTER_DATALOADER}),
    "AugMix": Case(make=AugMix, events={E.FIT_START}),
    "BatchSizeWarmup": Case(
        make=lambda: BatchSizeWarmup(0.25, "0.6dur"),
        events={E.BEFORE_LOAD, E.BATCH_START, E.BEFORE_STEP, E.AFTER_STEP},
        settings=(("gradient_accumulation_steps", 4), ("per_device_batch_size", 3)),
    ),
    "ColOut": Case(make=ColOut, events={E.AFTER_DATALOADER}),
    "ColOut per image": Case(
        make=lambda: ColOut(batch=False), events={E.FIT_START}, settings=(("per_device_batch_size", 4),)
    ),
    "CutMix": Case(make=CutMix, events=SOFT),
    "CutMix of losses": Case(make=lambda: CutMix(interpolate_loss=True), events=INTERPOLATED),
    "CutOut": Case(make=CutOut, events={E.AFTER_DATALOADER}),
    "DeviceResidentData": Case(make=DeviceResidentData, events={E.FIT_START}),
    "LabelSmoothing": Case(make=LabelSmoothing, events={E.BEFORE_LOSS, E.AFTER_LOSS}),
    "MixUp": Case(make=lambda: MixUp(0.5), events=SOFT),
    "MixUp of losses": Case(make=lambda: MixUp(0.5, interpolate_loss=True), events=INTERPOLATED),
    "ProgressiveResizing": Case(
        make=lambda: ProgressiveResizing("crop", size_increment=1), events={E.AFTER_DATALOADER}
    ),
    "RandAugment": Case(make=RandAugment, events={E.FIT_START}),
    "Resolution": Case(
        make=lambda: Resolution(6, 9, 8, [("0dur", 5), ("0.5dur", 6)]), events={E.AFTER_DATALOADER, E.EVAL_BATCH_START}
    ),
    "SelectiveBackprop": Case(
        make=lambda: SelectiveBackprop(0.2, 0.9, interrupt=3), events={E.INIT, E.AFTER_DATALOADER}
    ),
    "SeqLengthWarmup": Case(
        make=lambda: SeqLengthWarmup(0.8, 4, 16, 4),
        events={E.INIT, E.AFTER_DATALOADER},
        trainer=text_trainer,
        data=TokenData,
    ),
    "SequencePacking": Case(
        make=lambda: SequencePacking(24),
        events={E.BEFORE_LOAD, E.BEFORE_FORWARD, E.AFTER_LOSS},
        trainer=text_trainer,
        data=Documents,
        settings=(("per_device_batch_size", 2),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_matches_its_events_and_no_others(name):
    case = CASES[name]
    for event in Event:
        assert case.make().match(event, make_state()) is (event in case.events), event


@pytest.mark.parametrize("name", CASES)
def test_match_changes_nothing(name):
    algorithm, state = CASES[name].make(), make_state([torch.zeros(2, 3, 4, 4), torch.zeros(2)])
    before = (dict(vars(algorithm)), dict(vars(state)), algorithm.state_dict())
    for _ in range(100):
        for event in Event:
            algorithm.match(event, state)
    assert (vars(algorithm), vars(state), algorithm.state_dict()) == before


def run(case, at=None, folder=None, **kwargs):
    callbacks = [] if at is None else [PullPlug(at)]
    trainer = case.trainer(case.make(), callbacks=callbacks)
    settings = {"num_epochs": 3, "checkpoint_every": "1ba", "async_checkpoint": False, **dict(case.settings), **kwargs}
    train(trainer, case.data(), checkpoint_dir=folder, **settings)
    return weights(trainer.model), trainer.run_history


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_resumes_bit_for_bit(name, tmp_path):
    """Also: it trains, and the same seed gives the same run."""
    case = CASES[name]
    unbroken, history = run(case)
    assert all(torch.isfinite(value).all() for value in unbroken)
    with pytest.raises(RuntimeError, match="plug"):
        run(case, at=7, folder=tmp_path)
    torch.manual_seed(999)
    resumed, again = run(case, folder=tmp_path, resume_from="auto")
    assert same(resumed, unbroken)
    for metric in history.get_metric_names():
        assert again.get_metric_values(metric) == history.get_metric_values(metric)


def everything():
    return [
        AlternatingFlip(), SelectiveBackprop(0.2, 0.8), ProgressiveResizing(size_increment=2), CutOut(), ColOut(),
        LabelSmoothing(), OneOf(MixUp(0.4), CutMix(1.0), weights=(1, 2)),
    ]  # fmt: skip


def test_a_whole_recipe_trains_and_resumes(tmp_path):
    case = Case(
        make=lambda: None, events=set(), trainer=lambda _, callbacks: conv_trainer(*everything(), callbacks=callbacks)
    )
    unbroken, _ = run(case)
    with pytest.raises(RuntimeError, match="plug"):
        run(case, at=6, folder=tmp_path)
    assert same(run(case, folder=tmp_path, resume_from="auto")[0], unbroken)


def test_another_seed_gives_another_run():
    results = []
    for seed in (1, 2):
        trainer = conv_trainer(MixUp(0.5), seed=seed)
        torch.manual_seed(0)
        trainer.model.load_state_dict(ConvNet().state_dict())
        weights_drawn = Watch(E.BEFORE_LOSS, lambda state: state.algorithms[0]._own_weight)
        trainer.callback_handler.add_callback(weights_drawn)
        train(trainer, image_data())
        results.append(weights_drawn.values)
    assert results[0] != results[1]


def test_python_and_numpy_generators_are_left_alone_and_nothing_is_deep_copied(monkeypatch):
    trainer = conv_trainer(*everything(), RandAugment())

    def refuse(*args, **kwargs):
        raise AssertionError("something was deep-copied in the loop")

    class Patch(Watch):
        """Takes deepcopy away once the run has started."""

    trainer.callback_handler.add_callback(
        Patch(E.EPOCH_START, lambda state: monkeypatch.setattr(copy, "deepcopy", refuse))
    )
    before = random.getstate(), np.random.get_state()[1].tolist()
    train(trainer, image_data())
    monkeypatch.undo()
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]


def test_augmentations_run_in_the_users_order():
    for algorithms in ([CutOut(), ColOut(), ProgressiveResizing()], [ProgressiveResizing(), ColOut(), CutOut()]):
        trainer = conv_trainer(*algorithms)
        assert list(trainer.engine.listeners(E.AFTER_DATALOADER)) == algorithms


def test_the_explained_order_is_the_executed_one(capsys):
    trainer = conv_trainer(CutOut(), LabelSmoothing(), MixUp(), SelectiveBackprop(start=0))
    text = trainer.explain()
    for event, names in {
        E.AFTER_DATALOADER: ["SelectiveBackprop", "CutOut"],
        E.BEFORE_LOSS: ["LabelSmoothing", "MixUp"],
        E.AFTER_LOSS: ["MixUp", "LabelSmoothing"],
    }.items():
        lines = text.splitlines()
        start = next(number for number, line in enumerate(lines) if line.split()[:1] == [event.name])
        assert [line.split()[1] for line in lines[start + 1 : start + 1 + len(names)]] == names
        assert [str(one) for one in trainer.engine.listeners(event)] == names
        assert all("writes batch" in line for line in lines[start + 1 : start + 1 + len(names)])


def test_strict_mode_accepts_algorithms():
    train(conv_trainer(*everything(), strict=True), image_data(), num_epochs=1)


def test_bf16_autocast_and_microbatches():
    trainer = conv_trainer(LabelSmoothing(), MixUp(0.4), SelectiveBackprop(start=0), precision="bf16")
    train(trainer, image_data(), microbatch_size=3, num_epochs=1)
    assert all(torch.isfinite(value).all() for value in weights(trainer.model))


def test_interpolated_losses_are_computed_in_the_runs_precision():
    from drivetrain.algorithms.utils.losses import loss_with_targets

    state = make_state(
        [torch.zeros(2), torch.tensor([0, 1])], model=ConvNet(), loss_fn=nn.CrossEntropyLoss(), precision="amp_bf16"
    )
    state.outputs = torch.randn(2, 3).bfloat16()
    assert loss_with_targets(state, 1, torch.tensor([1, 0])).dtype == torch.float32


def test_a_compiled_model_is_compiled_once():
    from torch._dynamo.testing import CompileCounter

    torch.manual_seed(0)
    counter = CompileCounter()
    trainer = conv_trainer(CutOut(), LabelSmoothing(), OneOf(MixUp(0.4), CutMix()), SelectiveBackprop(start=1, end=1))
    trainer.model.compile(backend=counter, fullgraph=True)
    train(trainer, image_data())
    assert counter.frame_count == 1
    torch._dynamo.reset()


def on_two_ranks(folder):
    """Train a recipe whole, then killed and resumed; return mixes and weights."""
    drawn = Watch(E.BEFORE_LOSS, lambda state: state.algorithms[-1]._own_weight)

    def go(*callbacks, **kwargs):
        algorithms = [SelectiveBackprop(0.3, 0.9), CutOut(), LabelSmoothing(), MixUp(0.5)]
        trainer = conv_trainer(*algorithms, callbacks=callbacks, device="cpu")
        settings = {"checkpoint_every": "1ba", "async_checkpoint": False, "per_device_batch_size": 4, "num_epochs": 3}
        train(trainer, image_data(), **settings, **kwargs)
        return weights(trainer.model), [parameter.detach() for parameter in trainer.model.parameters()]

    unbroken, parameters = go(drawn)
    with pytest.raises(RuntimeError, match="plug"):
        go(PullPlug(4), checkpoint_dir=folder)
    resumed, _ = go(checkpoint_dir=folder, resume_from="auto")
    return drawn.values, parameters, same(resumed, unbroken)


def test_two_ranks_draw_different_mixes_agree_on_weights_and_resume(world2, tmp_path):
    (first, first_parameters, first_resumes), (second, second_parameters, second_resumes) = world2(
        on_two_ranks, str(tmp_path)
    )
    assert len(first) == len(second) == 9 and not set(first) & set(second)
    assert same(first_parameters, second_parameters)
    assert first_resumes and second_resumes
