"""A plan is a value: list-like, frozen, comparable, JSON."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.core.errors import (
    BatchSizeError,
    ConfigError,
    ConfigTypeError,
    ConflictError,
    MethodConfigError,
    PlanInfeasible,
    StrategyError,
    StrategyFormatError,
    UnknownMethodError,
    UnsupportedMethodError,
)
from drivetrain.strategy.batching import BatchSplit, plan_batch
from drivetrain.strategy.mesh import fit_axes
from drivetrain.strategy.method import Method, Stage, selected
from drivetrain.strategy.registry import _methods, expand_names, register_method
from drivetrain.strategy.value import Failure, Strategy
from tests.strategy.tasks import Block

FULL = [
    ("parallel_mode", ([("tensor", 2), ("dp", 4)], None)),
    ("fsdp", {"wrap": (Block, "Linear"), "reduce_dtype": torch.bfloat16}),
    ("amp_native", "bf16"),
    ("checkpoint", Block),
    ("compile", {"dynamo_backend": "eager", "dynamic": True}),
    ("module_replace", {"rms_norm": {"eps": 1e-6}}),
    ("tensor_parallel", {"plan": {"up": "colwise", "down": "rowwise"}}),
    ("micro_batch", 4, True),
]
TENSOR = ("parallel_mode", [("tensor", 2)])
PLAIN = {"drivetrain_strategy": 1, "methods": []}
BATCH = {"global_size": 8, "micro": 8, "accumulation": 1, "data_ranks": 1}


def test_it_reads_like_a_list():
    plan = Strategy(["parallel_mode", ("amp_native", "bf16"), ("micro_batch", 2, True)])
    assert len(plan) == 3 and plan.opt_names() == ["parallel_mode", "amp_native", "micro_batch"]
    name, config, tunable = plan[2]
    assert (name, config.size, tunable) == ("micro_batch", 2, True) and plan.is_tunable()
    assert plan.get_parallel_mode()[0] and not Strategy(["half"]).get_parallel_mode()[0]
    assert "half" not in plan and "parallel_mode" in plan
    assert "compile" in Strategy(["compile"]) and "native_dynamo" in Strategy(["compile"])
    with pytest.raises(TypeError, match="replace"):
        plan[0] = "half"
    with pytest.raises(AttributeError):
        plan.evidence = "measured"


def test_editing_returns_a_new_plan():
    plan = Strategy(["parallel_mode", "zero1"])
    assert plan.add_opt("checkpoint").opt_names() == ["parallel_mode", "zero1", "checkpoint"]
    assert plan.replace(1, ("amp_native", "fp16"))[1].config.dtype == "float16"
    assert plan.opt_names() == ["parallel_mode", "zero1"]
    assert Strategy([("checkpoint", {"every": 2})]).reset_config() == Strategy(["checkpoint"])
    assert plan.adjust_data_parallel(4)[0].config.axes == (("data", 4),)
    assert plan.add_opt("half").remove_distributed_method().opt_names() == ["half"]
    kept = Strategy(["tf32", "half"]).remove_device_unsupported_method("cpu")
    assert kept.opt_names() == ["half"] and kept.dropped[0][0] == "tf32"


def test_equality_ignores_order_numbers_and_reasons_but_not_settings_or_batch():
    one = Strategy(["zero1", ("amp_native", "bf16")], reasons=("a",), measured={"step": 1.0})
    other = Strategy([("amp_native", torch.bfloat16), "zero1"])
    assert one == other and hash(one) == hash(other)
    assert one != Strategy(["zero1", ("amp_native", "fp16")])
    assert one != Strategy(["zero1", ("amp_native", "bf16")], batch=plan_batch(8, 2))


def test_json_round_trip_is_exact():
    plan = Strategy(
        FULL, mesh={"data": 4, "tensor": 2}, batch=plan_batch(32, 4, micro=4), predicted={"peak": 1.5}, evidence="modelled",
        reasons=["because"], rejected=["ddp: too large"], dropped=[("tf32", "no GPU")], fingerprint={"world": 8},
    )  # fmt: skip
    again = Strategy.from_json(plan.to_json())
    assert again == plan and again.to_json() == plan.to_json() and list(again) == list(plan)
    assert again.batch == BatchSplit(global_size=32, micro=4, accumulation=2, data_ranks=4)
    text = json.loads(plan.to_json())
    assert text["drivetrain_strategy"] == 1
    configs = {entry["name"]: entry["config"] for entry in text["methods"]}
    assert configs["checkpoint"]["wrap_class"].endswith("tests.strategy.tasks.Block")
    assert configs["amp_native"]["dtype"] == "bfloat16"


def test_every_form_loads_to_the_same_plan(tmp_path):
    plan = Strategy(["parallel_mode", ("amp_native", "bf16")])
    plan.save(tmp_path / "deep" / "plan.json")
    assert os.listdir(tmp_path / "deep") == ["plan.json"]
    forms = [
        plan,
        list(plan),
        tuple(plan),
        json.loads(plan.to_json()),
        plan.to_json(),
        "  " + plan.to_json(),
        plan.to_json().encode(),
        tmp_path / "deep" / "plan.json",
        str(tmp_path / "deep" / "plan.json"),
        '["parallel_mode", ["amp_native", "bf16"]]',
    ]
    assert all(Strategy.load(form) == plan for form in forms)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (["paralle_mode"], UnknownMethodError, "Did you mean 'parallel_mode'"),
        ([("amp_native", "int8")], MethodConfigError, "dtype='int8'"),
        ([("fsdp", {"wrp": 1})], MethodConfigError, "Did you mean 'wrap'"),
        ([("fsdp", {"reshard_after_forward": "yes"})], MethodConfigError, "reshard_after_forward"),
        ([("zero1", {"a": 1})], MethodConfigError, "unknown key"),
        ([("zero1", "x")], MethodConfigError, "no configuration"),
        ([("checkpoint", {"mode": "selectve"})], MethodConfigError, "Did you mean 'selective'"),
        ([("checkpoint", {"every": 0})], MethodConfigError, "every=0"),
        ([("compile", {"scope": "blok"})], MethodConfigError, "Did you mean 'block'"),
        ([("compile", {"activation_memory_budget": 2})], MethodConfigError, "between 0 and 1"),
        ([("micro_batch", 0)], MethodConfigError, "size=0"),
        ([("micro_batch", True)], MethodConfigError, "size=True"),
        ([("tensor_parallel", {"plan": {"a": "colwize"}})], MethodConfigError, "colwize"),
        ([("module_replace", ["rms"])], MethodConfigError, "rms_norm"),
        ([("tf32", "low")], MethodConfigError, "precision='low'"),
        ([("parallel_mode", [("dta", 2)])], MethodConfigError, "Did you mean 'data'"),
        ([("parallel_mode", [("data", 0)])], MethodConfigError, "data=0"),
        ([("parallel_mode", [("data", 2), ("dp", 2)])], MethodConfigError, "twice"),
        ([("parallel_mode", ([("data", 2)], None, True))], MethodConfigError, "multi_instance"),
        ([("parallel_mode", ([("data", 2)], [0, 0]))], MethodConfigError, "rank_order"),
        ([("fsdp", {}, True, 4)], StrategyFormatError, "4 items"),
        ([("fsdp", {}, "yes")], StrategyFormatError, "tunable"),
        ([3], ConfigTypeError, "int"),
        (3, ConfigTypeError, "int"),
        ("no/such/plan.json", FileNotFoundError, "not a plan file"),
        ("{broken", StrategyFormatError, "not JSON"),
        ("{}", StrategyFormatError, "drivetrain_strategy"),
        ('{"drivetrain_strategy": 2, "methods": []}', StrategyFormatError, "schema 2.*schema 1"),
        ('{"drivetrain_strategy": 0, "methods": []}', StrategyFormatError, "schema 0"),
        ('{"drivetrain_strategy": 1, "metods": []}', StrategyFormatError, "Did you mean 'methods'"),
        ('{"drivetrain_strategy": 1, "methods": [{"nam": "half"}]}', StrategyFormatError, "name, config and tunable"),
        (b"\xff", StrategyFormatError, "not JSON"),
        ("x" * 5000, FileNotFoundError, "not a plan file"),
        ([("fsdp", {"ignored": [5]})], MethodConfigError, "ignored"),
        ([("checkpoint", {"wrap_class": [5]})], MethodConfigError, "wrap_class"),
        ([("cpu_offload", {"what": 5})], MethodConfigError, "cpu_offload"),
        ([("module_replace", {"pairs": 5})], MethodConfigError, "module_replace"),
        ([("tensor_parallel", {"a": {"b": 1}})], MethodConfigError, "unknown key 'a'"),
        ({**PLAIN, "methods": "fsdp"}, StrategyFormatError, "list of methods"),
        ({**PLAIN, "mesh": [["data", 2.5]]}, StrategyFormatError, "mesh"),
        ({**PLAIN, "mesh": [["dta", 2]]}, StrategyFormatError, "mesh"),
        ({**PLAIN, "batch": 5}, StrategyFormatError, "batch=5"),
        ({**PLAIN, "batch": {**BATCH, "micro": 3}}, BatchSizeError, "8 = 3 x 1 x 1"),
        ({**PLAIN, "batch": {**BATCH, "micro": "8"}}, ConfigError, "micro='8'"),
        ({**PLAIN, "predicted": 5}, StrategyFormatError, "predicted=5"),
        ({**PLAIN, "reasons": [5]}, StrategyFormatError, "texts"),
        (pickle.dumps(["half"]), StrategyFormatError, "allow_pickle=True"),
    ],
)
def test_wrong_plans_are_refused_while_they_are_read(source, error, message):
    with pytest.raises(error, match=message):
        Strategy.load(source)


def test_numbers_of_numpy_are_settings_like_any_other():
    plan = Strategy([("micro_batch", np.int64(4)), ("parallel_mode", [("data", np.int32(2))])])
    assert plan == Strategy([("micro_batch", 4), ("parallel_mode", [("data", 2)])])
    assert Strategy.load(plan.to_json()) == plan


@pytest.mark.parametrize("size", [0, -2, "a", 2.5])
def test_sizes_that_are_no_counts_are_refused(size):
    plan = Strategy(["fsdp"])
    for resize in (plan.rescale, plan.adjust_data_parallel):
        with pytest.raises(ConfigError, match="whole number"):
            resize(size)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_data_ranks_cannot_train_are_refused(layer):
    scaled, sparse = layer(8, 4, max_norm=1.0), nn.Sequential(layer(8, 4, sparse=True))
    for plan in (["parallel_mode"], ["zero1"], ["fsdp"]):
        with pytest.raises(UnsupportedMethodError, match="max_norm"):
            Strategy(plan).validate(scaled, "cpu", 2)
    with pytest.raises(UnsupportedMethodError, match="'0' has sparse gradients"):
        Strategy(["zero2"]).validate(sparse, "cpu", 2)
    Strategy(["zero1"]).validate(sparse, "cpu", 2)
    Strategy([]).validate(scaled, "cpu", 1)


def test_keys_without_a_meaning_warn_by_name():
    with pytest.warns(UserWarning, match="limit_all_gathers"):
        assert Strategy([("fsdp", {"limit_all_gathers": True, "atorch_wrap_cls": [Block]})])[0].config.wrap
    with pytest.warns(UserWarning, match="use_ds_zero"):
        Strategy([("zero1", {"use_ds_zero": True})])


@pytest.mark.parametrize(
    ("plan", "world", "error", "message"),
    [
        (["fsdp"], 0, ConfigError, "world_size=0"),
        (["zero1", "fsdp"], 2, ConflictError, "zero1 and fsdp"),
        (["zero2", "fsdp"], 2, ConflictError, "'zero'"),
        ([("checkpoint", {"every": 1}), ("checkpoint", {"every": 2})], 1, ConflictError, "twice"),
        ([("amp_native", "bf16"), ("half", "fp16")], 1, ConflictError, "bfloat16.*float16"),
        (["tensor_parallel"], 2, StrategyError, "no 'tensor' axis"),
        ([TENSOR, "tensor_parallel", ("compile", {"dynamic": True})], 2, ConflictError, "Remove dynamic"),
        ([("parallel_mode", [("tensor", 2)])], 2, StrategyError, "no tensor_parallel"),
        ([("parallel_mode", [("tensor", 3)]), "tensor_parallel"], 2, StrategyError, "need 3 processes"),
        ([("parallel_mode", [("tensor", 3), ("data", 1)]), "tensor_parallel"], 4, StrategyError, "multiple of 3"),
        ([("parallel_mode", [("pipeline", 2)])], 2, StrategyError, "pipeline_parallel"),
        ([("parallel_mode", ([("data", 2)], [1, 0]))], 4, StrategyError, "rank_order"),
        ([("parallel_mode", {"sync_batchnorm": True})], 2, UnsupportedMethodError, "accelerator"),
        ([("checkpoint", "Blok")], 1, MethodConfigError, "Did you mean 'Block'"),
        ([("fsdp", {"wrap": "Blok"})], 2, MethodConfigError, "Did you mean 'Block'"),
        ([("compile", "inductr")], 1, MethodConfigError, "Did you mean 'inductor'"),
        (["channels_last"], 1, UnsupportedMethodError, "no Conv2d"),
        ([("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"0.upp": "colwise"})], 2, MethodConfigError, "0.up"),
        (
            [("parallel_mode", [("tensor", 3)]), ("tensor_parallel", {"0.up": "colwise"})],
            3,
            MethodConfigError,
            "32 features",
        ),
        (
            [("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"0.norm1": "colwise"})],
            2,
            MethodConfigError,
            "LayerNorm",
        ),
        (
            [("parallel_mode", [("tensor", 2), ("data", 2)]), ("tensor_parallel", {"0.up": "colwise"}), "zero1"],
            4,
            ConflictError,
            "zero1",
        ),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_is_touched(plan, world, error, message):
    with pytest.raises(error, match=message):
        Strategy(plan).validate(nn.Sequential(Block(), Block()), "cpu", world)


def test_equal_duplicates_merge_and_auto_ddp_joins_parallel_mode():
    from drivetrain.strategy.resolve import resolve_plan

    plan = resolve_plan(Strategy(["auto_ddp", "checkpoint", "checkpoint"]), device="cpu", world=2)
    assert [method.name for _, method, _ in plan.steps] == ["parallel_mode", "checkpoint"]


def test_amp_beside_half_of_the_same_type_is_dropped():
    from drivetrain.strategy.resolve import resolve_plan

    plan = Strategy([("amp_native", "bf16"), ("half", "bf16")])
    with pytest.warns(UserWarning, match="amp_native"):
        assert resolve_plan(plan, device="cpu", world=1).dropped[0][0] == "amp_native"
    with pytest.raises(UnsupportedMethodError, match="amp_native"):
        resolve_plan(plan, device="cpu", world=1, strict=True)


def test_the_order_of_application_does_not_depend_on_the_list():
    from drivetrain.strategy.resolve import resolve_plan

    names = ["fused_optimizer", "fsdp", "checkpoint", ("compile", "eager"), ("half", "bf16"), "parallel_mode"]
    orders = [
        [method.name for _, method, _ in resolve_plan(Strategy(given), device="cpu", world=2).steps]
        for given in (names, names[::-1])
    ]
    assert orders[0] == orders[1]
    assert orders[0] == ["parallel_mode", "half", "checkpoint", "native_dynamo", "fsdp", "fused_optimizer"]


def test_only_data_stretches_and_the_first_axis_varies_fastest():
    assert fit_axes((("tensor", 2), ("pipe", 2), ("data", 2)), 16)[-1] == ("data", 4)
    assert fit_axes((), 3) == (("data", 3),)
    with pytest.raises(StrategyError, match="multiple of 4"):
        fit_axes((("tensor", 4), ("data", 2)), 6)


def test_batch_arithmetic_names_the_nearest_sizes():
    with pytest.raises(BatchSizeError, match="8 and 12"):
        plan_batch(10, 4)
    assert plan_batch(10, 4, allow_rounding=True).global_size == 8
    with pytest.raises(BatchSizeError, match="16"):
        plan_batch(8, 2, micro=4, accumulation=2)
    with pytest.raises(BatchSizeError, match="4 x 2 samples on each of 2 data ranks, which is 16"):
        plan_batch(32, 2, micro=4, accumulation=2)
    assert plan_batch(24, 2, accumulation=3).micro == 4


def test_rescaling_keeps_the_global_batch_and_the_fixed_axes():
    plan = Strategy(
        [("parallel_mode", [("tensor", 2), ("data", 4)]), ("tensor_parallel", {"up": "colwise"}), ("micro_batch", 4)],
        mesh=[("data", 4), ("tensor", 2)], batch=plan_batch(48, 4, micro=4),
    )  # fmt: skip
    smaller = plan.rescale(6)
    assert dict(smaller.mesh) == {"data": 3, "tensor": 2} and smaller[0].config.axes == (("tensor", 2), ("data", 3))
    assert smaller.batch.global_size == 48 and smaller.batch.data_ranks == 3
    assert smaller.batch.micro * smaller.batch.accumulation * 3 == 48 and smaller.batch.micro <= 4
    with pytest.raises(BatchSizeError, match="data ranks"):
        plan.rescale(10)
    with pytest.raises(PlanInfeasible, match="multiple of 2"):
        plan.rescale(7)
    hybrid = Strategy(["fsdp"], mesh=[("data", 2), ("zero", 4)])
    assert dict(hybrid.rescale(16).mesh) == {"data": 4, "zero": 4}
    assert dict(hybrid.rescale(6).mesh) == {"data": 3, "zero": 2}


def test_explain_and_diff_say_what_there_is():
    plan = Strategy(
        FULL, mesh={"data": 4}, batch=plan_batch(32, 4), measured={"step_s": 0.25}, rejected=["ddp: needs 103.1 of 73.4 GiB"],
        dropped=[("tf32", "no GPU")], failure=Failure(kind="oom", message="out of memory"),
    )  # fmt: skip
    text = plan.explain(width=90)
    assert max(map(len, text.splitlines())) <= 90
    for word in (
        "mesh    data 4",
        "32 = 8 x 1 x 4",
        "fsdp",
        "step_s 0.25",
        "rejected ddp",
        "dropped tf32",
        "FAILED (oom)",
        "(tunable)",
    ):
        assert word in text
    assert plan.diff(plan) == ""
    assert Strategy(["zero1", ("amp_native", "bf16")]).diff(
        Strategy(["fsdp", ("amp_native", "fp16")])
    ).splitlines() == [
        "- zero1",
        "+ fsdp",
        "~ amp_native.dtype: 'bfloat16' -> 'float16'",
    ]
    with pytest.raises(PlanInfeasible, match="out of memory"):
        plan.require_success()


def test_a_pickle_name_is_refused_for_saving(tmp_path):
    with pytest.raises(StrategyFormatError, match="JSON"):
        Strategy(["half"]).save(tmp_path / "plan.pkl")


class Payload:
    def __reduce__(self):
        return os.system, ("echo harm > harm.txt",)


def test_a_malicious_pickle_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in (pickle.dumps(Payload()), pickle.dumps([("half", pickle.dumps(Payload()))])):
        with pytest.raises(StrategyFormatError, match="legacy pickle"):
            Strategy.load(data)
        with pytest.raises(StrategyFormatError, match="system"):
            Strategy.load(data, allow_pickle=True)
    assert not list(tmp_path.iterdir())


def test_a_legacy_pickle_loads_as_data(tmp_path):
    data = pickle.dumps(
        [("amp_native", {"dtype": torch.bfloat16}, False), ("checkpoint", (nn.Linear,)), "parallel_mode"]
    )
    (tmp_path / "old.pkl").write_bytes(data)
    plan = Strategy.load(tmp_path / "old.pkl", allow_pickle=True)
    assert plan == Strategy([("amp_native", "bf16"), ("checkpoint", (nn.Linear,)), "parallel_mode"])


def test_a_method_of_ones_own_works_in_lists_and_json():
    class Noisy(Method):
        name, group, stage, aliases = "noisy", "mine", Stage.MODULE, ("loud",)

    register_method(Noisy)
    try:
        plan = Strategy(["loud"])
        assert plan == Strategy.load(plan.to_json()) and plan.opt_names() == ["noisy"]
        assert expand_names(["mine"]) == {"noisy"}
        with pytest.raises(ValueError, match="taken"):
            register_method(Noisy)
    finally:
        from drivetrain.strategy.registry import _aliases

        del _methods["noisy"], _aliases["loud"]


def test_a_class_of_a_script_is_found_in_a_process_that_the_script_started():
    block = type("Block", (nn.Linear,), {"__module__": "__mp_main__"})
    model = nn.Sequential(block(2, 2), nn.Tanh())
    assert selected(model, "__main__.Block") is block and selected(model, ("__main__.Block", "1")) == [block, "1"]
