"""One rule for every value: explicit, then parameter files, environment, the experiment's `defaults`, declared default.

The rule is the same for a command line and for `run(...)`, in any order of the arguments, and every value keeps its
origin. A parameter file may include others, also one of several that a folder offers (a config group), and its values may refer to
parameters, `${lr}`, which is replaced by the value that the run has in the end. Names are looked up; nothing is evaluated.
"""

import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.core.errors import ParameterError, did_you_mean
from drivetrain.core.secret import is_masked, masked, texts_of
from drivetrain.core.types import Settings
from drivetrain.experiment.parameters import Parameter, ParameterSet

if TYPE_CHECKING:
    from drivetrain.core.yaml import YamlFile

PARAMS_FILE = "params_file"
NEVER, AUTO = "never", "auto"
"""What `resume` may be other than a run."""
INCLUDE = "include"
"""The key of a parameter file that names others; an experiment with a parameter of this name cannot include."""
SUFFIXES = (".yaml", ".yml", ".json")
MOST_FILES = 64
"""Files that one parameter file may include, directly or not."""
REFERENCE = re.compile(r"\$?\$\{([^{}]*)\}")
RECORD = ("parameters.yaml", "manifest.json")
"""The parameter file of a run, and a file next to it: such a file is read as it is, without references and includes."""
NOT_DECLARED = (None, "default", "defaults", "sweep")
"""Origins of values that were not set for this run."""

logger = logging.getLogger("drivetrain")


class Given(NamedTuple):
    """A value as it was given, before it is read in its parameter's type."""

    value: Any
    origin: str
    is_text: bool = False
    refers: bool = False
    """Whether `${name}` in it refers to a parameter."""


@dataclass
class Resolved:
    """The values of one run, and where each came from."""

    values: Settings = field(default_factory=dict, repr=False)
    origins: dict[str, str] = field(default_factory=dict)
    """`cli`, `run`, `file.yaml:3`, `env:NAME`, `defaults` or `default`, by parameter."""
    secrets: frozenset[str] = frozenset()
    """Parameters whose values are masked wherever they are written."""
    public: frozenset[str] = frozenset()
    """Parameters that were declared not to be secret, so that nothing within them is masked."""

    def shown(self) -> Settings:
        """Return the values as files and screens show them."""
        return {name: self.shown_value(name, value) for name, value in self.values.items()}

    def shown_value(self, name: str, value: object) -> Any:
        """Return one value as files and screens show it."""
        return value if name in self.public else masked(value, is_secret=name in self.secrets)

    def hidden(self) -> frozenset[str]:
        """Return the secret texts, for texts that must not contain them."""
        found = (
            texts_of(value, is_secret=name in self.secrets)
            for name, value in self.values.items()
            if name not in self.public
        )
        return frozenset().union(*found)

    def is_declared(self, name: str) -> bool:
        """Return whether this value was set for this run and is not a default."""
        return self.origins.get(name) not in NOT_DECLARED


def given_in_python(
    values: Mapping[str, object], parameters: ParameterSet, origin: str = "run", *, takes_choices: bool = False
) -> dict[str, Given]:
    """Return what a Python caller gave, by full name; an unknown name is an error.

    With `takes_choices` the name of a config group and a text is a choice of that group.
    """
    if not isinstance(values, Mapping):
        raise ParameterError(f"parameters: expected a dict of names and values, got {values!r}.")
    given = {}
    for name, (value, keys) in flatten(values, parameters).items():
        is_choice = takes_choices and isinstance(value, str) and name in groups_of(parameters)
        if name not in parameters and not is_choice:
            place = "" if origin == "run" else f"{origin}: "
            raise ParameterError(place + unknown_parameter(".".join(keys), parameters))
        given[name] = Given(value, origin)
    return given


