"""Trace a model's forward through its containers, and record what happens between its blocks.

Blocks, and every other module that contains none, are single nodes of the recorded graph: they stay the user's own objects and
run their own code. Only the code between them is traced (`torch.fx`, Reed et al., 2022, arXiv 2112.08429). With a sample, each
value is also computed on fake tensors. So `if x.dim() == 3` and `for part in x.shape` follow the sample while sizes stay
symbolic, and the floating-point operations of each node are counted.
"""

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.core.errors import ConfigError, first_line
from drivetrain.module.probing import attributes_set, on_fake_tensors, use_copied_buffers

VALUE, FLOPS = "value", "flops"
_FACTORIES = (
    "arange", "zeros", "ones", "full", "empty", "linspace", "eye", "tensor", "triu_indices", "tril_indices", "finfo", "iinfo",
)  # fmt: skip
"""Functions of torch that take sizes or types and no tensors, and so do not notice a traced one by themselves."""
_UNKNOWN = object()


def trace_chain(model: nn.Module, opened: set[nn.Module], given: Mapping[str, object] | None = None) -> fx.Graph:
    """Return the graph of a model in which all modules except `opened` are single nodes.

    `given` holds the arguments of a sample call by name; arguments that are not in it keep their defaults. Without a sample,
    arguments that have defaults keep them, unless the model does nothing with them.
    """
    parameters = inspect.signature(model.forward).parameters
    optional = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    if given is not None:
        return _trace(model, opened, {name: value for name, value in optional.items() if name not in given}, given)
    if optional:
        with suppress(ConfigError):
            graph = _trace(model, opened, {})
            if not any(node.users for node in graph.nodes if node.target in optional):
                return graph
    return _trace(model, opened, optional)


def _trace(
    model: nn.Module, opened: set[nn.Module], constants: dict[str, object], given: Mapping[str, object] | None = None
) -> fx.Graph:
    tracer = _Tracer(opened, given)
    state = torch.get_rng_state()
    try:
        # A batch norm would count the fake batch, and remembered keys belong to whole models.
        with _factories_traced(tracer), use_copied_buffers(model), on_fake_tensors(model):
            graph = tracer.trace(model, concrete_args=constants or None)
            for path, module in model.named_modules():
                for name, buffer in module._buffers.items():
                    if isinstance(buffer, fx.Proxy):
                        raise _changed_buffer(model, f"{path}.{name}".lstrip("."))
            fakes = [name for name, value in vars(model).items() if isinstance(value, FakeTensor)]
            for name in fakes:  # the tracer keeps constants as attributes
                delattr(model, name)
            if fakes:
                raise TypeError("a tensor is made of values that exist only while the model runs")
            return graph
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code does with a value that is not there yet
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot be traced between its blocks: {type(error).__name__}: {first_line(error)}. "
            "Between blocks, control flow must not depend on tensor contents, and values must be tensors, sizes or plain containers. Move "
            "such code into its own module."
        ) from error
    finally:
        torch.set_rng_state(state)


def _changed_buffer(model: nn.Module, name: str) -> ConfigError:
    return ConfigError(
        f"the forward of {type(model).__name__} changes the buffer {name!r} between its blocks, which no stage would keep. Move such code "
        "into its own module."
    )


class _ValueProxy(fx.Proxy):
    """A traced value that knows its length where a sample has it."""

    def __len__(self) -> int:
        value = self.node.meta.get(VALUE, _UNKNOWN)
        return len(value) if value is not _UNKNOWN else super().__len__()

    def __setitem__(self, index: object, value: object) -> None:
        """Record a copy that has the item; this value is the copy from now on."""
        self.tracer.reject_buffer(self.node)  # type: ignore[attr-defined]
        self.node = self.tracer.create_proxy("call_function", with_item, (self, index, value), {}).node


