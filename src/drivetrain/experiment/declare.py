"""The decorators: `@experiment`, `@group`, `@parameter` and `@param_group`.

Parameters of an experiment come in one order: plugins and standard ones, the group's, inherited ones, those of decorators below
`@experiment`, the signature's, and those of decorators above.
"""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from drivetrain.core.errors import ParameterError
from drivetrain.experiment.experiments import MEMO, Experiment, ExperimentGroup, declare_experiment, declare_group
from drivetrain.experiment.parameters import Parameter, ParameterGroup

P = ParamSpec("P")
T = TypeVar("T")


def experiment(
    name: Any = None,
    inherit_params: Any = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    directions: Mapping[str, str] | None = None,
) -> Any:
    """Make a function an experiment: `@experiment`, or `@experiment(name=..., inherit_params=..., defaults={...})`.

    `directions={"eval/cost": "min"}` declares which values of a metric are good where its name does not say so.

    >>> @experiment
    ... def square(x: int = 3):
    ...     return x * x
    >>> square.name, [p.name for p in square.get_parameters()][-1]
    ('square', 'x')
    """
    if callable(name):
        return declare_experiment(name, None, inherit_params, defaults, directions)
    return lambda function: declare_experiment(function, name, inherit_params, defaults, directions)


def group(name: Any = None, inherit_params: Any = None) -> Any:
    """Make a function a group of experiments; the function itself is never called."""
    if callable(name):
        return declare_group(name, None, inherit_params)
    return lambda function: declare_group(function, name, inherit_params)


def _with_arguments_of(make: Callable[P, Parameter]) -> Callable[P, Callable[[T], T]]:
    def parameter(*args: P.args, **kwargs: P.kwargs) -> Callable[[T], T]:
        """Add a parameter to an experiment or group, above or below its decorator.

        `type` is a type, or any function of the given text. A function as `default` is called once per run. `envvar` names the
        environment variable it may be read from. `resumable` lets it differ when a run is continued. `behaviour` is an object
        whose `on_value(parameter, value, values)` is called when the parameter was given. `secret` decides whether the value is
        masked wherever it is written; by default its type (`Secret[str]`) and name (`api_key`, `password`) decide.
        """
        return _adder(make(*args, **kwargs))

    parameter.__wrapped__ = make  # type: ignore[attr-defined]  # help() and inspect show its arguments
    return parameter


parameter = _with_arguments_of(Parameter)


def param_group(name: str, *parameters: Any) -> Callable[[Any], Any]:
    """Add several parameters under one title in the help: `param_group("optimizer", "How it learns.", parameter(...), ...)`."""
    help = parameters[0] if parameters and isinstance(parameters[0], str) else None
    entries = parameters[1:] if help is not None else parameters
    made = []
    for entry in entries:
        found = getattr(entry, "parameter", entry)
        if not isinstance(found, Parameter):
            raise ParameterError(
                f"param_group {name!r}: {entry!r} is not a parameter. Write parameter(...) without the @, after the help text."
            )
        made.append(found)
    return _adder(ParameterGroup(name, help, made))


def _adder(entry: Parameter | ParameterGroup) -> Callable[[Any], Any]:
    def decorator(target: Any) -> Any:
        if isinstance(target, Experiment | ExperimentGroup):
            (target.add_param_group if isinstance(entry, ParameterGroup) else target.add_parameter)(entry)  # type: ignore[arg-type]
        else:
            if not hasattr(target, MEMO):
                setattr(target, MEMO, [])
            getattr(target, MEMO).append(entry)
        return target

    decorator.parameter = entry  # type: ignore[attr-defined]
    return decorator
