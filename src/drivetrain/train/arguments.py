"""Checks of what users pass to a Trainer, before anything is built: names of arguments, objects of the wrong type.

The constructor accepts model, loss function and optimizer without checks, because subclasses and tests may use anything there.
`train()` and the other methods check them here, by what they can do and not by their class.
"""

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, RandomSampler

from drivetrain.context.context import Context
from drivetrain.context.state import State
from drivetrain.core.arguments import check_callable, check_flag, check_number, naming
from drivetrain.core.binding import check_plugin
from drivetrain.core.errors import (
    BatchOutputError,
    ConfigError,
    ConfigTypeError,
    NoEffectWarning,
    UnsupportedMethodError,
    did_you_mean,
    warn,
)
from drivetrain.core.event import Event
from drivetrain.core.time import TimeUnit
from drivetrain.data.columns import find_columns
from drivetrain.module.optimizers import served_parameters
from drivetrain.optim.scheduler import OptimScheduler
from drivetrain.train.settings import RunLimits, TrainSettings, check_eval_interval, parse_time

if TYPE_CHECKING:
    from drivetrain.train.evaluation import EvaluationLoop
    from drivetrain.train.run import Run


_PLAIN = (bool, int, float, complex, str, bytes, bytearray, Tensor, nn.Module)


_PLUGINS = {
    "callbacks": "an object with methods such as on_train_epoch_end(self, trainer)",
    "algorithms": "an algorithm, such as MixUp()",
    "loggers": "a logger, such as Recorder('runs/a')",
}


def check_constructor(given: Mapping[str, Any]) -> None:
    """Check what a Trainer is made with, apart from model, loss function, optimizer and data."""
    for name in ("callbacks", "algorithms", "loggers"):
        for plugin in _listed(name, given[name]):
            if name == "algorithms":
                with naming("algorithms", plugin):
                    check_plugin(plugin)
            is_logger = any(callable(getattr(plugin, method, None)) for method in ("log_metrics", "scalar"))
            if name == "loggers" and not is_logger:
                raise ConfigTypeError(
                    f"loggers: {plugin!r} is not a logger. Expected an object with log_metrics(metrics, step=...), or a Recorder, such as "
                    "Recorder('runs/a'), which writes TensorBoard files, or Recorder('runs/a', sinks=('wandb',)); 'mlflow', too."
                )
    history, state, deterministic = given["run_history"], given["state"], given["deterministic"]
    if history is not None and not callable(getattr(history, "update_metric", None)):
        raise ConfigTypeError(f"run_history={history!r}: expected a RunHistory, such as InMemoryRunHistory(), or None.")
    if state is not None and not isinstance(state, Context):
        raise ConfigTypeError(f"state={state!r}: expected a Context or a State, or None.")
    for name in ("strict", "find_unused_parameters", "static_graph"):
        if given[name] is not None or name == "strict":
            check_flag(name, given[name])
    if not isinstance(deterministic, bool) and deterministic not in ("off", "warn", "strict"):
        raise ConfigError(f"deterministic={deterministic!r}: expected True, False, 'off', 'warn' or 'strict'.")
    if given["strategy_time_limit"] is not None:
        check_number("strategy_time_limit", given["strategy_time_limit"], at_least=0, infinite=True, hint=" of seconds")
        if not (isinstance(given["strategy"], str) and given["strategy"] == "auto"):
            warn(
                "strategy_time_limit is for a search, which strategy='auto' makes: it has no effect here.",
                NoEffectWarning,
            )
    check_number("scale_schedule_ratio", given["scale_schedule_ratio"], above=0, hint=", such as 0.5 for half the run")
    duration = given["max_duration"]
    if duration is not None and not parse_time("max_duration", duration).value > 0:
        raise ConfigError(f"max_duration={duration!r}: expected a length above 0, such as '10ep' or '2h'.")
    if given["eval_interval"] is not None:
        check_eval_interval(given["eval_interval"])
    for name in ("train_dataloader", "eval_dataloader"):
        data = given[name]
        several = name == "eval_dataloader" and isinstance(data, Mapping) and data  # one evaluation set by name
        for part in data.values() if several else () if data is None else (data,):
            check_dataset(name, part)


