"""Which checkpoints stay: the newest few, the best one, and one in every so often.

Pure functions over manifests. A checkpoint opens an interval of `keep_every` when it is the first at or after a
multiple; that first one is always kept, so the choice does not change when others are removed around it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drivetrain.checkpoint.layout import Manifest
from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.core.time import Time


@dataclass(frozen=True)
class Best:
    """By which metric the best checkpoint is chosen, and which end is good."""

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(unknown_name("mode", self.mode, ["min", "max"], where="mode"))


def best_checkpoint(checkpoints: Mapping[Path, Manifest], best: Best) -> Path | None:
    """Return the folder with the best value, the earliest of equals; a NaN is never the best."""
    sign = 1 if best.mode == "min" else -1
    scored = [
        (sign * manifest.metrics[best.metric], manifest.sequence, folder)
        for folder, manifest in checkpoints.items()
        if not math.isnan(manifest.metrics.get(best.metric, math.nan))
    ]
    return min(scored)[2] if scored else None


def milestones(checkpoints: Mapping[Path, Manifest], every: Time) -> set[Path]:
    """Return the first checkpoint at or after each multiple of `every`."""
    first: dict[int, Path] = {}
    for folder, manifest in sorted(checkpoints.items(), key=lambda item: item[1].sequence):
        interval = math.floor(manifest.progress.get(every.unit.value, 0) / every.value)
        if interval > 0:
            first.setdefault(interval, folder)
    return set(first.values())


def to_remove(
    checkpoints: Mapping[Path, Manifest], *, keep: int | None, best: Best | None = None, keep_every: Time | None = None
) -> list[Path]:
    """Return the folders that need not stay, oldest first; `keep=None` keeps all."""
    if keep is None:
        return []
    newest_first = sorted(checkpoints, key=lambda folder: checkpoints[folder].sequence, reverse=True)
    stays = set(newest_first[:keep])
    if best is not None and (leader := best_checkpoint(checkpoints, best)) is not None:
        stays.add(leader)
    if keep_every is not None:
        stays |= milestones(checkpoints, keep_every)
    return [folder for folder in reversed(newest_first) if folder not in stays]
