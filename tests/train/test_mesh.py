"""The Trainer on meshes with tensor and sequence axes does what one plain process does."""

import importlib.util
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from drivetrain.core.errors import ConfigError, ConflictError, DrivetrainError
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.finite import any_nonfinite
from drivetrain.module.wrapping import named_clean_parameters
from drivetrain.runtime.ranks import clear_data_ranks, get_num_processes, num_data_ranks
from drivetrain.train.callbacks import LimitEvalStepsCallback, TrainerCallback
from drivetrain.train.planning import constraints_of, request_of
from drivetrain.train.settings import TrainSettings
from drivetrain.train.trainer import Trainer
from tests.strategy.tasks import VOCAB, TinyGPT

TENSOR = [("parallel_mode", [("tensor", 2)]), "tensor_parallel"]
SEQUENCE = [("parallel_mode", [("sequence", 2)]), "sequence_parallel"]
TENSOR_DATA = [("parallel_mode", [("tensor", 2), ("data", 2)]), "tensor_parallel"]
TENSOR_ZERO = [("parallel_mode", [("tensor", 2), ("zero", 2)]), "tensor_parallel", "fsdp"]
SEQUENCE_DATA = [("parallel_mode", [("sequence", 2), ("data", 2)]), "sequence_parallel"]


class WithDropout(TinyGPT):
    """Drops where every rank holds the whole."""

    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.Sequential(self.norm, nn.Dropout(dropout))


def texts(size=21):
    rows = torch.randint(0, VOCAB, (size, 9), generator=torch.Generator().manual_seed(1))
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).float().mean()


def counting_metric():
    """Return a metric of torchmetrics that sums over ranks, so that a sample counted twice shows; nothing where it is not installed."""
    if importlib.util.find_spec("torchmetrics") is None:
        return {}
    import torchmetrics

    class Count(torchmetrics.Metric):
        full_state_update = False

        def __init__(self):
            super().__init__()
            self.add_state("rows", default=torch.tensor(0), dist_reduce_fx="sum")

        def update(self, outputs, targets):
            self.rows += len(targets)

        def compute(self):
            return self.rows

    return {"rows": Count(), "more": torchmetrics.MetricCollection({"rows": Count()})}


class StepLosses(TrainerCallback):
    """Keeps each batch's loss, of this rank's samples, and looks at nothing else."""

    def __init__(self):
        self.values = []

    def batch_end(self, state, logger):
        self.values.append(state.loss.item())


def make_trainer(strategy, dropout=0.0, optimizer=torch.optim.AdamW, callbacks=(), **kwargs):
    torch.manual_seed(0)
    model = WithDropout(dropout)
    steady = {"eps": 1e-4} if optimizer is torch.optim.AdamW else {}  # a gradient of mere rounding makes no step
    made = optimizer(model.parameters(), lr=0.01, **steady)
    return Trainer(model, token_loss, made, strategy=strategy, device="cpu", seed=3, callbacks=callbacks, **kwargs)


def train(trainer, data=None, **kwargs):
    settings = {"num_epochs": 1, "global_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_clip_norm": 0.5}
    return trainer.train(texts() if data is None else data, **{**settings, **kwargs})


def weights_of(trainer):
    named = named_clean_parameters(trainer.model)
    return {name: (p.full_tensor() if is_dtensor(p) else p).detach().clone() for name, p in named}


def history_of(trainer):
    return {name: list(trainer.run_history.get_metric_values(name)) for name in trainer.run_history.get_metric_names()}


def run(strategy, watched=True):
    """Train twice, evaluate and predict, with everything that counts over ranks; return what a user sees."""
    losses = StepLosses()
    looks = {"train_metrics": {"accuracy": accuracy}} if watched else {}
    limit = LimitEvalStepsCallback(2, limit_intermediate_only=True)
    trainer = make_trainer(
        strategy, callbacks=[losses, limit], metrics={"accuracy": accuracy, **counting_metric()}, **looks
    )
    for _ in range(2):
        train(trainer, eval_dataset=texts(13), reset_run_history=False)
    history, config = history_of(trainer), trainer.run_config
    outputs = trainer.predict(texts(7), per_device_batch_size=2)
    evaluated = trainer.evaluate(texts(7), per_device_batch_size=2)
    weights, ranks = weights_of(trainer), num_data_ranks()
    plain = make_trainer(None)
    train(plain, texts(4 * get_num_processes()), max_num_train_steps=1)
    assert num_data_ranks() == get_num_processes()  # another trainer's plan is its own affair
    return {
        "losses": losses.values, "history": history, "norm": trainer.last_grad_norm.item(), "outputs": outputs,
        "evaluated": evaluated, "weights": weights, "ranks": ranks, "processes": config.num_processes,
        "counts": (trainer.state.clock.sample, trainer.state.clock.step,
                   config.train_total_batch_size, config.num_local_update_steps_per_epoch),
        "notes": "" if strategy is None else " ".join(trainer.plan.reasons),
    }  # fmt: skip


