"""Every algorithm by the module it is in: what the package exports, what `drivetrain.functional` offers, and what a checkpoint may name.

One table for all three, so that a new idea is listed once. A checkpoint holds, for each algorithm, its class name and its constructor's
arguments as JSON holds them. That is all that is needed to make it again, and nothing in a file is ever executed: a name that is not
listed here is an error.
"""

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from drivetrain.core import ConfigError, ConfigTypeError, OneOf, Plugin
from drivetrain.core.errors import unknown_name
from drivetrain.core.types import Settings

Table = Mapping[str, tuple[str, ...]]
"""Names by module; `"public=private"` renames."""

TABLE = {
    # What happens to a batch.
    "alternating_flip": "AlternatingFlip | | alternating_flip",
    "augmix": "AugMix | AugmentAndMixTransform | augmix_image augment_and_mix=augmix_image",
    "batch_size_warmup": "BatchSizeWarmup",
    "colout": "ColOut | ColOutTransform | colout_batch colout=colout_batch",
    "cutmix": "CutMix | | cutmix_batch cutmix",
    "cutout": "CutOut | | cutout_batch cutout=cutout_batch",
    "device_resident": "DeviceResidentData",
    "label_smoothing": "LabelSmoothing | | smooth_labels",
    "mixup": "MixUp | | mixup_batch mixup",
    "progressive_resizing": "ProgressiveResizing | | resize_batch",
    "randaugment": "RandAugment | RandAugmentTransform | randaugment_image randaugment",
    "random_translation": "RandomTranslation | | translate_batch",
    "resolution": "Resolution",
    "selective_backprop": "SelectiveBackprop | | select_using_loss should_selective_backprop",
    "seq_length_warmup": "SeqLengthWarmup | | set_batch_sequence_length",
    "sequence_packing": "SequencePacking",
    "test_time_flip": "TestTimeFlip | | average_flips",
    # What happens to a model.
    "alibi": "Alibi | | apply_alibi",
    "blurpool": "BlurPool | BlurConv2d BlurMaxPool2d BlurPool2d | apply_blurpool blur_2d blurmax_pool2d",
    "channels_last": "ChannelsLast | | apply_channels_last",
    "factorize": (
        "Factorize | FactorizedConv2d FactorizedLinear LowRankSolution | "
        "apply_factorization factorize_conv2d factorize_matrix factorizing_could_speedup"
    ),
    "fp8_linear": "FP8Linear",
    "gated_linear_units": "GatedLinearUnits | BERTGatedFFOutput GatedFeedForward | apply_gated_linear_units",
    "ghost_batchnorm": "GhostBatchNorm | GhostBatchNorm1d GhostBatchNorm2d GhostBatchNorm3d | apply_ghost_batchnorm",
    "gyro_dropout": "GyroDropout | GyroDropoutLayer | apply_gyro_dropout",
    "low_precision_groupnorm": "LowPrecisionGroupNorm | LPGroupNorm | apply_low_precision_groupnorm",
    "low_precision_layernorm": (
        "LowPrecisionLayerNorm FusedLayerNorm=LowPrecisionLayerNorm | LPLayerNorm | "
        "apply_low_precision_layernorm apply_fused_layernorm=apply_low_precision_layernorm"
    ),
    "no_op_model": "NoOpModel | NoOpModelClass",
    "squeeze_excite": "SqueezeExcite | SqueezeExcite2d SqueezeExciteConv2d | apply_squeeze_excite apply_se=apply_squeeze_excite",
    "stochastic_depth": "StochasticDepth | BlockStochasticModule | apply_stochastic_depth",
    "weight_standardization": "WeightStandardization | WeightStandardizer | apply_weight_standardization",
    "whitening": "Whitening",
    # What happens to the loop and the optimizer.
    "cautious": "Cautious",
    "ema": "EMA | | compute_ema",
    "fast_defaults": "FastDefaults",
    "gradient_clipping": "GradientClipping AGC | | apply_agc apply_gradient_clipping",
    "kernel_norm": "KernelNorm | | normalise_kernels",
    "layer_freezing": "LayerFreezing | | freeze_layers",
    "lookahead": "Lookahead",
    "muon": "Muon",
    "sam": "SAM | SAMOptimizer",
    "scale_schedule": "ScaleSchedule",
    "schedule_free": "ScheduleFree",
    "soap": "SOAP",
    "swa": "SWA",
    "torch_compile": "TorchCompile",
}
"""The algorithms of each module | its layers and transforms | its plain functions, for your own training loop."""


