"""Speed, memory and learning rates."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import ConfigError
from drivetrain.train.callbacks import (
    LearningRateMonitor,
    LRMonitor,
    MemoryMonitor,
    SpeedMonitor,
    ThroughputMonitor,
    TrainerCallback,
    monitors,
)
from drivetrain.train.schedulers import CosineLrScheduler
from tests.train.tasks import make_data, make_model, make_trainer, train


class Sink:
    """A logger that keeps what it is sent."""

    def __init__(self):
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append((step, dict(metrics)))

    def values(self, name):
        return [metrics[name] for _, metrics in self.entries if name in metrics]

    def steps(self, name):
        return [step for step, metrics in self.entries if name in metrics]


def run(*callbacks, rows=80, **kwargs):
    sink = Sink()
    trainer = make_trainer(callbacks=callbacks, loggers=[sink])
    train(trainer, make_data(rows), **kwargs)
    return sink, trainer


def test_speed_is_logged_once_per_window_and_for_the_rest_of_an_epoch():
    sink, _ = run(ThroughputMonitor(window_size=4), num_epochs=2)  # 10 batches an epoch
    assert sink.steps("throughput/batches_per_sec") == [4, 8, 10, 14, 18, 20]
    batches, samples = sink.values("throughput/batches_per_sec"), sink.values("throughput/samples_per_sec")
    assert all(sample == pytest.approx(8 * batch) for batch, sample in zip(batches, samples))
    assert sink.values("throughput/device/samples_per_sec") == samples  # one device
    assert not sink.values("throughput/device/mfu")  # nothing is known about this device's peak


def test_time_spent_in_evaluation_does_not_count(monkeypatch):
    now = SimpleNamespace(seconds=0.0)

    class Slow(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            now.seconds += 2

        def on_eval_step_end(self, trainer, **kwargs):
            now.seconds += 1000

    monkeypatch.setattr(monitors, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    sink, _ = run(
        Slow(), ThroughputMonitor(window_size=5), eval_dataset=make_data(8), eval_interval="1ba", num_epochs=2
    )
    assert sink.values("throughput/batches_per_sec") == [0.5] * 4


def test_model_flops_utilisation_follows_from_the_flops_of_a_step():
    # Forward 2·(6·8 + 8·3) per sample; backward the same for the weights, and for the inputs of all but the first layer.
    per_sample = 2 * (6 * 8 + 8 * 3) * 2 + 2 * 8 * 3
    counted, _ = run(ThroughputMonitor(window_size=3, peak_flops=1e12))
    given, _ = run(ThroughputMonitor(window_size=3, flops_per_sample=per_sample, peak_flops=1e12))
    for sink in (counted, given):
        rates = sink.values("throughput/device/samples_per_sec")
        assert sink.values("throughput/device/flops_per_sec") == pytest.approx([per_sample * rate for rate in rates])
        assert sink.values("throughput/device/mfu") == pytest.approx([per_sample * rate / 1e12 for rate in rates])


def test_the_flops_of_a_second_run_are_counted_again():
    sink, trainer = run(ThroughputMonitor(window_size=3, peak_flops=1e12))
    counted = len(sink.values("throughput/device/mfu"))
    train(trainer, make_data(80))
    assert len(sink.values("throughput/device/mfu")) == 2 * counted


def test_a_group_without_a_rate_has_none_to_log():
    class Fixed(torch.optim.Optimizer):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad)

    model, sink = make_model(), Sink()
    trainer = make_trainer(model, optimizer=Fixed(model.parameters(), {}), callbacks=[LRMonitor("1ba")], loggers=[sink])
    train(trainer, log_every=1)
    assert sink.values("train_loss_step") and not sink.values("lr/group0")


def test_a_compiled_model_is_not_counted_and_no_counter_is_left_behind():
    model = make_model()
    model.compile(backend="eager")
    sink = Sink()
    trainer = make_trainer(model, callbacks=[ThroughputMonitor(window_size=3, peak_flops=1e12)], loggers=[sink])
    train(trainer, make_data(40))
    assert sink.values("throughput/samples_per_sec")
    assert not sink.values("throughput/device/mfu")


def test_a_first_batch_that_fails_leaves_no_counter_behind():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    class Fail(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        run(ThroughputMonitor(peak_flops=1e12), Fail())
    assert _get_current_dispatch_mode() is None


def test_tokens_are_counted_where_the_trainer_counts_them():
    text = TensorDataset(torch.randint(0, 7, (24, 5)), torch.randint(0, 3, (24,)))
    model = nn.Sequential(nn.Embedding(7, 2), nn.Flatten(), nn.Linear(10, 3))
    sink = Sink()
    train(make_trainer(model, callbacks=[ThroughputMonitor(window_size=2)], loggers=[sink]), text)
    samples, tokens = sink.values("throughput/samples_per_sec"), sink.values("throughput/tokens_per_sec")
    assert tokens == pytest.approx([5 * rate for rate in samples])
    assert tokens


@pytest.mark.parametrize("wrong", [{"window_size": 0}, {"flops_per_sample": "many"}, {"peak_flops": -1.0}])
def test_wrong_settings_of_the_speed_monitor_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ThroughputMonitor(**wrong)


def test_learning_rates_of_all_groups_are_logged_at_the_interval():
    model = make_model()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}], lr=0.2
    )
    sink = Sink()
    trainer = make_trainer(model, optimizer=optimizer, callbacks=[LRMonitor("3ba")], loggers=[sink])
    train(trainer, make_data(80), create_scheduler_fn=CosineLrScheduler.create_scheduler_fn())
    assert sink.steps("lr/group0") == [3, 6, 9]
    first, second = sink.values("lr/group0"), sink.values("lr/group1")
    assert first == sorted(first, reverse=True)
    assert len(set(first)) == 3
    assert second == pytest.approx([2 * rate for rate in first], rel=1e-4)


def test_an_interval_may_be_in_epochs():
    sink, _ = run(LRMonitor("1ep"), num_epochs=3)
    assert sink.steps("lr/group0") == [10, 20, 30]


def test_units_of_an_optim_set_are_logged_by_name():
    from drivetrain.train.callbacks.monitors import learning_rates

    groups = [{"lr": 0.1, "unit": "encoder"}, {"lr": 0.2, "unit": "decoder"}, {"lr": 0.3, "unit": "decoder"}]
    rates = learning_rates((SimpleNamespace(param_groups=groups),))
    assert rates == {"lr/encoder": 0.1, "lr/decoder": 0.2, "lr/decoder/group2": 0.3}


def test_memory_of_the_process_is_logged_on_a_cpu():
    sink, _ = run(MemoryMonitor("5ba"))
    peaks = sink.values("memory/peak_process_gib")
    assert len(peaks) == 2
    assert 0.01 < peaks[0] <= peaks[1] < 1000


@pytest.mark.gpu
def test_memory_of_the_device_is_logged():
    sink = Sink()
    trainer = make_trainer(callbacks=[MemoryMonitor("1ba")], loggers=[sink], device="cuda")
    train(trainer, make_data(8))
    metrics = sink.entries[0][1]
    assert metrics["memory/peak_allocated_gib"] >= metrics["memory/allocated_gib"] > 0
    assert metrics["memory/peak_reserved_gib"] >= metrics["memory/reserved_gib"] > 0


def test_other_libraries_names_are_accepted():
    assert SpeedMonitor is ThroughputMonitor
    assert LearningRateMonitor is LRMonitor
