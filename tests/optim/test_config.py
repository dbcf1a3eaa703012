"""Units from YAML and back."""

import argparse
import importlib
import io
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.optim import (
    ConstantLr,
    CosineLr,
    LambdaLr,
    NoamLr,
    OptimScheduler,
    OptimSet,
    as_optim_set,
    build_optim_sches,
    from_yaml,
    load_yaml,
    resolve_type,
    to_yaml,
)
from drivetrain.optim.building import keywords_of
from drivetrain.optim.units import SCHEDULES
from tests.optim.models import EncoderDecoder, batches, losses_of, same, weights

TWO_UNITS = """
warmup: 400
optim_sches:
    encoder_optim:
        type: noam.NoamLr
        conf:
            optim_type: Adam
            optim_conf: {lr: 1e-3, betas: !tuple [0.9, 0.98]}
            optim_losses: encoder_loss
            updated_modules: encoder
            step_per_update: 2
            warmup_steps: !ref <warmup>
    decoder_optim:
        type: noam.NoamLr
        conf: {optim_type: AdamW, optim_conf: {lr: 2e-3}, optim_losses: decoder_loss, updated_modules: decoder, warmup_steps: !ref <warmup>}
"""


class HalfLr(OptimScheduler):
    """A schedule of the user's own, found by its dotted path."""

    def sche_init(self, factor=0.5):
        self.factor = factor

    def update_lr(self, real_step):
        return self.base_lrs[0] * self.factor


def ramp(step):
    return step / 100


def load(text, model=None, **shared):
    return from_yaml(io.StringIO(textwrap.dedent(text)), model or EncoderDecoder(), **shared)


def test_the_documented_file_loads_and_equals_the_python_form():
    optim = load(TWO_UNITS, grad_clip=5.0)
    assert list(optim) == ["encoder_optim", "decoder_optim"]
    encoder, decoder = optim.values()
    assert (encoder.optim_loss, encoder.updated_modules, encoder.step_per_update) == ("encoder_loss", ["encoder"], 2)
    assert encoder.optimizer.defaults["betas"] == (0.9, 0.98) and encoder.base_lrs == [1e-3]
    assert type(decoder.optimizer) is torch.optim.AdamW and decoder.warmup_steps == 400 and decoder.grad_clip == 5.0


def test_yaml_and_python_train_alike():
    ours, theirs = EncoderDecoder(), EncoderDecoder()
    optim = OptimSet(
        encoder_optim=NoamLr(
            "Adam",
            {"lr": 1e-3, "betas": (0.9, 0.98)},
            theirs,
            optim_loss="encoder_loss",
            updated_modules="encoder",
            step_per_update=2,
            warmup_steps=400,
        ),
        decoder_optim=NoamLr(
            "AdamW", {"lr": 2e-3}, theirs, optim_loss="decoder_loss", updated_modules="decoder", warmup_steps=400
        ),
    )
    for model, units in ((ours, load(TWO_UNITS, ours)), (theirs, optim)):
        for x in batches(4):
            units.backward(losses_of(model, x))
            units.step()
            units.zero_grad()
    assert same(weights(ours), weights(theirs))


def test_the_single_form_is_a_unit_called_main():
    optim = load("optim_sches: {type: NoamLr, conf: {optim_type: SGD, optim_conf: {lr: 1e-1}}}")
    assert list(optim) == ["main"] and optim["main"].base_lrs == [0.1]


@pytest.mark.parametrize("query", ["noam.NoamLr", "NoamLr", "noam.Noamlr", "Noamlr", "drivetrain.optim.noam.NoamLr"])
def test_types_resolve_under_all_their_names(query):
    assert resolve_type(query) is NoamLr


def test_every_schedule_is_written_as_it_is_read_and_can_be_imported_from_the_module_of_its_type():
    for file, classes in SCHEDULES.items():
        for cls in classes.values():
            needed = {"first_cycle": 2, "step_size": 2, "milestones": [2], "fn": "math.sqrt"}
            conf = {name: needed[name] for name in keywords_of(cls.sche_init)[1] if name != "self"}
            written = OptimSet({"main": cls("SGD", {"lr": 1.0}, nn.Linear(1, 1), **conf)}).to_config()
            assert written["optim_sches"]["main"]["type"] == f"{file}.{cls.__name__}"
            assert resolve_type(f"{file}.{cls.__name__}") is cls
            assert getattr(importlib.import_module(f"drivetrain.optim.{file}"), cls.__name__) is cls


