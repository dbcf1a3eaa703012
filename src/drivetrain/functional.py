"""Every algorithm as a plain function, for loops of one's own; loaded when asked for."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "drivetrain.algorithms.agc": ["apply_agc"],
        "drivetrain.algorithms.alibi": ["apply_alibi"],
        "drivetrain.algorithms.alternating_flip": ["alternating_flip"],
        "drivetrain.algorithms.augmix": ["augmix_image", "augment_and_mix=augmix_image"],
        "drivetrain.algorithms.blurpool": ["apply_blurpool"],
        "drivetrain.algorithms.channels_last": ["apply_channels_last"],
        "drivetrain.algorithms.colout": ["colout_batch", "colout=colout_batch"],
        "drivetrain.algorithms.cutmix": ["cutmix_batch", "cutmix"],
        "drivetrain.algorithms.cutout": ["cutout_batch", "cutout=cutout_batch"],
        "drivetrain.algorithms.ema": ["compute_ema"],
        "drivetrain.algorithms.factorize": ["apply_factorization"],
        "drivetrain.algorithms.gated_linear_units": ["apply_gated_linear_units"],
        "drivetrain.algorithms.ghost_batchnorm": ["apply_ghost_batchnorm"],
        "drivetrain.algorithms.gradient_clipping": ["apply_gradient_clipping"],
        "drivetrain.algorithms.gyro_dropout": ["apply_gyro_dropout"],
        "drivetrain.algorithms.label_smoothing": ["smooth_labels"],
        "drivetrain.algorithms.layer_freezing": ["freeze_layers"],
        "drivetrain.algorithms.low_precision_groupnorm": ["apply_low_precision_groupnorm"],
        "drivetrain.algorithms.low_precision_layernorm": ["apply_low_precision_layernorm", "apply_fused_layernorm"],
        "drivetrain.algorithms.mixup": ["mixup_batch", "mixup"],
        "drivetrain.algorithms.progressive_resizing": ["resize_batch"],
        "drivetrain.algorithms.randaugment": ["randaugment_image", "randaugment"],
        "drivetrain.algorithms.selective_backprop": ["select_using_loss", "should_selective_backprop"],
        "drivetrain.algorithms.seq_length_warmup": ["set_batch_sequence_length"],
        "drivetrain.algorithms.squeeze_excite": ["apply_squeeze_excite", "apply_se=apply_squeeze_excite"],
        "drivetrain.algorithms.stochastic_depth": ["apply_stochastic_depth"],
        "drivetrain.algorithms.weight_standardization": ["apply_weight_standardization"],
    },
)
