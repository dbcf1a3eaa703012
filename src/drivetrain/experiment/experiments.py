"""Experiments, groups of them, and the decorators that make them: `@experiment`, `@group`, `@parameter` and `@param_group`.

Parameters of an experiment come in one order: plugins and standard ones, the group's, inherited ones, those of decorators below
`@experiment`, the signature's, and those of decorators above.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from drivetrain.core.display import aligned
from drivetrain.core.errors import DrivetrainError, ParameterError, nearest_name
from drivetrain.experiment.command_line import (
    BAD_INPUT,
    check_is_program,
    closed_pipe_ends_quietly,
    experiment_parser,
    group_help,
    params_table,
    parse,
    print_any_text,
    print_error,
    program_name,
    usage_line,
)
from drivetrain.experiment.directions import check_direction
from drivetrain.experiment.parameters import Parameter, ParameterGroup, ParameterSet, standard_parameters
from drivetrain.experiment.plugins import app
from drivetrain.experiment.resolve import Resolved, given_in_python, resolve
from drivetrain.experiment.signature import CallSignature, description_of

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

P = ParamSpec("P")
T = TypeVar("T")
Function = Callable[..., object]

MEMO = "__drivetrain_parameters__"
"""Function attribute in which decorators below `@experiment` store their parameters."""


@contextmanager
def _explained(usage: str, exit_on_error: bool) -> Iterator[None]:
    """Explain what prevents a run and end the program with status 2, unless the caller wants the error."""
    try:
        yield
    except DrivetrainError as error:
        if not exit_on_error:
            raise
        print_error(error, usage)
        raise SystemExit(BAD_INPUT) from None


class _WithParameters:
    """What an experiment and a group have in common."""

    def __init__(self, main_function: Callable[..., object], name: str | None):
        if not callable(main_function):
            raise ParameterError(
                f"an experiment needs a function, got {main_function!r}. Use @experiment above a `def`."
            )
        is_plain = isinstance(name, str) and name not in ("", ".", "..") and not any(sign in name for sign in "/\\\0")
        if name is not None and not is_plain:
            raise ParameterError(f"experiment name {name!r}: expected a plain name that can also name a folder.")
        self.main_function = main_function
        self.name = name or main_function.__name__.lower().replace("_", "-")
        self.parameters = ParameterSet()
        functools.update_wrapper(self, main_function, updated=())  # type: ignore[arg-type]

    def add_parameter(self, param: Parameter) -> None:
        """Add one parameter."""
        self.parameters.add(param)

    def get_parameters(self) -> list[Parameter]:
        """Return all parameters, in order of declaration."""
        return list(self.parameters.values())

    def add_param_group(self, param_group: ParameterGroup) -> None:
        """Add a group of parameters."""
        self.parameters.add_group(param_group)

    def get_param_groups(self) -> list[ParameterGroup]:
        """Return the parameter groups."""
        return list(self.parameters.groups)

    def inherit(self, sources: object) -> None:
        """Take over the parameters of experiments, groups or decorated functions; None is none."""
        for source in sources if isinstance(sources, list | tuple) else [sources] if sources is not None else []:
            if isinstance(source, _WithParameters):
                self.parameters.inherit(source.get_parameters(), source.get_param_groups())
            elif hasattr(source, MEMO):
                memo = getattr(source, MEMO)
                groups = [entry for entry in memo if isinstance(entry, ParameterGroup)]
                self.parameters.inherit([entry for entry in memo if isinstance(entry, Parameter)], groups)
            else:
                raise ParameterError(
                    f"{self.name}: inherit_params got {source!r}. Expected an experiment, a group, a function with "
                    "@parameter decorators, or a list of those."
                )

    def add(self, entry: Parameter | ParameterGroup) -> None:
        """Add what a decorator declares."""
        self.add_param_group(entry) if isinstance(entry, ParameterGroup) else self.add_parameter(entry)

    def add_signature(self) -> None:
        """Declare the parameters of the function's signature; a group's function is never called, so it has none."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Experiment(_WithParameters):
    """A function with parameters that can be run: from Python, from a command line, in a process of its own."""

    def __init__(
        self,
        main_function: Callable[..., object],
        name: str | None = None,
        defaults: Mapping[str, object] | None = None,
        directions: Mapping[str, str] | None = None,
    ):
        super().__init__(main_function, name)
        self.defaults = dict(defaults or {})
        self.directions = {tag: check_direction(good, tag) for tag, good in (directions or {}).items()}
        """Metrics for which smaller ("min") or larger ("max") values are better, where the name does not show it."""
        self.signature = CallSignature(main_function)
        for parameter in standard_parameters():
            parameter.is_standard = True
            self.add_parameter(parameter)

    @property
    def function_name(self) -> str:
        """The name of the main function in its module."""
        return inspect.unwrap(self.main_function).__qualname__

    @property
    def source(self) -> Path | None:
        """The file that defines the main function; None at a prompt."""
        found = inspect.getsourcefile(inspect.unwrap(self.main_function))
        return None if found is None else Path(os.path.abspath(found))

    def add_signature(self) -> None:
        """Declare the parameters of the function's signature; a name declared already only gets its default."""
        for parameter in self.signature.parameters:
            known = self.parameters.get(parameter.name)
            if known is None:
                self.add_parameter(parameter)
            elif parameter.default is not None:
                self.parameters[parameter.name] = known.with_default(parameter.default)
        # Unknown names among the defaults wait for the first use, as decorators above may still add them.
        for name, value in self.defaults.items():
            if name in self.parameters and value is not None:
                self.parameters[name].read(value, is_text=False, where=f"{self.name}: defaults")

    def run(self, params: Mapping[str, object] | None = None, **values: object) -> Any:
        """Run in this process and return what the main function returns: `digits.run(lr=0.1)` or `digits.run({"lr": 0.1})`."""
        return self._start(self.resolve({**(params or {}), **values}))

    __call__ = run

    def resolve(self, params: Mapping[str, object]) -> Resolved:
        """Return the value and origin of every parameter, as a run with these would have them."""
        given = given_in_python(params, self.parameters, takes_choices=True)
        return resolve(self.parameters, given, self.defaults)

    def resume(self, folder: str | Path, params: Mapping[str, object] | None = None, *, force: bool = False) -> Any:
        """Continue a run, or one of its checkpoints; `params` may change what is resumable, or anything with `force`."""
        return self._start(self.resolve({**(params or {}), "resume": str(folder)}), force=force)

    def cli(self, argv: Sequence[str] | None = None, exit_on_error: bool = True, *, program: str | None = None) -> Any:
        """Run with the options of a command line; what prevents the run is explained and ends the program with status 2."""
        check_is_program(self.name)
        program = program or program_name()
        print_any_text()
        with ExitStack() as stack:
            stack.enter_context(_explained(usage_line(program), exit_on_error))
            found = self._read_command(sys.argv[1:] if argv is None else argv, program)
            if found is not None:
                line = None if argv is None else [program, *map(str, argv)]
                # Errors of the run itself keep their traceback.
                return self._start(found[0], force=found[1], argv=line, when_ready=stack.pop_all)
        if exit_on_error:
            raise SystemExit(0)
        return None

    def _read_command(self, argv: Sequence[str], program: str) -> tuple[Resolved, bool] | None:
        """Return the values of a command line and whether it forces a resume; None if it asked for text, which is printed."""
        command = parse(argv, self.parameters)
        if not command.wants_help:
            resolved = resolve(self.parameters, command.given, self.defaults)
            if not command.prints_params:
                return resolved, command.force
        with closed_pipe_ends_quietly():
            print(self.help(program) if command.wants_help else params_table(resolved.shown(), resolved.origins))
        return None

    def help(self, program: str | None = None) -> str:
        """Return the help text."""
        common = [parameter.name for parameter in standard_parameters()]
        about = description_of(self.main_function)
        return experiment_parser(program or program_name(), self.parameters, about, common).format_help().rstrip()

    def run_in_new_process(self, params: Mapping[str, object]) -> "BaseProcess":
        """Run in a new process and return its handle; the caller waits for it."""
        from drivetrain.experiment.running import run_in_new_process

        return run_in_new_process(self, dict(params))

    def _start(self, resolved: Resolved, **options: Any) -> object:
        from drivetrain.experiment.running import run_experiment

        check_is_program(self.name)
        return run_experiment(self, resolved, **options)