def test_a_users_own_schedule_is_found_by_path():
    assert resolve_type(f"{__name__}.HalfLr") is HalfLr


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("noam.NoamLR", "'noam.NoamLr'"),
        ("CosinLr", "CosineLr"),
        ("tests.optim.models.EncoderDecoder", "subclass of OptimScheduler"),
        ("os.system", "subclass of OptimScheduler"),
        ("no_such_package.Thing", "no module"),
        (f"{__name__}.HalvLr", "'HalfLr'"),
        (5, "expected a name"),
        ("a b.c", "dotted path"),
    ],
)
def test_types_that_are_none_say_what_they_are(query, message):
    with pytest.raises(ConfigError, match=message):
        resolve_type(query)


def test_a_units_own_value_wins_over_a_shared_one():
    optim = load("optim_sches: {type: ConstantLr, conf: {optim_type: SGD, accum_grad: 2}}", accum_grad=5, ft_factor=0.5)
    assert (optim["main"].accum_grad, optim["main"].ft_factor, optim["main"].grad_clip) == (2, 0.5, 1.0)
    with pytest.raises(TypeError, match="'accum_grad'"):
        load(TWO_UNITS, acum_grad=2)


def test_the_builder_takes_a_namespace_of_shared_arguments():
    args = argparse.Namespace(accum_grad=3, grad_clip=5.0, seed=1, use_amp=False)
    cfg = load_yaml(io.StringIO(TWO_UNITS))["optim_sches"]
    optim = build_optim_sches(EncoderDecoder(), cfg, args, ft_factor=0.1)
    assert {(u.accum_grad, u.grad_clip, u.use_amp, u.ft_factor) for u in optim.values()} == {(3, 5.0, False, 0.1)}
    assert build_optim_sches(EncoderDecoder(), cfg, {"accum_grad": 2})["decoder_optim"].accum_grad == 2


RECIPE = """
warmup: 24
seed: 0
accum_grad: 2
ft_factor: 0.5
grad_clip: 5.0
selection: !tuple (valid, accuracy, max, 10)
train_cfg:
  model: {model_type: any.Model}
  optim_sches:
    type: noam.Noamlr
    conf:
      optim_type: Adam
      optim_conf: {lr: 0.001, betas: [0.9, 0.98], eps: 1.0e-9}
      warmup_steps: !ref <warmup>
"""


def test_a_recipe_with_the_units_in_train_cfg_is_read_with_what_is_next_to_it():
    unit = load(RECIPE)["main"]
    assert (unit.accum_grad, unit.ft_factor, unit.grad_clip, unit.sche_conf) == (2, 0.5, 5.0, {"warmup_steps": 24})
    assert unit.lr_at(24) == pytest.approx(0.5 * 0.001)
    by_keyword = load(RECIPE, accum_grad=8)["main"]
    assert (by_keyword.accum_grad, by_keyword.grad_clip) == (8, 5.0)
    assert OptimSet.from_config(load_yaml(io.StringIO(RECIPE)), EncoderDecoder())["main"].grad_clip == 5.0


def test_of_two_values_for_all_units_the_nearer_counts_and_a_units_own_comes_first():
    text = """
    grad_clip: 5.0
    accum_grad: 2
    train_cfg:
      grad_clip: 4.0
      optim_sches:
        enc: {type: ConstantLr, conf: {optim_type: SGD, updated_modules: encoder}}
        dec: {type: ConstantLr, conf: {optim_type: SGD, updated_modules: decoder, grad_clip: null, accum_grad: 3}}
    """
    units = load(text)
    assert (units["enc"].grad_clip, units["enc"].accum_grad) == (4.0, 2)
    assert (units["dec"].grad_clip, units["dec"].accum_grad) == (None, 3)


def test_the_file_comes_before_what_a_trainer_shares_and_a_value_without_effect_is_named():
    cfg = load_yaml(io.StringIO(RECIPE))
    assert as_optim_set(cfg, EncoderDecoder(), accum_grad=1)["main"].accum_grad == 2  # 1 is the Trainer's default
    with pytest.warns(DrivetrainWarning, match=r"accum_grad=4 has no effect: .*main: 2"):
        assert as_optim_set(cfg, EncoderDecoder(), accum_grad=4)["main"].accum_grad == 2


FULL = """
optim_sches:
    one:
        type: cosine.CosineLr
        conf:
            optim_type: AdamW
            optim_conf: {lr: 1.0e-3, betas: !tuple [0.9, 0.95]}
            optim_loss: {encoder_loss: 0.3, decoder_loss: 1}
            updated_modules: [encoder]
            excluded_modules: '*.bias'
            step_per_update: 2
            accumulate_skipped: true
            accum_grad: 4
            grad_clip: null
            nonfinite: raise
            param_groups: [{match: '*.weight', weight_decay: 0.0}]
            total_steps: 10ep
            warmup_steps: 0.05dur
            min_lr_ratio: 0.1
    two:
        type: function.LambdaLr
        conf: {optim_type: SGD, optim_conf: {lr: 0.1}, updated_modules: _rest_, manual: true, fn: tests.optim.test_config.ramp}
"""


