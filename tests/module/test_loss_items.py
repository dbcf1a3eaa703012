"""What a loss is a mean over, seen while it is computed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.module.loss_items import LossWatch, agreed_items, follow_loss

ROWS, LENGTH, CLASSES = 4, 6, 7
WEIGHTS = torch.arange(1.0, 8.0)


def batch():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(ROWS, LENGTH, CLASSES, generator=generator)
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    labels[0, 2:] = -100
    return {
        "scores": scores,
        "labels": labels,
        "value": torch.randn(ROWS, generator=generator),
        "kind": labels[:, 0].clone(),
        "num_items_in_batch": 31,
    }


def flat(b, **kwargs):
    return F.cross_entropy(b["scores"].flatten(0, 1), b["labels"].flatten(), **kwargs)


def shifted(b, pad):
    labels = F.pad(b["labels"], (0, 1), value=pad)[..., 1:].contiguous()
    return F.cross_entropy(b["scores"].view(-1, CLASSES), labels.view(-1))


def padded(b):
    return F.pad(b["labels"], (0, 1), value=-100)


def written_to(b):
    labels = b["labels"].clone()
    labels[:, 0] = -100
    return F.cross_entropy(b["scores"].transpose(1, 2), labels)


def written_through_a_view(b):
    b["labels"].view(-1)[:3].fill_(-100)
    return flat(b)


def added_in_place(b):
    loss = flat(b)
    loss += b["scores"].pow(2).mean()
    return loss


def masked(b):
    kept = b["labels"] != -100
    return (flat(b, reduction="none").view(ROWS, LENGTH) * kept).sum() / kept.sum()


def picked(b):
    return flat(b, reduction="none")[b["labels"].flatten() != -100].mean()


KNOWN = {
    "flat labels": (flat, 20),
    "classes second": (lambda b: F.cross_entropy(b["scores"].transpose(1, 2), b["labels"]), 20),
    "shifted by slices": (
        lambda b: F.cross_entropy(b["scores"][:, :-1].reshape(-1, 7), b["labels"][:, 1:].reshape(-1)),
        16,
    ),
    "shifted by padding": (lambda b: shifted(b, -100), 16),
    "another index": (lambda b: flat({**b, "scores": b["scores"].double()}, ignore_index=-100).float(), 20),
    "times a number": (lambda b: 0.5 * flat(b) / 3 + 1, 20),
    "two that count alike": (lambda b: flat(b) + 0.1 * flat({**b, "scores": b["scores"] * 2}), 20),
    "negative log likelihood": (
        lambda b: nn.NLLLoss()(b["scores"].log_softmax(-1).view(-1, 7), b["labels"].view(-1)),
        20,
    ),
    "all elements": (lambda b: F.mse_loss(b["scores"], torch.zeros_like(b["scores"])), ROWS * LENGTH * CLASSES),
    "a mean by hand": (lambda b: (b["scores"] ** 2).mean(), ROWS * LENGTH * CLASSES),
    "every label, ignored or not": (lambda b: flat(b, reduction="none").mean(), ROWS * LENGTH),
    "already of that type": (lambda b: flat({**b, "labels": b["labels"].contiguous()}).float(), 20),
    "without the last": (lambda b: F.cross_entropy(b["scores"][:, :-1].transpose(1, 2), b["labels"][:, :-1]), 17),
    "the last three": (lambda b: F.cross_entropy(b["scores"][:, -3:].transpose(1, 2), b["labels"][:, -3:]), 9),
    "a sum over the number of elements": (lambda b: b["scores"].pow(2).sum() / 168, ROWS * LENGTH * CLASSES),
}
BY_KIND = {
    "a sum of squared errors": (lambda b: F.mse_loss(b["scores"], b["scores"] * 2, reduction="sum"), "sum"),
    "a sum over the number in the batch": (lambda b: flat(b, reduction="sum") / b["num_items_in_batch"], "sum"),
    "a divergence of rows": (lambda b: F.kl_div(b["scores"][:, 0], b["scores"][:, 1].exp(), reduction="batchmean"), "samples"),
    "a ranking of rows": (lambda b: F.margin_ranking_loss(b["value"], -b["value"], torch.ones(ROWS)), "samples"),
    "sequences without alignment": (
        lambda b: F.ctc_loss(b["scores"].log_softmax(-1).transpose(0, 1), b["kind"][:, None] % 6 + 1, [LENGTH] * ROWS, [1] * ROWS),
        "samples",
    ),
    "errors with weights": (lambda b: F.mse_loss(b["scores"], b["scores"] * 2, weight=b["scores"].abs()), "unknown"),
    "a sum over another number": (lambda b: b["scores"].pow(2).sum() / 13, "unknown"),
    "a sum over a number by keyword": (lambda b: torch.div(flat(b, reduction="sum"), other=ROWS), "unknown"),
    "something unknown and a penalty": (lambda b: masked(b) * 2 + b["value"].pow(2).mean(), "unknown"),
    "shifted by padding, without its last": (lambda b: F.cross_entropy(b["scores"].transpose(1, 2), padded(b)[:, :-1]), "unknown"),
    "shifted by padding, its last three": (lambda b: F.cross_entropy(b["scores"][:, :3].transpose(1, 2), padded(b)[:, -3:]), "unknown"),
    "one value a row": (lambda b: ((b["scores"].mean((1, 2)) - b["value"]) ** 2).mean(), "samples"),
    "sums of rows": (lambda b: b["scores"].pow(2).sum((1, 2)).mean(), "samples"),
    "a sum over the number of rows": (lambda b: flat(b, reduction="sum") / ROWS, "samples"),
    "several values a row": (lambda b: b["scores"][..., :3].pow(2).mean(), "samples"),
    "one label a row and a penalty": (lambda b: F.cross_entropy(b["scores"][:, 0], b["kind"]) + b["scores"].pow(2).mean(), "samples"),
    "a sum": (lambda b: flat(b, reduction="sum"), "sum"),
    "a sum by hand": (lambda b: (b["scores"] ** 2).sum(), "sum"),
    "labels written to": (written_to, "unknown"),
    "labels written to through a view": (written_through_a_view, "unknown"),
    "labels padded with a class": (lambda b: shifted(b, 0), "unknown"),
    "labels changed": (lambda b: flat({**b, "labels": b["labels"].masked_fill(b["labels"] == 3, -100)}), "unknown"),
    "shifted after rows were joined": (lambda b: F.cross_entropy(b["scores"].view(-1, 7)[1:], b["labels"].view(-1)[1:]), "unknown"),
    "a masked mean": (masked, "unknown"),
    "a mean over what a mask picks": (picked, "unknown"),
    "something added in place": (added_in_place, "unknown"),
    "a sum of means": (lambda b: torch.stack([flat(b), flat(b)]).sum(), "unknown"),
    "two that count differently": (lambda b: flat(b) + b["scores"].pow(2).mean(), "unknown"),
    "a mean over a sum": (lambda b: flat(b) / flat(b, reduction="sum"), "unknown"),
}  # fmt: skip


def items_of(function):
    data = batch()
    watch = LossWatch(data, ROWS)
    with watch:
        loss = function(data)
    return watch.items_of(loss), data


@pytest.mark.parametrize("name", KNOWN)
def test_the_watch_sees_how_many_items_a_loss_is_a_mean_over(name):
    function, count = KNOWN[name]
    items, data = items_of(function)
    assert items.count(data) == count


@pytest.mark.parametrize("name", BY_KIND)
def test_the_watch_guesses_nothing(name):
    function, kind = BY_KIND[name]
    assert items_of(function)[0].kind == kind


@pytest.mark.parametrize(("other", "kind"), [(13, "sum"), (14, "unknown")])
def test_a_sum_over_a_number_is_a_sum_if_every_batch_has_this_number(other, kind):
    found = []
    for number in (13, other):
        data = batch()
        found.append(follow_loss(nn.Identity(), data, ROWS, lambda: flat(data, reduction="sum") / number))  # noqa: B023
    assert agreed_items(*found).kind == kind


def test_class_weights_are_summed_over_the_labels_that_are_kept():
    items, data = items_of(lambda b: flat(b, weight=WEIGHTS))
    kept = data["labels"][data["labels"] != -100]
    assert items.count(data) == WEIGHTS[kept].sum().item()


def test_a_watch_keeps_no_activation_alive():
    import weakref

    data = batch()
    watch = LossWatch(data, ROWS)
    with watch:
        hidden = data["scores"] / data["scores"].mean()
        gone = weakref.ref(hidden)
        loss = hidden.pow(2).mean()
        del hidden
    assert gone() is None
    assert watch.items_of(loss).kind == "unknown"
