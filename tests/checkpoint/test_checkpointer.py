import logging
import os
import random
import shutil
import signal
import threading

import numpy as np
import pytest
import torch

from drivetrain.checkpoint.chaos import damage, full_disk
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.layout import read_pointer
from drivetrain.checkpoint.store import save_checkpoint
from drivetrain.checkpoint.writer import WriteFailedError
from drivetrain.context.context import Context
from drivetrain.context.state import State
from drivetrain.core.errors import CheckpointError, ConfigError, DrivetrainWarning, NonFiniteStateError, StateError
from drivetrain.core.time import Clock
from drivetrain.runtime.run import Run, set_current_run
from drivetrain.runtime.signals import StopSignals
from tests.checkpoint.training import assert_same_state, make_context, train


@pytest.fixture(autouse=True)
def own_generators():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0]), random.setstate(before[1]), np.random.set_state(before[2])


def ids(keeper: Checkpointer) -> list[str]:
    return [entry.manifest.id for entry in keeper.list()]


def test_a_checkpoint_with_a_metric_that_is_nan_can_be_restored(tmp_path):
    Checkpointer(make_context(), dir=tmp_path).save(1, metrics={"loss": float("nan")})
    assert Checkpointer(make_context(), dir=tmp_path).restore() is not None


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("stop_at", [1, 5, 9])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path, async_save, stop_at):
    torch.manual_seed(3)
    whole = make_context()
    train(whole, 12)
    after_whole = torch.rand(4), random.random(), np.random.rand()

    torch.manual_seed(3)
    first = make_context()
    with Checkpointer(first, every=1, dir=tmp_path, async_save=async_save) as keeper:
        train(first, stop_at, keeper)

    torch.manual_seed(99), random.seed(99), np.random.seed(99)  # a new process starts from other random states
    second = make_context(seed=50)
    with Checkpointer(second, every=1, dir=tmp_path, async_save=async_save) as keeper:
        restored = keeper.restore()
        assert restored.step == stop_at and restored.id == f"ep0-ba{stop_at}"
        train(second, 12 - stop_at, keeper)
    assert_same_state(whole.state_dict(), second.state_dict())
    assert torch.equal(torch.rand(4), after_whole[0])
    assert stop_at != 12 and keeper.progress.num_calls == 12