@pytest.mark.parametrize("text", [TWO_UNITS, FULL])
def test_configuration_round_trips(text):
    first = load(text, ft_factor=0.5)
    config = first.to_config()
    second = OptimSet.from_config(config, EncoderDecoder())
    assert second.to_config() == config
    third = load(to_yaml(first))
    assert third.to_config() == config
    for a, b in zip(first.values(), third.values()):
        assert (
            repr(a) == repr(b)
            and a.base_lrs == b.base_lrs
            and a.param_names == b.param_names
            and a.ft_factor == b.ft_factor
        )


def test_the_written_file_is_readable(tmp_path):
    path = tmp_path / "optim.yaml"
    text = to_yaml(load(TWO_UNITS), path)
    assert path.read_text() == text and "betas: !tuple [0.9, 0.98]" in text
    assert list(from_yaml(path, EncoderDecoder())) == ["encoder_optim", "decoder_optim"]


def test_python_values_are_written_as_names():
    model = EncoderDecoder()
    config = OptimSet(main=LambdaLr(torch.optim.Adam, {"lr": torch.tensor(0.5)}, model, fn=ramp)).to_config()
    assert config["optim_sches"]["main"] == {
        "type": "function.LambdaLr",
        "conf": {"optim_type": "Adam", "optim_conf": {"lr": 0.5}, "fn": f"{__name__}.ramp"},
    }
    assert OptimSet(main=HalfLr("SGD", None, model)).to_config()["optim_sches"]["main"]["type"] == f"{__name__}.HalfLr"


def test_what_has_no_name_cannot_be_written():
    model = EncoderDecoder()
    with pytest.raises(ConfigError, match="inside a function"):
        OptimSet(main=LambdaLr("SGD", None, model, fn=lambda step: 1.0)).to_config()
    with pytest.raises(ConfigError, match="only name Optimizer classes"):
        OptimSet(main=ConstantLr(lambda params: torch.optim.SGD(params), None, model)).to_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\noptim_sches:\n  dec:\n    type: NoamLr\n    conf:\n      optim_type: SGD\n      warmup_step: 4",
            r"<stream>:7 optim_sches\.dec\.conf: unknown key 'warmup_step'. Did you mean 'warmup_steps'\? Valid: optim_type, ",
        ),
        (
            "optim_sches: {type: NoamLr, conf: {optim_type: SGD, warmup_step: 4}}",
            r"<stream>:1 optim_sches\.conf: unknown key",
        ),
        ("optim_sches: {a: {type: noam.NoamLR, conf: {optim_type: SGD}}}", r"optim_sches\.a\.type: .*'noam\.NoamLr'"),
        ("optim_sches: {a: {typ: NoamLr, conf: {}}}", r"optim_sches\.a: unknown key 'typ'. Did you mean 'type'"),
        ("optim_sches: {a: {type: NoamLr}}", "'conf' is missing"),
        ("optim_sches: {a: {type: NoamLr, conf: 5}}", "expected a mapping of arguments"),
        ("optim_sches: {a: 5}", r"expected \{type, conf\}"),
        ("optim_sches: 5", "names of units"),
        ("optim_sche: {type: NoamLr, conf: {}}", "The nearest key is 'optim_sche': rename it"),
        (
            "optim_sches:\n  type: noam.Noamlr\n  conf:\n    optim_type: Adam\n    eps: 1.0e-9\n",
            r"<stream>:5 optim_sches\.conf: 'eps' is an argument of Adam. Move it into optim_conf",
        ),
        ("{}", "there is no 'optim_sches'"),
        (
            "train_cfg: {optim_sche: {}}",
            "no 'optim_sches' at the top or in 'train_cfg'. The nearest key is 'optim_sche': rename it",
        ),
        ("train_cfg: a/b.yaml", r"<stream>:1 train_cfg: .*another file, 'a/b.yaml'"),
        ("train_cfg: {optim_sches: {}}\noptim_sches: {}", "also in 'train_cfg'"),
        (
            "train_cfg:\n  optim_sches: {type: NoamLr, conf: {optim_type: Adamm}}",
            r"<stream>:2 train_cfg.optim_sches.conf: ",
        ),
        (
            "a: 1\naccum_grad: 0\noptim_sches: {type: NoamLr, conf: {optim_type: SGD}}",
            r"<stream>:2 accum_grad: .*accum_grad=0",
        ),
        (
            "train_cfg:\n  ft_factor: -1\n  optim_sches: {type: NoamLr, conf: {optim_type: SGD}}",
            r":2 train_cfg.ft_factor: ",
        ),
        ("optim_sches: {type: NoamLr, conf: {}}", "'optim_type' is missing"),
        ("optim_sches: {type: NoamLr, conf: {optim_type: Adamm}}", r"conf: .*'Adam'"),
        ("optim_sches: {type: NoamLr, conf: {optim_type: os.system}}", "expected a subclass of torch.optim.Optimizer"),
        ("optim_sches: {type: NoamLr, conf: {optim_type: SGD, optim_conf: {learning_rate: 1}}}", "Its arguments: lr"),
        ("optim_sches: {type: NoamLr, conf: {optim_type: SGD, accum_grad: 0}}", "accum_grad=0"),
        ("optim_sches: {type: StepLr, conf: {optim_type: SGD}}", "step_size"),
        ("optim_sches: {type: NoamLr, conf: {optim_type: SGD, updated_modules: enocder}}", "'encoder'"),
        ("optim_sches: {type: NoamLr, conf: {optim_type: SGD, model: x}}", "unknown key 'model'"),
        ("optim_sches: {a: {type: !!python/name:os.system , conf: {}}}", "not allowed"),
    ],
)
def test_bad_configuration_names_place_and_remedy(text, message):
    with pytest.raises(ConfigError, match=message):
        load(text)


