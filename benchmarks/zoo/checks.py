"""What the zoo asks of every model. Each check returns "ok", "warned: of what", "rejected: reason", "no effect", "wrong: what" or
"error: what".

The reference is a loop written out by hand, with SGD and momentum: adaptive optimizers hide errors of scale. Weights are compared
parameter by parameter, as movements: the difference of two runs over how far the parameter has moved.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

import drivetrain.algorithms
from benchmarks.zoo.task import BATCH, NUM_SAMPLES, Entry, Task, in_float64
from drivetrain import Trainer
from drivetrain.core.errors import DrivetrainError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the models train, those of the Trainer and the reference."""
RATE, MOMENTUM, STEPS = 0.02, 0.9, NUM_SAMPLES // BATCH
EXACT, CLOSE, HALF = 0.0, 2e-3, 0.3
"""How far a parameter may be from the reference, over its movement: the same arithmetic, another order of sums in float32, 16 bits."""

METHODS: dict[str, tuple[object, float]] = {
    "amp_native": (("amp_native", {"dtype": "bf16"}), HALF),
    "half": ("half", HALF),
    "checkpoint": ("checkpoint", CLOSE),
    "native_dynamo": (("native_dynamo", {"backend": "aot_eager"}), CLOSE),
    "fused_optimizer": ("fused_optimizer", CLOSE),
    "micro_batch": (("micro_batch", {"accumulation": 2}), CLOSE),
    "channels_last": ("channels_last", CLOSE),
    "chunked_cross_entropy": ("chunked_cross_entropy", CLOSE),
}
"""Methods that one process can run, with settings for a CPU."""

PARALLEL: dict[str, tuple[list[object], float]] = {
    "data": (["parallel_mode"], CLOSE),
    "zero1": (["zero1"], CLOSE),
    "zero2": (["zero2"], CLOSE),
    "fsdp": (["fsdp"], CLOSE),
    "tensor": ([("parallel_mode", [("tensor", 2)]), "tensor_parallel"], CLOSE),
}
"""Methods for two ranks."""

SURGERY = (
    "BlurPool", "ChannelsLast", "Factorize", "GatedLinearUnits", "GhostBatchNorm", "GyroDropout", "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm", "SqueezeExcite", "StochasticDepth", "WeightStandardization", "Alibi",
)  # fmt: skip
SURGERY_SETTINGS: dict[str, dict[str, object]] = {
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck"},
    "Alibi": {"max_sequence_length": 32},
}


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    """Return the optimizer of every run here."""
    sparse = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in model.modules())
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.0 if sparse else MOMENTUM
    )


