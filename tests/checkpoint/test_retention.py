from pathlib import Path

import pytest

from drivetrain.checkpoint.layout import Best, Manifest, best_checkpoint, milestones, to_remove
from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time


def some(*batches: int, metrics=None) -> dict[Path, Manifest]:
    metrics = metrics or [{}] * len(batches)
    return {
        Path(f"checkpoint-{ba}"): Manifest(id=str(ba), sequence=number, progress={"ba": ba}, metrics=metric)
        for number, (ba, metric) in enumerate(zip(batches, metrics))
    }


def stay(checkpoints, **kwargs) -> list[str]:
    gone = to_remove(checkpoints, **kwargs)
    return [folder.name.removeprefix("checkpoint-") for folder in checkpoints if folder not in gone]


def test_the_newest_stay():
    assert stay(some(1, 2, 3, 4), keep=2) == ["3", "4"]
    assert stay(some(1, 2, 3, 4), keep=None) == ["1", "2", "3", "4"]
    assert to_remove(some(1, 2, 3, 4), keep=2) == [Path("checkpoint-1"), Path("checkpoint-2")]


def test_the_best_stays_and_nan_is_never_best():
    found = some(1, 2, 3, 4, metrics=[{"loss": 0.1}, {"loss": float("nan")}, {"loss": 0.1}, {"loss": 2.0}])
    assert stay(found, keep=1, best=Best("loss")) == ["1", "4"]
    assert stay(found, keep=1, best=Best("loss", "max")) == ["4"]
    assert best_checkpoint(found, Best("other")) is None


def test_the_first_at_or_after_each_multiple_stays_for_ever():
    """Removing others along the way must not change which ones are milestones."""
    kept: dict[Path, Manifest] = {}
    for number, batch in enumerate(range(400, 6001, 400)):
        kept |= {Path(f"checkpoint-{batch}"): Manifest(id=str(batch), sequence=number, progress={"ba": batch})}
        for folder in to_remove(kept, keep=1, keep_every=Time(1000, "ba")):
            del kept[folder]
    assert [manifest.id for manifest in kept.values()] == ["1200", "2000", "3200", "4000", "5200", "6000"]
    assert len(milestones(kept, Time(1000, "ba"))) == 6


def test_a_wrong_mode_is_refused():
    with pytest.raises(ConfigError, match="'max'"):
        Best("loss", "maxx")


@pytest.mark.parametrize(("unit", "every"), [("dur", 0.1), ("iter", 2), ("sec", 0.1)])
def test_every_unit_has_milestones(unit, every):
    found = {
        Path(str(number)): Manifest(id=str(number), sequence=number, progress={unit: every * 10 * number / 10})
        for number in range(1, 31)
    }
    assert milestones(found, Time(every, unit)) == set(found)
