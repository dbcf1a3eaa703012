"""What a search must be able to do with a training program: build the model, take samples, compute the loss, and apply a plan to it.

A task can be sent to another process: every field is a module, plain data or an importable function. `auto_accelerate` and the
Trainer each make one. Profile, simulation and trials know nothing else about the loop.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, default_collate

from drivetrain.context.context import Context
from drivetrain.core.types import Batch, Settings
from drivetrain.module.compilation import LossGraph
from drivetrain.module.loss_items import UNKNOWN, LossItems
from drivetrain.module.probing import copy_model, eval_mode
from drivetrain.runtime.seeds import capture_rng, preserve_rng_state, same_state
from drivetrain.strategy.apply import Application, LossFunc, PrepareInput, prepared_input, shape
from drivetrain.strategy.batching import BatchSplit
from drivetrain.strategy.optimizer_recipe import OptimizerRecipe
from drivetrain.strategy.resolve import ResolvedPlan
from drivetrain.strategy.stepping import finish

ParameterGroups = Callable[[nn.Module], Iterable[nn.Parameter] | Iterable[Settings]]
"""What an optimizer trains of a model."""

NUM_SAMPLES = 32
"""Number of samples that a search and a trial use; they repeat if more are needed."""


class Uncollated(NamedTuple):
    """Samples that only their loader's function can join: a batch of graphs, or of images of any size, is not cut along a dimension."""

    rows: list[object]
    collate: Callable[[list[object]], Batch]


def joined(samples: Batch) -> Batch:
    """Return samples as a loader yields them."""
    return samples.collate(samples.rows) if isinstance(samples, Uncollated) else samples


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """One training program, in the parts that plans are made for."""

    model: nn.Module | None = None
    model_fn: Callable[[], nn.Module] | None = None
    """Makes the model again; asked before `model`, which is copied."""
    call: Callable[[nn.Module, Any], Any]
    """Calls a model with its prepared input."""
    loss_func: LossFunc | None = None
    """The loss of prepared input and output: a scalar, or a sequence that begins with it."""
    prepare_input: PrepareInput | None = None
    optim_func: Callable[..., torch.optim.Optimizer] | None = None
    optim_args: Mapping[str, Any] = field(default_factory=dict)
    optim_param_func: ParameterGroups | None = None
    samples: Batch = None
    """Some samples as a loader yields them: nested containers whose tensors have samples along the first dimension; or `Uncollated`."""
    global_batch_size: int = 1
    find_unused_parameters: bool = False
    count_items: Callable[[Any], Any] | None = None
    """Counts what the loss of prepared input is a mean over; None: as `items` says, else samples."""
    items: LossItems = UNKNOWN
    """What the loss is a mean over, where `with_counted_loss` has found it."""
    loss_graph: LossGraph = "apart"
    """Whether the loop can call model and loss function as one compiled graph."""

    def build(self) -> nn.Module:
        """Return a separate model with its own memory."""
        if self.model_fn is not None:
            return self.model_fn()
        if self.model is None:
            raise ValueError("a task needs model or model_fn.")
        return copy_model(self.model)

    def batch(self, size: int) -> Batch:
        """Return `size` samples as a loader yields them, repeated if there are fewer."""
        return self.rows(range(size))

    def rows(self, numbers: Iterable[int]) -> Batch:
        """Return the samples with these numbers as a loader yields them; the first follows the last."""
        have = self.sample_count
        chosen = [number % max(1, have) for number in numbers]
        if isinstance(self.samples, Uncollated):
            return self.samples.collate([self.samples.rows[number] for number in chosen])
        return tree_map_only(
            Tensor, lambda tensor: tensor[chosen] if tensor.shape[:1] == (have,) else tensor, self.samples
        )

    def missing(self) -> str | None:
        """Return why no plan can be tried, or None if it can."""
        needs = {"loss_func": self.loss_func, "optim_func": self.optim_func, "readable data": self.samples}
        missing = [name for name, value in needs.items() if value is None]
        return f"there is no {' and no '.join(missing)}" if missing else None

    @property
    def sample_count(self) -> int:
        """The number of available samples."""
        if isinstance(self.samples, Uncollated):
            return len(self.samples.rows)
        sizes = [leaf.shape[0] for leaf in tree_leaves(self.samples) if isinstance(leaf, Tensor) and leaf.ndim > 0]
        return max(sizes, default=0)

    def prepared(self, batch: Batch, device: torch.device) -> Batch:
        """Return the model's input for a batch of the loader."""
        return prepared_input(batch, device, self.prepare_input)

    def loss(self, inputs: Batch, outputs: Any) -> Tensor:
        """Return the loss alone."""
        if self.loss_func is None:
            raise ValueError("the task has no loss_func.")
        result = self.loss_func(inputs, outputs)
        return result[0] if isinstance(result, list | tuple) else result

    @property
    def is_counted(self) -> bool:
        """Whether the weights of the losses of partial batches are known."""
        return self.count_items is not None or self.items.kind != "unknown"

    def recipe(self) -> OptimizerRecipe | None:
        """Return how the optimizer is made, or None without one."""
        if self.optim_func is None:
            return None
        recipe = OptimizerRecipe(build=self.optim_func, settings=dict(self.optim_args))
        recipe.groups = self.optim_param_func or recipe.groups
        return recipe

    def shaped(
        self,
        model: nn.Module,
        resolved: ResolvedPlan,
        batch: BatchSplit | None,
        make_loader: Callable[[Application], Any] | None = None,
    ) -> Application:
        """Apply a plan to a model, its optimizer and its loss. A loop uses `stepping` and `optimizer` of the result.

        `make_loader` is called when the mesh is there, so that a loader knows its share.
        """
        run = None if self.samples is None else self.run_samples
        context = Context(model=model, optimizer=None, loader=None, lr_scheduler=None, scaler=None)
        context._device = resolved.site.device
        ctx = Application(
            context, resolved, self.recipe(), self.loss_func, self.prepare_input, run,
            count_items=self.count_items, items=self.items, loss_graph=self.loss_graph,
        )  # fmt: skip
        if self.find_unused_parameters:
            ctx.ddp_settings["find_unused_parameters"] = True
        shape(ctx)
        finish(ctx, None if make_loader is None else make_loader(ctx), batch)
        return ctx

    def run_samples(self, model: nn.Module) -> Any:
        """Return a model's outputs for a few samples, in evaluation mode and without gradients."""
        place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        inputs = self.prepared(self.batch(min(8, self.sample_count)), place)
        with eval_mode(model), torch.no_grad():
            return self.call(model, inputs)


