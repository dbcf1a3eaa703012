"""The strict reader: YAML 1.2 scalars, our tags, limits, and one kind of error with file and line."""

import io
import json
import math
import random
import time
from datetime import date, datetime

import pytest

from drivetrain.core.errors import ConfigError, ParameterError
from drivetrain.core.yaml import MAX_BYTES, dump_yaml, load_yaml, read_yaml


def load(text, **options):
    return load_yaml(io.StringIO(text), **options)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("-7", -7),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("True", True),
        ("false", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("-.inf", -math.inf),
        ("'5'", "5"),
        ("!str 5", "5"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    result = load(f"key: {text}")["key"]
    assert result == value and type(result) is type(value)


def test_nan_is_a_number():
    assert math.isnan(load("key: .nan")["key"])


def test_keys_become_text_as_they_are_written():
    assert load("1: a\ntrue: b\n010: c") == {"1": "a", "true": "b", "010": "c"}


def test_an_empty_file_is_an_empty_mapping():
    assert load("") == {} and load("# only a comment\n") == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("!tuple (0.9, -1)", (0.9, -1)),
        ("!tuple [0.9, -1]", (0.9, -1)),
        ("!list (1, 2)", [1, 2]),
        ("!list [1, 2]", [1, 2]),
        ("!tuple ()", ()),
        ("!tuple (1,)", (1,)),
        ("!tuple (true, null, 'a, b', c d)", (True, None, "a, b", "c d")),
        ("!tuple (1, (2, -3e-1), [x])", (1, (2, -0.3), ["x"])),
        ("{betas: !tuple [0.9, 0.98]}", {"betas": (0.9, 0.98)}),
    ],
)
def test_tuple_and_list_tags_hold_yaml_scalars(text, value):
    assert load(f"key: {text}")["key"] == value


def test_a_tuple_in_braces_cut_at_its_comma_says_what_to_write():
    with pytest.raises(ConfigError, match=r"never closed.*Inside \{ \}.*!tuple \[0.9, 0.98\]"):
        load("key: {betas: !tuple (0.9, 0.98)}")


@pytest.mark.parametrize("text", ["(1, 2]", "(1 (2))", "(, 1)", "(1) 2", "5", "(((1)", "('a)"])
def test_malformed_brackets_are_refused(text):
    with pytest.raises(ConfigError, match="!tuple"):
        load(f'key: !tuple "{text}"')


def test_references_keep_the_type_and_may_point_forward_at_tagged_values():
    text = "\n".join(
        [
            "a: !ref <b>",
            "b: !tuple (1, 2.5)",
            "c: !ref <nested.list[0]>",
            'd: !ref "<nested.list[1][0]>"',
            "nested: {list: [7, [8]]}",
            "e: !ref <root>/exp/<c>",
            "root: /data",
            "f: !ref no brackets",
            "g: !ref <a[1]>",
        ]
    )
    data = load(text)
    assert (data["a"], data["c"], data["d"], data["e"], data["f"], data["g"]) == (
        (1, 2.5),
        7,
        8,
        "/data/exp/7",
        "no brackets",
        2.5,
    )


def test_a_reference_is_a_copy():
    data = load("a: [1]\nb: !ref <a>\nc: &c [1]\nd: *c")
    data["b"].append(2)
    data["d"].append(2)
    assert data["a"] == [1] and data["c"] == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !ref <b>\nb: !ref <c>\nc: !ref <a>", "cycle: <b> -> <c> -> <a> -> <b>"),
        ("a: {x: !ref <a>}", "cycle"),
        ("warmup: 1\na: !ref <warmpu>", "Did you mean 'warmup'"),
        ("a: !ref <b[3]>\nb: [1]", "1 items"),
        ("a: !ref <b.c>\nb: 5", "has no keys"),
        ("a: !ref <b[0]>\nb: {c: 1}", "has no items"),
        ("a: !ref <>", "is empty"),
        ("a: !ref [b]", "expects text"),
    ],
)
def test_bad_references_say_what_is_wrong(text, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load(text)


def test_anchors_and_merge_keys_work_and_own_keys_win():
    data = load("base: &b {x: 1, y: 2}\nmore: &m {y: 3, z: 4}\none: {<<: *b, y: 9}\ntwo: {<<: [*b, *m]}")
    assert data["one"] == {"x": 1, "y": 9} and data["two"] == {"x": 1, "y": 2, "z": 4}


def test_a_repeated_key_is_refused_with_both_lines():
    with pytest.raises(ConfigError, match=r"<stream>:3: the key 'x' appears twice in a, first in line 2"):
        load("a:\n  x: 1\n  x: 2")


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system ['touch {}']", "!!binary aGk=", "!!set {{a, b}}", "!own 1"]
)
def test_any_other_tag_is_refused_and_runs_nothing(tag, tmp_path):
    witness = tmp_path / "witness"
    with pytest.raises(ConfigError, match="not allowed"):
        load("key: " + tag.format(witness))
    assert not witness.exists()


def test_without_tags_ours_are_refused_too():
    with pytest.raises(ConfigError, match="must not use tags"):
        load("a: !str 5", tags=False)


