"""Put ALiBi into a model, and train it on shorter sequences than it will read.

The penalty on distance takes the place of learned position embeddings, which are zeroed, made long enough and frozen. Models whose
attention no adapter reaches have replacements for their layers by class.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, warn_no_effect
from drivetrain.context.state import State
from drivetrain.core import ConfigError, ConfigTypeError, Event, Logger
from drivetrain.core.arguments import check_counts, check_number
from drivetrain.core.containers import is_namedtuple, same_tuple
from drivetrain.core.errors import unknown_name
from drivetrain.core.types import Batch
from drivetrain.module import attention
from drivetrain.module.attention import ATTRIBUTE, AttentionAdapter, AttentionBias, find_attention, registered_attention
from drivetrain.module.surgery import (
    check_unwrapped,
    count_module_instances,
    replace_module_classes,
    update_params_in_optimizer,
)
from drivetrain.module.wrapping import user_class

_TABLES = {"BertEmbeddings": "position_embeddings", "RobertaEmbeddings": "position_embeddings", "GPT2Model": "wpe"}
"""Where classes of transformers keep their table."""


def position_table_at(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return holder and attribute name of the position embedding at a dotted path; a leading `module.` is passed over."""
    path = path.removeprefix("module.")
    holder_path, _, name = path.rpartition(".")
    known = dict(model.named_modules())
    table = known.get(path)
    if table is None or not isinstance(getattr(table, "weight", None), Tensor):
        tables = [key for key, module in known.items() if isinstance(module, nn.Embedding)]
        raise ConfigError(unknown_name("embedding", path, tables, where="apply_alibi(position_embedding_attribute=)"))
    return known[holder_path], name


def retire_position_table(holder: nn.Module, name: str, length: int, optimizers: Optimizers) -> None:
    """Replace a table of position embeddings by zeros for `length` positions that are never trained."""
    old: Any = getattr(holder, name)
    first = 0 if old.padding_idx is None else old.padding_idx + 1  # positions are counted from behind the padding
    weight = old.weight
    if len(weight) == length + first and not weight.requires_grad and not weight.any():
        return  # done before
    zeros = nn.Parameter(weight.new_zeros(length + first, weight.shape[1]), requires_grad=False)
    new = nn.Embedding(len(zeros), weight.shape[1], padding_idx=old.padding_idx, _weight=zeros, _freeze=True)
    setattr(holder, name, new.train(old.training))
    held = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    if any(p is weight for one in held for group in one.param_groups for p in group["params"]):
        update_params_in_optimizer([weight], [], held)
    # What counts positions next to the table must count as far as it.
    for name in ("position_ids", "token_type_ids"):
        buffer = holder._buffers.get(name)
        if buffer is not None:
            is_position = name == "position_ids"
            row = torch.arange(len(zeros), device=buffer.device) if is_position else buffer.new_zeros(len(zeros))
            holder._buffers[name] = row.to(buffer.dtype).expand(1, -1)
    config = getattr(holder, "config", None)
    if config is not None and hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = len(zeros)


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of the heads: a geometric series for powers of two, filled up from the next one otherwise.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        ratio = 2 ** (-(2 ** (3 - math.log2(heads))))
        return [ratio ** (index + 1) for index in range(heads)]
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: heads - power]


