"""Metrics over batches and ranks, against the whole data at once."""

import subprocess
import sys

import pytest
import torch

from drivetrain.core.errors import BatchOutputError, ConfigError, DrivetrainWarning
from drivetrain.train.tracking import MetricSet
from tests.train.tasks import make_data, make_trainer, train

torchmetrics = pytest.importorskip("torchmetrics")


def accuracy(outputs, targets):
    return (outputs.argmax(-1) == targets).float().mean()


def data(count=23, classes=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, classes, generator=generator), torch.randint(0, classes, (count,), generator=generator)


def feed(metrics, outputs, targets, size=8):
    for start in range(0, len(targets), size):
        part = targets[start : start + size]
        metrics.update(outputs[start : start + size], part, len(part))


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"accuracy": accuracy},
        lambda: {"accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=4, average="micro")},
        lambda: torchmetrics.MetricCollection(
            {"accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=4, average="micro")}
        ),
    ],
    ids=["function", "torchmetrics", "collection"],
)
def test_unequal_batches_count_for_their_size(make):
    outputs, targets = data()
    metrics = MetricSet(make())
    feed(metrics, outputs, targets)
    assert metrics.compute() == pytest.approx({"accuracy": float(accuracy(outputs, targets))})


def test_reset_forgets_earlier_batches():
    outputs, targets = data()
    metrics = MetricSet(
        {"plain": accuracy, "stateful": torchmetrics.classification.MulticlassAccuracy(num_classes=4, average="micro")}
    )
    feed(metrics, -outputs, targets)
    metrics.reset()
    feed(metrics, outputs, targets)
    expected = float(accuracy(outputs, targets))
    assert metrics.compute() == pytest.approx({"plain": expected, "stateful": expected})


def test_a_metric_may_return_a_flag_for_each_row_and_must_return_numbers():
    outputs, targets = data(8)
    metrics = MetricSet({"hits": lambda outputs, targets: outputs.argmax(-1) == targets})
    metrics.update(outputs, targets, 8)
    assert metrics.compute()["hits"] == pytest.approx(float(accuracy(outputs, targets)))
    for wrong in (dict, type(None), list, str):
        with pytest.raises(BatchOutputError, match=f"'own' returned a {wrong.__name__}"):
            MetricSet({"own": lambda outputs, targets, wrong=wrong: wrong()}).update(outputs, targets, 8)


@pytest.mark.parametrize("world", [1, 2])
def test_collected_metrics_go_on_from_what_was_saved(world):
    def make():
        kinds = {"num_classes": 4}
        both = [
            torchmetrics.classification.MulticlassAccuracy(**kinds),
            torchmetrics.classification.MulticlassRecall(**kinds),
        ]
        wrapped = torchmetrics.ClasswiseWrapper(torchmetrics.classification.MulticlassAccuracy(**kinds, average=None))
        return MetricSet({"plain": accuracy, "both": torchmetrics.MetricCollection(both), "classes": wrapped})

    outputs, targets = data(64)
    whole, half, resumed = make(), make(), make()
    for metrics, start, end in ((whole, 0, 64), (half, 0, 32)):
        for at in range(start, end, 16):
            metrics.update(outputs[at : at + 16], targets[at : at + 16], 16)
    saved = half.state_dict()
    resumed.update(outputs, targets, 64)  # of an earlier epoch
    if world == 2:
        with pytest.warns(DrivetrainWarning, match="only the rest"):
            resumed.load_state_dict([saved, saved])
        assert resumed.state_dict()["means"]["plain"]["running_count"] == 64
        return
    resumed.load_state_dict([saved])
    for at in range(32, 64, 16):
        resumed.update(outputs[at : at + 16], targets[at : at + 16], 16)
    assert resumed.compute() == whole.compute()


def test_results_that_are_vectors_or_mappings_get_a_name_for_each_value():
    outputs, targets = data(200)
    metrics = MetricSet(
        {
            "recall": torchmetrics.classification.MulticlassRecall(num_classes=4, average=None),
            "both": torchmetrics.MetricCollection({"mse": torchmetrics.MeanSquaredError()}),
        }
    )
    metrics._stateful["recall"].update(outputs, targets)
    metrics._stateful["both"].update(torch.ones(2), torch.zeros(2))
    result = metrics.compute()
    assert set(result) == {"recall_0", "recall_1", "recall_2", "recall_3", "both_mse"}
    assert all(isinstance(value, float) for value in result.values())


def test_without_metrics_there_is_nothing_to_do():
    metrics = MetricSet(None)
    assert not metrics
    assert metrics.compute() == {}
    assert MetricSet({"accuracy": accuracy})


def test_metrics_are_computed_without_a_graph():
    seen = []
    metrics = MetricSet({"m": lambda outputs, targets: seen.append((outputs * 2).requires_grad) or 1.0})
    metrics.update(torch.ones(2, requires_grad=True), None, 2)
    assert seen == [False]
    assert metrics.compute() == {"m": 1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (accuracy, "expected {name: metric}"),
        ({"a": 3}, r"metrics\['a'\]=3 is not callable. Expected a function of \(outputs, targets\)"),
        ({"a": torchmetrics.MeanSquaredError}, "is a class. Expected a function of .* or a torchmetrics.Metric"),
        ({"a": lambda predictions: 0.0}, "cannot be called with 2 arguments"),
    ],
)
def test_what_is_no_metric_is_refused_while_building(given, message):
    with pytest.raises(ConfigError, match=message):
        MetricSet(given)


@pytest.mark.parametrize("as_collection", [True, False])
def test_one_metric_for_training_and_evaluation_has_a_state_for_each(as_collection):
    def accuracy():
        made = {"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3)}
        return torchmetrics.MetricCollection(made) if as_collection else made

    def run(metrics, train_metrics):
        trainer = make_trainer(metrics=metrics, train_metrics=train_metrics)
        history = train(trainer, make_data(40), eval_dataset=make_data(16), eval_interval="2ba")
        return repr(history)

    both = accuracy()
    assert run(both, both) == run(accuracy(), accuracy())


def test_torchmetrics_is_imported_only_by_the_user():
    program = (
        "import sys, drivetrain.train.tracking as m; m.MetricSet({'a': lambda o, t: 1.0}); "
        "assert 'torchmetrics' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})


def _metrics_of_rank():
    from drivetrain.runtime.ranks import get_rank

    outputs, targets = data(11)
    mine = slice(0, 3) if get_rank() == 0 else slice(3, 11)
    metrics = MetricSet(
        {"plain": accuracy, "stateful": torchmetrics.classification.MulticlassAccuracy(num_classes=4, average="micro")}
    )
    feed(metrics, outputs[mine], targets[mine], size=4)
    return metrics.compute()


def test_unequal_shards_on_two_ranks_give_the_metric_of_all_samples(world2):
    expected = float(accuracy(*data(11)))
    for result in world2(_metrics_of_rank):
        assert result == pytest.approx({"plain": expected, "stateful": expected})