def hand_written(task: Task, dtype: torch.dtype | None = None) -> nn.Module:
    """Train a copy of the model by a loop written out; `dtype` computes under autocast."""
    model = copy.deepcopy(task.model).to(DEVICE).train()
    optimizer = optimizer_of(model)
    for batch in DataLoader(task.data, BATCH, collate_fn=task.collate_fn):
        batch = tree_map_only(Tensor, lambda item: item.to(DEVICE), batch)
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            if isinstance(batch, dict):
                outputs = model(**batch)
                loss = outputs["loss"] if isinstance(outputs, dict) else outputs.loss
            else:
                assert task.loss_func is not None
                loss = task.loss_func(model(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained(
    task: Task, *, steps: int = STEPS, model: nn.Module | None = None, train: dict | None = None, **settings
) -> nn.Module:
    """Train a copy of the model in the Trainer and return it, whole and unwrapped."""
    model = copy.deepcopy(task.model) if model is None else model
    trainer = Trainer(model, task.loss_func, optimizer_of(model), callbacks=(), **settings)
    trainer.train(
        task.data, num_epochs=1, max_num_train_steps=steps, collate_fn=task.collate_fn,
        train_dataloader_kwargs={"shuffle": False, "num_workers": 0}, **({"global_batch_size": BATCH} | (train or {})),
    )  # fmt: skip
    return trainer.get_model()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return whole copies of the parameters by name, whatever they were wrapped in."""
    from drivetrain.module.full_state import full_state_dict

    names = {name for name, _ in model.named_parameters()}
    return {
        name: value.detach().to("cpu", copy=True) for name, value in full_state_dict(model).items() if name in names
    }


def difference(
    task: Task, expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float, is_rounded: bool = False
) -> tuple[float, str]:
    """Return the largest difference over the movement of its parameter, and that parameter's name.

    `is_rounded`: the weights themselves are kept in 16 bits.
    """
    worst, name_of_worst = 0.0, ""
    movements = {name: (expected[name] - start.detach()).abs().max() for name, start in task.model.named_parameters()}
    # Some gradients are zero in exact arithmetic, as those of a key's bias: what is left of them is rounding.
    least = (1e-2 if tolerance >= HALF else 1e-5) * max(movement.item() for movement in movements.values())
    for name, start in task.model.named_parameters():
        if name not in found:
            return float("inf"), name
        noise = (2e-2 if is_rounded else 1e-6) * start.detach().abs().max().clamp(min=1e-3) * (tolerance > EXACT)
        apart = (found[name].detach().to(start.dtype) - expected[name]).abs().max()
        if apart > noise:
            ratio = float(apart / movements[name].clamp(min=max(least, float(noise))))
            if not ratio <= worst:
                worst, name_of_worst = ratio, name
    return worst, name_of_worst


def judged(
    task: Task,
    expected: nn.Module,
    run: Callable[[], nn.Module | dict[str, Tensor] | str],
    tolerance: float,
    is_rounded: bool = False,
) -> str:
    """Run, compare with what was expected and say how it went."""
    found: nn.Module | dict[str, Tensor] | str = ""

    def keep() -> None:
        nonlocal found
        found = run()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = outcome_of(keep)
    if outcome is None and isinstance(found, str):  # of the ranks
        outcome = found
    if outcome is not None:
        return outcome
    reference, result = weights(expected), found if isinstance(found, dict) else weights(found)
    apart, name = difference(task, reference, result, tolerance, is_rounded)
    if apart <= tolerance:
        return "ok"
    if (
        tolerance >= HALF
    ):  # 16 bits themselves may be far from float32: they are compared with a plain loop in 16 bits, too
        usual = weights(hand_written(task, torch.bfloat16))
        limit = max(tolerance, 2 * difference(task, reference, usual, tolerance)[0])
        apart = min(apart, difference(task, usual, result, tolerance, is_rounded)[0])
        if apart <= limit:
            return "ok"
    if any("mean over" in str(warning.message) for warning in caught):
        return f"warned: it is not known what the loss is a mean over; {name} is off by {apart:.2g} of its movement"
    return f"wrong: {name} is off by {apart:.2g} of its movement"


def outcome_of(run: Callable[[], object]) -> str | None:
    """Run quietly; return how it was rejected or failed, None where it was not."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            run()
        except DrivetrainError as error:
            return f"rejected: {_first_line(error)}"
        except Exception as error:  # what a user would see as a crash
            return f"error: {type(error).__name__}: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def check_trains(entry: Entry) -> str:
    """Train in the Trainer as it comes; the weights are those of the loop by hand."""
    task = entry.build()
    return judged(task, hand_written(task), lambda: trained(task), 1e-5)


def check_resumes(entry: Entry) -> str:
    """Stop in the middle and go on in a new Trainer: bit for bit the run that was not stopped."""
    task = entry.build()
    whole = trained(task)
    with tempfile.TemporaryDirectory() as folder:
        keeping = {"checkpoint_dir": folder, "checkpoint_every": "1ba", "async_checkpoint": False}

        def stopped_and_resumed() -> nn.Module:
            trained(task, steps=STEPS // 2, train=keeping)
            fresh = copy.deepcopy(task.model)
            with torch.no_grad():
                for parameter in fresh.parameters():
                    parameter.zero_()
            return trained(task, model=fresh, train={**keeping, "resume_from": "auto"})

        return judged(task, whole, stopped_and_resumed, EXACT)


def check_method(entry: Entry, method: str) -> str:
    """Train with one method of a plan."""
    plan, tolerance = METHODS[method]
    task = entry.build()
    torch._dynamo.reset()  # models of transformers share a wrapper that would be compiled for each of them, up to a limit
    if task.mixes_samples and method == "micro_batch":
        return "not comparable: samples of a batch depend on each other"
    if task.mixes_samples and tolerance < HALF:
        task = in_float64(task)
    return judged(
        task, hand_written(task), lambda: trained(task, strategy=[plan]), tolerance, is_rounded=method == "half"
    )


def check_automatic(entry: Entry, seconds: float = 8.0) -> str:
    """Let a search find the plan in little time, and train with it."""
    task = entry.build()
    return judged(task, hand_written(task), lambda: trained(task, strategy="auto", strategy_time_limit=seconds), HALF)


def check_surgery(entry: Entry, name: str) -> str:
    """Apply an algorithm that changes the model: it does, or says why not."""
    task = entry.build()
    model = copy.deepcopy(task.model)
    before = [(name, type(module), module.extra_repr()) for name, module in model.named_modules()]
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("always")
        try:
            algorithm = getattr(drivetrain.algorithms, name)(**SURGERY_SETTINGS.get(name, {}))
            changed = trained(task, steps=1, model=model, algorithms=[algorithm])
        except DrivetrainError as error:
            return f"rejected: {_first_line(error)}"
        except Exception as error:
            return f"error: {type(error).__name__}: {_first_line(error)}"
    if not all(torch.isfinite(p).all() for p in changed.parameters()):
        return "wrong: weights are not finite"
    after = [(name, type(module), module.extra_repr()) for name, module in changed.named_modules()]
    is_hooked = any(module._forward_pre_hooks or module._forward_hooks for module in changed.modules())
    is_laid_out = any(p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) for p in changed.parameters())
    if before != after or is_hooked or is_laid_out:
        return "ok"
    says_why = any(name in str(warning.message) for warning in caught)
    return "no effect" if says_why else "wrong: nothing has changed and nothing was said"


# ---------------------------------------------------------------------- on two ranks


Answer = tuple[dict[str, Tensor] | str, list[str]]
"""The whole weights, or how a run was rejected or failed; and what it warned of."""


def on_rank(build: Callable[[], Entry], plan: list[object] | None) -> Answer:
    """Train on this rank, as one of several."""
    task = build().build()
    settings = {} if plan is None else {"strategy": plan}
    found: dict[str, Tensor] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = outcome_of(lambda: found.update(weights(trained(task, **settings))))
    return outcome or found, [str(warning.message) for warning in caught]


def received(answer: Answer) -> dict[str, Tensor] | str:
    """Return what a rank found, and warn here of what it warned of there."""
    found, messages = answer
    for message in messages:
        warnings.warn(message, stacklevel=2)
    return found
