"""Several units as one optimizer: passes, ownership, windows of an epoch, state, manual units."""

import logging
import math
import warnings

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.optim import BatchPlan, ConstantLr, CosineLr, NoamLr, OptimSet
from tests.optim.models import EncoderDecoder, batches, losses_of, own_gradients, same, weights


def unit(model, part=None, lr=0.1, optim_type="SGD", **conf):
    conf = {"grad_clip": None, "updated_modules": part, **conf}
    if part is not None:
        conf.setdefault("optim_loss", f"{part}_loss")
    return ConstantLr(optim_type, {"lr": lr}, model, **conf)


def pair(model, order=("encoder", "decoder"), encoder=None, decoder=None, **both):
    own = {"encoder": encoder or {}, "decoder": decoder or {}}
    return OptimSet({part: unit(model, part, **{**both, **own[part]}) for part in order})


def counted(model, x):
    """The losses, and a counter of how often a backward passes through the encoder's output."""
    hidden, out = model(x)
    passes = []
    hidden.register_hook(lambda grad: passes.append(1))
    losses = {"encoder_loss": hidden.pow(2).mean(), "decoder_loss": (out - 1).pow(2).mean()}
    return {**losses, "loss": sum(losses.values())}, passes


class TestPasses:
    @pytest.mark.parametrize("order", [("encoder", "decoder"), ("decoder", "encoder")])
    def test_each_unit_gets_the_gradient_of_its_own_loss(self, order):
        model = EncoderDecoder()
        optim = pair(model, order)
        (x,) = batches(1)
        expected = {part: own_gradients(model, x, part, f"{part}_loss") for part in order}
        optim.backward(losses_of(model, x))
        for part in order:
            for p, grad in zip(getattr(model, part).parameters(), expected[part]):
                assert torch.allclose(p.grad, grad, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("order", [("encoder", "decoder"), ("decoder", "encoder")])
    def test_two_losses_on_one_graph_train_like_two_hand_written_optimizers(self, order):
        ours, theirs = EncoderDecoder(), EncoderDecoder()
        optim = pair(ours, order, optim_type="Adam")
        optimizers = {part: torch.optim.Adam(getattr(theirs, part).parameters(), lr=0.1) for part in order}
        for x in batches(10):
            optim.backward(losses_of(ours, x))
            optim.step()
            optim.zero_grad()
            grads = {part: own_gradients(theirs, x, part, f"{part}_loss") for part in order}
            for part, optimizer in optimizers.items():
                for p, grad in zip(getattr(theirs, part).parameters(), grads[part]):
                    p.grad = grad
                optimizer.step()
        for a, b in zip(weights(ours), weights(theirs)):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)

    def test_units_on_one_loss_share_one_pass_and_get_full_gradients(self):
        model = EncoderDecoder()
        optim = pair(model, optim_loss="loss")
        (x,) = batches(1)
        expected = torch.autograd.grad(losses_of(model, x)["loss"], list(model.parameters()))
        losses, passes = counted(model, x)
        value = losses["loss"].item()
        optim.backward(losses)
        assert len(passes) == 1 and losses["loss"].item() == value
        for p, grad in zip(model.parameters(), expected):
            assert torch.allclose(p.grad, grad, rtol=0, atol=1e-12)
        assert optim.passes() == [("encoder", "decoder")]

    @pytest.mark.parametrize("change", [{"optim_loss": "decoder_loss"}, {"accum_grad": 2}])
    def test_another_loss_or_divisor_needs_a_pass_of_its_own(self, change):
        model = EncoderDecoder()
        optim = pair(model, optim_loss="loss", decoder=change)
        assert optim.passes() == [("encoder",), ("decoder",)]

    def test_three_units_in_two_passes(self):
        model = nn.Sequential(EncoderDecoder(), nn.Linear(2, 2, dtype=torch.float64))
        conf = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "model": model}
        optim = OptimSet(
            a=ConstantLr(**conf, updated_modules="0.encoder", optim_loss="x"),
            b=ConstantLr(**conf, updated_modules="1", optim_loss="y"),
            c=ConstantLr(**conf, updated_modules="_rest_", optim_loss="x"),
        )
        assert optim.passes() == [("a", "c"), ("b",)] and optim["c"].param_names == [
            "0.decoder.weight",
            "0.decoder.bias",
        ]

    def test_clipping_one_unit_leaves_the_other_alone(self):
        model = EncoderDecoder()
        optim = pair(model, lr=1.0, encoder={"grad_clip": 1e-3})
        (x,) = batches(1)
        expected = own_gradients(model, x, "decoder", "decoder_loss")
        before = weights(model.decoder)
        optim.backward(losses_of(model, x))
        optim.step()
        for old, new, grad in zip(before, weights(model.decoder), expected):
            assert torch.allclose(old - new, grad, rtol=0, atol=1e-12)

    def test_graphs_are_kept_whole_before_the_first_forward_compiles_them(self):
        from torch._functorch import config

        with config.patch(donated_buffer=True):
            pair(EncoderDecoder(), encoder={"step_per_update": 2}).begin_batch(1, 1)
            assert config.donated_buffer is True  # nothing is compiled here
            model = torch.compile(EncoderDecoder(), backend="eager")
            pair(model, optim_loss="loss").begin_batch(1, 1)
            assert config.donated_buffer is True  # one pass
            pair(model, encoder={"step_per_update": 2}).begin_batch(1, 1)
            assert config.donated_buffer is False

    @pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, when it is first compiled
    def test_a_compiled_model_with_two_losses(self):
        torch._dynamo.reset()
        plain, inner = EncoderDecoder(), EncoderDecoder()
        for model in (plain, torch.compile(inner, backend="aot_eager")):
            optim = pair(model)
            for x in batches(3):
                optim.backward(losses_of(model, x))
                optim.step()
                optim.zero_grad()
        for a, b in zip(weights(plain), weights(inner)):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)

    def test_an_inf_skips_one_unit_and_the_other_moves(self):
        model = EncoderDecoder()
        optim = pair(model)
        before = {part: weights(getattr(model, part)) for part in optim}
        losses = losses_of(model, batches(1)[0])
        losses["encoder_loss"] = losses["encoder_loss"] * math.inf
        optim.backward(losses)
        assert optim.step() is True
        assert same(before["encoder"], weights(model.encoder)) and not same(before["decoder"], weights(model.decoder))
        assert {name: (u.skipped_steps, u.update_count) for name, u in optim.items()} == {
            "encoder": (1, 0),
            "decoder": (0, 1),
        }

    def test_raise_names_the_unit(self):
        model = EncoderDecoder()
        optim = pair(model, encoder={"nonfinite": "raise"})
        losses = losses_of(model, batches(1)[0])
        losses["encoder_loss"] = losses["encoder_loss"] * math.nan
        optim.backward(losses)
        with pytest.raises(FloatingPointError, match="'encoder'"):
            optim.step()

    def test_a_closure_is_refused(self):
        with pytest.raises(NotImplementedError, match="single torch optimizer"):
            pair(EncoderDecoder()).step(lambda: None)


