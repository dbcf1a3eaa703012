"""One unit in a hand-written loop: clocks, windows, gradients, clipping, non-finite gradients, arguments."""

import copy
import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.core.errors import BatchOutputError, ConfigError, SharedGraphError
from drivetrain.optim import ConstantLr, CosineLr, LambdaLr, NoamLr, OptimScheduler, OptimSet, StepLr
from tests.optim.models import EncoderDecoder, batches, losses_of, own_gradients, same, weights


def sgd(model, lr=0.1, **conf):
    conf = {"grad_clip": None, **conf}
    return ConstantLr("SGD", {"lr": lr}, model, **conf)


def trace(unit, count):
    """Drive the unit and write down B where it back-propagates and S where it steps."""
    marks, steps = [], []
    for number, x in enumerate(batches(count), start=1):
        active = unit.backward(losses_of(unit.model, x), number)
        changed = unit.update(number)
        marks.append(("B" if active else "-") + ("S" if changed else "-"))
        steps.append(unit.real_step)
    return " ".join(marks), steps


@pytest.mark.parametrize(
    ("accum", "every", "skipped", "marks", "steps"),
    [
        (1, 2, False, "-- BS -- BS -- BS -- BS", [1, 2, 3, 4, 5, 6, 7, 8]),
        (2, 1, False, "B- BS B- BS B- BS B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
        (2, 2, False, "-- -- B- BS -- -- B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
        (2, 2, True, "B- B- B- BS B- B- B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
    ],
)
def test_traces_of_windows(accum, every, skipped, marks, steps):
    unit = sgd(EncoderDecoder(), accum_grad=accum, step_per_update=every, accumulate_skipped=skipped)
    assert trace(unit, 8) == (marks, steps)
    assert unit.update_count == marks.count("S") and unit.skipped_steps == 0


def test_the_rate_follows_the_real_step_not_the_units_own_updates():
    unit = NoamLr("SGD", {"lr": 1.0}, EncoderDecoder(), step_per_update=2, warmup_steps=4)
    seen = []
    for number, x in enumerate(batches(6), start=1):
        if unit.step(losses_of(unit.model, x), step_num=number):
            seen.append(unit.get_lr())
    assert seen == pytest.approx([0.5, 1, math.sqrt(4 / 6)], rel=1e-12)


def test_before_the_first_window_the_rate_is_the_configured_one():
    unit = NoamLr("SGD", {"lr": 0.3}, EncoderDecoder(), warmup_steps=4, ft_factor=0.1)
    assert unit.get_lr() == 0.3


@pytest.mark.parametrize("optim_type", ["SGD", "Adam", "AdamW"])
def test_twenty_steps_equal_a_hand_written_loop_bit_for_bit(optim_type):
    ours, theirs = EncoderDecoder(), EncoderDecoder()
    conf = {"lr": 0.05, "weight_decay": 0.01}
    unit = CosineLr(optim_type, conf, ours, total_steps=20, warmup_steps=4, grad_clip=0.5)
    optimizer = getattr(torch.optim, optim_type)(theirs.parameters(), **conf)
    for number, x in enumerate(batches(20), start=1):
        unit.step(losses_of(ours, x))
        rate = number / 4 if number < 4 else (1 + math.cos(math.pi * ((number - 4) / 17))) / 2
        optimizer.param_groups[0]["lr"] = 0.05 * rate
        losses_of(theirs, x)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(ours), weights(theirs))


def test_micro_batches_equal_one_large_batch():
    small, large = EncoderDecoder(), EncoderDecoder()
    parts = batches(4)
    accumulated, whole = sgd(small, accum_grad=4), sgd(large)
    for x in parts:
        accumulated.step(losses_of(small, x))
    whole.step(losses_of(large, torch.cat(parts)))
    for a, b in zip(weights(small), weights(large)):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


def test_a_short_window_closed_by_force_is_the_mean_of_what_it_has():
    model = EncoderDecoder()
    unit = sgd(model, lr=1.0, accum_grad=4)
    before, (x,) = weights(model), batches(1)
    expected = torch.autograd.grad(losses_of(model, x)["loss"], list(model.parameters()))
    unit.backward(losses_of(model, x))
    assert unit.update() is False and unit.update(close=True) is True
    for old, new, grad in zip(before, weights(model), expected):
        assert torch.allclose(old - new, grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_weights_three_and_one_give_the_weighted_mean(as_tensor):
    model = EncoderDecoder()
    unit = sgd(model, lr=1.0, accum_grad=2)
    first, second = batches(2)
    g1, g2 = (torch.autograd.grad(losses_of(model, x)["loss"], list(model.parameters())) for x in (first, second))
    before = weights(model)
    for x, weight in ((first, 3.0), (second, 1.0)):
        unit.backward(losses_of(model, x), weight=torch.tensor(weight) if as_tensor else weight)
    unit.update()
    for old, new, a, b in zip(before, weights(model), g1, g2):
        assert torch.allclose(old - new, (3 * a + b) / 4, rtol=0, atol=1e-12)


def test_a_batch_skipped_at_a_boundary_does_not_merge_windows(caplog):
    model = EncoderDecoder()
    unit = sgd(model, lr=1.0, accum_grad=2)
    x1, _, x3, x4 = batches(4)
    unit.step(losses_of(model, x1), step_num=1)
    before = weights(model)
    grads = [torch.autograd.grad(losses_of(model, x)["loss"], list(model.parameters())) for x in (x3, x4)]
    with caplog.at_level(logging.WARNING):
        assert unit.step(losses_of(model, x3), step_num=3) is False
        assert unit.step(losses_of(model, x4), step_num=4) is True
    assert "1 batches are discarded" in caplog.text
    for old, new, a, b in zip(before, weights(model), *grads):
        assert torch.allclose(old - new, (a + b) / 2, rtol=0, atol=1e-12)


def test_a_batch_that_failed_inside_a_window_is_left_out_of_its_mean():
    model = EncoderDecoder()
    unit = sgd(model, lr=1.0, accum_grad=2)
    x1, _ = batches(2)
    before = weights(model)
    expected = torch.autograd.grad(losses_of(model, x1)["loss"], list(model.parameters()))
    unit.backward(losses_of(model, x1), 1)
    assert unit.update(2) is True  # the second batch had no backward
    for old, new, grad in zip(before, weights(model), expected):
        assert torch.allclose(old - new, grad, rtol=0, atol=1e-12)


def test_gradients_stay_in_own_parameters_and_the_loss_is_not_changed():
    model = EncoderDecoder()
    unit = sgd(model, optim_loss="decoder_loss", updated_modules="decoder", accum_grad=2)
    (x,) = batches(1)
    expected = own_gradients(model, x, "decoder", "decoder_loss")
    losses = losses_of(model, x)
    value = losses["decoder_loss"].item()
    assert unit.backward(losses) and losses["decoder_loss"].item() == value
    assert all(p.grad is None for p in model.encoder.parameters())
    for p, grad in zip(model.decoder.parameters(), expected):
        assert torch.allclose(p.grad * 2, grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("optim_loss", "combine"),
    [
        (None, lambda losses: losses["loss"]),
        ("encoder_loss", lambda losses: losses["encoder_loss"]),
        (["encoder_loss", "decoder_loss"], lambda losses: losses["encoder_loss"] + losses["decoder_loss"]),
        (
            {"encoder_loss": 0.25, "decoder_loss": 2},
            lambda losses: 0.25 * losses["encoder_loss"] + 2 * losses["decoder_loss"],
        ),
    ],
)
def test_a_loss_may_be_one_a_sum_or_a_weighted_sum(optim_loss, combine):
    model = EncoderDecoder()
    unit = sgd(model, lr=1.0, optim_loss=optim_loss, updated_modules="encoder")
    (x,) = batches(1)
    expected = torch.autograd.grad(combine(losses_of(model, x)), list(model.encoder.parameters()))
    before = weights(model.encoder)
    unit.step(losses_of(model, x))
    for old, new, grad in zip(before, weights(model.encoder), expected):
        assert torch.allclose(old - new, grad, rtol=0, atol=1e-12)


def test_clipping_is_over_own_parameters_only():
    model = EncoderDecoder()
    unit = sgd(model, lr=1.0, optim_loss="decoder_loss", updated_modules="decoder", grad_clip=0.01)
    (x,) = batches(1)
    losses = losses_of(model, x)
    losses["encoder_loss"].backward(inputs=list(model.encoder.parameters()), retain_graph=True)
    foreign = [p.grad.clone() for p in model.encoder.parameters()]
    before = weights(model.decoder)
    unit.step(losses)
    assert same(foreign, [p.grad for p in model.encoder.parameters()])
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, weights(model.decoder))])
    assert moved.norm() == pytest.approx(0.01, rel=1e-3) and unit.last_grad_norm > 0.01