def _listed(name: str, plugins: object) -> Iterable[Any]:
    """Return plugins that can be read more than once, none of which is a plain value."""
    if isinstance(plugins, str | bytes | Mapping | Tensor) or not isinstance(plugins, Iterable):
        raise ConfigTypeError(f"{name}={plugins!r}: expected a list, such as {name}=[...], also for a single one.")
    listed = plugins if isinstance(plugins, list | tuple | set | frozenset) else ()
    for plugin in listed:
        if plugin is None or isinstance(plugin, (*_PLAIN, list, tuple, dict, set)) or inspect.isroutine(plugin):
            raise ConfigTypeError(f"{name}: {plugin!r} is a {type(plugin).__name__}, expected {_PLUGINS[name]}.")
    return listed


def _reject_class(name: str, value: object, call: str = "...") -> None:
    if isinstance(value, type):
        raise ConfigTypeError(f"{name}={value.__name__} is a class. Pass an instance: {value.__name__}({call}).")


def check_model(model: object, loss_func: object, *, trains: bool = False) -> None:
    """Raise for a model that cannot be called or has no weights yet. One that a run trains must have a forward, and no loop of its own."""
    _reject_class("model", model)
    if not callable(model):
        raise ConfigTypeError(f"model={model!r} is not callable. Expected an nn.Module.")
    if not isinstance(model, nn.Module):
        if isinstance(model, torch.optim.Optimizer) or inspect.isroutine(model):
            raise ConfigTypeError(f"model={model!r} is a {type(model).__name__}, expected an nn.Module.")
        return
    tensors = (*model.named_parameters(), *model.named_buffers())
    if unmade := [name for name, tensor in tensors if tensor.device.type == "meta"]:
        raise ConfigError(
            f"model: {len(unmade)} tensors are on the meta device and have no values, first {unmade[0]!r}. Build the model on a real "
            "device, or call model.to_empty(device=...) and load or initialise its weights before the Trainer gets it."
        )
    if not trains:
        return
    has_forward = getattr(model.forward, "__func__", None) is not nn.Module.forward
    if not has_forward and type(model).__call__ is nn.Module.__call__:
        names = [name for name in dir(type(model)) if name not in dir(nn.Module)]
        raise ConfigError(
            f"model={type(model).__name__} has no forward().{did_you_mean('forward', names)} Define it, or override "
            "calculate_train_batch_loss in a Trainer subclass."
        )
    own_loop = [name for name in ("training_step", "configure_optimizers") if callable(getattr(model, name, None))]
    if own_loop:
        message = f"model={type(model).__name__} looks like a LightningModule: the Trainer does not call its {' and '.join(own_loop)}. "
        if loss_func is None:
            raise ConfigError(
                f"{message}Pass the network inside it as model, with loss_func= and optimizer=; move the code of training_step into "
                "calculate_train_batch_loss of a Trainer subclass."
            )
        warn(f"{message}The model's forward and the Trainer's loss_func are used.")


def check_loss_func(loss_func: object, optimizer: object = None) -> None:
    """Raise for what cannot be a loss function. None means that the model returns its loss."""
    if loss_func is None:
        return
    if isinstance(loss_func, torch.optim.Optimizer):
        swapped = callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)
        advice = "loss_func and optimizer are swapped: write" if swapped else "Write"
        raise ConfigTypeError(
            f"loss_func is the optimizer ({type(loss_func).__name__}). {advice} Trainer(model, loss_func=..., optimizer=...)."
        )
    _reject_class("loss_func", loss_func, "")
    check_callable("loss_func", loss_func, "a function of (outputs, targets), such as nn.CrossEntropyLoss()", 2)