def test_python_and_numpy_streams_are_restored_too(tmp_path):
    ctx = Context(x=1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    with Checkpointer(ctx, dir=tmp_path) as keeper:
        keeper.save(1)
        expected = random.random(), np.random.rand(), torch.rand(1).item()
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        restored = keeper.restore()
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
        restored.apply_rng()
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_restore_without_a_checkpoint_is_none_and_with_only_damaged_ones_an_error(tmp_path):
    ctx = make_context()
    with Checkpointer(ctx, dir=tmp_path / "new") as keeper:
        assert keeper.restore() is None
        with pytest.raises(FileNotFoundError):
            keeper.restore("last")
        damage(keeper.save(), "flip")
        before = {name: value.clone() for name, value in ctx.model.state_dict().items()}
        with pytest.raises(CheckpointError, match="nothing was loaded"):
            keeper.restore()
    assert_same_state(before, dict(ctx.model.state_dict()))


def test_a_damaged_newest_checkpoint_is_passed_over_and_reported(tmp_path):
    ctx = make_context()
    with Checkpointer(ctx, every=1, dir=tmp_path) as keeper:
        train(ctx, 3, keeper)
        damage(tmp_path / "checkpoint-ep0-ba3", "truncate")
        restored = keeper.restore()
        assert restored.step == 2 and restored.rejected[0].path.name == "checkpoint-ep0-ba3"
        train(ctx, 1, keeper)
        assert ids(keeper)[-1] == "ep0-ba3" and keeper.restore().step == 3


def test_a_state_that_does_not_fit_changes_nothing(tmp_path):
    save_checkpoint({"model": {"w": torch.ones(1)}, "other": 1}, 1, path=tmp_path)
    ctx = make_context()
    before = torch.get_rng_state()
    with Checkpointer(ctx, dir=tmp_path) as keeper, pytest.raises(StateError):
        keeper.restore()
    assert torch.equal(before, torch.get_rng_state())


def test_restore_takes_ids_pointers_paths_and_foreign_files(tmp_path):
    ctx = Context(n=0, w=torch.zeros(2))
    with Checkpointer(ctx, dir=tmp_path / "a", best="loss", keep=None) as keeper:
        for ctx.n, loss in enumerate([0.5, 0.1, 0.9]):
            keeper.save(f"number{ctx.n}", {"loss": torch.tensor(loss)})
        for which, n in (
            ("best", 1),
            ("last", 2),
            ("number0", 0),
            (tmp_path / "a" / "checkpoint-number1", 1),
            ("auto", 2),
        ):
            keeper.restore(which)
            assert ctx.n == n
        torch.save({"n": 7, "w": torch.ones(2)}, tmp_path / "checkpoint-1.pt")
        restored = keeper.restore(tmp_path / "checkpoint-1.pt")
        assert ctx.n == 7 and ctx.w.sum() == 2 and restored.rng is None and restored.step == 0
        with pytest.raises(FileNotFoundError, match="nowhere"):
            keeper.restore("nowhere")


def test_time_strings_decide_when_it_is_due(tmp_path):
    ctx = Context(epoch=0)
    with Checkpointer(ctx, every="2ep", dir=tmp_path, keep=None) as keeper:
        for ctx.epoch in range(7):
            keeper.step()
        assert ids(keeper) == ["ep2-ba3", "ep4-ba5", "ep6-ba7"]
    clock = Clock()
    ctx = Context(clock=clock)
    with Checkpointer(ctx, every="100sp", dir=tmp_path / "clock", keep=None) as keeper:
        for _ in range(10):
            clock.next_batch(samples=32)
            keeper.step()
        assert [entry.manifest.samples for entry in keeper.list()] == [128, 224, 320]


def test_wall_clock_time_counts_too(tmp_path):
    with Checkpointer(Context(x=1), every="3600sec", dir=tmp_path) as keeper:
        assert keeper.step() is None
        keeper.progress._started -= 3601
        assert keeper.step() is not None and keeper.step() is None


def test_restored_counters_do_not_make_a_save_due_at_once(tmp_path):
    with Checkpointer(Context(x=1), every=4, dir=tmp_path) as keeper:
        for _ in range(4):
            keeper.step()
    with Checkpointer(Context(x=1), every=4, dir=tmp_path) as keeper:
        keeper.restore()
        assert [keeper.step() is not None for _ in range(5)] == [False, False, False, True, False]


def test_the_newest_the_best_and_milestones_stay(tmp_path):
    ctx = Context(x=1)
    with Checkpointer(ctx, every=1, dir=tmp_path, keep=2, best="acc", mode="max", keep_every="4ba") as keeper:
        for acc in (0.1, 0.9, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7, 0.7, 0.1):
            keeper.step({"acc": acc})
        assert ids(keeper) == ["ba2", "ba4", "ba8", "ba9", "ba10"]
        assert read_pointer(tmp_path, "best").name == "checkpoint-ba2"
        assert read_pointer(tmp_path, "last").name == "checkpoint-ba10"
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("checkpoint-")) == ["best", "last"]


def test_a_checkpoint_that_was_copied_or_renamed_stays(tmp_path):
    ctx = make_context()
    with Checkpointer(ctx, keep=1, dir=tmp_path, signals=False) as keeper:
        shutil.copytree(keeper.save("a"), tmp_path / "checkpoint-a-copy")
        keeper.save("b").rename(tmp_path / "checkpoint-good")
        for id in "cde":
            keeper.save(id)
        assert ids(keeper) == ["a", "b", "e"]
        assert keeper.restore(tmp_path / "checkpoint-good").id == "b"