def test_the_norm_may_be_of_any_order():
    model = EncoderDecoder()
    (x,) = batches(1)
    grads = torch.autograd.grad(losses_of(model, x)["loss"], list(model.parameters()))
    for order in (1.0, 2.0, math.inf):
        unit = sgd(model, lr=1e-9, grad_clip=1.0, grad_norm_type=order)
        unit.step(losses_of(model, x))
        expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), order)
        assert unit.last_grad_norm == pytest.approx(expected.item(), rel=1e-6)


def test_groups_keep_their_ratios_and_tensor_rates_are_filled_in_place():
    model = EncoderDecoder()
    rate = torch.tensor(1.0)
    unit = CosineLr(
        "SGD",
        {"lr": rate},
        model,
        total_steps=4,
        ft_factor=0.5,
        param_groups=[{"match": "*.bias", "lr": 0.1}, {"match": ["decoder"], "lr": 2.0, "momentum": 0.9}],
    )
    assert unit.base_lrs == [1.0, 0.1, 2.0]
    filled = unit.optimizer.param_groups[0]["lr"]
    for number, x in enumerate(batches(3), start=1):
        unit.step(losses_of(model, x))
        expected = 0.5 * (1 + math.cos(math.pi * (number - 1) / 4)) / 2
        seen = [float(group["lr"]) for group in unit.optimizer.param_groups]
        assert seen == pytest.approx([expected, 0.1 * expected, 2 * expected], rel=1e-6)
    assert unit.optimizer.param_groups[0]["lr"] is filled and rate == 1
    assert [len(group["params"]) for group in unit.optimizer.param_groups] == [1, 2, 1]