def drive(optim, model, lengths):
    """Run epochs of the given lengths as the Trainer does and return one character pair per batch and unit."""
    marks = {name: [] for name in optim}
    real = {name: [] for name in optim}
    number = 0
    for epoch, length in enumerate(lengths, start=1):
        for index in range(length):
            number += 1
            plan = optim.begin_batch(number, epoch, last=index == length - 1)
            counts = {name: u.update_count for name, u in optim.items()}
            optim.backward(losses_of(model, batches(1, seed=number)[0]))
            if plan.closes:
                optim.finish_gradients()
                optim.step()
                optim.zero_grad()
            for name, u in optim.items():
                marks[name].append(
                    ("B" if name in plan.active else "-") + ("S" if u.update_count > counts[name] else "-")
                )
                real[name].append(u.real_step)
    return {name: " ".join(each) for name, each in marks.items()}, real


class TestWindows:
    @pytest.mark.parametrize(
        ("accum", "every", "skipped", "lengths", "marks", "steps"),
        [
            (1, 2, False, [8], "-- BS -- BS -- BS -- BS", [1, 2, 3, 4, 5, 6, 7, 8]),
            (2, 1, False, [8], "B- BS B- BS B- BS B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
            (2, 2, False, [8], "-- -- B- BS -- -- B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
            (2, 2, True, [8], "B- B- B- BS B- B- B- BS", [1, 1, 2, 2, 3, 3, 4, 4]),
            (4, 1, False, [6, 2], "B- B- B- BS B- BS B- BS", [1, 1, 1, 1, 2, 2, 3, 3]),
            (2, 2, True, [3, 3], "B- B- BS B- B- BS", [1, 1, 2, 3, 3, 4]),
        ],
    )
    def test_traces_with_windows_that_end_with_the_epoch(self, accum, every, skipped, lengths, marks, steps):
        model = EncoderDecoder()
        optim = OptimSet(main=unit(model, accum_grad=accum, step_per_update=every, accumulate_skipped=skipped))
        seen, real = drive(optim, model, lengths)
        assert (seen["main"], real["main"]) == (marks, steps)

    def test_units_keep_their_own_windows(self):
        model = EncoderDecoder()
        optim = pair(model, encoder={"step_per_update": 2}, decoder={"accum_grad": 2})
        seen, _ = drive(optim, model, [4])
        assert seen == {"encoder": "-- BS -- BS", "decoder": "B- BS B- BS"}

    def test_the_last_short_window_is_the_mean_of_its_batches(self):
        model = EncoderDecoder()
        optim = OptimSet(main=unit(model, lr=1.0, accum_grad=4))
        data = batches(6)
        for number, x in enumerate(data, start=1):
            plan = optim.begin_batch(number, 1, last=number == 6)
            if number == 5:
                before = weights(model)
                expected = [
                    torch.autograd.grad(losses_of(model, x)["loss"], list(model.parameters()))
                    for x in (data[4], data[5])
                ]
            optim.backward(losses_of(model, x))
            if plan.closes:
                optim.step()
                optim.zero_grad()
        assert optim["main"].update_count == 2
        for old, new, a, b in zip(before, weights(model), *expected):
            assert torch.allclose(old - new, (a + b) / 2, rtol=0, atol=1e-12)

    def test_weighted_parts_of_one_batch_are_their_weighted_mean(self):
        model = EncoderDecoder()
        optim = OptimSet(main=unit(model, lr=1.0))
        x, y = batches(2)
        grads = [torch.autograd.grad(losses_of(model, z)["loss"], list(model.parameters())) for z in (x, y)]
        before = weights(model)
        optim.begin_batch(1, 1)
        optim.backward(losses_of(model, x), weight=0.75)
        optim.backward(losses_of(model, y), weight=0.25)
        optim.step()
        for old, new, a, b in zip(before, weights(model), *grads):
            assert torch.allclose(old - new, 0.75 * a + 0.25 * b, rtol=0, atol=1e-12)

    def test_a_batch_that_failed_is_left_out_and_the_window_still_closes(self):
        model = EncoderDecoder()
        optim = OptimSet(main=unit(model, lr=1.0, accum_grad=2))
        x, _ = batches(2)
        expected = torch.autograd.grad(losses_of(model, x)["loss"], list(model.parameters()))
        before = weights(model)
        optim.begin_batch(1, 1)
        optim.backward(losses_of(model, x))
        assert optim.begin_batch(2, 1).closes
        assert optim.step() is True
        for old, new, grad in zip(before, weights(model), expected):
            assert torch.allclose(old - new, grad, rtol=0, atol=1e-12)

    def test_the_same_batch_announced_twice_counts_once(self):
        model = EncoderDecoder()
        optim = pair(model, accum_grad=2)
        assert optim.begin_batch(1, 1) is optim.begin_batch(1, 1)
        assert optim["encoder"].real_step == 1 and optim.begin_batch(2, 1).closes

    def test_zero_grad_never_touches_a_window_in_progress(self):
        model = EncoderDecoder()
        optim = pair(model, decoder={"accum_grad": 2})
        optim.backward(losses_of(model, batches(1)[0]))
        optim.step()
        optim.zero_grad()
        assert all(p.grad is None for p in model.encoder.parameters())
        assert all(p.grad is not None for p in model.decoder.parameters())
        optim.zero_grad(all=True)
        assert all(p.grad is None for p in model.parameters()) and optim["decoder"].window.count == 0

    def test_what_is_left_at_the_end_is_reported_in_one_line(self, caplog):
        model = EncoderDecoder()
        optim = OptimSet(main=unit(model, accum_grad=2, step_per_update=2, accumulate_skipped=True))
        drive(optim, model, [2, 2, 2])
        with caplog.at_level(logging.WARNING):
            optim.end_run()
        assert [record.getMessage() for record in caplog.records] == [
            "the run ended inside an accumulation window; gradients not used: main (2 batches)."
        ]

    def test_bad_batch_numbers_are_refused(self):
        for number in (0, -1, True, 1.5):
            with pytest.raises(ValueError, match="step_num"):
                pair(EncoderDecoder()).begin_batch(number, 1)

    def test_the_plan_names_active_units(self):
        optim = pair(EncoderDecoder(), encoder={"step_per_update": 2})
        assert optim.begin_batch(1, 1) == BatchPlan(("decoder",), True, True)
        assert optim.begin_batch(2, 1) == BatchPlan(("encoder", "decoder"), True, True)

    def test_a_clock_that_was_not_saved_comes_from_the_caller(self):
        optim = OptimSet(main=NoamLr("SGD", {"lr": 1.0}, EncoderDecoder(), warmup_steps=8, accum_grad=2))
        optim.begin_batch(7, 1)
        assert optim["main"].real_step == 4 and optim["main"].get_lr() == pytest.approx(0.5)


class TestOwnership:
    def test_lists_of_modules_can_be_built(self):
        model = EncoderDecoder()
        OptimSet(a=unit(model, ["encoder"], optim_loss="loss"), b=unit(model, ["decoder"], optim_loss="loss"))

    @pytest.mark.parametrize(
        ("first", "second"), [(None, "decoder"), ("decoder", "decoder.bias"), ("*.bias", "encoder")]
    )
    def test_a_parameter_in_two_units_names_both_and_the_way_out(self, first, second):
        model = EncoderDecoder()
        with pytest.raises(ConfigError, match=r"'first' and 'second'.*excluded_modules.*_rest_"):
            OptimSet(first=unit(model, first, optim_loss="loss"), second=unit(model, second, optim_loss="loss"))

    def test_tied_weights_across_units_are_refused(self):
        model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
        model["head"].weight = model["embed"].weight
        with pytest.raises(ConfigError, match=r"weight'.*'a' and 'b'"):
            OptimSet(a=unit(model, "embed", optim_loss="loss"), b=unit(model, "head", optim_loss="loss"))
        OptimSet(a=unit(model, ["embed", "head"], optim_loss="loss"))  # a repeat inside one unit is merged

    def test_rest_is_what_no_other_unit_owns(self):
        model = EncoderDecoder()
        optim = OptimSet(rest=unit(model, "_rest_", optim_loss="loss"), bias=unit(model, "*.bias", optim_loss="loss"))
        assert optim["rest"].param_names == ["encoder.weight", "decoder.weight"]
        with pytest.raises(ConfigError, match=r"no parameter is left"):
            OptimSet(a=unit(model, "_rest_", optim_loss="loss"), b=unit(model, None, optim_loss="loss"))

    def test_orphans_are_warned_about_once(self):
        model = EncoderDecoder()
        with pytest.warns(
            UserWarning, match=r"2 trainable parameters belong to no unit.*decoder.weight, decoder.bias"
        ) as caught:
            OptimSet(encoder=unit(model, "encoder"))
        assert len(caught) == 1
        model.decoder.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            OptimSet(encoder=unit(model, "encoder"))

    @pytest.mark.parametrize("make", [dict, lambda: {"a": 5}, lambda: {"": None}, lambda: {1: 2}])
    def test_what_is_no_unit_is_refused(self, make):
        with pytest.raises(ConfigError):
            OptimSet(make())

    def test_one_name_twice_is_refused(self):
        model = EncoderDecoder()
        with pytest.raises(ConfigError, match="two units"):
            OptimSet({"a": unit(model)}, a=unit(model))

    def test_unknown_units_are_key_errors_with_the_nearest_name(self):
        with pytest.raises(KeyError, match="encoder"):
            pair(EncoderDecoder())["encodr"]


class TestAsAnOptimizer:
    def test_groups_are_live_and_carry_the_unit(self):
        model = EncoderDecoder()
        optim = pair(model, encoder={"lr": 0.5})
        assert [(group["unit"], group["lr"]) for group in optim.param_groups] == [("encoder", 0.5), ("decoder", 0.1)]
        optim.param_groups[1]["lr"] = 7.0
        assert optim.get_lr() == {"encoder": 0.5, "decoder": 7.0}
        assert [type(o) for o in optim.optimizers] == [torch.optim.SGD] * 2
        assert list(optim) == ["encoder", "decoder"] and dict(optim.items())["encoder"] is optim["encoder"]

    def test_metrics_are_named_by_unit(self):
        model = EncoderDecoder()
        optim = pair(model, encoder={"grad_clip": 1.0}, decoder={"nonfinite": "ignore"})
        optim.backward(losses_of(model, batches(1)[0]))
        optim.step()
        metrics = optim.metrics()
        assert metrics.pop("grad_norm/encoder") is optim["encoder"].last_grad_norm
        assert metrics == {"lr/encoder": 0.1, "lr/decoder": 0.1, "skipped_steps/encoder": 0, "skipped_steps/decoder": 0}

    def test_state_is_merged_and_moves(self):
        model = EncoderDecoder()
        optim = pair(model, optim_type="Adam")
        optim.backward(losses_of(model, batches(1)[0]))
        optim.step()
        assert set(optim.state) == set(model.parameters())
        assert optim.to("cpu") is optim
        optim.to("meta")
        assert {kept["exp_avg"].device.type for kept in optim.state.values()} == {"meta"}
        assert {kept["step"].device.type for kept in optim.state.values()} == {"cpu"}

    def test_optimizers_with_modes_are_told(self):
        calls = []

        class Modal(torch.optim.SGD):
            def train(self):
                calls.append("train")

            def eval(self):
                calls.append("eval")

        model = EncoderDecoder()
        optim = OptimSet(main=ConstantLr(Modal, {"lr": 0.1}, model))
        optim.eval()
        optim.train()
        assert calls == ["eval", "train"]
        with pytest.warns(UserWarning, match="Modal"):
            CosineLr(Modal, {"lr": 0.1}, model, total_steps=10)

    def test_shared_values_hold_unless_a_unit_was_given_its_own(self):
        model = EncoderDecoder()
        optim = pair(model, encoder={"accum_grad": 1})
        optim.share(accum_grad=3, ft_factor=0.5)
        assert (optim["encoder"].accum_grad, optim["decoder"].accum_grad) == (1, 3)
        assert optim["decoder"].window.length == 3 and optim["encoder"].ft_factor == 0.5
        with pytest.raises(TypeError, match="'accum_grad'"):
            optim.share(accumgrad=3)
        with pytest.raises(ValueError, match="accum_grad"):
            optim.share(accum_grad=0)

    def test_bind_tells_every_unit_the_length(self):
        model = EncoderDecoder()
        optim = OptimSet(main=CosineLr("SGD", {"lr": 1.0}, model, accum_grad=2))
        with pytest.raises(ConfigError, match=r"'main'.*total_steps"):
            optim.bind()
        optim.bind(total_steps=8, steps_per_epoch=4)
        assert optim["main"].lr_at(3) == pytest.approx(0.5)

    def test_rebind_finds_names_in_another_model_before_the_first_update_only(self):
        first, second = EncoderDecoder(), EncoderDecoder(seed=1)
        optim = pair(first)
        optim.rebind(second)
        (x,) = batches(1)
        before = weights(second)
        optim.backward(losses_of(second, x))
        optim.step()
        assert not same(before, weights(second)) and optim["encoder"].params[0] is second.encoder.weight
        optim.rebind(torch.compile(second, backend="eager"))  # only the wrapper is new
        with pytest.raises(RuntimeError, match="1 updates"):
            optim.rebind(first)

    def test_explain_is_a_table(self):
        model = EncoderDecoder()
        optim = OptimSet(
            enc=CosineLr(
                "Adam",
                {"lr": 1.0},
                model,
                updated_modules="encoder",
                step_per_update=2,
                accum_grad=4,
                optim_loss={"a": 0.3},
            ),
            dec=ConstantLr("SGD", {"lr": 0.1}, model, updated_modules="decoder", manual=True),
        )
        optim.bind(total_steps=80, steps_per_epoch=8)
        text = optim.explain()
        for part in (
            "enc",
            "Adam",
            "16 in 2",
            "0.3*a",
            "every 2nd step of 4 batches",
            "CosineLr",
            "by hand",
            "▁",
            "passes per batch: 1",
        ):
            assert part in text
        assert "OptimSet(\n    enc=CosineLr(" in repr(optim)


class TestManualUnits:
    def test_step_now_updates_at_once_and_the_set_passes_over_the_unit(self):
        model = EncoderDecoder()
        optim = pair(model, encoder={"manual": True})
        x, y = batches(2)
        optim.begin_batch(1, 1)
        before = weights(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = model(x)
        assert optim.step_now("encoder", {"encoder_loss": hidden.pow(2).mean()}) is True
        assert not same(before[:2], weights(model.encoder)) and all(p.grad is None for p in model.parameters())
        after = weights(model.encoder)
        optim.backward(losses_of(model, y))
        optim.step()
        assert same(after, weights(model.encoder)) and not same(before[2:], weights(model.decoder))

    def test_step_now_follows_the_sets_clock(self):
        model = EncoderDecoder()
        optim = pair(model, encoder={"manual": True, "step_per_update": 2, "accum_grad": 2})
        marks, have_gradients, expected = [], [], weights(model.encoder)
        for x in batches(4)[2:]:
            for weight, gradient in zip(expected, own_gradients(model, x, "encoder", "encoder_loss"), strict=True):
                weight -= 0.1 * gradient / 2
        for number, x in enumerate(batches(4), start=1):
            optim.begin_batch(number, 1)
            marks.append(optim.step_now("encoder", losses_of(model, x)))
            have_gradients.append(model.encoder.weight.grad is not None)
        assert marks == [False, False, False, True] and optim["encoder"].update_count == 1
        assert have_gradients == [False, False, True, False]
        for ours, weight in zip(weights(model.encoder), expected, strict=True):
            torch.testing.assert_close(ours, weight)

    @pytest.mark.parametrize("is_first", [True, False])
    def test_the_clock_goes_on_without_begin_batch(self, is_first):
        model = EncoderDecoder()
        optim = pair(model, encoder={"manual": True})
        for x in batches(3):
            if is_first:
                optim.step_now("encoder", losses_of(model, x))
            optim.backward(losses_of(model, x))
            optim.step()
            optim.zero_grad()
            if not is_first:
                optim.step_now("encoder", losses_of(model, x))
        assert [one.update_count for one in optim.values()] == [3, 3]
        assert optim["decoder"].real_step == 3 + (
            not is_first
        )  # a step after the passes of a batch belongs to the next
        alone = OptimSet(main=unit(model, manual=True))
        for x in batches(3):
            alone.step_now("main", losses_of(model, x))
        assert alone["main"].real_step == alone["main"].update_count == 3

    def test_step_now_is_for_manual_units_only(self):
        model = EncoderDecoder()
        with pytest.raises(RuntimeError, match="manual=True"):
            pair(model).step_now("encoder", losses_of(model, batches(1)[0]))


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_unit_whose_first_update_is_skipped_starts_its_momentum_with_the_next(dampening):
    model, reference = nn.Linear(63, 63), nn.Linear(63, 63)
    reference.load_state_dict(model.state_dict())
    conf = {"lr": 0.01, "momentum": 0.9, "dampening": dampening}
    unit = ConstantLr("SGD", {**conf, "fused": True}, model, grad_clip=None)
    optimizer = torch.optim.SGD(reference.parameters(), **conf)
    for factor in (torch.nan, 1.0, 1.0):
        torch.full((63, 63), 1e30)  # what is left in the memory that the momentum may be made in
        unit.step(model(torch.ones(2, 63)).square().mean() * factor)
        if factor == 1.0:
            optimizer.zero_grad()
            reference(torch.ones(2, 63)).square().mean().backward()
            optimizer.step()
    assert unit.skipped_steps == 1
    torch.testing.assert_close(model.weight, reference.weight)
