"""Parameters, groups of them, the list of one experiment, in which no two may answer to one flag, and those that every one has."""

import copy
import enum
import inspect
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from drivetrain.core.display import shortened
from drivetrain.core.errors import ParameterError
from drivetrain.core.plain import plain
from drivetrain.core.secret import MASK, Secret, hide, is_secret_value, looks_secret, texts_of
from drivetrain.experiment.values import (
    BadValue,
    choice_of,
    declared_type,
    is_secret_type,
    read_int,
    read_path,
    read_str,
    wraps_secret,
)

SECRET_VARIABLE = "DRIVETRAIN_SECRET_"
"""With the name of a secret parameter in capitals: the environment variable it may come from."""

COMPARED = ("type", "default", "required", "allowed_values", "is_flag", "multiple", "envvar", "resumable", "is_secret")
"""What must be the same in two parameters of one name."""

NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


class Parameter:
    """One parameter: its name, type, default, and where its value may come from."""

    def __init__(
        self,
        name: str,
        type: object = str,
        default: object = None,
        required: bool = False,
        allowed_values: Iterable[object] | None = None,
        is_flag: bool = False,
        multiple: bool = False,
        allow_from_file: bool = True,
        envvar: str | bool | None = None,
        help: str | None = None,
        default_help: str | None = None,
        hidden: bool = False,
        behaviour: object = None,
        *,
        resumable: bool = False,
        secret: bool | None = None,
    ):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ParameterError(
                f"parameter name {name!r}: expected a Python name, such as batch_size; dots may join several (opt.lr)."
            )
        if name in ("help", "print_params"):
            raise ParameterError(
                f"parameter name {name!r}: this is already an option of the command line. Choose another name."
            )
        if is_flag and (multiple or allowed_values is not None):
            other = "multiple" if multiple else "allowed_values"
            raise ParameterError(
                f"parameter {name!r}: a flag is true or false and cannot have {other}. Remove one of them."
            )
        if envvar is True or not isinstance(envvar, str | bool | None.__class__):
            raise ParameterError(
                f"parameter {name!r}: envvar={envvar!r} is not a variable name. Give one, such as 'MASTER_ADDR', or None."
            )
        self.name = name
        self.required, self.is_flag, self.multiple = required, is_flag, multiple
        self.allowed_values = None if allowed_values is None else list(allowed_values)
        self.default: Any = False if is_flag and default is None and not required else default
        self.calls_default = callable(default) and not inspect.isclass(default)
        self.allow_from_file, self.resumable, self.hidden = allow_from_file, resumable, hidden
        self._envvar = envvar
        self.secret = secret
        """Whether to mask the value everywhere it is written; None: decided by its type and name."""
        self.help, self.default_help = help, default_help
        self.behaviour = behaviour
        self.type = bool if is_flag else type
        try:
            choices = self.allowed_values
            self.value_type = declared_type(self.type) if choices is None else choice_of(choices)
        except BadValue as problem:
            raise ParameterError(f"parameter {name!r}: {problem}.") from None
        self.container: Callable[[list[object]], object] = list
        """Container for the values of a `multiple` parameter."""
        self.is_standard = False
        """One of the parameters that every experiment has."""
        self.from_signature = False
        """Declared by the function's signature; an explicit declaration of the name may replace it."""
        self.optional_within: list[str] = []
        """The dataclasses around this field that are None until one of their fields is given."""

    @property
    def is_secret(self) -> bool:
        """Whether the value is hidden: as declared, by its type (`Secret[str]`), or text under a name such as `api_key`."""
        if self.secret is not None:
            return self.secret
        takes_text = self.type in (str, Any, object) or inspect.isroutine(self.type)
        return is_secret_type(self.type) or (takes_text and self.allowed_values is None and looks_secret(self.name))

    @property
    def envvar(self) -> str | None:
        """The environment variable the value may come from; a secret has one of its own unless `envvar=False`."""
        if isinstance(self._envvar, str):
            return self._envvar or None
        own = SECRET_VARIABLE + self.name.replace(".", "_").upper()
        return own if self._envvar is None and self.is_secret else None

    @property
    def flag(self) -> str:
        """The option as help prints it: `--batch-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> list[str]:
        """Every option that means this parameter, with `_` for `-`; a flag also has its negation."""
        return [self.name, f"no_{self.name}"] if self.is_flag else [self.name]

    def read(self, value: object, *, is_text: bool, where: str) -> Any:
        """Return a given value in the parameter's type, or raise a `ParameterError` that names the place."""
        if isinstance(value, str) and value == self._default_text:
            return self.make_default()
        if not self.multiple:
            return self._read_one(value, where, self.value_type.read, is_text)
        items = list(value) if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes) else [value]
        read = [self._read_one(item, where, self.value_type.read, is_text) for item in items]
        return self._read_one(read, where, self.container)

    def shown(self, text: str) -> str:
        """Return text that was given for this parameter as messages show it: a secret is masked."""
        return MASK if self.is_secret else text

    def _read_one(self, value: object, where: str, read: Callable[..., object], *how: bool) -> object:
        try:
            return read(value, *how)
        except BadValue as problem:
            shown = shortened(self.shown(repr(value)), 80)
            reason = hide(str(problem), texts_of(value, is_secret=self.is_secret))
            raise ParameterError(f"{where}: {self.name} cannot be {shown}: {reason}.") from None

    @property
    def _default_text(self) -> str | None:
        """How a file holds a default that has no plain form, such as a function or a dtype; read back, it is the default."""
        is_readable = isinstance(self.default, str | bytes | os.PathLike | enum.Enum)
        text = None if is_readable or self.calls_default else plain(self.default)
        return text if isinstance(text, str) else None

    def make_default(self) -> Any:
        """Return the default for one run; a function is called."""
        value = self.default() if self.calls_default else self.default
        if value is not None and wraps_secret(self.type) and not is_secret_value(value):
            return Secret(value)
        return own_containers(value)

    def describe_default(self) -> str | None:
        """Return the default as help prints it, None where there is none."""
        if self.default_help is not None:
            return self.default_help
        if self.default is None and self.required:
            return None
        if self.default is not None and self.is_secret:
            return MASK
        if self.calls_default:
            return "computed"
        return str(self.default.name if isinstance(self.default, enum.Enum) else self.default)

    def differences(self, other: "Parameter") -> dict[str, str]:
        """Return how two declarations differ, by attribute; two functions with the same code are the same."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in COMPARED}
        shown = {name: [repr(one) for one in pair] for name, pair in pairs.items() if not _is_same(*pair)}
        if "default" in shown:
            shown["default"] = [own.shown(text) for own, text in zip((self, other), shown["default"])]
        return {name: " and ".join(texts) for name, texts in shown.items()}

    def with_default(self, default: object, *, is_called: bool = False) -> "Parameter":
        """Return the same parameter with another default."""
        other = copy.copy(self)
        other.default, other.calls_default, other.default_help = default, is_called, None
        return other

    def __repr__(self) -> str:
        return f"Parameter({self.name!r})"


def own_containers(value: object) -> Any:
    """Return a value whose lists, dicts and sets are new ones, so that a run that changes them changes no other."""
    if type(value) is dict:
        return {key: own_containers(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set):
        return type(value)(map(own_containers, value))
    return value


def _is_same(one: object, other: object) -> bool:
    one, other = getattr(one, "__code__", one), getattr(other, "__code__", other)
    try:
        return one is other or bool(one == other)
    except (ValueError, TypeError, RuntimeError):  # arrays have no single truth value
        return False


class ParameterGroup:
    """Parameters that help shows together under a title."""

    def __init__(self, name: str, help: str | None, parameters: Iterable[Parameter]):
        self.name, self.help = name, help
        self.parameters = list(parameters)

    def get_parameters(self) -> list[Parameter]:
        """Return the parameters of the group."""
        return list(self.parameters)


class ParameterSet(dict[str, Parameter]):
    """The parameters of one experiment or group, in order of declaration."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[ParameterGroup] = []

    @property
    def secrets(self) -> frozenset[str]:
        """The names of parameters whose values are hidden."""
        return frozenset(name for name, parameter in self.items() if parameter.is_secret)

    def owner_of(self, flag: str) -> Parameter | None:
        """Return the parameter an option (without dashes, `_` for `-`) belongs to."""
        return next((parameter for parameter in self.values() if flag in parameter.flags), None)

    def add(self, parameter: Parameter) -> None:
        """Add a parameter; a name or flag that is taken already is an error."""
        earlier = self.get(parameter.name)
        if earlier is not None and earlier.from_signature:
            if parameter.default is None and earlier.default is not None:
                parameter = parameter.with_default(earlier.default, is_called=earlier.calls_default)
            del self[parameter.name]
        for flag in parameter.flags:
            if (owner := self.owner_of(flag)) is not None:
                raise ParameterError(
                    f"parameter {parameter.name!r}: the option --{flag.replace('_', '-')} already belongs to the "
                    f"parameter {owner.name!r}. Rename one of them."
                )
        for other in self:
            if f"{parameter.name}.".startswith(f"{other}.") or other.startswith(f"{parameter.name}."):
                raise ParameterError(
                    f"parameter {parameter.name!r}: {other!r} is a parameter too, and a value cannot be both. Rename one."
                )
        self[parameter.name] = parameter

    def add_group(self, group: ParameterGroup) -> None:
        """Add all parameters of a group, and its title."""
        if any(group.name == other.name for other in self.groups):
            raise ParameterError(f"the parameter group {group.name!r} already exists. Choose another name.")
        for parameter in group.parameters:
            self.add(parameter)
        self.groups.append(group)

    def inherit(self, parameters: Iterable[Parameter], groups: Iterable[ParameterGroup]) -> None:
        """Take over parameters of another experiment; one that is here already must be the same, and is then skipped."""
        for group in groups:
            if all(group.name != other.name for other in self.groups):
                new = [parameter for parameter in group.parameters if self._is_new(parameter)]
                self.add_group(ParameterGroup(group.name, group.help, new))
        for parameter in parameters:
            if self._is_new(parameter):
                self.add(parameter)

    def _is_new(self, parameter: Parameter) -> bool:
        earlier = self.get(parameter.name)
        if earlier is None or parameter.is_standard:
            return earlier is None
        different = earlier.differences(parameter)
        if different:
            shown = ", ".join(f"{name}={both}" for name, both in different.items())
            raise ParameterError(
                f"parameter {parameter.name!r} is inherited twice, with different {', '.join(different)}: {shown}. "
                "Rename one of them, or make them the same."
            )
        return False


