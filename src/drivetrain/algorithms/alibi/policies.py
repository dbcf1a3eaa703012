"""Replacements for layers by class, for models whose attention no adapter reaches."""

import inspect
from collections.abc import Callable

from torch import nn

from drivetrain.core.errors import ConfigError, ConfigTypeError

Policy = Callable[[nn.Module, int, int], nn.Module | None]


class PolicyRegistry(dict[type[nn.Module], Policy]):
    """Functions `(module, module_index, max_sequence_length) -> module or None` by the class of module they change.

    Each is called once for every module of its class when `apply_alibi` runs; it may change the module and return it, or return
    another one that takes its place.
    """

    def register(self, *modules: type[nn.Module]) -> Callable[[Policy], Policy]:
        """Return a decorator that registers a function for one or more classes."""
        if not modules:
            raise ConfigError("policy_registry.register() names no class. Use @policy_registry.register(MyAttention).")

        def enter(policy: Policy) -> Policy:
            self._check(policy, modules)
            for cls in modules:
                self[cls] = policy
            return policy

        return enter

    def _check(self, policy: Policy, modules: tuple[object, ...]) -> None:
        name = getattr(policy, "__name__", repr(policy))
        if not callable(policy):
            raise ConfigTypeError(f"policy_registry.register: {policy!r} is no function.")
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
                raise ConfigError(f"policy_registry.register: there is a policy for {cls.__name__} already.")


policy_registry = PolicyRegistry()
