"""Whether small or large values of a metric are good: as declared, else by its name, else unknown.

A metric of unknown direction has a last value and no best one.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from drivetrain.core.errors import ParameterError

Direction = Literal["min", "max"]

SMALL_IS_GOOD = frozenset(
    "wer cer ter der eer mer nll nlpd bce ce kl ppl bpb bpc bpd bpt fid kid fvd lpips mse mae rmse nrmse rmsle mape smape wape "
    "mase crps brier ece hd hd95 assd ber fpr fnr".split()
)
LARGE_IS_GOOD = frozenset(
    "acc f1 auc auroc auprc roc ap map miou iou dice bleu sacrebleu chrf rouge meteor cider spice comet bertscore psnr ssim "
    "recall precision sensitivity specificity reward return r2 ndcg mrr top em pass elbo mos pesq stoi sdr sisdr snr kappa mcc "
    "pearson spearman inception".split()
)
"""Short names, compared with whole words of a tag without the number at their end: `eval/F1@10` has `f`, `f1`."""

SMALL_WORDS = "loss error perplex bits_per negative_log cross_entropy divergence edit_distance regret deviance".split()
LARGE_WORDS = "accuracy score likelihood similarity correct success win_rate jaccard hit_rate".split()
"""Longer names, looked for anywhere in a tag."""


def direction_of(tag: str, declared: Mapping[str, str] | None = None) -> Direction | None:
    """Return whether small ("min") or large ("max") values of a metric are good, None where it is unknown.

    A declaration counts for its tag, and for tags that end in it after a slash.

    >>> direction_of("eval/WER"), direction_of("val_accuracy"), direction_of("lr"), direction_of("lr", {"lr": "max"})
    ('min', 'max', None, 'max')
    """
    for name, direction in (declared or {}).items():
        if tag == name or tag.endswith("/" + name):
            return check_direction(direction, name)
    plain = re.sub(r"[^a-z0-9]+", "_", tag.lower())
    words = set(plain.split("_")) | {re.sub(r"[0-9]+k?$", "", word) for word in plain.split("_")}
    if any(word in plain for word in SMALL_WORDS) or words & SMALL_IS_GOOD:
        return "min"
    return "max" if any(word in plain for word in LARGE_WORDS) or words & LARGE_IS_GOOD else None


def first_declared(*sources: Mapping[str, str]) -> dict[str, str]:
    """Return the directions that several sources declare; the first source that names a metric counts."""
    merged: dict[str, str] = {}
    for source in sources:
        merged |= {name: good for name, good in source.items() if name not in merged}
    return merged


def check_direction(direction: object, name: str) -> Direction:
    """Return a direction, or raise for anything else."""
    if direction not in ("min", "max"):
        raise ParameterError(
            f"direction of {name!r}: {direction!r} is not valid. Use 'min' if smaller values are better, or 'max'."
        )
    return direction


def read_directions(words: list[str]) -> dict[str, str]:
    """Read `NAME=min` and `NAME=max`, as a command line has them."""
    pairs = [word.rpartition("=")[::2] for word in words]
    return {name: check_direction(direction, name or word) for (name, direction), word in zip(pairs, words)}


def best_places(values: Sequence[float | None], direction: str | None) -> set[int]:
    """Return the positions of the best value; none where the direction is unknown or all values are the same.

    >>> best_places([3.0, 1.0, None, 1.0], "min"), best_places([3.0, 1.0], None)
    ({1, 3}, set())
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if direction is None or len(set(finite)) < 2:
        return set()
    best = min(finite) if direction == "min" else max(finite)
    return {place for place, value in enumerate(values) if value == best}
