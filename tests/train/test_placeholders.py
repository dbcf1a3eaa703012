"""Numbers that are filled in when training starts."""

import builtins
import warnings
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.train.settings import TrainerPlaceholderValues as P
from drivetrain.train.settings import replace_trainer_placeholder_values as replace
from tests.train.tasks import make_data, make_trainer, train


@pytest.fixture
def trainer():
    config = SimpleNamespace(num_epochs=5, num_update_steps_per_epoch=40, num_local_update_steps_per_epoch=10)
    return SimpleNamespace(run_config=config, _train_dataloader=range(12), _eval_dataloader=range(7))


def value_of(trainer, expression):
    return replace(trainer, partial(dict, x=expression))()["x"]


def test_each_placeholder_stands_for_its_number(trainer):
    assert value_of(trainer, P.NUM_EPOCHS) == 5
    assert value_of(trainer, P.NUM_UPDATE_STEPS_PER_EPOCH) == 40
    assert value_of(trainer, P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH) == 10
    assert value_of(trainer, P.TRAIN_DATALOADER_LEN) == 12
    assert value_of(trainer, P.EVAL_DATALOADER_LEN) == 7


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (2 * P.NUM_EPOCHS, 10),
        ((P.NUM_EPOCHS * 2) + 1, 11),
        (P.NUM_EPOCHS - 1, 4),
        (20 - P.NUM_EPOCHS, 15),
        (1 + P.NUM_EPOCHS, 6),
        (P.TRAIN_DATALOADER_LEN / 8, 1.5),
        (60 / P.TRAIN_DATALOADER_LEN, 5.0),
        (P.TRAIN_DATALOADER_LEN // 5, 2),
        (100 // P.TRAIN_DATALOADER_LEN, 8),
        (P.NUM_EPOCHS * P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH - (P.NUM_EPOCHS + 1) // 2, 47),
    ],
)
def test_arithmetic_on_either_side_and_nested_is_evaluated(trainer, expression, expected):
    assert value_of(trainer, expression) == expected


def test_positional_arguments_are_replaced_too(trainer):
    assert replace(trainer, partial(max, P.NUM_EPOCHS, P.NUM_EPOCHS + 3))() == 8


def test_placeholders_in_containers_and_nested_partials_are_replaced(trainer):
    Pair = namedtuple("Pair", "a b")
    inner = partial(pow, P.NUM_EPOCHS)
    given = partial(
        dict,
        milestones=[P.NUM_EPOCHS, (P.NUM_EPOCHS * 2,)],
        by={"x": P.NUM_EPOCHS},
        pair=Pair(P.NUM_EPOCHS, 0),
        f=inner,
    )
    made = replace(trainer, given)()
    assert made["milestones"] == [5, (10,)]
    assert made["by"] == {"x": 5}
    assert made["pair"] == Pair(5, 0)
    assert made["f"](2) == 25
    assert inner.args == (P.NUM_EPOCHS,)  # the user's own partial is untouched


def test_anything_but_a_partial_is_returned_as_it_is(trainer):
    function = lambda optimizer: optimizer
    assert replace(trainer, function) is function


def test_other_arguments_pass_through(trainer):
    marker = object()
    made = replace(trainer, partial(dict, a="num_epochs", b=marker, c=None))()
    assert made == {"a": "num_epochs", "b": marker, "c": None}


def test_nothing_is_ever_passed_to_eval(trainer, monkeypatch):
    def refuse(*_):
        raise AssertionError("eval was called")

    monkeypatch.setattr(builtins, "eval", refuse)
    assert value_of(trainer, P.NUM_EPOCHS * 2 + P.EVAL_DATALOADER_LEN) == 17


def test_a_loader_without_a_length_is_named(trainer):
    trainer._train_dataloader = iter(())
    with pytest.raises(ConfigError, match="TRAIN_DATALOADER_LEN has no value: the loader has no length"):
        value_of(trainer, P.TRAIN_DATALOADER_LEN * 2)
    trainer._eval_dataloader = None
    with pytest.raises(ConfigError, match="EVAL_DATALOADER_LEN has no value: there is no such loader"):
        value_of(trainer, P.EVAL_DATALOADER_LEN)


def test_a_number_the_run_does_not_know_is_named(trainer):
    trainer.run_config.num_epochs = None
    with pytest.raises(ConfigError, match=r"NUM_EPOCHS has no value: run_config\.num_epochs is not known"):
        value_of(trainer, P.NUM_EPOCHS)


def test_the_set_of_placeholders_has_all_five():
    assert P.placeholder_set() == set(P)
    assert len(P.placeholder_set()) == 5


def test_an_expression_reads_as_what_was_written():
    assert repr(P.NUM_EPOCHS * 2 + 1) == "((TrainerPlaceholderValues.NUM_EPOCHS * 2) + 1)"


# ---------------------------------------------------------------------- the length of a schedule


def one_cycle(steps_per_epoch):
    return partial(
        torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, epochs=P.NUM_EPOCHS, steps_per_epoch=steps_per_epoch
    )


def train_with_one_cycle(steps_per_epoch, **kwargs):
    trainer = make_trainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(trainer, make_data(64), num_epochs=2, create_scheduler_fn=one_cycle(steps_per_epoch), **kwargs)
    lengths = [str(w.message) for w in caught if "is built for" in str(w.message)]
    return trainer.scheduler.last_epoch, trainer.scheduler.total_steps, lengths


def both_counts_of_steps():
    return [
        train_with_one_cycle(P.NUM_UPDATE_STEPS_PER_EPOCH),
        train_with_one_cycle(P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH),
    ]


def test_a_schedule_made_for_the_steps_of_all_processes_is_named_with_both_numbers(world2):
    for of_all, of_each in world2(both_counts_of_steps):
        assert of_all[:2] == (8, 16) and len(of_all[2]) == 1
        assert "built for 16 steps, but this run has 8" in of_all[2][0]
        assert "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH" in of_all[2][0]
        assert of_each == (8, 8, [])


def test_a_schedule_of_another_length_than_the_run_is_named_before_the_first_step():
    assert train_with_one_cycle(P.NUM_UPDATE_STEPS_PER_EPOCH) == (16, 16, [])
    assert "built for 16 steps, but this run has 5" in train_with_one_cycle(8, max_num_train_steps=5)[2][0]
    assert "built for 16 steps, but this run has 8" in train_with_one_cycle(8, gradient_accumulation_steps=2)[2][0]
    assert train_with_one_cycle(8, max_num_train_steps=5, fast_dev_run=True)[2] == []
    assert train_with_one_cycle(8, max_duration="1000sp")[2] == []  # not known in steps
    with pytest.warns(DrivetrainWarning, match="built for 12 steps, but this run has 16: it ends before the run does"):
        with pytest.raises(ValueError, match="Tried to step 13 times"):
            train(make_trainer(), make_data(64), num_epochs=2, create_scheduler_fn=one_cycle(6))
