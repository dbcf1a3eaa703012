"""Tags become file names that stay in their folder."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.record.stream import check_tag, picture_path, safe_name

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


@given(words)
def test_no_tag_leaves_the_folder(tag):
    path = Path(picture_path("image", tag, 3))
    assert len(path.parts) == 3 and path.parts[0] == "images" and path.name == "3.png"
    assert ".." not in path.parts and not path.parts[1].startswith(".") and len(path.parts[1].encode()) <= 200


@given(words, words)
def test_two_tags_have_two_names(one, other):
    assert (safe_name(one) == safe_name(other)) == (one == other)


def test_names_stay_readable():
    assert safe_name("train/loss_1") == "train.loss_1"
    assert safe_name("größe") == "größe"
    assert safe_name("nul") == "%6Eul" and safe_name("..") == "%2E%2E" and safe_name("/") == "%2F"


@pytest.mark.parametrize("tag", ["", None, 3, "\ud800"])
def test_a_bad_tag_is_refused(tag):
    with pytest.raises(ValueError, match="tag"):
        check_tag(tag)