def test_a_guest_may_change_the_rate_until_the_step():
    model = EncoderDecoder()
    unit = sgd(model, lr=1.0)
    (x,) = batches(1)
    before = weights(model)
    unit.backward(losses_of(model, x))
    unit.optimizer.param_groups[0]["lr"] = 0.0
    unit.update()
    assert same(before, weights(model))


def test_a_group_added_later_is_scheduled_too():
    model = EncoderDecoder()
    extra = nn.Parameter(torch.zeros(1))
    unit = CosineLr("SGD", {"lr": 1.0}, model, total_steps=4)
    unit.optimizer.add_param_group({"params": [extra], "lr": 0.5})
    for x in batches(2):
        unit.step(losses_of(model, x))
    assert unit.optimizer.param_groups[1]["lr"] == pytest.approx(unit.get_lr() / 2)


@pytest.mark.parametrize("is_part", [True, False])
def test_parameters_of_a_group_added_later_are_the_units_own(is_part):
    """They are clipped, cleared, saved and labelled like those it was built with."""

    def build():
        model = EncoderDecoder()
        optim = OptimSet(ConstantLr("SGD", {"lr": 0.1, "momentum": 0.9}, model, accum_grad=2))
        return model, optim, torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def add(model, optim, extra):
        if is_part:
            model.extra = extra
        optim["main"].optimizer.add_param_group({"params": [extra], "lr": 0.02})

    def run(model, optim, extra, xs):
        for x in xs:
            optim.backward(losses_of(model, x)["loss"] + (extra * x.mean()).sum())
            optim.step()
            optim.zero_grad()

    model, optim, extra = build()
    xs = batches(7)
    run(model, optim, torch.zeros(1), xs[:2])
    add(model, optim, extra)
    reference, plain = torch.ones(2, dtype=torch.float64), EncoderDecoder()
    plain.load_state_dict(model.state_dict(), strict=False)
    run(model, optim, extra, xs[2:4])
    grads = [
        g / 2 for g in torch.autograd.grad(sum(losses_of(plain, x)["loss"] for x in xs[2:4]), list(plain.parameters()))
    ]
    own = torch.full((2,), float(sum(x.mean() for x in xs[2:4]) / 2), dtype=torch.float64)
    norm = torch.cat([g.flatten() for g in (*grads, own)]).norm()
    torch.testing.assert_close(extra.detach(), reference - 0.02 * own * min(1.0, float(1 / (norm + 1e-6))))
    assert extra.grad is None and [group["unit"] for group in optim.param_groups] == ["main", "main"]

    run(model, optim, extra, xs[4:5])  # saved inside a window
    model2, optim2, extra2 = build()
    add(model2, optim2, extra2)
    optim2.load_state_dict(copy.deepcopy(optim.state_dict()))
    optim2.rebind(model2)
    model2.load_state_dict(model.state_dict())
    extra2.data.copy_(extra.data)
    for one in ((model, optim, extra), (model2, optim2, extra2)):
        run(*one, xs[5:])
    assert same([*weights(model), extra], [*weights(model2), extra2])


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor])
def test_a_rate_of_another_library_becomes_a_number(number):
    model = EncoderDecoder()
    unit = LambdaLr("SGD", {"lr": 0.5}, model, fn=lambda step: number(0.5))
    unit.step(losses_of(model, batches(1)[0]))
    assert type(unit.optimizer.param_groups[0]["lr"]) is float and unit.get_lr() == 0.25