def check_optimizer_type(optimizer: object) -> None:
    """Raise for what cannot be an optimizer. Configurations and units are read elsewhere."""
    _reject_class("optimizer", optimizer, "model.parameters(), lr=...")
    if isinstance(optimizer, list | tuple | set):
        kinds = ", ".join(type(item).__name__ for item in optimizer) or "nothing"
        raise ConfigTypeError(
            f"optimizer is a {type(optimizer).__name__} of {kinds}, expected one optimizer. To use several, pass "
            "optimizer={'encoder': OptimScheduler(...), 'decoder': OptimScheduler(...)}; pass a schedule as train(create_scheduler_fn=...)."
        )
    if isinstance(optimizer, str) and optimizer.isidentifier():
        raise ConfigTypeError(
            f"optimizer={optimizer!r} is a name. Expected a torch optimizer, such as torch.optim.AdamW(model.parameters(), lr=...), or the "
            "path of a YAML file."
        )
    if isinstance(optimizer, str | os.PathLike | Mapping) or inspect.isfunction(optimizer):
        return  # a configuration, read before the first step
    steps = all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad"))
    if isinstance(optimizer, nn.Module) or not (steps or isinstance(optimizer, OptimScheduler)):
        raise ConfigTypeError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__} and cannot step. Expected a torch optimizer, such as "
            "torch.optim.AdamW(model.parameters()), units of drivetrain.optim, or the path of their YAML."
        )


def check_dataset(name: str, data: object) -> None:
    """Raise for what is neither a dataset nor a loader: a path would be read as a dataset of characters."""
    wanted = "Expected a dataset with __getitem__ and __len__, an IterableDataset, or a loader."
    if isinstance(data, str | bytes | os.PathLike):
        raise ConfigTypeError(
            f"{name}={data!r} is a path or text. {wanted} For images: torchvision.datasets.ImageFolder({data!r})."
        )
    _reject_class(name, data)
    if isinstance(data, dict | tuple) and find_columns(data) is not None:
        return  # tensors with a row for each sample
    if isinstance(data, Mapping) and not isinstance(data, Dataset) and 0 not in list(data.keys()):
        parts = ", ".join(map(repr, list(data.keys())[:5]))
        if hasattr(data, "to_dict"):
            wanted = f"To use its columns, pass {name}.to_dict(). {wanted}"
        raise ConfigTypeError(
            f"{name} is a {type(data).__name__} with the keys {parts}. Pass one of its parts. {wanted}"
        )
    if hasattr(type(data), "iloc") or hasattr(type(data), "__dataframe__"):
        raise ConfigTypeError(
            f"{name} is a {type(data).__name__}, which is indexed by column. Wrap it, for example as "
            "TensorDataset(torch.tensor(frame[inputs].to_numpy()), torch.tensor(frame[target].to_numpy()))."
        )
    if isinstance(data, tuple) and any(hasattr(item, "shape") for item in data):
        kinds = ", ".join(type(item).__name__ for item in data)
        raise ConfigTypeError(
            f"{name} is a tuple of {kinds}, expected dense tensors or plain numpy arrays with a row for each sample. Convert them, or pass "
            "a dataset that returns one sample: a list of samples has no such limit."
        )
    if isinstance(data, list | tuple | Dataset) and hasattr(data, "__len__") and not len(data):
        raise ConfigError(f"{name} is empty: it has 0 samples. Check the path or the filter it was made with.")
    has_items = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    if isinstance(data, set | frozenset | nn.Module) or inspect.isroutine(data) or not has_items:
        if hasattr(data, "train_dataloader"):
            wanted = "Pass its loaders: train(module.train_dataloader(), eval_dataset=module.val_dataloader())."
        raise ConfigTypeError(f"{name}={data!r} is a {type(data).__name__}. {wanted}")


def reject_unused(
    name: str, loader: object, kwargs_name: str, kwargs: Mapping[str, object] | None, collate_fn: object
) -> None:
    """Raise for settings that have no effect on a loader that the user built."""
    unused = [
        f"{key}={value}"
        if key == "global_batch_size"
        else f"{kwargs_name}[{key!r}]={value!r}"  # that one is an argument of train()
        for key, value in (kwargs or {}).items()
        if _differs(loader, key, value)
    ]
    if collate_fn is not None and _differs(loader, "collate_fn", collate_fn):
        unused.append("collate_fn")
    if unused:
        raise ConfigError(
            f"{', '.join(unused)} would have no effect: {name} is a loader ({type(loader).__name__}) and is used unchanged. "
            f"Build the loader with these settings, or pass the dataset as {name}."
        )


