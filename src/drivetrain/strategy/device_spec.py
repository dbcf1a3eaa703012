"""What a planner needs to know about a device, and nominal figures of common ones.

The figures are those of data sheets: memory that a program can use, dense 16-bit arithmetic (without sparsity, accumulated in
float32), memory bandwidth, and the rate of a link in one direction. They are defaults; measurements replace them.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from drivetrain.core import display
from drivetrain.core.arguments import check_number
from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.core.files import load_json


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One kind of device, and how several of them are connected."""

    name: str
    memory: int
    """Usable bytes."""
    flops: float
    """Dense bfloat16 operations per second; float16 where the device has no bfloat16."""
    bandwidth: float
    """Bytes per second to its own memory."""
    intra_bw: float = 0.0
    """Bytes per second to another device of the node, in one direction; 0 when unknown."""
    inter_bw: float = 0.0
    """Bytes per second to a device of another node, in one direction; 0 when unknown."""
    per_node: int = 8
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for anything else."""
    fp32_flops: float = 0.0
    """Float32 operations per second without tensor cores; 0: a sixteenth of `flops`."""

    def __post_init__(self) -> None:
        for field_name in ("memory", "flops", "bandwidth", "per_node"):
            if not getattr(self, field_name) > 0:
                raise ConfigError(f"DeviceSpec.{field_name}: {getattr(self, field_name)!r} must be more than 0.")

    @property
    def rates(self) -> dict[str, float]:
        """Operations per second for each arithmetic that the device supports: float32, tf32, float16, bfloat16, float8.

        >>> sorted(DeviceSpec.preset("a100").rates)
        ['bfloat16', 'float16', 'float32', 'tf32']
        """
        rates = {"float32": self.fp32_flops or self.flops / 16}
        if self.capability is None:
            return rates | {"bfloat16": self.flops}
        rates["float16"] = self.flops
        if self.capability >= (8, 0):
            rates |= {"bfloat16": self.flops, "tf32": self.flops / 2}
        if self.capability >= (8, 9):
            rates["float8"] = 2 * self.flops
        return rates

    @classmethod
    def preset(cls, name: str) -> "DeviceSpec":
        """Return the nominal figures of a device.

        >>> DeviceSpec.preset("h100").name
        'h100-80g'
        """
        folded = name.strip().lower().replace("_", "-").replace(" ", "-")
        found = PRESETS.get(_ALIASES.get(folded, folded))
        if found is None:
            raise ConfigError(unknown_name("device preset", name, [*PRESETS, *_ALIASES]))
        return found

    @classmethod
    def load(cls, source: "DeviceSpec | Mapping[str, Any] | str | os.PathLike[str]") -> "DeviceSpec":
        """Return a spec from its fields, a JSON file that holds them, or the name of a preset.

        `preset` among the fields gives the figures that the others change; sizes may be written as "80GiB".

        >>> DeviceSpec.load({"preset": "h100", "name": "half an h100", "memory": "40GiB"}).memory == 40 * 2**30
        True
        """
        if isinstance(source, DeviceSpec):
            return source
        if isinstance(source, Mapping):
            return cls._from_fields(source)
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(
                f"device: {type(source).__name__} given; expected a DeviceSpec, its fields, a JSON file or a preset's name."
            )
        path = Path(source)
        if not (path.suffix == ".json" or path.is_file()):
            return cls.preset(str(source))
        try:
            held = load_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"device {str(path)!r} is not JSON: {error}. Expected an object with the fields of DeviceSpec."
            ) from error
        if not isinstance(held, Mapping):
            raise ConfigError(
                f"device {str(path)!r} holds a {type(held).__name__}; expected an object with a DeviceSpec's fields."
            )
        return cls._from_fields(held)

    @classmethod
    def _from_fields(cls, given: Mapping[str, Any]) -> "DeviceSpec":
        values = dict(given)
        base = values.pop("preset", None)
        known = {item.name for item in fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(unknown_name("field", key, [*known, "preset"], where="DeviceSpec"))
        if base is not None:
            preset = cls.preset(str(base))
            values = {name: getattr(preset, name) for name in known} | values
        missing = sorted({"name", "memory", "flops", "bandwidth"} - set(values))
        if missing:
            raise ConfigError(
                f"DeviceSpec: {', '.join(missing)} missing. Give them, or `preset` with the name of a similar device."
            )
        values["memory"] = parse_size(values["memory"], where="DeviceSpec.memory")
        if (capability := values.get("capability")) is not None:
            if not isinstance(capability, list | tuple) or [type(number) for number in capability] != [int, int]:
                raise ConfigError(
                    f"DeviceSpec.capability: {capability!r} given; expected two numbers such as [9, 0], or null."
                )
            values["capability"] = tuple(capability)
        for key in ("flops", "bandwidth", "intra_bw", "inter_bw", "fp32_flops", "per_node"):
            if key in values:
                check_number(key, values[key], owner="DeviceSpec")
        if not isinstance(values["name"], str):
            raise ConfigError(f"DeviceSpec.name: {values['name']!r} given; expected a text.")
        return cls(**values)


def parse_size(value: Any, *, where: str) -> int:
    """Return bytes from a number or a text such as "80GiB".

    >>> parse_size("1.5KiB", where="memory")
    1536
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return int(value)
    size = display.parse_size(value) if isinstance(value, str) else None
    if size is None:
        raise ConfigError(
            f'{where}: {value!r} given; expected bytes, or a number with one of {", ".join(display.SIZE_UNITS)}: "80GiB".'
        )
    return size


