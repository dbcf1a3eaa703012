"""Run history and loss tracking against plain Python sums."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from drivetrain.core.errors import MissingExtra
from drivetrain.train.tracking import InMemoryRunHistory, LossTracker, RunHistory, reduce_means
from tests.train.tasks import calls_of, make_data, make_trainer, train

LOSSES = [105.5, 94.7, 98.0, 55.2, 32.5]
SIZES = [64, 32, 16, 8, 4]


def waiting(loss):
    """A loss that waits in the ring as those of other devices do; a number on the CPU is added at once."""
    return torch.as_tensor(loss).reshape(1)


def weighted_mean(losses, sizes):
    return sum(loss * size for loss, size in zip(losses, sizes)) / sum(sizes)


def test_values_come_back_in_the_order_they_were_recorded():
    history = InMemoryRunHistory()
    for value in (3, 1, 2):
        history.update_metric("a", value)
    assert history.get_metric_values("a") == [3, 1, 2]
    assert history.get_latest_metric("a") == 2


def test_reading_an_unknown_metric_does_not_create_it():
    history = InMemoryRunHistory()
    assert list(history.get_metric_values("ghost")) == []
    with pytest.raises(ValueError):
        history.get_latest_metric("ghost")
    assert list(history.get_metric_names()) == []


def test_an_unknown_metric_is_answered_with_the_recorded_names_and_the_nearest():
    history = InMemoryRunHistory()
    history.update_metric("eval_loss_epoch", 1.0)
    with pytest.raises(ValueError, match="Did you mean 'eval_loss_epoch'"):
        history.get_latest_metric("eval_los_epoch")


def test_names_compare_as_a_set_and_keep_their_order():
    history = InMemoryRunHistory()
    for name in ("z", "a", "m"):
        history.update_metric(name, 0)
    assert history.get_metric_names() == {"a", "m", "z"}
    assert list(history.get_metric_names()) == ["z", "a", "m"]


def test_the_prefix_applies_on_writing_only_and_survives_reset():
    history = InMemoryRunHistory()
    history.set_metric_name_prefix("ema_")
    history.update_metric("loss", 1)
    assert history.get_metric_values("ema_loss") == [1]
    assert history.get_metric_values("loss") == []
    history.reset()
    assert history.metric_name_prefix == "ema_"
    assert not list(history.get_metric_names())


def test_epochs_count_from_one_and_reset_returns_there():
    history = InMemoryRunHistory()
    assert history.current_epoch == 1
    history._increment_epoch()
    history._set_epoch(7)
    assert history.current_epoch == 7
    history.reset()
    assert history.current_epoch == 1


def test_deleting_a_metric_removes_it_and_an_unknown_one_is_an_error():
    history = InMemoryRunHistory()
    history.update_metric("a", 1)
    history.delete_metric("a")
    assert "a" not in history.get_metric_names()
    with pytest.raises(KeyError, match="unknown metric 'a'"):
        history.delete_metric("a")


def test_a_history_restored_from_its_state_goes_on():
    history = InMemoryRunHistory()
    history.set_metric_name_prefix("p_")
    history.update_metric("a", 1.5)
    history._set_epoch(3)
    restored = InMemoryRunHistory()
    restored.load_state_dict(history.state_dict())
    restored.update_metric("a", 2.5)
    assert restored.get_metric_values("p_a") == [1.5, 2.5]
    assert history.get_metric_values("p_a") == [1.5]
    assert restored.current_epoch == 3


def test_a_history_of_ones_own_needs_no_set_epoch_to_go_forward():
    class Counting(InMemoryRunHistory):
        _set_epoch = RunHistory._set_epoch

    history = Counting()
    history._set_epoch(4)
    assert history.current_epoch == 4
    with pytest.raises(NotImplementedError, match="cannot return from epoch 4 to 2"):
        history._set_epoch(2)


@pytest.mark.parametrize("make", [float, torch.tensor, waiting])
def test_the_average_is_weighted_by_sample_counts(make):
    tracker = LossTracker()
    for loss, size in zip(LOSSES, SIZES):
        tracker.update(make(loss), size)
    assert tracker.average == pytest.approx(weighted_mean(LOSSES, SIZES), rel=1e-7)
    assert tracker.running_count == sum(SIZES)
    assert tracker.total_loss == pytest.approx(weighted_mean(LOSSES, SIZES) * sum(SIZES), rel=1e-7)
    assert tracker.loss_value == pytest.approx(LOSSES[-1])


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_any_number_of_losses_around_the_ring_has_the_exact_mean(count):
    generator = torch.Generator().manual_seed(count)
    losses = torch.rand(count, generator=generator, dtype=torch.float64)
    sizes = torch.randint(1, 9, (count,), generator=generator).tolist()
    expected = pytest.approx(weighted_mean(losses.tolist(), sizes), rel=1e-13)
    for given in (losses, losses[:, None]):
        tracker, alike = LossTracker(), LossTracker()
        for loss, size in zip(given, sizes):
            tracker.update(loss, size)
            alike.update(loss, 3)
        assert tracker.average == expected and tracker.loss_value == losses[-1]
        counted = LossTracker()
        for loss, size in zip(given, sizes):
            counted.update(loss, torch.tensor(size))
        counted.update(0.0, 5)
        total, weight = (float(number) for number in counted.unread_sums())
        assert total / (weight - 5) == expected and counted.running_count == sum(sizes) + 5
        assert alike.average == pytest.approx(losses.mean().item(), rel=1e-13) and alike.running_count == 3 * count


def test_losses_that_are_not_finite_are_ignored_where_their_updates_are_skipped():
    for make in (float, torch.tensor, waiting):
        for count in (int, torch.tensor):
            tracker, open_to_all = LossTracker(), LossTracker()
            tracker.leaves_out_nonfinite = True
            for loss in (2.0, math.nan, 4.0, math.inf):
                tracker.update(make(loss), count(3))
                open_to_all.update(make(loss), count(3))
            assert (tracker.average, tracker.running_count) == (3.0, 6)
            assert math.isnan(open_to_all.average)


def test_memory_stays_constant_over_many_steps():
    tracker = LossTracker()
    for _ in range(1000):
        tracker.update(torch.ones(1), 2)
        assert len(tracker._ring) < 64
    assert tracker.total_loss == 2000.0


def test_weights_may_be_tensors_beside_numbers():
    tracker = LossTracker()
    tracker.update(torch.tensor(1.0), torch.tensor(3))
    tracker.update(torch.tensor(2.0), 1)
    tracker.update(4.0, torch.tensor(4))
    tracker.update(8.0, 8)
    assert tracker.running_count == 16
    assert tracker.average == pytest.approx((3 + 2 + 16 + 64) / 16)


def test_losses_of_different_types_are_added_up():
    tracker = LossTracker()
    tracker.update(torch.tensor(1.0, dtype=torch.bfloat16), 1)
    tracker.update(torch.tensor(2.0, dtype=torch.float64), 1)
    tracker.update(torch.tensor([3.0]), 1)
    assert tracker.average == 2.0


def test_a_tracked_loss_holds_on_to_no_graph():
    weight = torch.ones((), requires_grad=True)
    tracker = LossTracker()
    tracker.update(weight * 2, 1)
    tracker.update(waiting(weight * 2), torch.ones((), requires_grad=True) * 2)
    assert [loss.requires_grad for loss in tracker._ring] == [False]
    assert not any(total.requires_grad for total in tracker.unread_sums())


def test_without_samples_the_average_is_nan():
    tracker = LossTracker()
    assert math.isnan(tracker.average)
    for loss in (torch.tensor(1.0), math.nan, torch.tensor(math.nan), waiting(math.nan)):
        tracker.update(loss, 0)
    tracker.update(waiting(math.nan), torch.tensor(0))
    assert math.isnan(tracker.average)
    tracker.update(2.0)
    assert tracker.average == 2.0


def test_reset_forgets_everything():
    tracker = LossTracker()
    tracker.update(torch.tensor(1.0), 3)
    tracker.reset()
    assert (tracker.total_loss, tracker.running_count, tracker.latest_known) == (0.0, 0, None)


def test_the_latest_known_loss_on_a_cpu_is_the_last_one():
    tracker = LossTracker()
    assert tracker.latest_known is None
    tracker.update(torch.tensor(1.5), 1)
    assert tracker.latest_known == 1.5
    tracker.update(waiting(2.5), 1)
    assert tracker.latest_known == 2.5
    tracker.update(0.5, 1)
    assert tracker.latest_known == 0.5


def test_elsewhere_the_latest_known_loss_is_what_somebody_read_back():
    tracker = LossTracker()
    tracker.update(torch.ones((), device="meta"), 1)  # a device whose values cannot be read
    assert tracker.latest_known is None
    tracker.latest_known = 2.5
    tracker.update(torch.ones((), device="meta"), 1)
    assert tracker.latest_known == 2.5


def test_updating_and_folding_reads_nothing_from_the_device():
    tracker = LossTracker()
    for step in range(200):  # reading a meta tensor would raise
        tracker.update(torch.ones((), device="meta"), 1 + step % 3)


def test_a_tracker_restored_in_the_middle_of_an_epoch_has_the_mean_of_all_of_it():
    whole, first, second = LossTracker(), LossTracker(), LossTracker()
    for loss, size in zip(LOSSES, SIZES):
        whole.update(torch.tensor(loss), size)
    for loss, size in zip(LOSSES[:2], SIZES[:2]):
        first.update(torch.tensor(loss), size)
    second.load_state_dict(first.state_dict())
    for loss, size in zip(LOSSES[2:], SIZES[2:]):
        second.update(torch.tensor(loss), size)
    assert second.average == pytest.approx(whole.average, rel=1e-15)


def test_an_update_calls_hardly_anything():
    tracker, loss = LossTracker(), torch.tensor(1.0)
    assert calls_of(lambda: tracker.update(loss, 32)) < 6  # of Python or C; it runs once per step


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_device_nothing_synchronises_until_the_mean_is_read():
    losses = [torch.full((), float(step), device="cuda") for step in range(200)]
    sizes = [8] * 100 + [1 + step % 3 for step in range(100)]
    tokens = [torch.full((), 2, device="cuda") for _ in range(100)]
    tracker, weighted = LossTracker(), LossTracker()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss, size in zip(losses, sizes):
            tracker.update(loss, size)
        for loss, count in zip(losses, tokens):
            weighted.update(loss, count)
        assert tracker.latest_known is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tracker.average == pytest.approx(weighted_mean(range(200), sizes))
    assert weighted.average == pytest.approx(49.5)


def _rank_means(rank_dependent_name):
    from drivetrain.runtime.ranks import get_rank

    rank, tracker, extra = get_rank(), LossTracker(), LossTracker()
    tracker.update(torch.tensor(float(rank + 1)), 1 + 2 * rank)  # 1 over one sample, 2 over three
    extra.update(5.0, 2)
    trackers = {"loss": tracker}
    if rank == 1 and rank_dependent_name:
        trackers["extra"] = extra
    return reduce_means(trackers), tracker.average_over_ranks()


def test_means_are_taken_over_the_samples_of_all_ranks(world2):
    for means, average in world2(_rank_means, True):
        assert average == pytest.approx((1 + 6) / 4)
        assert means == pytest.approx({"loss": 7 / 4, "extra": 5.0})


# ---------------------------------------------------------------------- looking at a history


def test_a_value_knows_the_batch_after_which_it_was_recorded_over_several_runs():
    trainer = make_trainer()
    train(trainer, num_epochs=2)
    history = train(trainer, num_epochs=1, reset_run_history=False)
    assert history.get_metric_steps("train_loss_epoch") == [3, 6, 9]
    restored = InMemoryRunHistory()
    restored.load_state_dict(history.state_dict())
    assert restored.get_metric_steps("train_loss_epoch") == [3, 6, 9]
    assert restored.get_metric_steps("unknown") == []
    restored.load_state_dict(
        {"current_epoch": 3, "prefix": "", "metrics": {"old": [1.0, 2.0]}}
    )  # before steps were kept
    assert restored.get_metric_steps("old") == [1, 2]


def test_later_runs_do_not_change_the_history_a_run_returned():
    trainer = make_trainer()
    first = train(trainer, num_epochs=2)
    values = list(first.get_metric_values("train_loss_epoch"))
    second = train(trainer, num_epochs=3)
    trainer.evaluate(make_data(8))
    assert first.get_metric_values("train_loss_epoch") == values and first.current_epoch == 3
    assert len(second.get_metric_values("train_loss_epoch")) == 3
    assert list(trainer.run_history.get_metric_names()) == ["evaluation_loss"]


def test_a_snapshot_keeps_its_class_and_a_history_without_one_is_returned_itself():
    class Mine(InMemoryRunHistory):
        def best(self):
            return min(self.get_metric_values("train_loss_epoch"))

    assert train(make_trainer(run_history=Mine())).best() > 0
    assert RunHistory.snapshot(history := Mine()) is history


def test_a_history_prints_as_a_table_of_moments():
    history = InMemoryRunHistory()
    assert repr(history) == "InMemoryRunHistory: nothing recorded yet"
    history.update_metric("train_loss_epoch", 0.30000001192092896)
    history.update_metric("eval_loss_epoch", torch.tensor(1.25e-7))
    history._increment_epoch()
    history.update_metric("train_loss_epoch", 2)
    assert repr(history).splitlines() == [
        "InMemoryRunHistory",
        "epoch  step  train_loss_epoch  eval_loss_epoch",
        "    1     0               0.3         1.25e-07",
        "    2     0                 2",
    ]


def test_a_long_and_wide_history_prints_short():
    history = InMemoryRunHistory()
    history.update_metric("intermediate_eval_loss", 1.0)  # recorded first, shown after what epochs recorded
    for epoch in range(40):
        for index in range(9):
            history.update_metric(f"some_long_metric_name_{index}", epoch + index)
        history._increment_epoch()
    lines = repr(history).splitlines()
    assert lines[0] == "InMemoryRunHistory: 40 rows, 30 not shown" and len(lines) == 1 + 1 + 3 + 1 + 7 + 1
    assert all(len(line) <= 80 for line in lines[:-1])
    assert lines[-1].startswith("and 8 more: some_long_metric_name_2, ") and lines[-1].endswith(
        "intermediate_eval_loss"
    )


def test_a_metric_recorded_twice_at_one_moment_has_two_rows():
    trainer = make_trainer()
    trainer.evaluate(make_data(8))
    trainer.evaluate(reset_run_history=False)
    assert len(repr(trainer.run_history).splitlines()) == 4


def test_a_history_of_another_kind_can_be_looked_at_too():
    class Mine(RunHistory):
        current_epoch, metric_name_prefix = 1, ""

        def get_metric_names(self):
            return ["loss"]

        def get_metric_values(self, metric_name):
            return [3.0, 2.0]

        get_latest_metric = set_metric_name_prefix = update_metric = delete_metric = None
        _increment_epoch = reset = None

    assert Mine().get_metric_steps("loss") == [1, 2]
    assert len(repr(Mine()).splitlines()) == 4


def test_a_dataframe_has_a_row_per_moment_or_says_what_to_install(monkeypatch):
    history = train(make_trainer(), num_epochs=2, eval_dataset=make_data(8))
    made = {}
    pandas = SimpleNamespace(DataFrame=lambda rows, columns: made.update(rows=rows, columns=columns))
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    history.to_dataframe()
    assert made["columns"] == ["epoch", "step", "train_loss_epoch", "eval_loss_epoch"]
    assert [(row["epoch"], row["step"], len(row)) for row in made["rows"]] == [(1, 3, 4), (2, 6, 4)]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match="pip install pandas"):
        history.to_dataframe()


def test_a_plot_draws_training_and_evaluation_of_one_quantity_together(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    trainer = make_trainer(
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()}
    )
    history = train(trainer, num_epochs=2, eval_dataset=make_data(8))
    figure = history.plot(path=str(tmp_path / "history.png"))
    labels = [[line.get_label() for line in axes.lines] for axes in figure.axes]
    assert labels == [["train_loss_epoch", "eval_loss_epoch"], ["eval_accuracy_epoch"]]
    assert list(figure.axes[0].lines[0].get_xdata()) == [3, 6] and (tmp_path / "history.png").exists()
    with pytest.raises(ValueError, match="train_loss_epoch"):
        history.plot(["train_los_epoch"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        history.plot()
