# Written by `make stubs` from the lazy exports of this module.
from drivetrain.algorithms.alternating_flip import alternating_flip as alternating_flip
from drivetrain.algorithms.augmix import augmix_image as augmix_image
from drivetrain.algorithms.augmix import augmix_image as augment_and_mix
from drivetrain.algorithms.colout import colout_batch as colout_batch
from drivetrain.algorithms.colout import colout_batch as colout
from drivetrain.algorithms.cutmix import cutmix_batch as cutmix_batch
from drivetrain.algorithms.cutmix import cutmix as cutmix
from drivetrain.algorithms.cutout import cutout_batch as cutout_batch
from drivetrain.algorithms.cutout import cutout_batch as cutout
from drivetrain.algorithms.label_smoothing import smooth_labels as smooth_labels
from drivetrain.algorithms.mixup import mixup_batch as mixup_batch
from drivetrain.algorithms.mixup import mixup as mixup
from drivetrain.algorithms.progressive_resizing import resize_batch as resize_batch
from drivetrain.algorithms.randaugment import randaugment_image as randaugment_image
from drivetrain.algorithms.randaugment import randaugment as randaugment
from drivetrain.algorithms.random_translation import translate_batch as translate_batch
from drivetrain.algorithms.selective_backprop import select_using_loss as select_using_loss
from drivetrain.algorithms.selective_backprop import should_selective_backprop as should_selective_backprop
from drivetrain.algorithms.seq_length_warmup import set_batch_sequence_length as set_batch_sequence_length
from drivetrain.algorithms.test_time_flip import average_flips as average_flips
from drivetrain.algorithms.alibi import apply_alibi as apply_alibi
from drivetrain.algorithms.blurpool import apply_blurpool as apply_blurpool
from drivetrain.algorithms.blurpool import blur_2d as blur_2d
from drivetrain.algorithms.blurpool import blurmax_pool2d as blurmax_pool2d
from drivetrain.algorithms.channels_last import apply_channels_last as apply_channels_last
from drivetrain.algorithms.factorize import apply_factorization as apply_factorization
from drivetrain.algorithms.factorize import factorize_conv2d as factorize_conv2d
from drivetrain.algorithms.factorize import factorize_matrix as factorize_matrix
from drivetrain.algorithms.factorize import factorizing_could_speedup as factorizing_could_speedup
from drivetrain.algorithms.gated_linear_units import apply_gated_linear_units as apply_gated_linear_units
from drivetrain.algorithms.ghost_batchnorm import apply_ghost_batchnorm as apply_ghost_batchnorm
from drivetrain.algorithms.gyro_dropout import apply_gyro_dropout as apply_gyro_dropout
from drivetrain.algorithms.low_precision_groupnorm import apply_low_precision_groupnorm as apply_low_precision_groupnorm
from drivetrain.algorithms.low_precision_layernorm import apply_low_precision_layernorm as apply_low_precision_layernorm
from drivetrain.algorithms.low_precision_layernorm import apply_low_precision_layernorm as apply_fused_layernorm
from drivetrain.algorithms.squeeze_excite import apply_squeeze_excite as apply_squeeze_excite
from drivetrain.algorithms.squeeze_excite import apply_squeeze_excite as apply_se
from drivetrain.algorithms.stochastic_depth import apply_stochastic_depth as apply_stochastic_depth
from drivetrain.algorithms.weight_standardization import apply_weight_standardization as apply_weight_standardization
from drivetrain.algorithms.ema import compute_ema as compute_ema
from drivetrain.algorithms.gradient_clipping import apply_agc as apply_agc
from drivetrain.algorithms.gradient_clipping import apply_gradient_clipping as apply_gradient_clipping
from drivetrain.algorithms.kernel_norm import normalise_kernels as normalise_kernels
from drivetrain.algorithms.layer_freezing import freeze_layers as freeze_layers

__all__ = [
    "alternating_flip",
    "augmix_image",
    "augment_and_mix",
    "colout_batch",
    "colout",
    "cutmix_batch",
    "cutmix",
    "cutout_batch",
    "cutout",
    "smooth_labels",
    "mixup_batch",
    "mixup",
    "resize_batch",
    "randaugment_image",
    "randaugment",
    "translate_batch",
    "select_using_loss",
    "should_selective_backprop",
    "set_batch_sequence_length",
    "average_flips",
    "apply_alibi",
    "apply_blurpool",
    "blur_2d",
    "blurmax_pool2d",
    "apply_channels_last",
    "apply_factorization",
    "factorize_conv2d",
    "factorize_matrix",
    "factorizing_could_speedup",
    "apply_gated_linear_units",
    "apply_ghost_batchnorm",
    "apply_gyro_dropout",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_fused_layernorm",
    "apply_squeeze_excite",
    "apply_se",
    "apply_stochastic_depth",
    "apply_weight_standardization",
    "compute_ema",
    "apply_agc",
    "apply_gradient_clipping",
    "normalise_kernels",
    "freeze_layers",
]