def check_against_plain(found, others, expected):
    """Compare a mesh with the plain run; `others` are the results of all ranks."""
    first = [sum(values) / len(values) for values in zip(*(other["losses"] for other in others))]
    assert first[0] == pytest.approx(expected["losses"][0], rel=1e-5)
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-4), name
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    assert found["counts"] == expected["counts"] and found["processes"] == len(others)
    torch.testing.assert_close(found["outputs"], expected["outputs"], rtol=0, atol=2e-3)
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-4)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-3, msg=name)
    for name in ("history", "evaluated", "norm"):
        assert found[name] == others[0][name]  # to the last bit: ranks decide alike


def test_two_processes_follow_the_plain_run(world2):
    for plan, watched in ((TENSOR, False), (SEQUENCE, True)):
        expected, others = run(None, watched), world2(run, plan, watched)
        for found in others:
            check_against_plain(found, others, expected)
            assert found["ranks"] == 1 and ("logits stay split" in found["notes"]) == (not watched)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [TENSOR_DATA, SEQUENCE_DATA])
def test_four_processes_follow_the_plain_run(world4, plan):
    expected, others = run(None), world4(run, plan)
    for found in others:
        check_against_plain(found, others, expected)
        assert found["ranks"] == 2


class Noise(Algorithm):
    """Replaces a few tokens of every batch by random ones."""

    events, writes = frozenset({Event.AFTER_DATALOADER}), ("batch",)

    def apply(self, event, state, logger):
        tokens, targets = state.batch
        drawn = torch.randint(0, 3 * VOCAB, tokens.shape, generator=state.rng("noise"))
        state.batch = torch.where(drawn < VOCAB, drawn, tokens), targets


def run_with_noise(strategy):
    trainer = make_trainer(strategy, algorithms=[Noise()])
    train(trainer)
    weights = weights_of(trainer)
    clear_data_ranks()
    return weights


def test_ranks_of_one_group_change_a_batch_alike(world2):
    plain, expected = run_with_noise(None), make_trainer(None)
    train(expected)
    assert any(not torch.allclose(plain[name], value, atol=1e-3) for name, value in weights_of(expected).items())
    for plan in (TENSOR, SEQUENCE):
        for found in world2(run_with_noise, plan):
            for name, value in plain.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3, msg=name)


def save_and_resume(plan, folder, epochs=2, cut=7):
    """Return the weights of a run and of the same run cut inside an accumulation window, and what a file of weights holds."""
    results = []
    for place, parts in (
        ("whole", [{}]),
        ("cut", [{"max_duration": f"{cut}ba", "num_epochs": None}, {"resume_from": "auto"}]),
    ):
        for part in parts:
            trainer = make_trainer(plan, dropout=0.3)
            settings = {"num_epochs": epochs, "checkpoint_dir": folder / place, "keep_checkpoints": None, **part}
            train(trainer, **settings)
        results.append((weights_of(trainer), history_of(trainer)))
        assert trainer.state.clock.batch == 6 * epochs
    trainer.save_checkpoint(folder / "weights.pt")
    held = torch.load(folder / "weights.pt", weights_only=True)["model_state_dict"]
    clear_data_ranks()
    return (*results, {name: held[name] for name in results[1][0]})