def test_the_best_metric_is_asked_of_a_recorder(tmp_path):
    class Recorder:
        def scalar(self, tag, value): ...
        def last(self, tag):
            return {"eval/acc": 0.25}[tag]

        def state_dict(self):
            return {}

        def load_state_dict(self, state): ...

    with Checkpointer(Context(recorder=Recorder()), best="eval/acc", dir=tmp_path) as keeper:
        keeper.save()
        assert keeper.list()[0].manifest.metrics == {"eval/acc": 0.25}


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_is_survived_twice_in_a_row(tmp_path, caplog, async_save):
    ctx = Context(x=torch.ones(100))
    with Checkpointer(ctx, every=1, dir=tmp_path, async_save=async_save) as keeper:
        keeper.step()
        keeper.wait()
        with full_disk(100):
            for _ in range(2):
                keeper.step()
                keeper.wait()
        assert keeper.failures_in_a_row == 2 and "The run continues" in caplog.text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-ba1", "last", "writer.lock"]
        keeper.step()
        keeper.wait()
        assert keeper.failures_in_a_row == 0 and ids(keeper) == ["ba1", "ba4"]
        with full_disk(100):
            for _ in range(2):
                keeper.step()
                keeper.wait()
            with pytest.raises(WriteFailedError, match="No space left"):
                keeper.save(), keeper.wait()


def test_a_final_save_raises_at_the_first_failure(tmp_path):
    with Checkpointer(Context(x=1), dir=tmp_path) as keeper:
        with full_disk(), pytest.raises(WriteFailedError):
            keeper.save(final=True)


def test_a_background_error_surfaces_at_the_next_step(tmp_path, monkeypatch):
    with Checkpointer(Context(x=1), dir=tmp_path, async_save=True) as keeper:
        monkeypatch.setattr(
            "drivetrain.checkpoint.checkpointer.write_checkpoint",
            lambda *a, **k: (_ for _ in ()).throw(TypeError("boom")),
        )
        keeper.save()
        keeper._job.wait()
        with pytest.raises(TypeError, match="boom"):
            keeper.step()


def test_values_changed_right_after_an_async_save_do_not_reach_the_file(tmp_path, monkeypatch):
    """The writing thread is held until the live values have been destroyed."""
    ctx = make_context()
    train(ctx, 3)
    expected = {name: value.clone() for name, value in ctx.model.state_dict().items()}
    moments = ctx.optimizer.state[ctx.model[0].weight]["exp_avg"].clone()
    changed = threading.Event()
    from drivetrain.checkpoint import checkpointer

    real = checkpointer.write_checkpoint

    def late(*args, **kwargs):
        assert changed.wait(200)
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpointer, "write_checkpoint", late)
    with Checkpointer(ctx, dir=tmp_path, async_save=True) as keeper:
        keeper.save()
        with torch.no_grad():
            for parameter in ctx.model.parameters():
                parameter.fill_(7.0)
            ctx.optimizer.state[ctx.model[0].weight]["exp_avg"].fill_(7.0)
            ctx.losses.clear()
        changed.set()
        keeper.wait()
        fresh = make_context(seed=4)
        with Checkpointer(fresh, dir=tmp_path) as other:
            other.restore()
    assert_same_state(expected, dict(fresh.model.state_dict()))
    assert torch.equal(fresh.optimizer.state[fresh.model[0].weight]["exp_avg"], moments) and len(fresh.losses) == 3


def test_host_buffers_are_reused_and_only_one_save_is_in_flight(tmp_path):
    ctx = Context(x=torch.ones(1000))
    with Checkpointer(ctx, every=1, dir=tmp_path, async_save=True, keep=None) as keeper:
        keeper.step()
        addresses = {key: buffer.data_ptr() for key, buffer in keeper._buffers._buffers.items()}
        for _ in range(3):
            ctx.x += 1
            keeper.step()
        assert {key: buffer.data_ptr() for key, buffer in keeper._buffers._buffers.items()} == addresses
        keeper.wait()
        assert len(keeper.list()) == 4 and keeper.last_stall > 0
        for entry, value in zip(keeper.list(), (1.0, 2.0, 3.0, 4.0)):
            keeper.restore(entry.path)
            assert ctx.x[0] == value


def test_a_sync_save_on_the_cpu_is_the_default_and_writes_before_it_returns(tmp_path):
    with Checkpointer(Context(x=torch.ones(2)), dir=tmp_path) as keeper:
        assert (keeper.save() / "manifest.json").exists()