def test_units_with_one_configuration_have_their_own_tensor_rates():
    model, conf = EncoderDecoder(), {"lr": torch.tensor(1.0, dtype=torch.float64), "foreach": False}
    units = {
        part: NoamLr("Adam", conf, model, updated_modules=part, warmup_steps=w)
        for part, w in [("encoder", 4), ("decoder", 2)]
    }
    optim = OptimSet(units)
    optim.begin_batch(1)
    assert optim.get_lr() == pytest.approx({"encoder": 0.25, "decoder": 0.5})
    optim.rebind(EncoderDecoder())  # new parameters, before the first update
    assert [unit.base_lrs for unit in optim.values()] == [[1.0], [1.0]]


@pytest.mark.parametrize("clip", [None, 0.01])
def test_sparse_gradients_are_clipped_and_tested_like_dense_ones(clip):
    models = []
    for sparse in (True, False):
        torch.manual_seed(0)
        models.append(nn.Embedding(6, 3, sparse=sparse, dtype=torch.float64))
        unit = ConstantLr("SGD", {"lr": 0.5}, models[-1], grad_clip=clip, accum_grad=2)
        for rows in ([1, 2, 2], [0, 2, 5], [1, 1, 1], [3, 1, 0]):
            unit.step(models[-1](torch.tensor(rows)).pow(2).sum())
        unit.step(models[-1](torch.tensor([1])).sum() * math.nan)
        unit.step(models[-1](torch.tensor([2])).sum())
        assert (unit.update_count, unit.skipped_steps) == (2, 1)
    torch.testing.assert_close(*(model.weight for model in models))
    assert ConstantLr("SparseAdam", None, models[0]).step(models[0](torch.tensor([1])).sum())


class TestNonFinite:
    def poisoned(self, model, x):
        losses = losses_of(model, x)
        return {"loss": losses["loss"] * math.inf}

    def test_skip_counts_clears_and_advances_the_clock(self, caplog):
        model = EncoderDecoder()
        unit = NoamLr("SGD", {"lr": 0.1}, model, warmup_steps=4)
        before, (x, y) = weights(model), batches(2)
        with caplog.at_level(logging.WARNING):
            assert unit.step(self.poisoned(model, x)) is False
        assert same(before, weights(model)) and (unit.skipped_steps, unit.update_count, unit.real_step) == (1, 0, 1)
        assert all(p.grad is None for p in model.parameters()) and "not finite" in caplog.text
        assert unit.step(losses_of(model, y)) is True and unit.get_lr() == pytest.approx(0.05)

    def test_many_skips_are_logged_once_in_a_while(self, caplog):
        model = EncoderDecoder()
        unit, (x,) = sgd(model), batches(1)
        with caplog.at_level(logging.WARNING):
            for _ in range(150):
                unit.step(self.poisoned(model, x))
        assert len(caplog.records) == 2 and unit.skipped_steps == 150

    def test_raise_names_the_unit(self):
        model = EncoderDecoder()
        unit = sgd(model, nonfinite="raise")
        with pytest.raises(FloatingPointError, match="ConstantLr"):
            unit.step(self.poisoned(model, batches(1)[0]))

    def test_ignore_steps_anyway(self):
        model = EncoderDecoder()
        unit = sgd(model, nonfinite="ignore")
        assert unit.step(self.poisoned(model, batches(1)[0])) is True
        assert not all(torch.isfinite(p).all() for p in model.parameters()) and unit.last_grad_norm is None

    def test_a_fused_optimizer_takes_the_verdict_as_a_flag_and_keeps_its_state(self):
        model = EncoderDecoder(dtype=torch.float32)
        unit = ConstantLr("Adam", {"lr": 0.1, "fused": True}, model)
        x, y, z = batches(3, dtype=torch.float32)
        unit.step(losses_of(model, x))
        before = weights(model)
        state = {k: [s[k].clone() for s in unit.optimizer.state.values()] for k in ("step", "exp_avg")}
        assert unit.step(self.poisoned(model, y)) is False
        assert same(before, weights(model)) and (unit.update_count, unit.skipped_steps) == (1, 1)
        for key, kept in state.items():
            assert same(kept, [s[key] for s in unit.optimizer.state.values()])
        assert unit.step(losses_of(model, z)) is True and not same(before, weights(model))
        assert (unit.update_count, unit.skipped_steps) == (2, 1)


