"""The State: fields, time, randomness, and how plugins are saved."""

import io

import pytest
import torch
from torch import nn

from drivetrain.context import Context, State
from drivetrain.core.errors import DeviceError, StateError
from drivetrain.core.plugin import Algorithm, Callback
from drivetrain.core.time import Time
from drivetrain.runtime.run import Run, set_current_run
from drivetrain.runtime.seeds import derive_seed

FIELDS = (
    "model rank_zero_seed seed run_name device max_duration device_train_microbatch_size auto_microbatching train_dataloader "
    "evaluators dataloader dataloader_label dataloader_len dataset_state dataset_resumption precision precision_config "
    "optimizers schedulers scaler algorithms callbacks timestamp eval_timestamp predict_timestamp previous_timestamp batch "
    "outputs output loss total_loss_dict train_metrics eval_metrics metric_outputs profiler loss_fn accumulation_steps "
    "sample_index make_optimizer clock batch_output step is_intermediate timings"
)


class Shadow(Algorithm):
    """Keeps a tensor."""

    def __init__(self, decay: float = 0.9):
        self.decay, self.value = decay, torch.zeros(2)

    def match(self, event, state):
        return False

    def apply(self, event, state, logger): ...

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Surgery(Shadow):
    @staticmethod
    def required_on_load():
        return True