def warn_of_batch_size(loader: object, given: int) -> None:
    """Warn about a batch size that was set and is not that of the only loader."""
    own = getattr(loader, "batch_size", None)
    if isinstance(own, int) and given not in (own, TrainSettings.per_device_batch_size):
        warn(f"per_device_batch_size={given} has no effect: the data is a loader, whose batches have {own} samples.")


def _differs(loader: object, key: str, value: object) -> bool:
    if key == "shuffle":
        return bool(value) != bool(
            getattr(loader, "shuffle", isinstance(getattr(loader, "sampler", None), RandomSampler))
        )
    return getattr(loader, key, None) != value


def check_idle(run: "Run") -> None:
    """Raise for `train()` in a hook or callback of a run, whose state it would replace."""
    if run.is_running:
        raise ConfigError(
            "train() was called during a run of the same Trainer. Call it when that run has ended, or make a second Trainer; "
            "evaluate() and predict() may be called during a run."
        )


def check_loader_arguments(collate_fn: object, **loader_arguments: object) -> None:
    """Check what makes batches, and arguments of loaders, by the name under which the user passes them."""
    if collate_fn is not None:
        check_callable("collate_fn", collate_fn, "a function of a list of samples", classes=True)
    for name, value in loader_arguments.items():
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            raise ConfigTypeError(
                f"{name}={value!r}: expected a dict of loader arguments, such as {{'num_workers': 4}}."
            )


# ---------------------------------------------------------------------- before the first step, and what a first batch must show

REQUIRED_OUTPUTS = ("loss", "model_outputs", "batch_size")
_CALL = {
    Event.AFTER_FORWARD: "Call self.forward(...) in the hook instead of self.model(...).",
    Event.BEFORE_LOSS: "Call self.compute_loss(outputs, targets) in the hook instead of self.loss_func(...).",
}


def check_optimizer(state: State, strict: bool) -> None:
    """Raise for training without an optimizer, or with one that holds no parameter of the model."""
    model = state.model
    if len(state.optimizers) > 1:
        check_optimizer_type(state.optimizers)
    if not state.optimizers:
        raise ConfigError(
            "train() needs an optimizer, and the Trainer has none. Pass optimizer=torch.optim.AdamW(model.parameters(), ...) "
            "to the Trainer; evaluate() and predict() work without one."
        )
    optimizer = state.optimizers[0]
    check_optimizer_type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    for index, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if rate is not None and not isinstance(rate, Tensor):  # a rate on a device is not read
            check_number("lr", rate, at_least=0, owner=f"optimizer.param_groups[{index}]")
    if not isinstance(model, nn.Module):
        return
    held = {id(p) for p in served_parameters(optimizer)}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trainable.items() if id(p) not in held]
    if held and not any(id(p) in held for p in model.parameters()):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} holds {len(held)} parameters, but no parameter of the model "
            f"({type(model).__name__}). Was the model copied, or replaced after the optimizer was made?"
        )
    known = held.union(map(id, model.parameters()))
    if missing:
        shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
        message = f"{len(missing)} trainable parameters are not in the optimizer and will not change: {shown}"
        if strict:
            raise ConfigError(message + ". Add them, or set requires_grad=False.")
        warn(message)
    for owner in model.modules():
        for name, value in vars(owner).items():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            modules = [] if name.startswith("_") else [item for item in items if isinstance(item, nn.Module)]
            if any(p.requires_grad and id(p) not in known for module in modules for p in module.parameters()):
                warn(
                    f"{type(owner).__name__}.{name} is a {type(value).__name__} of modules, which torch does not register: their weights "
                    "are not trained, moved or saved. Use nn.ModuleList or nn.ModuleDict, or requires_grad_(False) if this is meant."
                )


def check_scheduler(given: object, optimizer: object, units: object, *, is_called: bool) -> None:
    """Raise for what cannot make a scheduler when it `is_called` with the optimizer, and for a scheduler made for another optimizer."""
    if units is not None:
        raise ConfigError(
            "create_scheduler_fn was given, but the units of an OptimSet set their own learning rates. Remove create_scheduler_fn, "
            "or use a plain torch optimizer with it."
        )
    own = getattr(given, "optimizer", None)
    if isinstance(own, torch.optim.Optimizer):
        if own is not optimizer:
            raise ConfigError(
                f"the scheduler ({type(given).__name__}) belongs to a different optimizer than the Trainer's. Build it with "
                "the Trainer's optimizer, or pass a function of the optimizer."
            )
    elif is_called:
        example = "a function of the optimizer, such as functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)"
        check_callable("create_scheduler_fn", given, example, classes=True)
        if isinstance(given, nn.Module):
            raise ConfigTypeError(f"create_scheduler_fn={given!r} is a module. Expected {example}.")


