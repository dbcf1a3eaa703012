"""Names that stand for a value which is set later."""

import copy
import os
import pickle
from pathlib import Path

import pytest

from drivetrain.core.errors import ExperimentError
from drivetrain.experiment.proxies import NumberProxy, PathProxy, Proxy, bind


def test_before_the_first_run_any_use_is_an_error():
    path = PathProxy("output_dir")
    for use in (
        lambda: path / "x",
        lambda: os.fspath(path),
        lambda: path.name,
        lambda: str(path),
        lambda: len(path),
        lambda: bool(path),
    ):
        with pytest.raises(ExperimentError, match="outside a running experiment"):
            use()
    assert "no experiment has been started" in repr(path)


def test_a_proxy_behaves_like_its_value(tmp_path):
    path, number, mapping = PathProxy("p"), NumberProxy("n"), Proxy("m")
    bind(path, tmp_path)
    bind(number, 3)
    bind(mapping, {"a": 1})
    assert isinstance(path, Path) and path / "x" == tmp_path / "x" and Path(path) == tmp_path == path
    assert os.path.join(path, "x") == str(tmp_path / "x") and os.listdir(path) == []
    assert number + 1 == 4 and 1 + number == 4 and [10, 11, 12, 13][number] == 13 and number > 2 and int(number) == 3
    assert (
        mapping["a"] == 1
        and "a" in mapping
        and len(mapping) == 1
        and list(mapping) == ["a"]
        and dict(mapping) == {"a": 1}
    )
    mapping["b"] = 2
    assert mapping.get("b") == 2 and bool(mapping) and hash(path) == hash(tmp_path)
    assert type(pickle.loads(pickle.dumps(mapping))) is dict


def test_a_copy_is_the_users_own_and_formats_and_keywords_reach_the_value():
    number, mapping, function = NumberProxy("n"), Proxy("m"), Proxy("f")
    bind(number, 3)
    bind(mapping, {"a": [1]})
    bind(function, lambda x, *, y: x + y)
    own = copy.copy(mapping)
    own["b"] = 2
    assert "b" not in mapping and own["a"] is mapping["a"] and copy.deepcopy(mapping) == {"a": [1]}
    assert f"{number:02d}" == "03" and function(1, y=2) == 3