class TestAsOptimSet:
    def test_everything_a_trainer_may_be_given(self, tmp_path):
        model = EncoderDecoder()
        path = tmp_path / "train.yaml"
        path.write_text(TWO_UNITS)
        one = ConstantLr("SGD", {"lr": 0.1}, model)
        whole = OptimSet(main=one)
        assert as_optim_set(whole, model, accum_grad=4) is whole and one.accum_grad == 4
        assert list(as_optim_set(one, model)) == ["main"]
        assert list(as_optim_set({"x": one}, model)) == ["x"]
        assert (
            list(as_optim_set(path, model))
            == list(as_optim_set(str(path), model))
            == ["encoder_optim", "decoder_optim"]
        )
        assert list(as_optim_set(load_yaml(path), model, accum_grad=2)) == ["encoder_optim", "decoder_optim"]
        assert list(as_optim_set(lambda m: {"y": ConstantLr("SGD", None, m)}, model)) == ["y"]
        with pytest.raises(TypeError, match="int is not an optimizer"):
            as_optim_set(5, model)

    def test_a_torch_optimizer_in_a_mapping_keeps_its_rate_and_trains_as_it_is(self):
        ours, theirs = EncoderDecoder(), EncoderDecoder()
        optim = as_optim_set(
            {
                "enc": torch.optim.SGD(ours.encoder.parameters(), lr=0.5),
                "dec": ConstantLr("SGD", {"lr": 0.1}, ours, updated_modules="decoder", grad_clip=None),
            },
            ours,
        )
        optimizers = [
            torch.optim.SGD(theirs.encoder.parameters(), lr=0.25),
            torch.optim.SGD(theirs.decoder.parameters(), lr=0.1),
        ]
        optim.param_groups[0]["lr"] = 0.25  # by whoever owns the optimizer
        for x in batches(3):
            optim.backward(losses_of(ours, x))
            optim.step()
            optim.zero_grad()
            losses_of(theirs, x)["loss"].backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert same(weights(ours), weights(theirs)) and optim.passes() == [("enc", "dec")]

    def test_a_torch_optimizer_of_another_model_is_refused(self):
        with pytest.raises(ConfigError, match="parameters that are not in the model"):
            as_optim_set({"a": torch.optim.SGD(EncoderDecoder().parameters(), lr=0.1)}, EncoderDecoder())


def test_numbers_of_numpy_are_numbers():
    model = EncoderDecoder()
    conf = {"optim_loss": {"loss": np.float32(0.5)}, "total_steps": np.int64(4), "warmup_steps": np.int64(1)}
    optim = OptimSet(CosineLr("SGD", {"lr": np.float64(0.5)}, model, grad_clip=np.float32(2), **conf))
    again = OptimSet.from_yaml(io.StringIO(to_yaml(optim)), model)
    assert again["main"].lr_at(2) == optim["main"].lr_at(2) and again["main"].loss_terms == (("loss", 0.5),)
    with pytest.raises(ConfigError, match=r"optim_loss\['loss'\]=nan"):
        CosineLr("SGD", {"lr": 0.5}, model, optim_loss={"loss": float("nan")})
