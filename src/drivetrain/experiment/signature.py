"""The parameters that a function's signature declares, and how the function is then called.

A function with one plain argument receives all values as a dict. Any other function declares its parameters by its signature:
types from annotations, else from defaults; a dataclass becomes one parameter per field, with dotted names (`opt.lr`), and is put
together again for the call.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ParameterError
from drivetrain.core.secret import masked
from drivetrain.core.types import Settings
from drivetrain.experiment.parameters import Parameter
from drivetrain.experiment.values import SIMPLE, annotated_type, without_none

MAPPINGS = (dict, Mapping, MutableMapping)
LISTS: dict[Any, Callable[[list[object]], object]] = {
    **dict.fromkeys((Sequence, Collection, Iterable), list),
    **{kind: kind for kind in (list, set, frozenset, tuple)},
}
MISSING = inspect.Parameter.empty

SECTION = re.compile(
    r"^(args|arguments|parameters|params|returns|return|raises|yields|example|examples|note|notes):?\s*$", re.I
)
ARGUMENT_SECTIONS = {"args", "arguments", "parameters", "params"}
ENTRY = re.compile(r"^\*{0,2}([A-Za-z_][\w.]*)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
FIELD = re.compile(r"^:param\s+(?:[^:]*\s)?([A-Za-z_][\w.]*)\s*:\s*(.*)$")
TOOL_COMMENT = re.compile(r"#\s*(noqa|type:|pragma|pylint|mypy|fmt:|ruff)")
OTHER_FIELD = re.compile(r"^:\w+[^:]*:")


@dataclass(frozen=True, kw_only=True)
class Param:
    """What an annotation may add: `lr: Annotated[float, Param(help="step size", resumable=True)]`."""

    help: str | None = None
    resumable: bool = False
    """May differ when a run is resumed."""
    envvar: str | None = None
    allowed_values: Sequence[object] | None = None
    hidden: bool = False
    secret: bool | None = None
    """Whether the value is masked wherever it is written; None: its type and name decide."""


class CallSignature:
    """How an experiment's function is called."""

    def __init__(self, function: Callable[..., object]):
        self.function = function
        self.parameters: list[Parameter] = []
        self.nested: dict[str, tuple[type, object]] = {}
        """The class and default of each dataclass, by the full name of the argument or field."""
        self._help = argument_help(function)
        self._arguments = list(inspect.signature(function).parameters.values())
        hints = _hints(function)
        self.takes_dict = _takes_dict(self._arguments, hints)
        self.takes_rest = any(argument.kind is argument.VAR_KEYWORD for argument in self._arguments)
        for argument in [] if self.takes_dict else self._arguments:
            name = argument.name
            if argument.kind is argument.VAR_POSITIONAL:
                raise ParameterError(
                    f"{function.__name__}(*{name}): parameters are passed by name, so *{name} would always be empty. "
                    f"Use a list: {name}: list[str]."
                )
            if argument.kind is not argument.VAR_KEYWORD:
                self._declare(name, hints.get(name, MISSING), argument.default, self._help.get(name))

    def call(self, values: Mapping[str, object], origins: Mapping[str, str]) -> Any:
        """Call the function with resolved values."""
        if self.takes_dict:
            return self.function(dict(values))
        positional, named = [], {}
        for argument in self._arguments:
            if argument.kind is argument.POSITIONAL_ONLY:
                positional.append(self._build(argument.name, values, origins))
            elif argument.kind is not argument.VAR_KEYWORD:
                named[argument.name] = self._build(argument.name, values, origins)
        own = {parameter.name for parameter in self.parameters}
        rest = {name: value for name, value in values.items() if name not in own} if self.takes_rest else {}
        return self.function(*positional, **named, **rest)

    def _build(self, name: str, values: Mapping[str, object], origins: Mapping[str, str]) -> object:
        """Return a value, or the dataclass of this name; one that may be None stays None until one of its fields is given."""
        if name not in self.nested:
            return values[name]
        kind, default = self.nested[name]
        inside = [parameter.name for parameter in self.parameters if parameter.name.startswith(f"{name}.")]
        if default is None and all(origins.get(own, "default") == "default" for own in inside):
            return None
        fields = [entry.name for entry in dataclasses.fields(kind) if entry.init]
        arguments = {own: self._build(f"{name}.{own}", values, origins) for own in fields}
        try:
            return kind(**arguments)
        except ValueError as error:
            if isinstance(error, ParameterError):
                raise
            raise ParameterError(f"{kind.__name__} rejects {masked(arguments)}: {error}") from error

    def _declare(self, name: str, annotation: object, default: object, help: str | None) -> None:
        """Declare one argument or field."""
        extra, constraints = Param(), list[object]()
        if typing.get_origin(annotation) is typing.Annotated:
            annotation, *extras = typing.get_args(annotation)
            extra = next((entry for entry in extras if isinstance(entry, Param)), extra)
            constraints = [entry for entry in extras if not isinstance(entry, Param | str)]
        kind = type(default) if annotation is MISSING else without_none(annotation)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(default, kind):
            kind = type(default)  # it may have more fields than the class that is annotated
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            self.nested[name] = (kind, default)
            before = len(self.parameters)
            self._declare_fields(name, kind, default)
            for parameter in self.parameters[before:] if default is None else []:
                parameter.optional_within.append(name)
            return
        if annotation is MISSING and default is MISSING:
            raise ParameterError(
                f"{self.function.__name__}: the parameter {name!r} has neither annotation nor default, so its type is "
                f"unknown. Write {name}: float, or {name}=0.1."
            )
        parameter = _parameter(name, annotation, default, extra, help, constraints)
        parameter.from_signature = True
        self.parameters.append(parameter)

    def _declare_fields(self, prefix: str, kind: type, default: object) -> None:
        hints = typing.get_type_hints(kind, include_extras=True)
        help_texts = {**field_help(kind), **argument_help(kind)}
        for entry in dataclasses.fields(kind):
            if not entry.init:
                continue
            value: Any = MISSING
            factory: Any = None
            if default is not MISSING and default is not None:
                value = getattr(default, entry.name)
            elif entry.default is not dataclasses.MISSING:
                value = entry.default
            elif entry.default_factory is not dataclasses.MISSING:
                factory, value = entry.default_factory, entry.default_factory()
            name = f"{prefix}.{entry.name}"
            said = entry.metadata.get("help") or getattr(entry, "doc", None)
            text = said or help_texts.get(entry.name) or self._help.get(name)
            self._declare(name, hints[entry.name], value, text)
            if factory is not None and name not in self.nested:
                self.parameters[-1].default, self.parameters[-1].calls_default = factory, True
                self.parameters[-1].default_help = str(value)


