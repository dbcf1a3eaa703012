"""What users pass to a Trainer, checked before anything is built on it: names of arguments, objects in the wrong place.

The constructor takes model, loss function and optimizer as they are, because subclasses and tests may use anything there. `train()` and the
other verbs check them here, by what they can do and not by their class.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, RandomSampler

from drivetrain.context.context import Context
from drivetrain.core.arguments import check_callable, check_count, check_flag, check_number, naming
from drivetrain.core.binding import check_plugin
from drivetrain.core.errors import ConfigError, ConfigTypeError, DrivetrainWarning, did_you_mean
from drivetrain.core.lazy import Slot
from drivetrain.data.columns import find_columns
from drivetrain.optim.scheduler import OptimScheduler
from drivetrain.train.settings import check_eval_interval, parse_time

FOREIGN_ARGUMENTS: Slot[Mapping[str, str]] = Slot("train.foreign_arguments")
"""What to write instead of an argument of another library's trainer."""
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, Tensor, nn.Module)


def reject_unknown(function: Callable[..., Any], unknown: Mapping[str, object]) -> None:
    """Name what to write instead when a keyword is unknown: another library's word, or a misspelt one of ours."""
    if not unknown:
        return
    valid = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    ]
    name = next(iter(unknown))
    instead = FOREIGN_ARGUMENTS.load()
    if name in instead:
        hint = f" Write instead: {instead[name]}."
    else:
        hint = did_you_mean(name, valid) or f" Arguments: {', '.join(valid)}."
    title = "Trainer" if function.__name__ == "__init__" else f"Trainer.{function.__name__}"
    raise TypeError(f"{title}() got an unexpected keyword argument {name!r}.{hint}")


def check_constructor(given: Mapping[str, Any]) -> None:
    """Check what a Trainer is made with, apart from model, loss function, optimizer and data."""
    for name in ("callbacks", "algorithms", "loggers"):
        _check_plugins(name, given[name])
    for plugin in given["algorithms"] if isinstance(given["algorithms"], list | tuple) else ():
        with naming("algorithms", plugin):
            check_plugin(plugin)
    for logger in given["loggers"] if isinstance(given["loggers"], list | tuple) else ():
        if not any(callable(getattr(logger, method, None)) for method in ("log_metrics", "scalar")):
            raise ConfigTypeError(
                f"loggers: {logger!r} cannot log. Expected an object with log_metrics(metrics, step=...), or a Recorder."
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


def _check_plugins(name: str, plugins: object) -> None:
    if isinstance(plugins, str | bytes | Mapping | Tensor) or not isinstance(plugins, Iterable):
        raise ConfigTypeError(f"{name}={plugins!r}: expected a list, such as {name}=[...], also for a single one.")
    if isinstance(plugins, list | tuple | set | frozenset):
        for plugin in plugins:
            if plugin is None or isinstance(plugin, (*_PLAIN, list, tuple, dict, set)) or inspect.isroutine(plugin):
                raise ConfigTypeError(f"{name}: {plugin!r} is a {type(plugin).__name__}, expected an object of {name}.")


def check_model(model: object, loss_func: object, *, trains: bool = False) -> None:
    """Reject what cannot be called as a model, has no weights yet, or brings a loop of its own."""
    if isinstance(model, type):
        raise ConfigTypeError(f"model={model.__name__} is a class. Pass an instance: {model.__name__}(...).")
    if not callable(model):
        raise ConfigTypeError(f"model={model!r} is not callable. Expected an nn.Module.")
    if not isinstance(model, nn.Module):
        if isinstance(model, torch.optim.Optimizer) or inspect.isroutine(model):
            raise ConfigTypeError(f"model={model!r} is a {type(model).__name__}, expected an nn.Module.")
        return
    unmade = [name for name, tensor in _tensors_of(model) if tensor.device.type == "meta"]
    if unmade:
        raise ConfigError(
            f"model: {len(unmade)} tensors are on the meta device and have no values, first {unmade[0]!r}. Build the model on a real "
            "device, or call model.to_empty(device=...) and load or initialise its weights before the Trainer gets it."
        )
    own_loop = [name for name in ("training_step", "configure_optimizers") if callable(getattr(model, name, None))]
    if trains and own_loop:
        message = f"model={type(model).__name__} looks like a LightningModule: its {' and '.join(own_loop)} are not called here. "
        if loss_func is None:
            raise ConfigError(
                message
                + "Pass the network inside it as model, with loss_func= and optimizer=; what training_step does goes into "
                "calculate_train_batch_loss of a Trainer subclass."
            )
        warnings.warn(
            message + "The model's forward and the Trainer's loss_func are used.", DrivetrainWarning, stacklevel=4
        )


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_loss_func(loss_func: object, optimizer: object = None) -> None:
    """Reject what cannot be a loss function; None means that the model returns its loss."""
    if loss_func is None:
        return
    if isinstance(loss_func, torch.optim.Optimizer):
        swapped = callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)
        raise ConfigTypeError(
            f"loss_func is the optimizer ({type(loss_func).__name__}). "
            + ("loss_func and optimizer are swapped: write " if swapped else "Write ")
            + "Trainer(model, loss_func=..., optimizer=...)."
        )
    if isinstance(loss_func, type):
        raise ConfigTypeError(f"loss_func={loss_func.__name__} is a class. Pass an instance: {loss_func.__name__}().")
    check_callable("loss_func", loss_func, "a function of (outputs, targets), such as nn.CrossEntropyLoss()", 2)