@pytest.mark.parametrize("plan", [TENSOR, pytest.param(SEQUENCE, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_cut_inside_a_window_goes_on_exactly(world2, tmp_path, plan, caplog):
    answers = world2(save_and_resume, plan, tmp_path)
    for (weights, history), (resumed, same), held in answers:
        assert history == same
        for key, value in weights.items():
            assert torch.equal(resumed[key], value) and torch.equal(held[key], value), key
            # Ranks of one group drop the same entries: else what each holds whole would drift apart.
            torch.testing.assert_close(value, answers[0][0][0][key], rtol=0, atol=1e-5)
    # Another mesh goes on from a checkpoint between two updates: this one has none after batch 6 before batch 12.
    shutil.rmtree(tmp_path / "cut" / "checkpoint-ep2-ba12")
    trainer = make_trainer(None)
    train(trainer, num_epochs=None, max_duration="8ba", resume_from=tmp_path / "cut")
    assert "inside an accumulation window" in caplog.text and "ba7 is skipped" in caplog.text
    trainer = make_trainer(None)
    train(trainer, num_epochs=3, resume_from=tmp_path / "whole" / "checkpoint-ep2-ba12")
    assert trainer.state.clock.batch == 18


@pytest.mark.slow
@pytest.mark.parametrize("plan", [TENSOR_ZERO, pytest.param(TENSOR_DATA, marks=pytest.mark.slow)])
def test_a_run_on_columns_of_a_mesh_is_saved_once_and_goes_on_exactly(world4, tmp_path, plan):
    """Parameters outside the tensor plan are sharded in each column anew: equal ones are written by the first column."""
    answers = world4(save_and_resume, plan, tmp_path, epochs=1, cut=3)
    for (weights, history), (resumed, same), held in answers:
        assert history == same
        for key, value in weights.items():
            assert torch.equal(resumed[key], value) and torch.equal(held[key], value), key
    trainer = make_trainer(None, dropout=0.3)
    train(trainer, num_epochs=1, resume_from=tmp_path / "whole" / "checkpoint-ep1-ba6")
    for key, value in weights_of(trainer).items():  # nothing is left to train: these are the weights that were saved
        torch.testing.assert_close(value, answers[0][0][0][key], rtol=0, atol=1e-6)


def refusals():
    """Return what the Trainer says to what it cannot do on a mesh, by name; nothing has been trained then."""
    sequence = ("sequence_parallel", {"batch_sp_processing_fn": lambda batch, size, rank: batch})
    cases = {
        "pipe": ([("parallel_mode", [("pipe", 2)]), "pipeline_parallel"], {}),
        "batch_sp_processing_fn": ([SEQUENCE[0], sequence], {}),
        "LBFGS": (TENSOR, {"optimizer": torch.optim.LBFGS}),
        "float16": ([*TENSOR, ("amp_native", "fp16")], {}),
        "loss_parallel": (
            [TENSOR[0], ("tensor_parallel", {"loss_parallel": True})],
            {"train_metrics": {"accuracy": accuracy}},
        ),
    }
    said = {}
    for name, (plan, kwargs) in cases.items():
        trainer = make_trainer(plan, **kwargs)
        with pytest.raises(DrivetrainError) as refusal:
            train(trainer)
        said[name] = str(refusal.value)
        assert num_data_ranks() == 2 and trainer.state.clock.batch == 0
    own = DataLoader(texts(), batch_size=4, sampler=DistributedSampler(texts()))
    with pytest.raises(ConfigError, match="must see the same samples") as refusal:
        train(make_trainer(TENSOR), own, global_batch_size=None)
    said["DistributedSampler"] = str(refusal.value)
    clear_data_ranks()
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), float("nan") if torch.distributed.get_rank() == 1 else 1.0)
    said["finite"] = not any_nonfinite([weight])
    return said


def test_what_cannot_work_is_refused_before_the_first_step(world2):
    for said in world2(refusals):
        assert said.pop("finite") is False  # one rank's gradient concerns all
        for name, text in said.items():
            assert name in text or (name == "pipe" and "pipeline" in text), (name, text)


def test_the_search_may_use_what_the_loop_can_do():
    def excluded(**kwargs):
        trainer = make_trainer("auto", **kwargs)
        trainer.settings = TrainSettings(num_epochs=1)
        return constraints_of(request_of(trainer)).excluded

    assert excluded().isdisjoint({"chunked_cross_entropy", "cpu_offload"})
    assert {"tensor_parallel", "sequence_parallel", "pipeline_parallel"} <= excluded()
    looks = excluded(train_metrics={"accuracy": accuracy})
    assert "chunked_cross_entropy" in looks and "cpu_offload" not in looks
    with pytest.raises(ConflictError, match="train_metrics"):
        train(make_trainer(["chunked_cross_entropy"], train_metrics={"accuracy": accuracy}))