def test_errors_name_file_and_line_and_may_be_of_another_class(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("a: 1\nb: [1, 2\nc: 3\n")
    with pytest.raises(ParameterError, match=r"^params.yaml:\d: "):
        load_yaml(path, error=ParameterError)


@pytest.mark.parametrize(
    "text",
    ["- 1", "just words", "null", "a: b: c", "a: *x", "{?[1]: 2}", "---\na: 1\n---\nb: 2", "a: \x00", "a: \t- b"],
)
def test_what_is_no_single_mapping_is_a_config_error(text):
    with pytest.raises(ConfigError):
        load(text)


def test_a_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "train.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"Did you mean .*train\.yaml"):
        load_yaml(tmp_path / "trian.yaml")


def test_text_instead_of_a_path_says_how_to_pass_it():
    with pytest.raises(ConfigError, match="StringIO"):
        load_yaml("a: 1\nb: 2")


def test_broken_utf8_names_the_line(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"a: 1\nb: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"x.yaml:2: .*UTF-8"):
        load_yaml(tmp_path / "x.yaml")


def test_lines_are_kept_for_every_key():
    file = read_yaml(io.StringIO("a: 1\nb:\n  c: {d: 2}\n  e:\n    - 5\n    - 6\n"))
    assert (file.line("a"), file.line("b", "c", "d"), file.line("b", "e", 1)) == (1, 3, 6)
    assert file.where("b", "e", key="missing") == "<stream>:4 b.e"


BOMBS = {
    "aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)),
    "merges": "a0: &a0 {k: [x, x, x, x]}\n"
    + "".join(f"a{i}: &a{i} {{l: [{', '.join([f'*a{i - 1}'] * 9)}], <<: *a{i - 1}}}\n" for i in range(1, 12)),
    "references": "a0: [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: [{', '.join([f'!ref <a{i - 1}>'] * 10)}]\n" for i in range(1, 12)),
    "text": "a0: xxxxxxxxxx\n" + "".join(f"a{i}: !ref <a{i - 1}><a{i - 1}>\n" for i in range(1, 50)),
    "flow nesting": "a: " + "[" * 50_000,
    "block nesting": "- " * 50_000,
    "brackets": "a: !tuple " + "(" * 500 + ")" * 500,
    "a chain": "".join(f"a{i}: !ref <a{i + 1}>\n" for i in range(2000)) + "a2000: 1",
    "itself": "a: &a [*a]",
    "digits": "a: " + "9" * 10_000,
    "overflow": "a: 1e999",
    "length": "a: " + "x" * MAX_BYTES,
    "many values": "a: [" + "1," * 400_000 + "]",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_input_that_would_exhaust_the_reader_is_refused_quickly(kind):
    start = time.process_time()  # other programs must not make this test fail
    with pytest.raises(ConfigError):
        load(BOMBS[kind])
    assert time.process_time() - start < 5


def test_any_garbage_gives_a_mapping_or_a_config_error():
    draw = random.Random(0)
    pieces = ["a", ": ", "\n", "  ", "- ", "[", "]", "{", "}", ", ", "&x ", "*x", "<<", "!ref <a>", "!tuple (", ")"]
    pieces += [
        "'",
        '"',
        "\\",
        "\t",
        "#",
        "|",
        ">",
        "---\n",
        "!!int ",
        "1e5",
        "\u00e9",
        "\x07",
        "? ",
        "%YAML 1.1\n",
        "~",
        "@",
    ]
    outcomes = {"mapping": 0, "refused": 0}
    for _ in range(1500):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 14)))
        try:
            assert isinstance(load(text), dict)
            outcomes["mapping"] += 1
        except ConfigError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 50


def test_json_is_read_by_the_same_function(tmp_path):
    value = {"a": [1, 2.5e-3, True, None, "no"], "emoji": '\U0001f600 \\ / "q" \\ud83d', "<<": {"x": 1}, "e": {}}
    path = tmp_path / "x.json"
    for text in (
        json.dumps(value),
        json.dumps(value, indent="\t"),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    ):
        path.write_text(text, encoding="utf-8")
        assert load_yaml(path) == value
    for text in ('{"a": NaN}', '{"a": yes}', '{"a": 1, "a": 2}', '{"a": "\\ud83d"}', '{"a": 1', "{a: 1}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"x\.json:\d"):
            load_yaml(path)


def test_what_is_dumped_is_read_back_equal():
    data = {
        "floats": [1e-3, 1e-5, 1e20, -0.5, math.inf, 3.0],
        "texts": ["1e-3", "no", "true", "010", "1:30", "", "~", " padded ", "a: b", "!ref <x>", "line\nbreak", "é😀"],
        "more": ["2024-01-01", "<<", "=", "0o7", ".5", "null", "- a", "# b", "{", "*x", "\t"],
        "tuples": (1, (2.5, "x"), [None, True]),
        "nested": {"a": {"b": [{}]}, "1": 2},
    }
    assert load(dump_yaml(data)) == data


def test_dumping_what_is_not_plain_is_an_error():
    with pytest.raises(ConfigError, match="object"):
        dump_yaml({"a": object()})


@pytest.mark.parametrize("character", ["\x7f", "\x85", "\x9f", "\u2028", "\u2029", "\uffff"])
def test_json_keeps_characters_that_yaml_folds_or_rejects(character, tmp_path):
    data = {f"k{character}": f"a{character}b"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    assert load_yaml(path) == data
    assert load(dump_yaml(data)) == data


@pytest.mark.parametrize("value", [b"x", {1}, date(2026, 1, 2), datetime(2026, 1, 2)])
def test_what_the_reader_would_reject_is_not_written(value):
    with pytest.raises(ConfigError, match="cannot be written as YAML"):
        dump_yaml({"a": [value]})