def with_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Return a copy of a tensor in which an item is set."""
    result = tensor.clone()
    result[index] = value
    return result


def changed_copy(tensor: Tensor, method: str, *args: object, **kwargs: object) -> Tensor:
    """Return a copy of a tensor after a method changed it in place."""
    return getattr(tensor.clone(), method)(*args, **kwargs)


class _Tracer(fx.Tracer):
    """Traces through the opened modules, with the values of a sample next to the symbols."""

    proxy_buffer_attributes = True

    def __init__(self, opened: set[nn.Module], given: Mapping[str, object] | None):
        super().__init__(autowrap_modules=(math,))
        self._opened, self._given = opened, given
        self._installed: set[nn.Module] = set()
        self._mode: Any = None if given is None else FakeTensorMode(allow_non_fake_inputs=True)
        self._is_computing = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ValueProxy(node, self)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return how the forward is called, by name, whatever its decorators are; arguments without a symbol are constants."""
        constants = concrete_args or {}
        self._installed = set(self.root.modules())
        parameters = inspect.signature(self.root.forward).parameters
        loose = [name for name, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = [name for name in parameters if name not in constants and name not in loose]
        defaults = [() if (p := parameters[name]).default is p.empty else (p.default,) for name in names]
        proxies = [self.create_proxy("placeholder", name, default, {}) for name, default in zip(names, defaults)]

        def run(root: nn.Module, *values: object) -> Any:
            return root_fn(root, **dict(zip(names, values)), **constants)

        return run, [self.root, *proxies]

    def create_arg(self, a: object) -> Any:
        """Keep the class of a mapping with a class of its own, such as the outputs of transformers, which losses ask by attribute."""
        if isinstance(a, dict) and type(a) not in (dict, OrderedDict) and type(a) in SUPPORTED_NODES:
            return self.create_proxy("call_function", type(a), (), dict(a)).node
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._opened

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self._is_computing or m not in self._installed:  # inside a single step, or made on the way, such as a loss
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._is_computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = obj.node.meta.get(VALUE, _UNKNOWN)
        return bool(value) if value is not _UNKNOWN else super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = obj.node.meta.get(VALUE, _UNKNOWN)
        if isinstance(value, tuple | list):
            items: Any = obj
            return iter([items[index] for index in range(len(value))])
        return super().iter(obj)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **more: Any) -> fx.Proxy:
        is_in_place = kind == "call_method" and target.endswith("_") and not target.endswith("__")
        changed = args[0] if is_in_place and isinstance(args[0], fx.Proxy) else None
        if changed is not None:
            self.reject_buffer(changed.node)
            kind, target, args = "call_function", changed_copy, (changed, target, *args[1:])
        proxy = super().create_proxy(kind, target, args, kwargs, *others, **more)
        if self._mode is not None:
            self._compute(proxy.node)
        if changed is not None:
            changed.node = proxy.node
        return proxy

    def reject_buffer(self, node: fx.Node) -> None:
        """Raise if a value that is about to be changed in place is a buffer of the model: only a copy would be changed."""
        if node.op == "get_attr" and str(node.target) in dict(self.root.named_buffers(remove_duplicate=False)):
            raise _changed_buffer(self.root, str(node.target))

    def _compute(self, node: fx.Node) -> None:
        """Give a node the value it has for the sample; one that cannot be computed has none."""
        if any(VALUE not in argument.meta for argument in node.all_input_nodes):
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta[VALUE])
        self._is_computing = True
        try:
            with self._mode, torch.no_grad():
                node.meta[VALUE] = self._value(node, args, kwargs)
        except KeyError:
            pass  # an argument the sample does not have
        finally:
            self._is_computing = False

    def _value(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        def fake(tensor: Tensor) -> Tensor:
            return self._mode.from_tensor(tensor.detach())

        if node.op == "placeholder":
            assert self._given is not None
            return tree_map_only(Tensor, fake, self._given[str(node.target).lstrip("*")])
        if node.op == "get_attr":
            return tree_map_only(Tensor, fake, attrgetter(str(node.target))(self.root))
        if node.op == "call_module":
            with FlopCounterMode(display=False) as counter:
                result = self.root.get_submodule(str(node.target))(*args, **kwargs)
            node.meta[FLOPS] = counter.get_total_flops()
            return result
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _factories_traced(tracer: _Tracer) -> AbstractContextManager[None]:
    """Let torch's factories be recorded when a size or device given to them is traced."""

    def traced(original: Callable[..., object]) -> Callable[..., object]:
        def make(*args: object, **kwargs: object) -> object:
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                return tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return make

    return attributes_set((torch, name, traced(getattr(torch, name))) for name in _FACTORIES)