class TestTiming:
    def test_time_func_is_entered_for_backward_and_update(self):
        from contextlib import contextmanager

        entered = []

        @contextmanager
        def time_func(names):
            entered.append(tuple(names))
            yield

        model = EncoderDecoder()
        unit = sgd(model)
        unit.step(losses_of(model, batches(1)[0]), time_func, "enc", 1)
        assert entered == [("loss_backward_time", "enc"), ("optim_time", "enc")]

    def test_the_logger_given_receives_the_line_about_a_skip(self, caplog):
        model = EncoderDecoder()
        logger = logging.getLogger("mine")
        with caplog.at_level(logging.WARNING):
            sgd(model).step({"loss": losses_of(model, batches(1)[0])["loss"] * math.nan}, logger=logger)
        assert [record.name for record in caplog.records] == ["mine"]


class TestSubclasses:
    def test_the_base_class_is_abstract(self):
        with pytest.raises(TypeError, match="abstract"):
            OptimScheduler("SGD", {"lr": 0.1}, EncoderDecoder())

    def test_both_arities_of_update_lr_work(self):
        seen = []

        class One(OptimScheduler):
            def sche_init(self):
                self.base = self.get_lr()

            def update_lr(self, real_step):
                return self.base / real_step

        class Two(One):
            def update_lr(self, real_step, epoch_num):
                seen.append(epoch_num)
                return self.base / real_step

        for cls in (One, Two):
            model = EncoderDecoder()
            unit = cls("SGD", {"lr": 1.0}, model)
            for number, x in enumerate(batches(2), start=1):
                unit.step(losses_of(model, x), step_num=number, epoch_num=7)
            assert unit.get_lr() == 0.5
        assert seen == [7, 7]

    def test_repr_has_no_trailing_comma_without_extra(self):
        class Bare(OptimScheduler):
            def sche_init(self): ...

            def update_lr(self, real_step):
                return 1.0

        assert repr(Bare("SGD", None, EncoderDecoder())) == "Bare(optimizer=SGD, optim_loss=None, updated_modules=None)"
        assert (
            repr(NoamLr("Adam", None, EncoderDecoder(), updated_modules="encoder"))
            == "NoamLr(optimizer=Adam, optim_loss=None, updated_modules=['encoder'], d_model=None, warmup_steps=4000)"
        )