def check_schedule_length(scheduler: object, run: "Run") -> None:
    """Warn if a scheduler with a known number of steps is shorter or longer than the run."""
    settings, config = run.require_settings(), run.config
    planned = getattr(scheduler, "total_steps", None) or getattr(scheduler, "total_iterations", None)
    if not isinstance(planned, int) or config is None or settings.fast_dev_run:
        return
    steps = _steps_of_schedule(settings, run.agreement.limits, config.num_local_update_steps_per_epoch)
    if steps is None or 0 <= planned - steps <= 1:  # one to spare is a habit, and moves the rate by next to nothing
        return
    effect = "the rate does not reach its end value" if planned > steps else "it ends before the run does"
    advice = "Give it the steps of this run, for example by TrainerPlaceholderValues."
    if config.is_distributed and planned == (config.num_epochs or 0) * (config.num_update_steps_per_epoch or 0):
        advice = (
            f"NUM_UPDATE_STEPS_PER_EPOCH counts the updates of all {config.num_processes} processes. Use "
            "TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH."
        )
    warn(f"{type(scheduler).__name__} is built for {planned} steps, but this run has {steps}: {effect}. {advice}")


def _steps_of_schedule(settings: TrainSettings, limits: RunLimits, updates_per_epoch: int | None) -> int | None:
    """Return how often the scheduler will have been stepped when the run ends, as far as that is known."""
    epochs = settings.epochs
    if settings.scheduler_interval == "epoch":
        return None if limits.end_inside_epochs else epochs
    ends = [] if epochs is None or updates_per_epoch is None else [epochs * updates_per_epoch]
    for end in limits.ends:
        if end.unit is TimeUnit.STEP or (end.unit is TimeUnit.BATCH and settings.gradient_accumulation_steps == 1):
            ends.append(int(end.value))
        elif end.unit is not TimeUnit.EPOCH:
            return None  # samples, tokens, time
    return min(ends, default=None)


def check_batch_output(output: object, trainer: "EvaluationLoop") -> None:
    """Raise if the result of a loss hook lacks what the loop needs, or if a hook hides events from their listeners."""
    if not isinstance(output, Mapping):
        raise BatchOutputError(
            f"a loss hook returned {type(output).__name__}, expected a dict with {', '.join(REQUIRED_OUTPUTS)}. "
            'For example: return {"loss": loss, "model_outputs": outputs, "batch_size": len(targets)}.'
        )
    missing = [name for name in REQUIRED_OUTPUTS if name not in output]
    if missing:
        raise BatchOutputError(
            f"a loss hook returned no {' and no '.join(missing)}; its keys are: {', '.join(map(str, output)) or 'none'}. "
            f"Expected {', '.join(REQUIRED_OUTPUTS)}."
        )
    loss = output["loss"]
    if not callable(getattr(loss, "detach", None)):
        advice = "Return one tensor; several losses go by name, as a dict."
        if loss is None:
            advice = "Does the loss function, or the hook, return it?"
        elif isinstance(loss, Real):
            advice = "It was detached from the model: leave out .item() or float()."
        raise BatchOutputError(f"the loss is of type {type(loss).__name__}, expected a scalar tensor. {advice}")
    if trainer.run.is_evaluating:
        return
    step, engine = trainer.run.loss, trainer.engine
    fired = {Event.AFTER_FORWARD: step.saw_forward, Event.BEFORE_LOSS: step.saw_loss}
    for event, was_fired in fired.items():
        if not was_fired and engine.has_algorithm_for(event):
            names = ", ".join(type(plugin).__name__ for plugin in engine.listeners(event))
            raise ConfigError(
                f"{type(trainer).__name__}.calculate_train_batch_loss hides {event.name} from {names}, which needs it. {_CALL[event]}"
            )