def check_optimizer_type(optimizer: object) -> None:
    """Reject what cannot be an optimizer; configurations and units are read elsewhere."""
    if isinstance(optimizer, type):
        raise ConfigTypeError(
            f"optimizer={optimizer.__name__} is a class. Pass an instance: {optimizer.__name__}(model.parameters(), lr=...)."
        )
    if isinstance(optimizer, list | tuple | set):
        kinds = ", ".join(type(item).__name__ for item in optimizer) or "nothing"
        raise ConfigTypeError(
            f"optimizer is a {type(optimizer).__name__} of {kinds}, expected one optimizer. Several share a run as "
            "optimizer={'encoder': OptimScheduler(...), 'decoder': OptimScheduler(...)}; a schedule goes to train(create_scheduler_fn=...)."
        )
    if isinstance(optimizer, str | os.PathLike | Mapping) or inspect.isfunction(optimizer):
        return  # a configuration, read before the first step
    steps = all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad"))
    if isinstance(optimizer, nn.Module) or not (steps or isinstance(optimizer, OptimScheduler)):
        raise ConfigTypeError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__} and cannot step. Expected a torch optimizer, such as "
            "torch.optim.AdamW(model.parameters()), units of drivetrain.optim, or the path of their YAML."
        )


def check_rates(optimizer: torch.optim.Optimizer) -> None:
    """Reject learning rates that are NaN, infinite or negative; a rate on a device is not read."""
    for index, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if rate is not None and not isinstance(rate, Tensor):
            check_number("lr", rate, at_least=0, owner=f"optimizer.param_groups[{index}]")


def check_dataset(name: str, data: object) -> None:
    """Reject what is neither a dataset nor a loader: a path would be read as a dataset of characters."""
    wanted = "Expected a dataset with __getitem__ and __len__, an IterableDataset, or a loader."
    if isinstance(data, str | bytes | os.PathLike):
        raise ConfigTypeError(
            f"{name}={data!r} is a path or text. {wanted} For images: torchvision.datasets.ImageFolder({data!r})."
        )
    if isinstance(data, type):
        raise ConfigTypeError(f"{name}={data.__name__} is a class. Pass an instance: {data.__name__}(...).")
    if isinstance(data, dict | tuple) and find_columns(data) is not None:
        return  # tensors with a row for each sample
    if isinstance(data, Mapping) and not isinstance(data, Dataset) and 0 not in data:
        parts = ", ".join(map(repr, list(data)[:5]))
        raise ConfigTypeError(
            f"{name} is a {type(data).__name__} with the keys {parts}. Pass one of its parts. {wanted}"
        )
    if hasattr(data, "iloc"):
        raise ConfigTypeError(
            f"{name} is a {type(data).__name__}, which is indexed by column. Wrap it, for example as "
            "TensorDataset(torch.tensor(frame[inputs].values), torch.tensor(frame[target].values))."
        )
    if isinstance(data, list | tuple | Dataset) and hasattr(data, "__len__") and not len(data):
        raise ConfigError(f"{name} is empty: it has 0 samples. Check the path or the filter it was made with.")
    has_items = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    if isinstance(data, set | frozenset | nn.Module) or inspect.isroutine(data) or not has_items:
        raise ConfigTypeError(f"{name}={data!r} is a {type(data).__name__}. {wanted}")


def reject_unused(
    name: str, loader: object, kwargs_name: str, kwargs: Mapping[str, Any] | None, collate_fn: object
) -> None:
    """Reject settings that a loader of the user's own does not follow, because it is used as it is."""
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
            f"{', '.join(unused)} would have no effect: {name} is a loader ({type(loader).__name__}) and is used as it is. "
            f"Build the loader with these settings, or pass the dataset as {name}."
        )


def _differs(loader: object, key: str, value: object) -> bool:
    if key == "shuffle":
        return bool(value) != bool(
            getattr(loader, "shuffle", isinstance(getattr(loader, "sampler", None), RandomSampler))
        )
    return getattr(loader, key, None) != value


def check_training(given: Mapping[str, object]) -> None:
    """Check those arguments of `train()` that are not settings."""
    check_flag("reset_run_history", given["reset_run_history"])
    for name in ("train_dataloader_kwargs", "eval_dataloader_kwargs"):
        check_mapping(name, given[name])
    check_collate(given["collate_fn"])
    if given["max_grad_norm"] is not None:
        check_number("max_grad_norm", given["max_grad_norm"], above=0, infinite=True)


def check_loader_arguments(
    per_device_batch_size: object, dataloader_kwargs: object, collate_fn: object, *, name: str = "dataloader_kwargs"
) -> None:
    """Check the arguments that build a loader."""
    check_count("per_device_batch_size", per_device_batch_size)
    check_mapping(name, dataloader_kwargs)
    check_collate(collate_fn)


def check_collate(collate_fn: object) -> None:
    """Reject a collate function that does not take a list of samples."""
    if collate_fn is not None:
        check_callable("collate_fn", collate_fn, "a function of a list of samples", classes=True)


def check_mapping(name: str, value: object) -> None:
    """Reject loader arguments that are not a mapping by name."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise ConfigTypeError(f"{name}={value!r}: expected a dict of loader arguments, such as {{'num_workers': 4}}.")
