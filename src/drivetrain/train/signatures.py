"""What users call and what they override: unknown keywords and attributes, and hooks that the loop could not call.

A wrong name raises before the first step, with what to write instead: another library's name has its counterpart in a table
(`compat`), any other the nearest of ours.
"""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from drivetrain.context.state import State
from drivetrain.core.arguments import only_begins
from drivetrain.core.engine import Engine
from drivetrain.core.errors import BETWEEN, ConfigTypeError, DrivetrainError, did_you_mean, nearest_name, warn
from drivetrain.core.lazy import Slot
from drivetrain.data.workers import ending_workers
from drivetrain.train.hooks import TrainerHooks
from drivetrain.train.logbook import Logbook
from drivetrain.train.run import Run

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer

P = ParamSpec("P")
T = TypeVar("T")

FOREIGN_ARGUMENTS: Slot[Mapping[str, str]] = Slot("train.foreign_arguments")
"""What to write instead of an argument of another library's trainer."""
FOREIGN_METHODS: Slot[Mapping[str, str]] = Slot("train.foreign_methods")
"""The same for methods and attributes of its trainers, and for methods that its users override."""
_ARGUMENTS: dict[str, list[str]] = {}
"""The arguments of each method that users call."""
_NO_HOOKS = ("forward", "generate", "gather", "get_model", "log", "print", "request_stop")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate what users call: an unknown keyword raises, and worker processes end with the call.

    Checkers and editors see the signature of the function itself.
    """
    valid = [*inspect.signature(function).parameters][1:]  # without self

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in valid:
                raise TypeError(_unknown_keyword(function.__name__, name, valid))
        _check_parts(args[0])
        with ending_workers() as is_outermost:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if is_outermost and not os.environ.get("DRIVETRAIN_FULL_TRACEBACK"):
                    _shorten_traceback(error)
                raise

    _ARGUMENTS[function.__name__] = valid
    return checked


def _shorten_traceback(error: BaseException) -> None:
    """Leave out the frames of the Trainer and of torch between the user's call, the user's own code and the line that raises.

    An error that is not explained and that our own code raises may be a defect of ours: then everything is shown.
    """
    seen: set[int] = set()
    shown: BaseException | None = error
    while shown is not None and id(shown) not in seen:
        seen.add(id(shown))
        links, link = [], shown.__traceback__
        while link is not None:
            links.append(link)
            link = link.tb_next
        modules = [link.tb_frame.f_globals.get("__name__") or "" for link in links]
        innermost = next((name for name in reversed(modules) if not name.startswith(("torch.", "contextlib"))), "")
        is_explained = isinstance(error, DrivetrainError | KeyboardInterrupt) or hasattr(error, "__notes__")
        if is_explained or not innermost.startswith("drivetrain."):
            ends = (*links[:1], *links[-1:])
            kept = [link for link, module in zip(links, modules) if link in ends or not BETWEEN.match(module)]
            for link, following in itertools.pairwise(kept):
                link.tb_next = following
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


def _unknown_keyword(function: str, name: str, valid: Sequence[str]) -> str:
    title = "Trainer" if function == "__init__" else f"Trainer.{function}"
    instead = FOREIGN_ARGUMENTS.load().get(name, "")
    if function in ("evaluate", "predict") and f"{function}(" not in instead:  # it is about the constructor and train()
        near = {"batch_size": "per_device_batch_size", "num_workers": "dataloader_kwargs"}.get(name)
        instead = f"{function}({near}=...)" if near else ""
    elif not instead and name in _ARGUMENTS["train" if function == "__init__" else "__init__"]:
        instead = f"{'train' if function == '__init__' else 'Trainer'}({name}=...)"
    hint = f" Write instead: {instead}." if instead else did_you_mean(name, valid) or f" Arguments: {', '.join(valid)}."
    return f"{title}() got an unexpected keyword argument {name!r}.{hint}"


def missing_attribute(trainer: "Trainer", name: str) -> AttributeError:
    """Return the error for an attribute that a Trainer does not have."""
    kind = type(trainer)
    if "_options" not in vars(trainer):
        return AttributeError(
            f"{kind.__name__} has no {name!r} yet: Trainer.__init__ has not run. Call super().__init__(model, loss_func, optimizer, ...) "
            f"first in {kind.__name__}.__init__."
        )
    instead = FOREIGN_METHODS.load().get(name)
    hint = f" Write instead: {instead}." if instead else did_you_mean(name, [n for n in dir(kind) if n[0] != "_"])
    return AttributeError(f"{kind.__name__!r} object has no attribute {name!r}.{hint}")


def _check_parts(trainer: object) -> None:
    """Raise if a subclass uses the name of a part of the Trainer for something else."""
    for name, part in {"run": Run, "state": State, "engine": Engine, "logbook": Logbook}.items():
        if hasattr(type(trainer), name) or not isinstance(vars(trainer).get(name), part | None):
            raise ConfigTypeError(
                f"{type(trainer).__name__}.{name} replaces a part of the Trainer, its {part.__name__}. Use another name, such as my_{name}."
            )


def check_hooks(trainer: "Trainer") -> None:
    """Reject hooks that cannot be called as the loop calls them. Warn about methods that look like hooks, and that nothing calls."""
    kind = type(trainer)
    hooks = {
        n: f for n, f in vars(TrainerHooks).items() if n[0] != "_" and inspect.isfunction(f) and n not in _NO_HOOKS
    }
    for name, hook in hooks.items():
        if not trainer.overrides(name) or name == "create_scheduler":  # which may also take the optimizer
            continue
        passed = [*inspect.signature(hook).parameters][1:]
        function, problem = getattr(trainer, name), ""
        signature = inspect.signature(function)
        try:
            signature.bind(*passed)
        except TypeError as error:
            problem = str(error)
        if name == "compute_loss" and "inputs" in signature.parameters:
            problem = "it gets outputs and targets"
        if only_begins(function):
            problem = "it has yield or async, so a call would run nothing"
        if problem:
            instead = FOREIGN_METHODS.load().get(name)
            raise ConfigTypeError(
                f"{kind.__name__}.{name}{signature} does not fit its call, self.{name}({', '.join(passed)}): {problem}."
                + (f" Write instead: {instead}." if instead else "")
            )
    base = next(index for index, cls in enumerate(kind.__mro__) if cls.__module__.startswith("drivetrain."))
    own = {name: item for cls in kind.__mro__[:base] for name, item in vars(cls).items() if inspect.isfunction(item)}
    called = {word for function in own.values() for word in function.__code__.co_names}
    for name in own.keys() - called - set(dir(kind.__mro__[base])):
        instead, near = FOREIGN_METHODS.load().get(name), nearest_name(name, hooks, cutoff=0.9)
        if instead or near:
            hint = f"Write instead: {instead}." if instead else f"Did you mean {near!r}?"
            warn(f"{kind.__name__}.{name} is not a method that the Trainer calls. {hint}")
