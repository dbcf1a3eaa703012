"""A folder that ranks on several machines should share, and do not."""

import os
from pathlib import Path

import pytest

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.folder import prepare_folder
from drivetrain.checkpoint.writer import WriteFailedError
from drivetrain.context.context import Context
from drivetrain.core.locking import RUN_LOCK, FolderLock
from drivetrain.runtime import collectives
from drivetrain.runtime.collectives import why_not_shared
from drivetrain.runtime.ranks import get_rank


def look(folders: list[str]) -> list[str | None]:
    """Rank 0 locks its folder; each rank looks into its own, as on machines with local disks at one path."""
    folder = Path(folders[get_rank()])
    collectives.PATIENCE_SECONDS = 0.2
    with FolderLock(folder) as lock:
        found = [why_not_shared(folder, RUN_LOCK)]  # no lock at all: a disk that is gone is reported elsewhere
        if get_rank() == 0:
            assert lock.acquire()
        return [*found, why_not_shared(folder, RUN_LOCK)]


def test_a_rank_that_does_not_see_what_rank_0_wrote_is_named_on_all(world2, tmp_path):
    (tmp_path / "local").mkdir()
    one, other = str(tmp_path), str(tmp_path / "local")
    assert world2(look, [one, one]) == [[None, None]] * 2
    (none, first), (_, second) = world2(look, [one, other])
    assert none is None and first == second
    assert "rank 1 on host" in first and f"{other!r}) did not find there what rank 0" in first


def start_saving(folders: list[str]) -> list[str]:
    collectives.PATIENCE_SECONDS = 0.2
    directory = Path(folders[get_rank()])
    texts = []
    with pytest.raises(WriteFailedError) as error:
        prepare_folder(directory, fresh=True)
    texts.append(str(error.value))
    with (
        pytest.raises(WriteFailedError) as error,
        Checkpointer(Context(epoch=0), every="1ba", dir=directory, signals=False) as keeper,
    ):
        keeper.step()
    texts.append(str(error.value))
    return texts


def test_nodes_with_folders_of_their_own_are_an_error_before_the_first_step(world2, tmp_path):
    for texts in world2(start_saving, [str(tmp_path / "a"), str(tmp_path / "b")]):
        assert all("is not one folder for all ranks" in text and "all nodes share" in text for text in texts)
    assert os.listdir(tmp_path) == ["a"] and os.listdir(tmp_path / "a") == []  # no lock and no half of a checkpoint