def resolve(
    parameters: ParameterSet,
    explicit: Mapping[str, Given],
    defaults: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the value of every parameter; None means "not given" wherever it appears."""
    sources = [
        dict(explicit),
        _from_files(parameters, explicit),
        _from_environment(parameters, os.environ if environment is None else environment),
        given_in_python(defaults or {}, parameters, "defaults"),
    ]
    public = frozenset(name for name, parameter in parameters.items() if parameter.secret is False)
    resolved = Resolved(secrets=parameters.secrets, public=public)
    given = {name: _first_given(name, parameters[name], sources) for name in parameters}
    values = _Values(parameters, given)
    resolved.origins |= {name: entry.origin if entry else "default" for name, entry in given.items()}
    absent = absent_fields(parameters, resolved)
    resolved.values |= {name: None if name in absent else values.read(name) for name in parameters}
    if resolved.values.get("resume") in (None, NEVER, AUTO):  # else the run that is continued has values of its own
        check_required(parameters, resolved)
    for name, parameter in parameters.items():
        if parameter.behaviour is not None and resolved.is_declared(name) and hasattr(parameter.behaviour, "on_value"):
            parameter.behaviour.on_value(parameter, resolved.values[name], resolved.values)
    return resolved


def absent_fields(parameters: ParameterSet, resolved: Resolved) -> frozenset[str]:
    """Return the fields of dataclasses that are None because none of their fields has another value than the declared default."""
    declared = [name for name in parameters if resolved.origins.get(name, "default") != "default"]
    return frozenset(
        name
        for name, parameter in parameters.items()
        for around in parameter.optional_within
        if not any(other.startswith(f"{around}.") for other in declared)
    )


def check_required(parameters: ParameterSet, resolved: Resolved) -> None:
    """Raise for a required parameter without a value."""
    absent = absent_fields(parameters, resolved)
    for name, parameter in parameters.items():
        if parameter.required and resolved.values[name] is None and name not in absent:
            raise ParameterError(
                f"the parameter {name!r} is required. Give {parameter.flag} on the command line, or {name}=..."
            )


def _first_given(name: str, parameter: Parameter, sources: Sequence[Mapping[str, Given]]) -> Given | None:
    """Return the effective value, None if none was set."""
    every = [source[name] for source in sources if name in source and source[name].value is not None]
    given = next((entry for entry in every if not holds_mask(parameter, entry.value)), None)
    if given is None and every:
        raise ParameterError(masked_value(parameter, every[0].origin))
    return given


class _Values:
    """Reads values in their parameters' types; one that refers to another is read after it."""

    def __init__(self, parameters: ParameterSet, given: Mapping[str, Given | None]):
        self._parameters, self._given = parameters, given
        self._known: Settings = {}
        self._open: list[str] = []  # the parameters whose references are being followed

    def read(self, name: str) -> object:
        """Return the value of a parameter."""
        if name not in self._known:
            given, parameter = self._given[name], self._parameters[name]
            if given is not None and given.refers:
                given = given._replace(value=self._filled(name, given, given.value))
            if given is None or given.value is None:
                self._known[name] = parameter.make_default()
            else:
                self._known[name] = _read(parameter, given)
        return self._known[name]

    def _filled(self, name: str, given: Given, value: object) -> object:
        """Return a value with its references replaced; `$${` is a plain `${`."""
        if isinstance(value, Mapping):
            return {key: self._filled(name, given, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._filled(name, given, item) for item in value)
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = REFERENCE.fullmatch(value)
        if whole and not value.startswith("$$"):
            return self._target(name, given, whole[1])
        return REFERENCE.sub(
            lambda found: found[0][1:] if found[0].startswith("$$") else str(self._target(name, given, found[1])), value
        )

    def _target(self, name: str, given: Given, text: str) -> object:
        other = text.strip() if text.strip() in self._parameters else text.strip().replace("-", "_")
        if other not in self._parameters:
            raise ParameterError(
                f"{given.origin}: {name} refers to ${{{text}}}: {unknown_parameter(text.strip(), self._parameters)} Plain text is "
                "written $${...}."
            )
        if self._parameters[other].is_secret and not self._parameters[name].is_secret:
            raise ParameterError(f"{given.origin}: {name} refers to {other}, a secret, which would be written with it.")
        if other in (*self._open, name):
            chain = " -> ".join([*self._open, name, other])
            raise ParameterError(f"{given.origin}: references form a cycle: {chain}.")
        self._open.append(name)
        try:
            return self.read(other)
        finally:
            self._open.pop()


def holds_mask(parameter: Parameter, value: object) -> bool:
    """Return whether a value that was read back was masked when it was written."""
    may_be = parameter.is_secret or (parameter.secret is None and not isinstance(value, str))
    return may_be and is_masked(value)


def masked_value(parameter: Parameter, where: str) -> str:
    """Return the message for a value that was masked when it was written: how to give it again."""
    variable = f" or in the environment variable {parameter.envvar}" if parameter.envvar else ""
    return (
        f"{where}: the value of {parameter.name} is masked, because it is a secret. Give it again with {parameter.flag}{variable}. "
        "If it is not a secret, declare it with secret=False."
    )


def _read(parameter: Parameter, given: Given) -> object:
    where = {"cli": parameter.flag, "run": "run"}.get(given.origin, given.origin)
    if parameter.name == PARAMS_FILE and isinstance(given.value, list | tuple):
        files = [parameter.read(item, is_text=given.is_text, where=where) for item in given.value]
        return files[0] if len(files) == 1 else files
    return parameter.read(given.value, is_text=given.is_text, where=where)


def _from_files(parameters: ParameterSet, explicit: Mapping[str, Given]) -> dict[str, Given]:
    choices = {name: entry for name, entry in explicit.items() if name not in parameters}
    given = explicit.get(PARAMS_FILE)
    reader = ParameterFiles(parameters, {name: str(entry.value) for name, entry in choices.items()})
    found: dict[str, Given] = {}
    files = [] if given is None or given.value is None else _read(parameters[PARAMS_FILE], given)
    for path in files if isinstance(files, list) else [files]:
        found |= {name: entry for name, entry in reader.read(Path(str(path))).items() if entry.value is not None}
    for name in choices:
        if name not in reader.used:
            raise ParameterError(
                f"{name}={choices[name].value}: {name} has parameters of its own ({name}.*), and no parameter file offers a choice for "
                f"it. Set one of these, or use a --params-file with `{INCLUDE}: [{name}: ...]`."
            )
    return found


def _from_environment(parameters: ParameterSet, environment: Mapping[str, str]) -> dict[str, Given]:
    """Read the variables that parameters declare; an empty one counts as not set."""
    found = {}
    for name, parameter in parameters.items():
        text = environment.get(parameter.envvar, "") if isinstance(parameter.envvar, str) else ""
        if text:
            origin = f"env:{parameter.envvar}"
            found[name] = Given(_items(text, origin) if parameter.multiple else text, origin, is_text=True)
    return found


def _items(text: str, origin: str) -> list[str]:
    """Split a list at spaces and commas; quotes keep an item together."""
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="")
        lexer.whitespace += ","
        lexer.whitespace_split, lexer.commenters = True, ""
        return list(lexer)
    except ValueError as error:
        raise ParameterError(f"{origin}: the value cannot be split into items: {error}.") from None


Keys = tuple[str, ...]


def flatten(
    values: Mapping[str, object],
    parameters: ParameterSet,
    prefix: str = "",
    place_of: Callable[[Keys], str] = lambda keys: "",
) -> dict[str, tuple[Any, Keys]]:
    """Return each value under its full name, with the path of keys it was found at: `opt: {lr: 1}` gives `opt.lr`.

    A dataclass instance counts as its fields. Names that no parameter has come out as they are. One parameter under two spellings,
    `batch-size` and `batch_size`, is an error; `place_of` gives the start of its message.
    """
    found: dict[str, tuple[Any, Keys]] = {}
    for name, value, keys in _leaves(values, (), prefix, parameters):
        if name in found:
            spellings = f"{'.'.join(found[name][1])} and {'.'.join(keys)}"
            raise ParameterError(f"{place_of(keys)}{name} is given twice, as {spellings}.")
        found[name] = (value, keys)
    return found


def _leaves(
    values: Mapping[str, object], path: Keys, prefix: str, parameters: ParameterSet
) -> Iterator[tuple[str, Any, Keys]]:
    for key, value in values.items():
        name = f"{prefix}{key}" if isinstance(key, str) else str(key)
        if isinstance(key, str) and name not in parameters:
            name = prefix + key.replace("-", "_")
        inside = name not in parameters and any(other.startswith(name + ".") for other in parameters)
        if inside and hasattr(value, "__dataclass_fields__"):
            value = {field: getattr(value, field) for field in value.__dataclass_fields__}
        if inside and value is None:
            continue
        if inside and isinstance(value, Mapping):
            yield from _leaves(value, (*path, str(key)), name + ".", parameters)
        else:
            yield name, value, (*path, str(key))


def full_names(values: Mapping[str, object], parameters: ParameterSet) -> Settings:
    """Return values by the full names of their parameters: `{"opt": {"lr": 1}}` is `{"opt.lr": 1}`."""
    return {name: value for name, (value, _) in flatten(values, parameters).items()}


def groups_of(parameters: ParameterSet) -> list[str]:
    """Return the names that have parameters within, such as `opt` of `opt.lr`."""
    parts = [name.split(".") for name in parameters]
    return list(dict.fromkeys(".".join(part[:length]) for part in parts for length in range(1, len(part))))


class ParameterFiles:
    """Reads parameter files with what they include; `choices` are those of config groups, which count before the files' own."""

    def __init__(self, parameters: ParameterSet, choices: Mapping[str, str] | None = None):
        self._parameters, self._choices = parameters, choices or {}
        self.used: set[str] = set()
        """The config groups that files have asked for."""
        self._left = MOST_FILES

    def read(self, path: Path, group: str = "", trail: tuple[Path, ...] = ()) -> dict[str, Given]:
        """Return the values of a file, of those it includes first; the keys of a group's file are within the group."""
        from drivetrain.core.yaml import read_yaml

        file = read_yaml(path, error=ParameterError)
        own, found = dict(file.data), dict[str, Given]()
        is_record = path.name == RECORD[0] and (path.parent / RECORD[1]).is_file()
        if INCLUDE in own and f"{group}{INCLUDE}" not in self._parameters and not is_record:
            for place, other, inner in self._included(file, path, own.pop(INCLUDE)):
                if other.resolve() in (*trail, path.resolve()):
                    raise ParameterError(f"{place}: files include each other in a cycle: {other}.")
                self._left -= 1
                if self._left < 0:
                    raise ParameterError(f"{place}: more than {MOST_FILES} files are included.")
                try:
                    found |= self.read(other, group + inner, (*trail, path.resolve()))
                except ParameterError as error:
                    raise error if str(error).startswith(other.name) else ParameterError(f"{place}: {error}") from None
        return found | self._own_values(file, own, group, refers=not is_record)

    def _own_values(self, file: "YamlFile", own: Mapping[str, object], group: str, refers: bool) -> dict[str, Given]:
        parameters, given = self._parameters, dict[str, Given]()
        place_of = lambda keys: f"{file.name}:{file.line(*keys) or 1}"
        for name, (value, keys) in flatten(own, parameters, group, lambda keys: f"{place_of(keys)}: ").items():
            place = place_of(keys)
            if name not in parameters:
                raise ParameterError(f"{place}: {unknown_parameter(group + '.'.join(keys), parameters)}")
            parameter = parameters[name]
            if parameter.allow_from_file:
                given[name] = Given(value, place, refers=refers)
            elif value not in (None, parameter.default) and not parameter.hidden:
                logger.warning("%s: %s is never read from a file and is ignored. Give %s.", place, name, parameter.flag)
        return given

    def _included(self, file: "YamlFile", path: Path, entries: object) -> Iterator[tuple[str, Path, str]]:
        """Yield place, path and group of each file that is included: `base.yaml`, or `model: large` for `model/large.yaml`."""
        for index, entry in enumerate(entries if isinstance(entries, list | tuple) else [entries]):
            place = f"{file.name}:{file.line(INCLUDE, index) or file.line(INCLUDE) or 1}"
            if isinstance(entry, str) and Path(entry).suffix in SUFFIXES:
                other = path.parent / entry
                if other.exists() and not other.is_file():  # a pipe would never end
                    raise ParameterError(f"{place}: {INCLUDE}: {entry} is not a plain file.")
                yield place, other, ""
            elif isinstance(entry, Mapping) and entry:
                for group, choice in entry.items():
                    yield place, self._chosen(place, path.parent, group, choice), f"{group}."
            else:
                raise ParameterError(
                    f"{place}: {INCLUDE}: expected a file ({', '.join(SUFFIXES)}), or a group and a choice (model: large), got {entry!r}."
                )

    def _chosen(self, place: str, folder: Path, group: str, choice: object) -> Path:
        """Return the file of a config group: the choice made for the run, else the file's own."""
        if group not in groups_of(self._parameters):
            near = did_you_mean(group, groups_of(self._parameters))
            raise ParameterError(f"{place}: no parameter is within {group!r}.{near}")
        self.used.add(group)
        folder = folder.joinpath(*group.split("."))
        files = {file.stem: file for file in sorted(folder.glob("*")) if file.suffix in SUFFIXES}
        name = self._choices.get(group, choice)
        if name not in files:
            what = f"{group} needs a choice" if name is None else f"there is no {name!r} in {folder}"
            raise ParameterError(
                f"{place}: {what}.{did_you_mean(str(name), files)} Choices: {', '.join(files) or 'none'}."
            )
        return files[str(name)]


def unknown_parameter(name: str, parameters: ParameterSet) -> str:
    """Return the message for an unknown parameter, with the nearest name and all names."""
    shown = [other for other, parameter in parameters.items() if not parameter.hidden]
    if inside := [other for other in shown if other.startswith(f"{name}.")]:
        return f"{name!r} has parameters of its own: {', '.join(inside)}. Set these."
    hint = did_you_mean(str(name).replace("-", "_"), shown)
    return f"unknown parameter {name!r}.{hint} Parameters: {', '.join(shown)}."
