"""The decorators: `@experiment`, `@group`, `@parameter` and `@param_group`.

Parameters of an experiment come in one order: plugins and standard ones, the group's, inherited ones, those of decorators below
`@experiment`, the signature's, and those of decorators above.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drivetrain.core.errors import ParameterError
from drivetrain.experiment.experiments import MEMO, Experiment, ExperimentGroup
from drivetrain.experiment.parameters import Parameter, ParameterGroup
from drivetrain.experiment.plugins import app


def experiment(name: Any = None, inherit_params: Any = None, defaults: Mapping[str, Any] | None = None) -> Any:
    """Make a function an experiment: `@experiment`, or `@experiment(name=..., inherit_params=..., defaults={...})`.

    >>> @experiment
    ... def square(x: int = 3):
    ...     return x * x
    >>> square.name, [p.name for p in square.get_parameters()][-1]
    ('square', 'x')
    """
    if callable(name):
        return declare_experiment(name, None, inherit_params, defaults)
    return lambda function: declare_experiment(function, name, inherit_params, defaults)


def group(name: Any = None, inherit_params: Any = None) -> Any:
    """Make a function a group of experiments; the function itself is never called."""
    if callable(name):
        return declare_group(name, None, inherit_params)
    return lambda function: declare_group(function, name, inherit_params)


def parameter(
    name: str,
    type: Any = str,
    default: Any = None,
    required: bool = False,
    allowed_values: Iterable[Any] | None = None,
    is_flag: bool = False,
    multiple: bool = False,
    allow_from_file: bool = True,
    envvar: str | bool | None = None,
    help: str | None = None,
    default_help: str | None = None,
    hidden: bool = False,
    behaviour: Any = None,
    *,
    resumable: bool = False,
    secret: bool | None = None,
) -> Callable[[Any], Any]:
    """Add a parameter to an experiment or group, above or below its decorator.

    `type` is a type, or any function of the given text. A function as `default` is called once per run. `envvar` names the
    environment variable it may be read from. `resumable` lets it differ when a run is continued. `behaviour` is an object whose
    `on_value(parameter, value, values)` is called when the parameter was given. `secret` says whether the value is masked wherever it
    is written; by default its type (`Secret[str]`) and name (`api_key`, `password`) decide.
    """
    made = Parameter(
        name=name,
        type=type,
        default=default,
        required=required,
        allowed_values=allowed_values,
        is_flag=is_flag,
        multiple=multiple,
        allow_from_file=allow_from_file,
        envvar=envvar,
        help=help,
        default_help=default_help,
        hidden=hidden,
        behaviour=behaviour,
        resumable=resumable,
        secret=secret,
    )
    return _adder(made)


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


def declare_experiment(
    function: Callable[..., Any],
    name: str | None,
    inherit_params: Any,
    defaults: Mapping[str, Any] | None,
    *,
    inherit_first: Any = None,
    member_of: ExperimentGroup | None = None,
) -> Experiment:
    """Make an experiment of a function."""
    app.load_all_plugins()
    made: Experiment = app.experiment_created(Experiment(function, name, defaults))
    for source in (inherit_first, inherit_params):
        if source is not None:
            made.inherit(source)
    made.add_memo()
    made.add_signature()
    made.check_defaults()
    if member_of is not None:
        member_of.add_experiment(made)
    return made


def declare_group(
    function: Callable[..., Any],
    name: str | None,
    inherit_params: Any,
    *,
    inherit_first: Any = None,
    member_of: ExperimentGroup | None = None,
) -> ExperimentGroup:
    """Make a group of a function."""
    made = ExperimentGroup(function, name)
    for source in (inherit_first, inherit_params):
        if source is not None:
            made.inherit(source)
    made.add_memo()
    if member_of is not None:
        member_of.add_experiment(made)
    return made