class AlibiBias(AttentionBias):
    """Slope times key position where only the past is seen, which differs from the distance by a constant per query and so makes
    the same attention; otherwise minus slope times distance."""

    slopes: Tensor

    def __init__(self, heads: int, causal: bool):
        super().__init__()
        self.causal = causal
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)), persistent=False)

    def scores(self, queries: int, keys: int) -> Tensor:
        slopes = self.slopes.float()[None, :, None, None]
        place = torch.arange(keys, device=self.slopes.device, dtype=torch.float32)
        if self.causal:
            return slopes * place
        return -slopes * (place[keys - queries :, None] - place[None, :]).abs()


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: Optimizers = None,
    *,
    heads_per_layer: int | None = None,
    position_embedding_attribute: str | None = None,
    attention_module: type[nn.Module] | None = None,
    attr_to_replace: str | None = None,
    alibi_attention: Callable[..., object] | None = None,
    mask_replacement_function: Callable[[nn.Module, int], nn.Module | None] | None = None,
) -> None:
    """Add the distance penalty to every self-attention of a model, and retire its position embeddings.

    Layers are found by their registered classes (`register_attention`). The keywords describe one more class for this call:
    `attention_module` with `heads_per_layer` heads, whose method `attr_to_replace` becomes `alibi_attention` where it has one and
    whose calls of `F.scaled_dot_product_attention` are intercepted otherwise. The first pass through the model must meet the
    penalty in every layer, or it raises.
    """
    check_counts("apply_alibi", 1, max_sequence_length=max_sequence_length)
    check_unwrapped(model, "apply_alibi")
    layers = find_attention(model)
    if attention_module is not None:
        layers = _layers_of(model, attention_module, heads_per_layer, layers)
    policies = {
        cls: lambda module, index, policy=policy: policy(module, index, max_sequence_length)
        for cls, policy in policy_registry.items()
    }
    replaced = replace_module_classes(model, policies, optimizers) if policies else {}
    if not layers and not replaced:
        warn_no_effect(
            f"Alibi found no supported attention in {type(model).__name__}. Registered: {', '.join(registered_attention())}. Register "
            "yours: register_attention(MyAttention, heads='num_heads', causal=True)."
        )
        return
    device = next((tensor.device for tensor in model.parameters()), None)
    for _, layer, adapter in layers:
        if getattr(layer, ATTRIBUTE, None) is not None:
            continue
        bias = AlibiBias(adapter.heads(layer), adapter.causal(layer)).to(device)
        if attr_to_replace is not None and alibi_attention is not None and hasattr(layer, attr_to_replace):
            setattr(layer, ATTRIBUTE, bias)
            setattr(layer, attr_to_replace, MethodType(alibi_attention, layer))
        else:
            adapter.inject(layer, bias)
        if mask_replacement_function is not None:
            mask_replacement_function(layer, max_sequence_length)
    attention.leave_fast_path(model)
    known = ((module, _TABLES.get(user_class(module).__name__)) for module in model.modules())
    tables = [(module, name) for module, name in known if name is not None]
    if position_embedding_attribute is not None:
        tables.append(position_table_at(model, position_embedding_attribute))
    for holder, name in tables:
        retire_position_table(holder, name, max_sequence_length, optimizers)
    _verify(model)


def _layers_of(
    model: nn.Module, cls: type[nn.Module], heads: int | None, known: list[tuple[str, nn.Module, AttentionAdapter]]
) -> list[tuple[str, nn.Module, AttentionAdapter]]:
    """Return the attention layers of one class, with what the registry does not know taken from the caller."""
    adapters = {layer: adapter for _, layer, adapter in known}
    found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, cls)]
    if heads is None and any(layer not in adapters for _, layer in found):
        raise ConfigError(
            f"apply_alibi(attention_module={cls.__name__}) needs heads_per_layer: the class is not registered."
        )
    own = AttentionAdapter(
        heads=lambda _: heads or 0, causal=lambda layer: bool(getattr(layer, "is_causal", True)),
        inject=attention.intercept_attention_calls,
    )  # fmt: skip
    return [(name, layer, adapters.get(layer, own)) for name, layer in found]


def _verify(model: nn.Module) -> None:
    """Check that the penalty arrives: now, where the model has inputs to try and accepts them, and otherwise in its first pass."""
    if _runs_dummy_inputs(model):
        _check_all_used(model)
    elif not any(isinstance(hook, _FirstPass) for hook in model._forward_hooks.values()):
        hook = _FirstPass()
        hook.handle = model.register_forward_hook(hook)


def _runs_dummy_inputs(model: nn.Module) -> bool:
    """Run a model on the inputs that it declares for trials; False without any, or where they are not all it needs, as with images."""
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping) or not all(isinstance(value, Tensor) for value in inputs.values()):
        return False
    device, was_training = next(model.parameters()).device, model.training
    try:
        with torch.no_grad():
            model.eval()(**{name: value.to(device) for name, value in inputs.items()})
    except Exception:  # whatever a model raises for lack of its other inputs; its first pass is checked instead
        return False
    finally:
        model.train(was_training)
    return True


class _FirstPass:
    """Checks after the first pass through a model, without skipped blocks, that every layer used its bias, and takes itself away."""

    handle: RemovableHandle

    def __call__(self, model: nn.Module, args: object, output: object) -> None:
        is_partial = any(getattr(module, "is_dropped", False) for module in model.modules())  # by StochasticDepth
        if torch.compiler.is_compiling() or (is_partial and attention.unused_biases(model)):
            return
        self.handle.remove()
        _check_all_used(model)


def _check_all_used(model: nn.Module) -> None:
    unused = attention.unused_biases(model)
    if unused:
        raise RuntimeError(
            f"Alibi: the attention layers {', '.join(unused)} did not use their bias in a forward pass. Their adapter does not match how "
            "they compute attention; register one with register_attention(cls, heads=, causal=, inject=)."
        )