class TestArguments:
    @pytest.mark.parametrize("name", ["accum_grad", "step_per_update"])
    @pytest.mark.parametrize("value", [0, -1, True, 1.0, "2"])
    def test_counts_must_be_whole_and_positive(self, name, value):
        with pytest.raises(ValueError, match=name):
            sgd(EncoderDecoder(), **{name: value})

    @pytest.mark.parametrize(
        "conf",
        [
            {"ft_factor": 0},
            {"ft_factor": -1},
            {"ft_factor": math.nan},
            {"grad_clip": 0},
            {"grad_clip": -1.0},
            {"grad_clip": "1"},
            {"grad_norm_type": 0},
            {"nonfinite": "skpi"},
            {"use_amp": 1},
            {"optim_loss": []},
            {"optim_loss": {"a": "b"}},
            {"optim_loss": ["a", "a"]},
            {"updated_modules": []},
            {"updated_modules": [5]},
            {"param_groups": {"match": "*"}},
            {"param_groups": [{"lr": 1.0}]},
            {"param_groups": [{"match": "*.bais"}]},
            {"param_groups": [{"match": "*.bias", "weigth_decay": 0.0}]},
        ],
    )
    def test_bad_values_are_value_errors(self, conf):
        with pytest.raises(ValueError, match=next(iter(conf))):
            sgd(EncoderDecoder(), **conf)

    @pytest.mark.parametrize("step_num", [0, -3, True, 1.5])
    def test_batches_count_from_one(self, step_num):
        model = EncoderDecoder()
        with pytest.raises(ValueError, match="step_num"):
            sgd(model).step(losses_of(model, batches(1)[0]), step_num=step_num)

    def test_unknown_keywords_name_the_nearest(self):
        with pytest.raises(TypeError, match="'warmup_steps'"):
            NoamLr("SGD", None, EncoderDecoder(), warmup_step=4)
        with pytest.raises(TypeError, match="'grad_clip'"):
            NoamLr("SGD", None, EncoderDecoder(), grad_clipp=4)
        with pytest.raises(TypeError, match="step_size"):
            StepLr("SGD", None, EncoderDecoder())

    def test_two_names_of_one_argument_must_agree(self):
        unit = sgd(EncoderDecoder(), optim_losses="decoder_loss", update_modules="decoder")
        assert unit.optim_loss == "decoder_loss" and unit.updated_modules == ["decoder"]
        sgd(EncoderDecoder(), optim_loss="decoder_loss", optim_losses="decoder_loss", updated_modules="decoder")
        with pytest.raises(ConfigError, match="differ"):
            sgd(EncoderDecoder(), optim_loss="loss", optim_losses="decoder_loss")

    @pytest.mark.parametrize(
        ("optim_type", "conf", "message"),
        [
            ("Adamm", None, "'Adam'"),
            ("Adam", {"learning_rate": 1}, "lr, betas"),
            ("Adam", {"lrr": 1}, "'lr'"),
            ("Adam", {"lr": -1}, "rejected"),
            ("Adam", {"params": []}, "updated_modules"),
            ("LBFGS", None, "closure"),
            ("Muon", None, "MuonHybrid"),
            ("math.sqrt", None, "expected a subclass"),
            ("collections.OrderedDict", None, "OrderedDict"),
            ("no.such.module", None, "no module"),
            ("torch.optim.Adamm", None, "'Adam'"),
            (nn.Linear, None, "Linear"),
            (5, None, "expected a name"),
            (lambda params: nn.Linear(1, 1), None, "made a Linear"),
            ("Adam", [1], "mapping"),
        ],
    )
    def test_bad_optimizers_are_config_errors(self, optim_type, conf, message):
        with pytest.raises(ConfigError, match=message):
            ConstantLr(optim_type, conf, EncoderDecoder())

    def test_an_optimizer_may_be_a_class_a_path_or_a_function(self):
        for optim_type in (torch.optim.Adam, "torch.optim.Adam", lambda params, lr: torch.optim.Adam(params, lr=lr)):
            assert type(ConstantLr(optim_type, {"lr": 0.5}, EncoderDecoder()).optimizer) is torch.optim.Adam

    def test_a_missing_loss_is_a_key_error_with_the_names_given(self):
        model = EncoderDecoder()
        unit = sgd(model, optim_loss="decodr_loss")
        with pytest.raises(
            BatchOutputError, match=r"'decoder_loss'.*Losses given: encoder_loss, decoder_loss, loss"
        ) as caught:
            unit.step(losses_of(model, batches(1)[0]))
        assert isinstance(caught.value, KeyError)

    @pytest.mark.parametrize("loss", [torch.ones(2, requires_grad=True), torch.ones(()), 1.0])
    def test_a_loss_that_is_no_scalar_with_a_gradient_is_a_value_error(self, loss):
        with pytest.raises(ValueError, match="'loss'"):
            sgd(EncoderDecoder()).step({"loss": loss})