def test_the_run_is_continued_with_its_parameters_time_and_seeds(tmp_path):
    run = Run(folder=tmp_path, seed=4, params={"lr": 0.1, "root": tmp_path, "hook": print}, name="digits")
    run.elapsed_before = 100.0
    set_current_run(run)
    try:
        first = run.random_gen.getrandbits(32)
        with Checkpointer(Context(x=1)) as keeper:
            assert keeper.save() == tmp_path / "checkpoints" / "checkpoint-ba0"
            second = run.random_gen.getrandbits(32)
    finally:
        set_current_run(None)
    run = Run(folder=tmp_path, seed=4, params={}, name="digits")
    set_current_run(run)
    try:
        with Checkpointer(Context(x=1)) as keeper:
            restored = keeper.restore()
        assert 100 < run.elapsed < 200 and run.random_gen.getrandbits(32) == second != first
        assert restored.parameters == {"lr": 0.1, "root": tmp_path, "hook": repr(print)}
    finally:
        set_current_run(None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"keep": 0}, "keep"),
        ({"keep": True}, "keep"),
        ({"every": "0ba"}, "every"),
        ({"every": "-3ba"}, "every"),
        ({"every": "10epp"}, "10ep"),
        ({"every": "100sp"}, "sp"),
        ({"keep_every": "5tok"}, "keep_every"),
        ({"every": "0.5dur"}, "dur"),
        ({"best": "x", "mode": "mim"}, "'min'"),
        ({"async_save": "yes"}, "async_save"),
        ({"verify": "none"}, "verify"),
    ],
)
def test_bad_arguments_fail_while_building(tmp_path, arguments, text):
    with pytest.raises(ConfigError, match=text):
        Checkpointer(Context(x=1), dir=tmp_path, **arguments)


def test_something_without_state_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="save_checkpoint"):
        Checkpointer({"x": 1}, dir=tmp_path)
    with pytest.raises(CheckpointError, match="dir="):
        Checkpointer(Context(x=1))


def test_sigterm_saves_and_leaves_with_143_and_sigint_with_130(tmp_path):
    earlier = signal.getsignal(signal.SIGTERM)
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        ctx = make_context()
        keeper = Checkpointer(ctx, dir=tmp_path / str(status), async_save=True)
        train(ctx, 2, keeper)
        os.kill(os.getpid(), number)
        with pytest.raises(SystemExit) as stop:
            train(ctx, 5, keeper)
        assert stop.value.code == status and ids(keeper) == ["ep0-ba3"]
        assert StopSignals.active() is None
    assert signal.getsignal(signal.SIGTERM) is earlier


def test_sigusr1_saves_and_goes_on(tmp_path):
    ctx = make_context()
    with Checkpointer(ctx, dir=tmp_path) as keeper:
        train(ctx, 1, keeper)
        os.kill(os.getpid(), signal.SIGUSR1)
        train(ctx, 3, keeper)
        assert ids(keeper) == ["ep0-ba2"] and len(ctx.losses) == 4
        os.kill(os.getpid(), signal.SIGUSR1)
        assert keeper.step() == keeper.list()[-1].path


def test_signals_are_left_to_an_owner_above(tmp_path):
    with StopSignals() as owner:
        keeper = Checkpointer(Context(x=1), dir=tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)
        assert keeper.step() is None and owner.requested == signal.SIGTERM
        owner.clear()
    keeper = Checkpointer(Context(x=1), dir=tmp_path, signals=False)
    keeper.step()
    assert StopSignals.active() is None


def test_a_dropped_checkpointer_gives_the_signals_back(tmp_path):
    earlier = signal.getsignal(signal.SIGTERM)
    keeper = Checkpointer(Context(x=1), dir=tmp_path)
    keeper.step()
    assert signal.getsignal(signal.SIGTERM) is not earlier
    del keeper
    assert signal.getsignal(signal.SIGTERM) is earlier and StopSignals.active() is None