class Alibi(ModelSurgery):
    """Puts ALiBi into the model and reshapes batches to shorter sequences, for example a quarter of the length and four times the
    rows."""

    events = frozenset({Event.INIT, Event.AFTER_DATALOADER})
    writes = ("model", "optimizers", "batch")

    def __init__(self, max_sequence_length: int, train_sequence_length_scaling: float = 0.25):
        check_counts("Alibi", 1, max_sequence_length=max_sequence_length)
        scaling = train_sequence_length_scaling
        check_number("train_sequence_length_scaling", scaling, above=0, owner="Alibi", hint=", such as 0.25")
        self.max_sequence_length, self.train_sequence_length_scaling = max_sequence_length, scaling
        self._has_found = True
        if scaling == 1:
            self.events = frozenset({Event.INIT})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.AFTER_DATALOADER:
            if self._has_found:
                state.batch = scale_sequences(state.batch, self.train_sequence_length_scaling)
        else:
            super().apply(event, state, logger)

    def operate(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        # Without the penalty, shorter sequences would only take context away.
        self._has_found = bool(find_attention(model)) or count_module_instances(model, tuple(policy_registry)) > 0
        apply_alibi(model, self.max_sequence_length, optimizers)


def scale_sequences(batch: object, scaling: float) -> Batch:
    """Return a batch with sequences of another length and as many more rows, each tensor (B, S, ...) as (B / s, S s, ...)."""
    if isinstance(batch, Mapping):
        scaled = {name: _scaled(value, scaling, repr(name)) for name, value in batch.items()}
        return scaled if type(batch) is dict else type(batch)(scaled)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        names = map(repr, batch._fields) if is_namedtuple(batch) else (f"number {index}" for index in range(len(batch)))  # type: ignore[union-attr]
        items = [_scaled(value, scaling, name) for name, value in zip(names, batch)]
        return same_tuple(batch, items) if isinstance(batch, tuple) else type(batch)(items)
    return _scaled(batch, scaling, "itself")


def _scaled(value: object, scaling: float, name: str) -> Batch:
    if not isinstance(value, Tensor):
        return value
    if value.ndim < 2:
        raise ConfigError(
            f"Alibi: entry {name} of the batch has shape {tuple(value.shape)}; without a sequence dimension it cannot change "
            "length. Use train_sequence_length_scaling=1."
        )
    rows, length = value.shape[:2]
    new_length = round(length * scaling)
    if abs(new_length - length * scaling) > 1e-6 or new_length < 1 or rows * length % new_length:
        raise ConfigError(
            f"Alibi(train_sequence_length_scaling={scaling}): entry {name} of the batch has {rows} sequences of length {length}, which "
            f"cannot be cut to length {length * scaling:g}. Use a length and scaling that divide."
        )
    return value.reshape(rows * length // new_length, new_length, *value.shape[2:])


Policy = Callable[[nn.Module, int, int], nn.Module | None]


class PolicyRegistry(dict[type[nn.Module], Policy]):
    """Functions `(module, module_index, max_sequence_length) -> module or None` by the class of module they change.

    Each is called once for every module of its class when `apply_alibi` runs; it may change the module and return it, or return
    another one that takes its place.
    """

    def register(self, *modules: type[nn.Module]) -> Callable[[Policy], Policy]:
        """Return a decorator that registers a function for one or more classes."""
        if not modules:
            raise ConfigError("policy_registry.register() needs a class. Use @policy_registry.register(MyAttention).")

        def enter(policy: Policy) -> Policy:
            self._check(policy, modules)
            self.update(dict.fromkeys(modules, policy))
            return policy

        return enter

    def _check(self, policy: Policy, modules: tuple[object, ...]) -> None:
        name = getattr(policy, "__name__", repr(policy))
        if not callable(policy):
            raise ConfigTypeError(f"policy_registry.register: {policy!r} is not a function.")
        parameters = list(inspect.signature(policy).parameters)
        if len(parameters) != 3:
            raise ConfigError(
                f"policy_registry.register: {name} takes {len(parameters)} parameters; expected 3: (module, module_index, "
                "max_sequence_length)."
            )
        if parameters[2] != "max_sequence_length":
            raise NameError(
                f"policy_registry.register: the third parameter of {name} is {parameters[2]!r}; expected 'max_sequence_length'."
            )
        for cls in modules:
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise ConfigTypeError(f"policy_registry.register({cls!r}): expected classes derived from nn.Module.")
            if cls in self:
                raise ConfigError(f"policy_registry.register: a policy for {cls.__name__} already exists.")


policy_registry = PolicyRegistry()
