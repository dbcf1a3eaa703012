"""Every algorithm by the module it lives in: what the package exports, what `drivetrain.functional` offers, and what a
checkpoint may name.

One table for all three, so that a new idea is listed once. A name is offered only where its module is there.
"""

import pkgutil
from collections.abc import Mapping
from pathlib import Path

Table = Mapping[str, tuple[str, ...]]
"""Names by module; `"public=private"` renames."""

ALGORITHMS: Table = {
    # What happens to a batch.
    "alternating_flip": ("AlternatingFlip",),
    "augmix": ("AugMix",),
    "batch_size_warmup": ("BatchSizeWarmup",),
    "colout": ("ColOut",),
    "cutmix": ("CutMix",),
    "cutout": ("CutOut",),
    "device_resident": ("DeviceResidentData",),
    "label_smoothing": ("LabelSmoothing",),
    "mixup": ("MixUp",),
    "progressive_resizing": ("ProgressiveResizing",),
    "randaugment": ("RandAugment",),
    "random_translation": ("RandomTranslation",),
    "resolution": ("Resolution",),
    "selective_backprop": ("SelectiveBackprop",),
    "seq_length_warmup": ("SeqLengthWarmup",),
    "sequence_packing": ("SequencePacking",),
    "test_time_flip": ("TestTimeFlip",),
    # What happens to a model.
    "alibi": ("Alibi",),
    "blurpool": ("BlurPool",),
    "channels_last": ("ChannelsLast",),
    "factorize": ("Factorize",),
    "fp8_linear": ("FP8Linear",),
    "gated_linear_units": ("GatedLinearUnits",),
    "ghost_batchnorm": ("GhostBatchNorm",),
    "gyro_dropout": ("GyroDropout",),
    "low_precision_groupnorm": ("LowPrecisionGroupNorm",),
    "low_precision_layernorm": ("LowPrecisionLayerNorm", "FusedLayerNorm=LowPrecisionLayerNorm"),
    "no_op_model": ("NoOpModel",),
    "squeeze_excite": ("SqueezeExcite",),
    "stochastic_depth": ("StochasticDepth",),
    "weight_standardization": ("WeightStandardization",),
    "whitening": ("Whitening",),
    # What happens to the loop and the optimizer.
    "agc": ("AGC",),
    "cautious": ("Cautious",),
    "ema": ("EMA",),
    "fast_defaults": ("FastDefaults",),
    "gradient_clipping": ("GradientClipping",),
    "kernel_norm": ("KernelNorm",),
    "layer_freezing": ("LayerFreezing",),
    "lookahead": ("Lookahead",),
    "muon": ("Muon",),
    "sam": ("SAM",),
    "scale_schedule": ("ScaleSchedule",),
    "schedule_free": ("ScheduleFree",),
    "soap": ("SOAP",),
    "swa": ("SWA",),
    "torch_compile": ("TorchCompile",),
}
"""The algorithms, by which a checkpoint knows them."""

PARTS: Table = {
    "augmix": ("AugmentAndMixTransform",),
    "blurpool": ("BlurConv2d", "BlurMaxPool2d", "BlurPool2d"),
    "colout": ("ColOutTransform",),
    "factorize": ("FactorizedConv2d", "FactorizedLinear", "LowRankSolution"),
    "gated_linear_units": ("BERTGatedFFOutput", "GatedFeedForward"),
    "ghost_batchnorm": ("GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d"),
    "gyro_dropout": ("GyroDropoutLayer",),
    "low_precision_groupnorm": ("LPGroupNorm",),
    "low_precision_layernorm": ("LPLayerNorm",),
    "no_op_model": ("NoOpModelClass",),
    "randaugment": ("RandAugmentTransform",),
    "sam": ("SAMOptimizer",),
    "squeeze_excite": ("SqueezeExcite2d", "SqueezeExciteConv2d"),
    "stochastic_depth": ("BlockStochasticModule",),
    "warnings": ("NoEffectWarning", "NotIntendedUseWarning"),
    "weight_standardization": ("WeightStandardizer",),
}
"""Layers, transforms and warnings."""

FUNCTIONS: Table = {
    "agc": ("apply_agc",),
    "alibi": ("apply_alibi",),
    "alternating_flip": ("alternating_flip",),
    "augmix": ("augmix_image", "augment_and_mix=augmix_image"),
    "blurpool": ("apply_blurpool", "blur_2d", "blurmax_pool2d"),
    "channels_last": ("apply_channels_last",),
    "colout": ("colout_batch", "colout=colout_batch"),
    "cutmix": ("cutmix_batch", "cutmix"),
    "cutout": ("cutout_batch", "cutout=cutout_batch"),
    "ema": ("compute_ema",),
    "factorize": ("apply_factorization", "factorize_conv2d", "factorize_matrix", "factorizing_could_speedup"),
    "gated_linear_units": ("apply_gated_linear_units",),
    "ghost_batchnorm": ("apply_ghost_batchnorm",),
    "gradient_clipping": ("apply_gradient_clipping",),
    "gyro_dropout": ("apply_gyro_dropout",),
    "kernel_norm": ("normalise_kernels",),
    "label_smoothing": ("smooth_labels",),
    "layer_freezing": ("freeze_layers",),
    "low_precision_groupnorm": ("apply_low_precision_groupnorm",),
    "low_precision_layernorm": (
        "apply_low_precision_layernorm",
        "apply_fused_layernorm=apply_low_precision_layernorm",
    ),
    "mixup": ("mixup_batch", "mixup"),
    "progressive_resizing": ("resize_batch",),
    "randaugment": ("randaugment_image", "randaugment"),
    "random_translation": ("translate_batch",),
    "selective_backprop": ("select_using_loss", "should_selective_backprop"),
    "seq_length_warmup": ("set_batch_sequence_length",),
    "squeeze_excite": ("apply_squeeze_excite", "apply_se=apply_squeeze_excite"),
    "stochastic_depth": ("apply_stochastic_depth",),
    "test_time_flip": ("average_flips",),
    "weight_standardization": ("apply_weight_standardization",),
}
"""The ideas as plain functions, for loops of one's own."""


def offered(*tables: Table) -> dict[str, list[str]]:
    """Return the names of the tables by full module name, for those modules that are there."""
    present = {entry.name for entry in pkgutil.iter_modules([str(Path(__file__).parent)])}
    found: dict[str, list[str]] = {}
    for table in tables:
        for module, names in table.items():
            if module in present:
                found.setdefault(f"drivetrain.algorithms.{module}", []).extend(names)
    return found