def _hints(function: Callable[..., object]) -> Settings:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ParameterError(
            f"{function.__name__}: an annotation cannot be resolved ({error}). Import the name at the top of the module, "
            "not under TYPE_CHECKING or inside a function."
        ) from None


def _takes_dict(arguments: list[inspect.Parameter], hints: Mapping[str, object]) -> bool:
    if len(arguments) != 1 or arguments[0].default is not MISSING:
        return False
    if arguments[0].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return False
    annotation = hints.get(arguments[0].name, MISSING)
    return annotation is MISSING or (typing.get_origin(annotation) or annotation) in MAPPINGS


def _parameter(
    name: str, annotation: object, default: object, extra: Param, help: str | None, constraints: list[object]
) -> Parameter:
    declared = _kind_of_default(default) if annotation is MISSING else annotation
    inner = without_none(declared)
    origin = typing.get_origin(inner) or inner
    items = typing.get_args(inner)
    checked = typing.Annotated[(annotation, *constraints)] if constraints else declared
    # A tuple with a type for each position is one value, which pydantic checks.
    is_list = origin in LISTS and (origin is not tuple or not items or items[1:] == (Ellipsis,))
    parameter = Parameter(
        name,
        default=None if default is MISSING else default,
        required=default is MISSING and inner is declared,
        allowed_values=extra.allowed_values,
        is_flag=declared is bool and extra.allowed_values is None,
        multiple=is_list,
        envvar=extra.envvar,
        help=extra.help or help,
        hidden=extra.hidden,
        resumable=extra.resumable,
        secret=extra.secret,
    )
    parameter.calls_default = False  # a function in a signature is a value
    if extra.allowed_values is None:
        parameter.type = (items[0] if items else Any) if is_list else inner
        parameter.value_type = annotated_type(parameter.type if is_list or not constraints else checked)
    if is_list:
        make = LISTS[origin]
        parameter.container = (lambda items: annotated_type(checked).convert(make(items))) if constraints else make
    return parameter