def read_samples(dataset: Any, collate: Callable[..., Batch] | None = None, count: int | None = NUM_SAMPLES) -> Batch:
    """Return the first samples of a dataset as a loader yields them, or `Uncollated` where that cannot be cut into samples again.

    `count` is None for a dataset of whole batches. Random states are restored.
    """
    with preserve_rng_state():
        if count is None:
            return next(iter(DataLoader(dataset, batch_size=None, collate_fn=collate)))
        read, join = next(iter(DataLoader(dataset, count, collate_fn=lambda rows: rows))), collate or default_collate
        if not isinstance(read, list):  # a dataset may return several rows as one object
            return join(read)
        rows = [row for row in read if row is not None]  # a function that joins rows leaves those out
        before = capture_rng()
        try:
            batch = join(rows)
        except Exception:  # rows that a sampler puts into different batches
            rows = rows[:1]
            batch = join(rows)
        is_random = not same_state(before, capture_rng())  # joined again, the rows would be others
        is_whole = join is default_collate or is_random or _can_be_cut(batch, rows, join)
    return batch if is_whole else Uncollated(rows, join)


def _can_be_cut(batch: Batch, rows: list[object], join: Callable[[list[object]], Batch]) -> bool:
    """Return whether the tensors of joined rows have them along the first dimension, or are the same for a single row."""
    try:
        single = join(rows[:1])
    except Exception:  # it joins several rows only
        return True
    pairs = [[leaf.shape for leaf in tree_leaves(one) if isinstance(leaf, Tensor)] for one in (batch, single)]
    has_rows = [many[:1] == (len(rows),) and one[:1] == (1,) for many, one in zip(*pairs)]
    is_known = len(pairs[0]) == len(pairs[1]) and any(has_rows)
    return is_known and all(has or many == one for has, many, one in zip(has_rows, *pairs))


@dataclass(frozen=True)
class CallModel:
    """Calls a model as `model_input_format` defines: `model(x)`, `model(*x)` or `model(**x)`."""

    input_format: str | None = None

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        if self.input_format == "unpack_dict":
            return model(**inputs)
        return model(*inputs) if self.input_format == "unpack_sequence" else model(inputs)