# name, usable GiB, dense 16-bit TFLOP/s, TB/s, capability, GB/s inside a node (one direction), float32 TFLOP/s
_ROWS = (
    ("h200", 139.8, 989, 4.8, (9, 0), 450, 67),
    ("h100-80g", 79.1, 989, 3.35, (9, 0), 450, 67),
    ("h100-pcie", 79.1, 756, 2.0, (9, 0), 64, 51),
    ("h100-nvl", 93, 835, 3.9, (9, 0), 300, 60),
    ("b200", 178, 2250, 8.0, (10, 0), 900, 80),
    ("a100-80g", 79.1, 312, 2.0, (8, 0), 300, 19.5),
    ("a100-40g", 39.4, 312, 1.55, (8, 0), 300, 19.5),
    ("a10", 22, 125, 0.6, (8, 6), 32, 31.2),
    ("l40s", 44.4, 362, 0.86, (8, 9), 32, 91.6),
    ("l4", 22, 121, 0.30, (8, 9), 32, 30.3),
    ("rtx3090", 23.5, 71, 0.94, (8, 6), 32, 35.6),
    ("rtx4090", 23.5, 165, 1.0, (8, 9), 32, 82.6),
    ("rtx5090", 31.3, 209, 1.79, (12, 0), 64, 104.8),
    ("v100-32g", 31.7, 125, 0.9, (7, 0), 150, 15.7),
    ("v100-16g", 15.7, 125, 0.9, (7, 0), 150, 15.7),
    ("t4", 14.6, 65, 0.32, (7, 5), 16, 8.1),
    ("cpu", 16, 1, 0.1, None, 10, 1),
)
PRESETS = {
    name: DeviceSpec(
        name=name, memory=int(gib * 2**30), flops=tflops * 1e12, bandwidth=tbs * 1e12, intra_bw=intra * 1e9,
        inter_bw=1e9 if name == "cpu" else 50e9, capability=capability, fp32_flops=fp32 * 1e12,
    )
    for name, gib, tflops, tbs, capability, intra, fp32 in _ROWS
}  # fmt: skip
_ALIASES = {
    "h200-141g": "h200",
    "h100": "h100-80g",
    "h100-sxm": "h100-80g",
    "a100": "a100-80g",
    "v100": "v100-32g",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "rtx-3090": "rtx3090",
    "rtx-4090": "rtx4090",
    "rtx-5090": "rtx5090",
}


def preset_named_like(device_name: str, memory: int | None = None) -> DeviceSpec | None:
    """Return the preset for the device name that the driver reports. If there are several memory sizes, return the nearest.

    >>> preset_named_like("NVIDIA H100 80GB HBM3").name
    'h100-80g'
    >>> preset_named_like("NVIDIA A100-SXM4-40GB").name
    'a100-40g'
    """
    folded = re.sub(r"[^a-z0-9]", "", device_name.lower())
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    gigabytes = re.search(r"(\d+) ?gb", device_name.lower())
    size = memory or (int(gigabytes[1]) * 10**9 if gigabytes else None)
    fitting = []
    for spec in PRESETS.values():
        model, _, variant = spec.name.partition("-")
        is_named = model in words or (model.startswith("rtx") and model in folded)
        if is_named and (variant in ("", "80g", "40g", "32g", "16g") or variant in words):
            fitting.append((variant in words, spec))
    if not fitting:
        return None
    fitting.sort(key=lambda found: (not found[0], abs(found[1].memory - size) if size else 0))
    return fitting[0][1]