def _kind_of_default(default: object) -> object:
    if isinstance(default, list | tuple | set) and default:
        first = type(next(iter(default)))
        return type(default)[first, ...] if isinstance(default, tuple) else type(default)[first]  # type: ignore[index]
    kind = Path if isinstance(default, Path) else type(default)
    return kind if kind in SIMPLE or kind in (*LISTS, dict) or hasattr(kind, "__members__") else Any


def description_of(function: Callable[..., object]) -> str:
    """Return the docstring without its sections about arguments, results and errors."""
    return "\n".join(_split(function)[0]).strip()


def argument_help(function: Callable[..., object]) -> dict[str, str]:
    """Return the help text of each argument, from an `Args:` section or from `:param name:` lines.

    >>> def train(lr): '''Train.
    ...
    ...     Args:
    ...         lr: how far each step goes,
    ...             before scaling.
    ... '''
    >>> argument_help(train)
    {'lr': 'how far each step goes, before scaling.'}
    """
    return {name: " ".join(words) for name, words in _split(function)[1].items()}


def field_help(kind: type) -> dict[str, str]:
    """Return what the source of a dataclass says about its fields: a string or comment beneath one, or a comment after it."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base)) if dataclasses.is_dataclass(base) else ""
        except (OSError, TypeError):  # made at a prompt, or by a function
            continue
        lines = source.splitlines()
        for body in (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
            for node, after in zip(body, [*body[1:], None]):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    text = _string(after) or _comment(lines, node)
                    found |= {node.target.id: text} if text else {}
    return found


def _string(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment at the end of a field's last line, else the comment lines beneath it."""
    assert node.end_lineno is not None
    rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
    if rest.startswith("#"):
        return "" if TOOL_COMMENT.match(rest) else rest.lstrip("#: ")
    beneath = itertools.takewhile(lambda line: line.strip().startswith("#"), lines[node.end_lineno :])
    return " ".join(line.strip().lstrip("#: ") for line in beneath if not TOOL_COMMENT.match(line.strip()))


def _split(function: Callable[..., object]) -> tuple[list[str], dict[str, list[str]]]:
    about: list[str] = []
    arguments: dict[str, list[str]] = {}
    section, current, indent = "", "", -1
    for line in (inspect.getdoc(function) or "").splitlines():
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if field := FIELD.match(text):
            section, current = "", field[1]
            arguments[current] = [field[2]]
        elif depth == 0 and (title := SECTION.match(text)):
            section, current, indent = title[1].lower(), "", -1
        elif depth == 0 and text and not OTHER_FIELD.match(text):
            section, current = "", ""
            about.append(line)
        elif section in ARGUMENT_SECTIONS and text:
            indent = depth if indent < 0 else indent
            entry = ENTRY.match(text) if depth <= indent else None
            if entry:
                current = entry[1]
                arguments[current] = [entry[2]] if entry[2] else []
            elif current:
                arguments[current].append(text)
        elif not section and current and text and depth:
            arguments[current].append(text)
        elif not section and not current and not OTHER_FIELD.match(text):
            about.append(line)
    return about, arguments