class ExperimentGroup(_WithParameters):
    """Experiments under one command, which inherit the group's parameters; its function is never called."""

    def __init__(self, main_function: Callable[..., object], name: str | None = None):
        super().__init__(main_function, name)
        self.experiments: list[Experiment | ExperimentGroup] = []

    def add_experiment(self, experiment: "Experiment | ExperimentGroup") -> None:
        """Add an experiment or a group; names must differ."""
        if any(experiment.name == other.name for other in self.experiments):
            raise ParameterError(
                f"the group {self.name!r} already has an experiment {experiment.name!r}. Rename one of them."
            )
        self.experiments.append(experiment)

    @overload
    def experiment(self, name: Function, /) -> Experiment: ...
    @overload
    def experiment(
        self,
        name: str | None = None,
        inherit_params: object = None,
        defaults: Mapping[str, object] | None = None,
        inherit_params_from_group: bool = True,
        *,
        directions: Mapping[str, str] | None = None,
    ) -> Callable[[Function], Experiment]: ...
    def experiment(
        self,
        name: object = None,
        inherit_params: object = None,
        defaults: Mapping[str, object] | None = None,
        inherit_params_from_group: bool = True,
        *,
        directions: Mapping[str, str] | None = None,
    ) -> Any:
        """Declare an experiment of this group: `@group.experiment` or `@group.experiment(...)`."""
        make = lambda function, own: app.experiment_created(Experiment(function, own, defaults, directions))
        return _decorator(name, make, inherit_params, self, inherit_params_from_group)

    @overload
    def group(self, name: Function, /) -> "ExperimentGroup": ...
    @overload
    def group(
        self, name: str | None = None, inherit_params: object = None, inherit_params_from_group: bool = True
    ) -> Callable[[Function], "ExperimentGroup"]: ...
    def group(self, name: object = None, inherit_params: object = None, inherit_params_from_group: bool = True) -> Any:
        """Declare a group within this group: `@group.group` or `@group.group(...)`."""
        return _decorator(name, ExperimentGroup, inherit_params, self, inherit_params_from_group)

    def cli(self, argv: Sequence[str] | None = None, exit_on_error: bool = True, *, program: str | None = None) -> Any:
        """Run the experiment that the first argument names."""
        check_is_program(self.name)
        program = program or program_name()
        print_any_text()
        arguments = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
        if arguments and arguments[0] in ("-h", "--help"):
            with closed_pipe_ends_quietly():
                print(self.help(program))
            if exit_on_error:
                raise SystemExit(0)
            return None
        with _explained(f"Usage: {program} EXPERIMENT [--option VALUE ...]", exit_on_error):
            chosen = self._find(arguments[0] if arguments else None)
        return chosen.cli(arguments[1:], exit_on_error, program=f"{program} {chosen.name}")

    def help(self, program: str | None = None) -> str:
        """Return the help text."""
        return group_help(program or program_name(), description_of(self.main_function), self.tree())

    def tree(self) -> str:
        """Return the names of all experiments within, one a line, with the first line of what each does."""
        return "\n".join(aligned(list(self._rows("  ")), gap="    "))

    def _rows(self, indent: str) -> Iterator[tuple[str, str]]:
        for entry in self.experiments:
            yield indent + entry.name, description_of(entry.main_function).partition("\n")[0]
            if isinstance(entry, ExperimentGroup):
                yield from entry._rows(indent + "  ")

    def _find(self, name: str | None) -> "Experiment | ExperimentGroup":
        found = next((entry for entry in self.experiments if entry.name == name), None)
        if found is not None:
            return found
        if name is None or name.startswith("-"):
            what = "the first argument names the experiment" + (f", got {name}" if name else "")
        else:
            near = nearest_name(name, [entry.name for entry in self.experiments])
            what = f"there is no experiment {name!r}" + (f"; did you mean {near!r}?" if near else "")
        raise ParameterError(f"{what.rstrip('.')}\nExperiments:\n{self.tree()}")