MODES = ("off", "warn", "strict")

BOOKKEEPING = frozenset(
    "output_dir debug params_file run_name subprocess local_rank checkpoint resume cuda device distributed node_rank "
    "nproc_per_node nnodes master_addr master_port max_restarts".split()
)
"""Where and how a run executes, not what it computes. Changing them does not make it another run on resume."""


def process_count(value: object) -> int | str:
    """Read a number of processes, or `auto`."""
    if str(value).strip().lower() == "auto":
        return "auto"
    number = read_int(value)
    if number < 1:
        raise BadValue("expected a whole number of at least 1, or auto for one per accelerator")
    return number


def folder(value: object) -> str:
    """Read the name of a folder; `~` is the home folder, because shells leave it in `--output-dir=~/runs`."""
    return os.path.expanduser(read_str(value))


def path(value: object) -> Path:
    """Read a path in which `~` is the home folder."""
    return Path(os.path.expanduser(read_path(value)))


def wants_cpu(values: Mapping[str, object]) -> bool:
    """Return whether a run with these values uses only the CPU, even if there are other devices."""
    device = values["device"]
    return str(device) == "cpu" or (device in (None, "auto") and not values["cuda"])


def standard_parameters() -> list[Parameter]:
    """Return new standard parameters, in the order help prints them."""
    return [
        Parameter("output_dir", folder, "./output", help="Where to create run folders."),
        Parameter(
            "run_name", str, None, help="Name of the run folder; None: time and a random suffix.", allow_from_file=False
        ),
        Parameter(
            "params_file",
            path,
            None,
            help="Read parameters from a YAML or JSON file, such as the parameters.yaml of an earlier run. Options on "
            "the command line override it. May be repeated; later files override earlier ones.",
            allow_from_file=False,
        ),
        Parameter(
            "random_seed",
            int,
            lambda: random.SystemRandom().getrandbits(32),  # independent of the state of `random`
            help="Seed of all random numbers.",
            default_help="random 32 bits",
        ),
        Parameter("debug", is_flag=True, help="Log debug messages too."),
        Parameter("checkpoint", path, None, help="Start a new run from the state in this checkpoint."),
        Parameter(
            "resume",
            folder,
            "never",
            help="never; auto: continue the newest unfinished run with the same parameters; or the folder or short id of a run.",
            allow_from_file=False,
        ),
        Parameter("device", str, "auto", help="Device to compute on: auto, cpu, cuda, cuda:1, mps, ..."),
        Parameter("cuda", is_flag=True, default=True, help="Use CUDA if available; if given explicitly, require it."),
        Parameter(
            "deterministic",
            allowed_values=MODES,
            default="off",
            help="Use deterministic torch kernels: warn reports operations without one, strict rejects them.",
        ),
        Parameter("distributed", is_flag=True, help="Run on several processes."),
        Parameter(
            "nproc_per_node",
            process_count,
            1,
            envvar="NPROC_PER_NODE",
            help="Processes to start on this node; auto: one per accelerator.",
        ),
        Parameter("nnodes", int, 1, envvar="NNODES", help="Number of nodes."),
        Parameter("node_rank", int, 0, envvar="NODE_RANK", help="Index of this node, from 0."),
        Parameter("master_addr", str, "127.0.0.1", envvar="MASTER_ADDR", help="Address of node 0."),
        Parameter("master_port", int, 29500, envvar="MASTER_PORT", help="A free port on node 0."),
        Parameter("max_restarts", int, 0, help="How many times to restart the group after a process dies."),
        Parameter("subprocess", Path, None, allow_from_file=False, hidden=True),
        Parameter("local_rank", int, 0, allow_from_file=False, hidden=True),
    ]
