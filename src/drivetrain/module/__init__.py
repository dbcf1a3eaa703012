"""What can be done to an nn.Module: surgery, block discovery, wrapping, averaged weights, compilation, checkpointing."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".surgery": [
            "ReplacementFunction",
            "count_module_instances",
            "replace_module_classes",
            "update_params_in_optimizer",
        ],
        ".blocks": ["BlockGroup", "find_blocks", "repeated_blocks", "select_modules"],
        ".wrapping": ["clean_name", "clean_state_dict", "is_wrapped", "load_clean_state_dict", "unwrap"],
        ".ddp": ["rewrap_ddp", "wrap_ddp"],
        ".sharding": ["rebind_optimizer", "shard_fully"],
        ".average": ["AveragedWeights"],
        ".params": ["MuonGroups", "muon_groups", "select_parameters"],
        ".compilation": ["compile_module", "set_recompile_limit"],
        ".checkpointing": ["checkpoint_blocks"],
        ".accumulation": ["AccumulationWindow", "scale_gradients"],
        ".fp8": ["Float8Linear", "convert_linears_to_fp8", "supports_fp8"],
        ".attention": ["AttentionAdapter", "AttentionBias", "find_attention", "register_attention"],
        ".precision": ["Precision", "parse_precision"],
        ".convolutions": [
            *("channels_last_input", "is_worth_channels_last", "to_channels_last"),
            *("whiten_convolution", "whitening_kernel"),
        ],
    },
)