def _decorator(
    name: object,
    make: Callable[[Any, Any], Any],
    inherit_params: object,
    group: ExperimentGroup | None = None,
    inherits_group: bool = False,
) -> Any:
    """Return what `@decorate` and `@decorate(name)` evaluate to: in the first form the name is the function."""

    def declare(function: object, own_name: object) -> Any:
        made = make(function, own_name)
        made.inherit(group if inherits_group else None)
        made.inherit(inherit_params)
        for entry in getattr(function, MEMO, []):
            made.add(entry)
        made.add_signature()
        if group is not None:
            group.add_experiment(made)
        return made

    return declare(name, None) if callable(name) else lambda function: declare(function, name)


@overload
def experiment(name: Function, /) -> Experiment: ...
@overload
def experiment(
    name: str | None = None,
    inherit_params: object = None,
    defaults: Mapping[str, object] | None = None,
    *,
    directions: Mapping[str, str] | None = None,
) -> Callable[[Function], Experiment]: ...
def experiment(
    name: object = None,
    inherit_params: object = None,
    defaults: Mapping[str, object] | None = None,
    *,
    directions: Mapping[str, str] | None = None,
) -> Any:
    """Make a function an experiment: `@experiment`, or `@experiment(name=..., inherit_params=..., defaults={...})`.

    `directions={"eval/cost": "min"}` declares which values of a metric are good where its name does not give it.

    >>> @experiment
    ... def square(x: int = 3):
    ...     return x * x
    >>> square.name, [p.name for p in square.get_parameters()][-1]
    ('square', 'x')
    """
    make = lambda function, own: app.experiment_created(Experiment(function, own, defaults, directions))
    return _decorator(name, make, inherit_params)


@overload
def group(name: Function, /) -> ExperimentGroup: ...
@overload
def group(name: str | None = None, inherit_params: object = None) -> Callable[[Function], ExperimentGroup]: ...
def group(name: object = None, inherit_params: object = None) -> Any:
    """Make a function a group of experiments; the function itself is never called."""
    return _decorator(name, ExperimentGroup, inherit_params)


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


def param_group(name: str, *parameters: object) -> Callable[[Any], Any]:
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
    def decorator(target: object) -> Any:
        if isinstance(target, _WithParameters):
            target.add(entry)
        else:
            if not hasattr(target, MEMO):
                setattr(target, MEMO, [])
            getattr(target, MEMO).append(entry)
        return target

    decorator.parameter = entry  # type: ignore[attr-defined]
    return decorator
