"""A copy of somebody's model that has shapes and no memory.

A model that exists is copied with its parameters and buffers replaced by fake ones on the way, wherever they are (host, device, meta);
the original is only read. A model that is made by a function is made inside the mode.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.strategy.profile.torch_private import faked
from drivetrain.strategy.task import TrainingTask


def fake_model(task: TrainingTask, mode: Any) -> nn.Module:
    """Return a fake copy of the task's model, in training mode."""
    model = _made(task, mode) if task.model is None else fake_copy(task.model, mode)
    return model.train()


def _made(task: TrainingTask, mode: Any) -> nn.Module:
    assert task.model_fn is not None, "a task has a model or a function that makes one"
    try:
        with mode:
            return task.model_fn()
    except (
        Exception
    ):  # a constructor that reads values (a ramp of drop rates, say) needs real ones; then the copy is faked
        return fake_copy(task.model_fn(), mode)


def fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    """Return a deep copy of a model whose tensors are fake; shared ones stay shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _fake_parameter(parameter, mode)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = faked(mode, buffer)
        for value in vars(module).values():  # tensors that a module keeps without registering them
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = faked(mode, value)
    return copy.deepcopy(model, memo)


def _fake_parameter(parameter: nn.Parameter, mode: Any) -> nn.Parameter:
    with mode:
        fake = nn.Parameter(faked(mode, parameter), requires_grad=parameter.requires_grad)
    fake.__dict__.update({key: value for key, value in vars(parameter).items() if not isinstance(value, Tensor)})
    return fake


def fake_inputs(inputs: Any, mode: Any) -> Any:
    """Return nested containers with every tensor fake."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda tensor: faked(mode, tensor), inputs)


def prepared_inputs(task: TrainingTask, size: int, mode: Any) -> Any:
    """Return the model's fake input for so many samples: prepared as real ones, on the host, then faked."""
    return fake_inputs(task.prepared(task.batch(size), torch.device("cpu")), mode)