class TestOwnership:
    def test_dotted_names_parameters_and_patterns(self):
        model = nn.Sequential(EncoderDecoder(), nn.Linear(2, 2))
        cases = {
            "0.encoder": ["0.encoder.weight", "0.encoder.bias"],
            "0.encoder.bias": ["0.encoder.bias"],
            "*.bias": ["0.encoder.bias", "0.decoder.bias", "1.bias"],
            "0.??coder": ["0.encoder.weight", "0.encoder.bias", "0.decoder.weight", "0.decoder.bias"],
        }
        for entry, names in cases.items():
            assert sgd(model, updated_modules=entry).param_names == names
        unit = sgd(model, updated_modules=["0", "0.encoder"], excluded_modules="*.weight")
        assert unit.param_names == ["0.encoder.bias", "0.decoder.bias"]

    def test_unknown_and_empty_selections_are_config_errors(self):
        with pytest.raises(ConfigError, match=r"'enocder'.*'encoder'.*First level: encoder, decoder"):
            sgd(EncoderDecoder(), updated_modules="enocder")
        with pytest.raises(ConfigError, match="no parameter is left"):
            sgd(EncoderDecoder(), updated_modules="encoder", excluded_modules="encoder")
        with pytest.raises(ConfigError, match="excluded_modules"):
            sgd(EncoderDecoder(), excluded_modules="decodr")

    def test_wrappers_are_looked_through(self):
        model = EncoderDecoder()
        for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
            assert sgd(wrapped, updated_modules="encoder").param_names == ["encoder.weight", "encoder.bias"]

    def test_a_module_called_module_is_no_wrapper(self):
        model = nn.Module()
        model.module = nn.Linear(2, 2)
        assert sgd(model, updated_modules="module").param_names == ["module.weight", "module.bias"]

    def test_frozen_parameters_wait_and_are_trained_once_thawed(self):
        model = EncoderDecoder()
        model.encoder.requires_grad_(False)
        unit = sgd(model)
        x, y = batches(2)
        before = weights(model.encoder)
        unit.step(losses_of(model, x))
        assert same(before, weights(model.encoder))
        model.encoder.requires_grad_(True)
        unit.step(losses_of(model, y))
        assert not same(before, weights(model.encoder))

    def test_a_loss_that_reaches_nothing_names_unit_and_loss(self):
        model = EncoderDecoder()
        unit = sgd(model, optim_loss="encoder_loss", updated_modules="decoder")
        with pytest.raises(ConfigError, match=r"(?s)ConstantLr.*'encoder_loss'.*use_reentrant"):
            unit.step(losses_of(model, batches(1)[0]))

    def test_gradients_that_were_there_before_the_first_pass_are_kept(self):
        model = EncoderDecoder()
        unit = sgd(model, updated_modules="decoder", accum_grad=2)
        (x,) = batches(1)
        (grad, _) = torch.autograd.grad(losses_of(model, x)["loss"], list(model.decoder.parameters()))
        model.decoder.weight.grad = torch.ones_like(model.decoder.weight)
        unit.backward(losses_of(model, x))
        assert torch.allclose(model.decoder.weight.grad, 1 + grad / 2, rtol=0, atol=1e-14)


def test_bfloat16_on_the_cpu_trains_without_a_scaler():
    model = EncoderDecoder(dtype=torch.float32)
    unit = NoamLr("AdamW", {"lr": 0.01}, model, warmup_steps=2)
    (x,) = batches(1, dtype=torch.float32)
    first = losses_of(model, x)["loss"].item()
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = losses_of(model, x)
        unit.step(losses)
    assert unit.scaler is None and losses_of(model, x)["loss"].item() < first


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, when it is first compiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_gets_the_same_gradients(backend):
    torch._dynamo.reset()
    plain, inner = EncoderDecoder(), EncoderDecoder()
    compiled = torch.compile(inner, backend=backend)
    for model in (plain, compiled):
        unit = sgd(model, updated_modules="encoder", optim_loss="decoder_loss")
        for x in batches(3):
            unit.step(losses_of(model, x))
    for a, b in zip(weights(plain), weights(inner)):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_units_stepped_one_by_one_on_losses_with_a_common_graph_get_an_error_that_says_what_to_do():
    model = EncoderDecoder()
    first = sgd(model, optim_loss="decoder_loss", updated_modules="decoder")
    second = sgd(model, optim_loss="encoder_loss", updated_modules="encoder")
    third = sgd(model, optim_loss="decoder_loss", updated_modules="encoder")
    x = batches(1)[0]
    losses = losses_of(model, x)
    first.step(losses)
    with pytest.raises(SharedGraphError, match=r"unit 'ConstantLr': .*freed.*OptimSet.*retain_graph=True") as caught:
        third.step(losses)
    assert isinstance(caught.value, RuntimeError)
    losses = losses_of(model, x)
    first.backward(losses, retain_graph=True)
    first.update()  # changes weights that the graph of the second pass needs
    with pytest.raises(SharedGraphError, match="weights that have changed"):
        third.backward(losses)
    losses = losses_of(model, x)
    before = weights(model)
    first.backward(losses, retain_graph=True)
    second.backward(losses)
    assert first.update() and second.update() and not same(before, weights(model))