def test_the_time_training_was_held_is_told(tmp_path, caplog):
    with caplog.at_level(logging.INFO), Checkpointer(Context(x=1), dir=tmp_path, async_save=True) as keeper:
        keeper.save()
    assert "training was blocked for" in caplog.text and "written in" in caplog.text


def test_a_state_that_is_not_finite_is_not_written_and_the_newest_stays_the_newest(tmp_path):
    ctx = Context(model=torch.nn.Linear(2, 1), epoch=0)
    ctx.optimizer = torch.optim.Adam(ctx.model.parameters())
    keeper = Checkpointer(ctx, dir=tmp_path, async_save=False, every="1ba")
    keeper.step()
    before = ctx.model.weight.detach().clone()
    with torch.no_grad():
        ctx.model.weight[0, 1] = float("nan")
    with pytest.raises(NonFiniteStateError, match=r"model\.weight"):
        keeper.step()
    assert len(ids(keeper)) == 1
    keeper.restore()
    assert torch.equal(ctx.model.weight, before)
    keeper.close()


def test_a_stop_signal_ends_the_process_in_good_order_also_with_a_state_that_is_not_finite(tmp_path):
    ctx = Context(model=torch.nn.Linear(2, 1))
    keeper = Checkpointer(ctx, dir=tmp_path, async_save=False)
    keeper.step()
    with torch.no_grad():
        ctx.model.bias.fill_(float("inf"))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        keeper.step()
    assert left.value.code == 143 and ids(keeper) == []


def test_program_that_changes_its_folder_saves_where_it_began(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with Checkpointer(make_context(), every="1ba", dir="checkpoints", signals=False) as keeper:
        keeper.step()
        monkeypatch.chdir(tmp_path / "b")
        keeper.step()
        assert len(ids(keeper)) == 2 and keeper.restore().step == 2
    assert not list((tmp_path / "b").iterdir()) and not (tmp_path / "a/checkpoints/writer.lock").exists()


def test_folder_may_be_called_like_a_checkpoint(tmp_path):
    folder = tmp_path / "checkpoint-run1"
    with Checkpointer(make_context(), dir=folder, signals=False) as keeper:
        keeper.save("first")
        assert keeper.restore().id == "first"


def test_what_cannot_take_its_state_back_is_rejected_before_it_is_saved(tmp_path):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ConfigError, match=r"has no load_state_dict\(state, strict\)"):
        Checkpointer(optimizer, dir=tmp_path)


def test_bare_module_is_tested_for_finite_weights_too(tmp_path):
    model = torch.nn.Linear(2, 1)
    with Checkpointer(model, dir=tmp_path, signals=False) as keeper:
        keeper.save(1)
        model.weight.data[0, 0] = float("nan")
        with pytest.raises(NonFiniteStateError, match="weight"):
            keeper.save(2)


class Attributes(dict):
    """A dict whose entries are attributes: what it does not have is a KeyError."""

    __getattr__ = dict.__getitem__


def test_settings_in_a_dict_with_attributes_are_saved_and_restored(tmp_path):
    ctx = Context(settings=Attributes(lr=0.1, inner=Attributes(depth=2)), model=torch.nn.Linear(1, 1))
    with Checkpointer(ctx, dir=tmp_path, signals=False, best="loss") as keeper:
        keeper.save(1)
        ctx.settings["inner"]["depth"] = 3
        keeper.restore()
    assert type(ctx.settings) is Attributes and ctx.settings.inner.depth == 2


def test_what_a_step_has_computed_is_not_part_of_the_test_for_finite_values(tmp_path):
    state = State(model=torch.nn.Linear(1, 1))
    state.outputs, state.batch = Attributes(), torch.nn.Linear(1, 1)
    state.batch.weight.data.fill_(float("nan"))
    with Checkpointer(state, dir=tmp_path, signals=False) as keeper:
        keeper.save(1)


def test_modules_inside_of_containers_are_tested_for_finite_values(tmp_path):
    ctx = Context(models={"a": [torch.nn.Linear(1, 1)]})
    ctx.models["a"][0].weight.data.fill_(float("nan"))
    with (
        Checkpointer(ctx, dir=tmp_path, signals=False) as keeper,
        pytest.raises(NonFiniteStateError, match=r"models\.a\.0\.weight"),
    ):
        keeper.save(1)