class Bar(Callback):
    def batch_end(self, state, logger): ...


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_all_fields_exist_and_the_state_is_made_by_keyword():
    model = nn.Linear(2, 1)
    state = State(model=model, rank_zero_seed=3, run_name="run", device="cpu", max_duration="2ep", extra=5)
    assert [name for name in FIELDS.split() if not hasattr(state, name)] == []
    assert state.model is model and state.seed == 3 and state.device == torch.device("cpu") and state.extra == 5
    assert state.max_duration == Time(2, "ep") and state.optimizers == () and isinstance(state, Context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert State(optimizers=optimizer).optimizers == (optimizer,) == State(optimizers=[optimizer]).optimizers


def test_fields_of_a_step_are_plain_attributes_and_are_neither_saved_nor_moved():
    state = State(model=nn.Linear(2, 1))
    state.batch, state.outputs, state.loss, state.timings = torch.ones(1), object(), object(), object()
    assert {"batch", "outputs", "loss"} <= set(vars(state))
    saved = state.state_dict()
    assert not set(saved) & State.transient
    state.to(torch.device("meta"))
    assert state.batch.device.type == "cpu" and state.model.weight.device.type == "meta"
    assert State.__setattr__ is object.__setattr__  # assignment costs what Python costs


def test_output_is_another_name_for_outputs():
    state = State()
    state.output = 3
    assert state.outputs == 3 == state.output


def test_the_timestamp_is_a_picture_of_the_clock_and_cannot_be_set():
    state = State()
    before = state.timestamp
    state.clock.next_batch(samples=4)
    assert (before.batch, state.timestamp.batch, state.timestamp.sample) == (0, 1, 4)
    with pytest.raises(AttributeError):
        state.timestamp = before


@pytest.mark.parametrize(
    ("duration", "elapsed"),
    [("4ep", (1 + 2 / 5) / 4), ("14ba", 0.5), ("28sp", 1.0), ("35st", 0.2), (None, None)],
)
def test_elapsed_duration_counts_batches_within_the_epoch(duration, elapsed):
    state = State(max_duration=duration)
    state.set_dataloader(range(5), "train")
    for batch in range(7):
        state.clock.next_batch(samples=4)
        if batch == 4:
            state.clock.next_epoch()
    state.set_dataloader(range(99), "eval")  # evaluating does not change how long an epoch is
    found = state.get_elapsed_duration()
    assert (found if found is None else found.value) == (elapsed if elapsed is None else pytest.approx(elapsed))
    assert found is None or found.unit == "dur"


def test_stop_training_ends_the_run_at_this_batch():
    state = State(max_duration="10ep")
    state.clock.next_batch()
    state.stop_training()
    assert state.max_duration == Time(1, "ba") and state.get_elapsed_duration() == Time(1.0, "dur")


def test_set_dataloader_asks_for_the_length():
    state = State()
    state.set_dataloader([1, 2, 3], "train")
    assert state.dataloader_len == Time(3, "ba") and state.dataloader_label == "train"
    state.set_dataloader([1, 2, 3], "train", 2)
    assert int(state.dataloader_len) == 2
    state.set_dataloader(iter([]), "stream")
    assert state.dataloader_len is None
    state.set_dataloader()
    assert state.dataloader is None and state.dataloader_label is None


def test_parts_of_the_batch_are_read_and_set():
    state = State()
    state.batch = (1, 2)
    state.batch_set_item(1, state.batch_get_item(0))
    assert state.batch == (1, 1)


def test_generators_are_seeded_by_name_and_continue_after_a_restore():
    state = State(rank_zero_seed=7)
    expected = torch.Generator().manual_seed(derive_seed(7, "mixup", 0))
    assert torch.equal(torch.rand(3, generator=state.rng("mixup")), torch.rand(3, generator=expected))
    assert state.rng("mixup") is state.rng("mixup") is not state.rng("cutmix")
    live = State(rank_zero_seed=99)
    mixup = live.rng("mixup")
    live.rng("new")
    live.load_state_dict(through_file(state.state_dict()))
    assert live.seed == 7 and live.rng("mixup") is mixup and set(live.generators) == {"mixup", "cutmix", "new"}
    for name in ("mixup", "cutmix"):
        assert torch.equal(torch.rand(3, generator=live.rng(name)), torch.rand(3, generator=state.rng(name)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_generators_of_an_absent_device_begin_anew():
    state = State(rank_zero_seed=7)
    state.rng("drop")
    saved = state.state_dict()
    saved["generators"]["drop@cuda"] = {
        "__drivetrain__": "generator",
        "value": {"device": "cuda:0", "seed": 1, "state": torch.zeros(16, dtype=torch.uint8)},
    }
    live = State()
    with pytest.warns(UserWarning, match="drop@cuda were saved on a device that this machine does not have"):
        live.load_state_dict(saved)
    assert set(live.generators) == {"drop"}
    with pytest.raises(DeviceError):
        live.device = "cuda"


def test_the_seed_comes_from_the_run_or_from_torch_when_none_is_given(tmp_path):
    torch.manual_seed(11)
    assert State().seed == 11
    set_current_run(Run(folder=tmp_path, seed=12))
    try:
        assert State().seed == 12 and State(seed=13).seed == 13 == State(rank_zero_seed=13).rank_zero_seed
    finally:
        set_current_run(None)


def make_state(**items):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return State(model, 1, optimizers=optimizer, schedulers=scheduler, scaler=torch.amp.GradScaler("cpu"), **items)


def test_a_state_is_saved_and_restored_as_a_whole():
    state = make_state(algorithms=[Shadow(0.5)], callbacks=[Bar()], notes={"a": 1})
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizers[0].step()
    state.schedulers[0].step()
    state.clock.next_batch(samples=8)
    state.algorithms[0].value += 3
    saved = through_file(state.state_dict())
    assert saved["algorithms"][0]["name"] == "Shadow" and saved["algorithms"][0]["config"] == {"decay": 0.5}
    live = make_state(algorithms=[Shadow(0.5)], callbacks=[Bar()], notes={})
    assert live.load_state_dict(saved).is_complete
    assert live.clock.state_dict() == state.clock.state_dict() and live.notes == {"a": 1}
    assert torch.equal(live.model.weight, state.model.weight)
    assert live.schedulers[0].last_epoch == 1 and live.algorithms[0].value.tolist() == [3, 3]
    assert isinstance(live.optimizers, tuple) and isinstance(live.optimizers[0], torch.optim.Adam)


def test_plugins_are_matched_by_name_and_order():
    source = State(algorithms=[Shadow(), Bar(), Shadow()])
    source.algorithms[0].value += 1
    source.algorithms[2].value += 2
    live = State(algorithms=[Bar(), Shadow(), Shadow()])
    live.load_state_dict(source.state_dict())
    assert [plugin.value[0].item() for plugin in live.algorithms[1:]] == [1, 2]


def test_other_plugins_than_before_are_said_and_required_ones_refused():
    with pytest.warns(UserWarning, match=r"algorithms\.Shadow is new"):
        State(algorithms=[Shadow()]).load_state_dict(State().state_dict())
    with pytest.warns(UserWarning, match=r"algorithms\.Shadow was saved with a state"):
        State().load_state_dict(State(algorithms=[Shadow()]).state_dict())
    State(callbacks=[Bar()]).load_state_dict(State().state_dict())  # nothing to say: it has no state
    with pytest.raises(StateError, match=r"algorithms\.Surgery: the saved model was made with it"):
        State().load_state_dict(State(algorithms=[Surgery()]).state_dict())


@pytest.mark.parametrize("name", ["optimizers", "schedulers", "scaler", "loss_fn", "model"])
def test_a_file_never_puts_plain_data_where_an_object_belongs(name):
    saved = through_file(make_state(loss_fn=nn.BatchNorm1d(1)).state_dict())
    live = make_state(loss_fn=nn.BatchNorm1d(1))
    setattr(live, name, () if name.endswith("s") else None)
    with pytest.raises(StateError, match=f"{name}"):
        live.load_state_dict(saved)


def test_an_optimizer_without_saved_state_is_missing():
    live = make_state()
    live.optimizers = (*live.optimizers, torch.optim.SGD(live.model.parameters(), lr=1))
    with pytest.raises(StateError, match=r"optimizers\.1"):
        live.load_state_dict(make_state().state_dict())


def test_settings_of_the_run_are_not_restored():
    saved = State(max_duration="9ep", run_name="old", accumulation_steps=4).state_dict()
    live = State(max_duration="2ep", run_name="new")
    live.load_state_dict(saved)
    assert live.max_duration == Time(2, "ep") and live.run_name == "new" and live.accumulation_steps == 1