def warn_of_sample_weights(run: "Run", output: Mapping[str, object]) -> None:
    """Warn if losses of partial batches are combined and it is not known what each is a mean over."""
    window, microbatch_size = run.stepper.window, run.microbatch_size
    if (
        run.measures.train_items.is_known
        or window.is_plain
        or not {"num_items", "num_items_in_batch"}.isdisjoint(output)
    ):
        return
    parts = {
        f"gradient_accumulation_steps={window.length}": window.length > 1,
        f"microbatch_size={microbatch_size}": microbatch_size is not None,
        f"{window.world} processes": window.world > 1,
    }
    warn(
        f"{' and '.join(name for name, is_used in parts.items() if is_used)}: it is not known what the loss is a mean over, so parts are "
        "weighted by their samples. That is right for a mean over samples. For any other mean pass Trainer(count_items=...), a function of "
        "the batch or 'labels', or return num_items from the loss hook."
    )


def check_loss(loss: Tensor, trainer: "EvaluationLoop") -> None:
    """Raise for a loss that cannot be back-propagated, unless the user overrides `backward_step`."""
    if trainer.overrides("backward_step") or trainer.run.units is not None:
        return
    if loss.numel() != 1:
        raise BatchOutputError(
            f"the loss has shape {tuple(loss.shape)}, expected a scalar. Reduce it, for example with .mean()."
        )
    if not loss.requires_grad:
        raise BatchOutputError(
            f"the loss (shape {tuple(loss.shape)}) has no gradient: it does not depend on a trainable parameter. Are all parameters "
            "frozen, was it detached, or computed under no_grad?"
        )


def check_graphs(records: bool, settings: TrainSettings, *, splits: bool) -> None:
    """Raise for CUDA graphs with accumulation: the next replay would overwrite gradients that are still needed."""
    if records and (settings.gradient_accumulation_steps > 1 or settings.microbatch_size is not None or splits):
        raise UnsupportedMethodError(
            "CUDA graphs (cuda_graphs, or mode='reduce-overhead' or 'max-autotune' of the compiler) with gradient accumulation give wrong "
            "gradients in the Trainer: a recorded backward pass overwrites the gradients of the previous one. Remove them, or the "
            "accumulation and micro-batches; mode='max-autotune-no-cudagraphs' records nothing."
        )


def check_watched_metrics(callbacks: Iterable[object], eval_sets: Sequence[str] | None) -> None:
    """Raise for callbacks that watch an evaluation metric that will never be recorded. `eval_sets` is None without an evaluation."""
    for callback in callbacks:
        metric = getattr(callback, "watch_metric", None)
        is_compared = getattr(callback, "evaluate_during_training", True)  # else an average is only saved
        if isinstance(metric, str) and is_compared and (reason := _why_never_recorded(metric, eval_sets)):
            raise ValueError(f"{type(callback).__name__} watches {metric!r}, {reason}")


def check_plateau(metric: str, eval_sets: Sequence[str] | None) -> None:
    """Raise for a scheduler that waits for an evaluation metric that will never be recorded."""
    if reason := _why_never_recorded(metric, eval_sets):
        raise ConfigError(f"ReduceLROnPlateau watches scheduler_metric={metric!r}, {reason}")


def _why_never_recorded(metric: str, eval_sets: Sequence[str] | None) -> str | None:
    """Return why an evaluation metric of this name cannot come, and what to do; None for any other name."""
    prefix = next((p for p in ("eval_", "intermediate_eval_") if metric.removeprefix("ema_model_").startswith(p)), None)
    if prefix is None:
        return None
    if eval_sets is None:
        return "but train() got no eval_dataset, so it will never be recorded. Pass eval_dataset=..., or watch 'train_loss_epoch'."
    own, rest = metric.partition(prefix)[::2]
    if not eval_sets or any(rest.startswith(f"{name}_") for name in eval_sets):
        return None
    near = " or ".join(repr(f"{own}{prefix}{name}_{rest}") for name in eval_sets)
    return f"but eval_dataset holds several sets, and each metric name contains the name of its set. Watch {near}."
