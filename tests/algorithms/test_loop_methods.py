"""What holds for every method of the loop and the optimizer: when it acts, that asking changes nothing, and that it resumes."""

import copy
import inspect

import pytest
import torch
from torch import nn

from drivetrain.algorithms.cautious import Cautious
from drivetrain.algorithms.ema import EMA
from drivetrain.algorithms.fast_defaults import FastDefaults
from drivetrain.algorithms.gradient_clipping import AGC, GradientClipping
from drivetrain.algorithms.layer_freezing import LayerFreezing
from drivetrain.algorithms.lookahead import Lookahead
from drivetrain.algorithms.muon import Muon
from drivetrain.algorithms.sam import SAM
from drivetrain.algorithms.scale_schedule import ScaleSchedule
from drivetrain.algorithms.schedule_free import ScheduleFree
from drivetrain.algorithms.soap import SOAP
from drivetrain.algorithms.swa import SWA
from drivetrain.core.errors import PluginConflictError
from drivetrain.core.event import Event
from drivetrain.train.trainer import Trainer
from tests.algorithms.optimizer_tasks import conv_run, resumed_equals_uninterrupted
from tests.algorithms.tasks import image_data, make_state, train

E = Event
LOOKING = {E.EVAL_START, E.EVAL_END, E.PREDICT_START, E.PREDICT_END}
CASES = {
    "AGC": (AGC, {E.AFTER_TRAIN_BATCH}),
    "GradientClipping": (lambda: GradientClipping("norm", 0.1), {E.AFTER_TRAIN_BATCH}),
    "EMA": (lambda: EMA("4ba"), {E.INIT, E.BATCH_END, *LOOKING}),
    "EMA of steps": (lambda: EMA("4st", update_interval="2st"), {E.INIT, E.BATCH_END, *LOOKING}),
    "EMA of epochs": (lambda: EMA("2ep"), {E.INIT, E.EPOCH_END, *LOOKING}),
    "SWA": (lambda: SWA("0.3dur", "0.9dur"), {E.INIT, E.FIT_START, E.EPOCH_END, E.FIT_END}),
    "SWA of batches": (
        lambda: SWA("0.3dur", "0.9dur", "1ba", schedule_swa_lr=True, swa_lr=0.01),
        {E.INIT, E.FIT_START, E.BATCH_END, E.FIT_END},
    ),
    "LayerFreezing": (lambda: LayerFreezing(0.3), {E.AFTER_LOAD, E.EPOCH_END}),
    "Lookahead": (lambda: Lookahead(3), {E.FIT_START, E.AFTER_STEP, E.FIT_END}),
    "Lookahead, cubic": (lambda: Lookahead(2, schedule="cubic"), {E.FIT_START, E.AFTER_STEP, E.FIT_END}),
    "Muon": (Muon, {E.INIT}),
    "SOAP": (lambda: SOAP(precondition_frequency=2), {E.INIT}),
    "Cautious": (Cautious, {E.INIT}),
    "SAM": (SAM, {E.AFTER_LOAD}),
    "ScheduleFree": (lambda: ScheduleFree("sgd", 0.2), {E.INIT, E.FIT_START, E.FIT_END, *LOOKING}),
    "FastDefaults": (lambda: FastDefaults(channels_last=False), {E.INIT, E.FIT_END}),
    "ScaleSchedule": (lambda: ScaleSchedule(0.5), {E.INIT}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_acts_at_its_events_and_asking_changes_nothing(name):
    make, events = CASES[name]
    algorithm, state = make(), make_state(max_duration="4ep")
    state.clock.next_batch()
    before = copy.deepcopy(vars(algorithm)), state.clock.state_dict()
    for _ in range(100):
        assert {event for event in Event if algorithm.match(event, state)} == events
    after = vars(algorithm), state.clock.state_dict()
    assert repr(before[0].keys()) == repr(after[0].keys()) and before[1] == after[1]
    assert algorithm.state_dict() == make().state_dict()


@pytest.mark.parametrize("name", [name for name in CASES if name != "ScaleSchedule"])
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_was_broken_off_ends_as_one_that_was_not(name, accumulation, tmp_path):
    make = lambda **kw: conv_run(CASES[name][0](), **kw)
    scheduler = None if name == "ScheduleFree" else lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.9)
    assert resumed_equals_uninterrupted(
        make,
        tmp_path,
        at=7,  # inside an epoch of four batches, and inside a window of two
        eval_dataset=image_data(12),
        gradient_accumulation_steps=accumulation,
        create_scheduler_fn=scheduler,
    )


@pytest.mark.parametrize(
    "pair",
    [(EMA(), SWA()), (EMA(), ScheduleFree()), (SWA(), ScheduleFree()), (Muon(), SOAP()), (Muon(), ScheduleFree())],
)
def test_what_cannot_work_together_is_refused_naming_both(pair):
    with pytest.raises(PluginConflictError) as caught:
        conv_run(*pair)
    assert all(type(one).__name__ in str(caught.value) for one in pair)


@pytest.mark.parametrize("name", ["Muon", "SOAP", "ScheduleFree", "Cautious"])
def test_a_run_without_an_optimizer_to_replace_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} works with a single torch optimizer; this run has none"):
        conv_run(CASES[name][0](), optimizers=())


@pytest.mark.parametrize("name", ["Muon", "SOAP", "ScheduleFree", "Cautious"])
def test_an_optimizer_that_has_begun_is_not_replaced(name):
    first = conv_run()
    train(first, image_data(), num_epochs=1)
    with pytest.raises(ValueError, match="has already taken steps"):
        Trainer(first.model, nn.CrossEntropyLoss(), first.optimizer, (), algorithms=[CASES[name][0]()])


SIGNATURES = {
    EMA: {"half_life": "1000ba", "smoothing": None, "ema_start": "0.0dur", "update_interval": None},
    SWA: {
        "swa_start": "0.7dur", "swa_end": "0.97dur", "update_interval": "1ep", "schedule_swa_lr": False,
        "anneal_strategy": "linear", "anneal_steps": 10, "swa_lr": None,
    },
    SAM: {"rho": 0.05, "epsilon": 1e-12, "interval": 1},
    AGC: {"clipping_threshold": 0.01},
    LayerFreezing: {"freeze_start": 0.5, "freeze_level": 1.0},
    Lookahead: {"k": 5, "alpha": 0.5, "schedule": None},
    Muon: {
        "lr": None, "momentum": 0.95, "weight_decay": 0.1, "ns_steps": 5, "adjust_lr": "match_rms_adamw", "other": "adamw",
        "other_kwargs": {},
    },
    FastDefaults: {
        "tf32": True, "cudnn_benchmark": True, "fused_optimizer": True, "channels_last": "auto", "fused_loss": False,
    },
    Cautious: {"eps": 1e-3},
}  # fmt: skip


@pytest.mark.parametrize("cls", SIGNATURES, ids=lambda cls: cls.__name__)
def test_defaults(cls):
    assert {name: p.default for name, p in inspect.signature(cls).parameters.items()} == SIGNATURES[cls]