def _column(place: int) -> Table:
    found = {module: "".join(text.split("|")[place : place + 1]).split() for module, text in TABLE.items()}
    return {module: tuple(names) for module, names in found.items() if names}


ALGORITHMS, PARTS, FUNCTIONS = map(_column, range(3))
"""The algorithms by the names that checkpoints use, and the two other columns."""

_HOMES = {
    public: (f"drivetrain.algorithms.{module}", private or public)
    for module, entries in ALGORITHMS.items()
    for public, _, private in (entry.partition("=") for entry in entries)
}


def offered(*tables: Table) -> dict[str, list[str]]:
    """Return the names of the tables by full module name."""
    found: dict[str, list[str]] = {}
    for table in tables:
        for module, names in table.items():
            found.setdefault(f"drivetrain.algorithms.{module}", []).extend(names)
    return found


P = TypeVar("P", bound=type[Plugin])

_registered: dict[str, type[Plugin]] = {}


def register(cls: P) -> P:
    """Let checkpoints name an algorithm of one's own; can be used as a decorator.

    Two classes of one name would make files ambiguous, so the second one is rejected.
    """
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise ConfigTypeError(f"register({cls!r}): expected a class derived from Algorithm.")
    name = cls.__name__
    if name in _HOMES or _registered.get(name, cls) is not cls:
        raise ConfigError(f"register: an algorithm named {name!r} already exists. Rename the class.")
    _registered[name] = cls
    return cls


def names() -> list[str]:
    """Return the name of every algorithm that can be created."""
    return sorted({OneOf.__name__, *_HOMES, *_registered})


def find(name: str) -> type[Plugin]:
    """Return the class of that name."""
    if name == OneOf.__name__:
        return OneOf
    if name in _registered:
        return _registered[name]
    if name not in _HOMES:
        raise ConfigError(unknown_name("algorithm", name, names()) + " Register your own with registry.register(cls).")
    module, private = _HOMES[name]
    return getattr(importlib.import_module(module), private)


def create(name: str, config: Mapping[str, object]) -> Plugin:
    """Return the algorithm of that name made with the arguments that its `config()` returned.

    >>> create("LabelSmoothing", {"smoothing": 0.2, "target_key": 1})
    LabelSmoothing(smoothing=0.2, target_key=1)
    """
    cls = find(name)
    parameters = inspect.signature(cls).parameters
    args: list[object] = []
    kwargs: Settings = {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument, value in config.items():
        if argument not in parameters and not takes_any:
            raise ConfigError(unknown_name("argument", argument, parameters, where=name))
        revived = _rebuild_argument(value, f"{name}({argument}=...)")
        if argument in parameters and parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(revived)
        else:
            kwargs[argument] = revived
    return cls(*args, **kwargs)


def restore_required(
    saved: Iterable[Mapping[str, Any]], live: Sequence[Plugin] = (), exclude: Iterable[str] = ()
) -> list[Plugin]:
    """Return, newly made, the saved algorithms that the saved model cannot do without and that are not among `live`.

    `saved` are entries as the State saves them: `name`, `config`, `required`. An algorithm named in `exclude` is left out.
    """
    present = [type(plugin).__name__ for plugin in live]
    left_out = set(exclude)
    made: list[Plugin] = []
    for entry in saved:
        name = entry["name"]
        if name in present:
            present.remove(name)
        elif entry.get("required") and name not in left_out:
            made.append(create(name, entry["config"]))
    return made


def _rebuild_argument(value: object, where: str) -> Any:
    """Return an argument as the constructor wants it: members are made again, what JSON could not hold is rejected."""
    if isinstance(value, Mapping):
        if set(value) == {"__repr__"}:
            raise ConfigError(
                f"{where}: the saved value was {value['__repr__']}, which cannot be restored from a file. Create the "
                "algorithm and pass it to the Trainer before loading."
            )
        if set(value) == {"name", "config"}:
            return create(value["name"], value["config"])
        return {key: _rebuild_argument(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rebuild_argument(item, where) for item in value]
    return value