def test_number_that_was_an_id_finds_its_checkpoint(tmp_path):
    with Checkpointer(make_context(), dir=tmp_path, signals=False) as keeper:
        keeper.save(1)
        keeper.save(2)
        assert keeper.restore(1).id == "1"


@pytest.mark.parametrize("async_save", [False, True])
def test_default_device_of_the_program_does_not_matter(tmp_path, async_save):
    """Buffers and random states belong on the host; on a device of `torch.set_default_device` they cannot be pinned or read."""
    ctx = make_context()
    ctx.words = np.array([], dtype="U3")
    with torch.device("meta"), Checkpointer(ctx, dir=tmp_path, async_save=async_save, signals=False) as keeper:
        keeper.save(1)
        assert keeper.restore().id == "1"


def test_a_folder_that_cannot_be_listed_is_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    def fail(directory):
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr("drivetrain.checkpoint.layout.checkpoint_folders", fail)
    with pytest.raises(CheckpointError, match="Permission denied"):
        Checkpointer(make_context(), dir=tmp_path, signals=False).restore()


def test_a_folder_is_taken_by_the_first_step_or_restore_of_a_run_that_saves_at_intervals(tmp_path):
    for name, begin in {"step": Checkpointer.step, "restore": Checkpointer.restore}.items():
        with Checkpointer(Context(x=1), every=5, dir=tmp_path / name, signals=False) as keeper:
            begin(keeper)
            assert (tmp_path / name / "writer.lock").exists()
    own = Checkpointer(Context(x=1), dir=tmp_path / "dropped", signals=False)
    own.save()
    assert (tmp_path / "dropped" / "writer.lock").exists()
    del own
    assert not (tmp_path / "dropped" / "writer.lock").exists()


def test_a_loop_that_fails_leaves_its_last_save_whole_and_the_folder_free(tmp_path):
    def fail():
        with keeper:
            keeper.save()
            raise KeyError

    keeper = Checkpointer(Context(x=1), dir=tmp_path, async_save=True)
    with pytest.raises(KeyError):
        fail()
    assert len(keeper.list()) == 1 and not keeper._job.is_busy and not (tmp_path / "writer.lock").exists()
    assert StopSignals.active() is None


def test_the_end_of_a_run_whose_last_save_failed_is_an_error(tmp_path):
    keeper = Checkpointer(Context(x=1), dir=tmp_path, signals=False)
    with full_disk():
        keeper.save()
    assert keeper.failures_in_a_row == 1 and keeper.last_failure is not None
    with pytest.raises(WriteFailedError):
        keeper.close()


def test_the_best_checkpoint_of_an_earlier_run_stays_where_this_one_knows_no_best(tmp_path):
    with Checkpointer(Context(x=1), dir=tmp_path, best="loss", signals=False) as keeper:
        keeper.save("good", {"loss": 0.1})
    with Checkpointer(Context(x=1), dir=tmp_path, keep=1, signals=False) as keeper:
        for name in ("later", "last"):
            keeper.save(name)
        assert ids(keeper) == ["good", "last"]


def test_a_folder_that_the_first_save_made_and_that_disappears_is_missed(tmp_path):
    with Checkpointer(Context(x=1), dir=tmp_path / "new", signals=False) as keeper:
        keeper.save(1)
        shutil.rmtree(tmp_path / "new")
        with pytest.warns(DrivetrainWarning, match="disappeared during the run"):
            keeper.save(2)


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state, strict=True):
        self.count = state["count"]
        return "loaded"


def test_an_object_with_its_own_state_is_saved_and_restored(tmp_path):
    counter = Counter()
    with Checkpointer(counter, dir=tmp_path, signals=False) as keeper:
        assert keeper.last_stall == 0.0
        counter.count = 4
        keeper.save()
        assert keeper.last_stall > 0
        counter.count = 5
        assert keeper.restore().report == "loaded" and counter.count == 4
