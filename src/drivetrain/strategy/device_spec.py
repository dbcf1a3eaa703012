"""What a planner needs to know about a device, and nominal figures for common ones.

The figures are those of data sheets: memory that a program can use, dense bfloat16 arithmetic, memory and link bandwidth. They are
priors; a measurement always wins.
"""

from dataclasses import dataclass

from drivetrain.core.errors import ConfigError, unknown_name

_GIB, _TERA = 2**30, 1e12


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One kind of device and how its copies are connected."""

    name: str
    memory: int
    """Usable bytes."""
    flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Bytes per second to its own memory."""
    intra_bw: float = 0.0
    """Bytes per second to another device of the node."""
    inter_bw: float = 0.0
    """Bytes per second to a device of another node."""
    per_node: int = 8
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for anything else."""

    @classmethod
    def preset(cls, name: str) -> "DeviceSpec":
        """Return the nominal figures of a device.

        >>> DeviceSpec.preset("h100").name
        'h100-80g'
        """
        found = PRESETS.get(_ALIASES.get(name, name))
        if found is None:
            raise ConfigError(unknown_name("device preset", name, [*PRESETS, *_ALIASES]))
        return found


def _spec(
    name: str, gib: float, tflops: float, tbs: float, capability: tuple[int, int] | None, intra: float = 0.0
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory=int(gib * _GIB),
        flops=tflops * _TERA,
        bandwidth=tbs * _TERA,
        intra_bw=intra * 1e9,
        inter_bw=50e9,
        capability=capability,
    )


PRESETS = {
    spec.name: spec
    for spec in (
        _spec("h200", 139.8, 989, 4.8, (9, 0), 450),
        _spec("h100-80g", 79.1, 989, 3.35, (9, 0), 450),
        _spec("b200", 178, 2250, 8.0, (10, 0), 900),
        _spec("a100-80g", 79.1, 312, 2.0, (8, 0), 300),
        _spec("a100-40g", 39.4, 312, 1.55, (8, 0), 300),
        _spec("l40s", 44.4, 362, 0.86, (8, 9), 32),
        _spec("l4", 22, 121, 0.30, (8, 9), 32),
        _spec("rtx4090", 23.5, 165, 1.0, (8, 9), 32),
        _spec("cpu", 16, 1, 0.1, None, 10),
    )
}
_ALIASES = {"h100": "h100-80g", "a100": "a100-80g"}
