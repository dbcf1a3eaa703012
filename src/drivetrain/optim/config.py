"""Units from configuration and back: mappings, YAML files, and whatever a Trainer may be given as its optimizer.

`optim_sches: {type: noam.NoamLr, conf: {...}}` is one unit, called `main`; otherwise each key is the name of a unit with its own `type`
and `conf`. The key is at the top of the file or, as in SpeeChain's recipes, in `train_cfg`; `accum_grad` and the other shared arguments
next to either hold for all units. Types are imported and checked before they are called, and every error names the place in the file.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from drivetrain.core.errors import ConfigError, did_you_mean, nearest_name, unknown_name
from drivetrain.core.files import replace_bytes
from drivetrain.core.time import Time
from drivetrain.core.types import StateDict
from drivetrain.core.yaml import YamlFile, dump_yaml
from drivetrain.optim.building import SHARED, check_class, check_shared, find_optimizer, import_dotted, keywords_of
from drivetrain.optim.scheduler import GENERAL, OptimScheduler
from drivetrain.optim.units import SCHEDULES

_KEY = "optim_sches"
_SECTION = "train_cfg"


def resolve_type(query: str) -> type[OptimScheduler]:
    """Return the schedule class of `file_name.class_name`, a bare class name, or the dotted path of a user's own.

    >>> resolve_type("noam.NoamLr") is resolve_type("NoamLr") is resolve_type("noam.Noamlr")
    True
    """
    if not isinstance(query, str):
        raise ConfigError(f"type={query!r}: expected a name such as 'noam.NoamLr'.")
    file, _, name = query.rpartition(".")
    name = "NoamLr" if name == "Noamlr" else name
    for known, classes in SCHEDULES.items():
        if name in classes and file in (known, "", f"drivetrain.optim.{known}"):
            return classes[name]
    if not file or file in SCHEDULES:
        everything = [f"{known}.{one}" for known, classes in SCHEDULES.items() for one in classes]
        hint = did_you_mean(query, everything) or did_you_mean(name, [one.partition(".")[2] for one in everything])
        valid = ", ".join(f"{known}.{next(iter(classes))}" for known, classes in SCHEDULES.items())
        raise ConfigError(f"type={query!r}: no schedule has this name.{hint} Valid: {valid}, or a dotted path.")
    value = import_dotted(query, "type")
    check_class(value, OptimScheduler, f"type={query!r}", "OptimScheduler")
    return value


def read_units(
    cfg: Mapping[str, object], model: nn.Module, *, file: YamlFile | None = None, **shared: object
) -> dict[str, OptimScheduler]:
    """Build the units of a configuration, which may come from a YAML file.

    `shared` values hold for units that do not give their own, and come before those that the configuration gives for all units.
    """
    reader = _ConfigReader(file)
    specs = reader.units(cfg)
    common = {name: value for name, value in reader.shared(cfg).items() if name not in shared}
    built = {name: reader.build(name, spec, model, common) for name, spec in specs.items()}
    for unit in built.values():
        unit.share(**shared)
    return built


def to_config(optim_set: Mapping[str, OptimScheduler]) -> dict[str, Any]:
    """Return plain values from which `from_config` builds the same set; shared values are written into each unit."""
    known = {cls: f"{file}.{name}" for file, classes in SCHEDULES.items() for name, cls in classes.items()}
    defaults: StateDict = {"optim_loss": None, "updated_modules": None, "excluded_modules": None, "step_per_update": 1}
    defaults |= {"accumulate_skipped": False, "param_groups": [], "nonfinite": "skip", "manual": False}
    units = {}
    for name, unit in optim_set.items():
        conf = {"optim_type": _optimizer_name(unit.optim_type), "optim_conf": _plain(unit.optim_conf)}
        given = {key: getattr(unit, key) for key, default in defaults.items() if getattr(unit, key) != default}
        conf |= _plain({**given, **unit.given_arguments, **unit.sche_conf})
        units[name] = {"type": known.get(type(unit)) or _dotted(type(unit)), "conf": conf}
    return {_KEY: units}


def to_yaml(optim_set: Mapping[str, OptimScheduler], path: str | os.PathLike[str] | None = None) -> str:
    """Return the configuration of a set as YAML text, and write it to `path` if one is given."""
    text = dump_yaml(to_config(optim_set))
    if path is not None:
        replace_bytes(Path(path), text.encode())
    return text


class _ConfigReader:
    """Checks a configuration; errors name the position in the file."""

    def __init__(self, file: YamlFile | None):
        self.file = file
        self.path: tuple[str, ...] = (_KEY,)
        """Where the units are."""

    def where(self, *path: str, key: str | None = None) -> str:
        """Return the place for a message, with file and line where they are known."""
        return self.file.where(*path, key=key) if self.file is not None else ".".join(path)

    def units(self, cfg: object) -> dict[str, object]:
        """Return the unit descriptions by name, for both forms, and note in `path` where they were."""
        if not isinstance(cfg, Mapping):
            raise ConfigError(f"expected a mapping with {_KEY!r}, got a {type(cfg).__name__}.")
        section = cfg.get(_SECTION)
        units = [cfg] if isinstance(cfg.get("type"), str) else list(cfg.values())
        holds_units = bool(units) and all(isinstance(unit, Mapping) and "type" in unit for unit in units)
        if isinstance(section, Mapping) and _KEY in section:
            if _KEY in cfg:
                raise ConfigError(f"{self.where(_KEY)}: {_KEY!r} is also in {_SECTION!r}. Keep one of the two.")
            cfg, self.path = section[_KEY], (_SECTION, _KEY)
        elif _KEY in cfg:
            cfg = cfg[_KEY]
        elif self.file is not None or not holds_units:
            raise ConfigError(self._missing(cfg).removeprefix(": "))
        if not isinstance(cfg, Mapping) or not cfg:
            raise ConfigError(
                f"{self.where(*self.path)}: expected {{type, conf}} or names of units, each with {{type, conf}}."
            )
        return {"main": dict(cfg)} if isinstance(cfg.get("type"), str) else dict(cfg)

    def shared(self, cfg: Mapping[str, Any]) -> dict[str, object]:
        """Return the shared arguments that are next to `optim_sches`, or next to `train_cfg`; the nearer one counts."""
        if _KEY not in cfg and self.path == (_KEY,):
            return {}  # the mapping is the content of `optim_sches`
        found: dict[str, object] = {}
        for place in [self.path[:length] for length in range(len(self.path) - 1, -1, -1)]:
            level = cfg[_SECTION] if place else cfg
            for name in SHARED:
                if name in level and name not in found:
                    try:
                        found[name] = check_shared(name, level[name])
                    except ConfigError as problem:
                        raise ConfigError(f"{self.where(*place, name)}: {problem}") from problem
        return found

    def build(self, name: str, spec: object, model: nn.Module, common: Mapping[str, object]) -> OptimScheduler:
        """Build one unit, its keys checked first; `common` holds for what its `conf` does not give."""
        path = (*self.path, name)
        if self.file is not None and self.file.line(*path) == self.file.line(*self.path) and name == "main":
            path = self.path  # the single form has no level for the name
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{self.where(*path)}: expected {{type, conf}}, got {spec!r}.")
        self._check_keys(path, spec, ["type", "conf"])
        for key in ("type", "conf"):
            if key not in spec:
                raise ConfigError(f"{self.where(*path)}: {key!r} is missing. A unit needs 'type' and 'conf'.")
        if not isinstance(spec["conf"], Mapping):
            raise ConfigError(f"{self.where(*path, 'conf')}: expected a mapping of arguments, got {spec['conf']!r}.")
        try:
            cls = resolve_type(spec["type"])
        except ConfigError as problem:
            raise ConfigError(f"{self.where(*path, 'type')}: {problem}") from problem
        path, conf = (*path, "conf"), {**common, **spec["conf"]}
        accepted, _ = keywords_of(cls.sche_init)
        if accepted is not None:
            valid = [*GENERAL, *SHARED, *(name for name in accepted if name != "self")]
            self._check_keys(path, conf, valid, conf.get("optim_type"))
        if "optim_type" not in conf:
            raise ConfigError(f"{self.where(*path)}: 'optim_type' is missing, for example optim_type: AdamW.")
        try:
            return cls(conf.pop("optim_type"), conf.pop("optim_conf", None), model, **conf)
        except (ConfigError, TypeError) as problem:
            raise ConfigError(f"{self.where(*path)}: {problem}") from problem

    def _missing(self, cfg: Mapping[str, object]) -> str:
        """Return the message for a configuration without units."""
        section = cfg.get(_SECTION)
        if isinstance(section, str):
            return (
                f"{self.where(_SECTION)}: {_SECTION!r} is the path of another file, {section!r}. Build the units from that file, and "
                "pass accum_grad, ft_factor and grad_clip of this one: OptimSet.from_yaml(path, model, accum_grad=...)."
            )
        looked_in = f" at the top or in {_SECTION!r}" if isinstance(section, Mapping) else ""
        near = nearest_name(_KEY, [*cfg, *(section if isinstance(section, Mapping) else ())])
        hint = f" The nearest key is {near!r}: rename it." if near else ""
        return f"{self.where()}: there is no {_KEY!r}{looked_in}.{hint}"

    def _check_keys(
        self, path: tuple[str, ...], given: Iterable[str], valid: list[str], optim_type: object = None
    ) -> None:
        for key in given:
            if key not in valid:
                where = self.where(*path, key=key)
                if key in _options_of(optim_type):
                    raise ConfigError(f"{where}: {key!r} is an argument of {optim_type}. Move it into optim_conf.")
                raise ConfigError(unknown_name("key", key, valid, where=where))


def _options_of(optim_type: object) -> list[str]:
    """Return the arguments of an optimizer, none where there is no such optimizer."""
    try:
        return keywords_of(find_optimizer(optim_type))[0] or []
    except ConfigError:
        return []


def _optimizer_name(optim_type: object) -> str:
    if isinstance(optim_type, str):
        return optim_type
    if not isinstance(optim_type, type):
        raise ConfigError(f"optim_type={optim_type!r} is a function; a configuration can only name Optimizer classes.")
    is_torch = getattr(torch.optim, optim_type.__name__, None) is optim_type
    return optim_type.__name__ if is_torch else _dotted(optim_type)


def _dotted(value: Callable[..., object]) -> str:
    name = value.__qualname__
    if "<" in name:
        raise ConfigError(
            f"{name} is defined inside a function so a configuration cannot name it. Move it to the top level of a module."
        )
    return f"{value.__module__}.{name}"


def _plain(value: object) -> Any:
    """Return a value as a configuration can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        kind = tuple if type(value) is tuple else list
        return kind(map(_plain, value))
    if isinstance(value, Time):
        return str(value)
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return _dotted(value) if callable(value) else value
