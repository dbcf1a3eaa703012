"""Every reader meets files that went wrong: it raises an error of ours or passes over them, and nothing else."""

import pytest

from drivetrain.core.files import JSON_DEPTH, load_json
from tests.fuzzing import readers, try_reader

COUNT = 120


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_a_file_that_went_wrong_gives_an_error_of_ours(reader, tmp_path):
    assert list(try_reader(reader, tmp_path, COUNT, seed=1)) == []


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_the_example_that_is_changed_is_a_good_one(reader, tmp_path):
    if reader.name == "checkpoint-manifest":
        pytest.skip("a manifest needs its hash, which a changed one never has")
    file = tmp_path / "good.json"
    file.write_bytes(reader.write(reader.example))
    assert reader.read(file)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_json_may_be_nested_up_to_a_limit(as_bytes):
    def nested(depth):
        text = "[" * depth + "0" + "]" * depth
        return text.encode() if as_bytes else text

    assert load_json(nested(JSON_DEPTH))
    for depth in (JSON_DEPTH + 1, 500, 100_000):
        with pytest.raises(ValueError, match=f"nested more than {JSON_DEPTH} times"):
            load_json(nested(depth))
