"""Composer's modules: where each public name is here, and what to use instead of those that are not.

The names are Composer 0.32's. A package offers what its modules offer, as in Composer; only names that are in no module of their own are
listed for the package itself.
"""

from collections.abc import Mapping

from drivetrain.algorithms.registry import ALGORITHMS, FUNCTIONS, PARTS, offered

_CORE, _TYPES = "drivetrain.core", "drivetrain.compat.composer_types"
_BATCH, _RANKS, _SEEDS = "drivetrain.context.batch", "drivetrain.runtime.ranks", "drivetrain.runtime.seeds"
_MONITORS = "drivetrain.train.callbacks.monitors"

OFFERED: dict[str, dict[str, str]] = {
    "": {"drivetrain": "__version__"},
    # The name in older releases.
    "algorithms.alibi.gpt2_alibi": {"drivetrain.algorithms.alibi.gpt2_alibi": "_attn enlarge_mask"},
    "algorithms.utils.augmentation_primitives": {
        "drivetrain.algorithms.utils.primitives": (
            "AugmentationFn=Augmentation augmentation_sets autocontrast equalize posterize rotate solarize shear_x shear_y translate_x "
            "translate_y color color_original contrast contrast_original brightness brightness_original sharpness sharpness_original"
        )
    },
    "algorithms.warnings": {"drivetrain.core.errors": "NoEffectWarning NotIntendedUseWarning"},
    "callbacks.lr_monitor": {_MONITORS: "LRMonitor"},
    "callbacks.memory_monitor": {_MONITORS: "MemoryMonitor"},
    "callbacks.nan_monitor": {"drivetrain.train.callbacks.stopping": "NaNMonitor=TerminateOnNaNCallback"},
    "callbacks.speed_monitor": {_MONITORS: "SpeedMonitor"},
    "core": {"torch.utils.data": "Dataset"},
    "core.algorithm": {_CORE: "Algorithm"},
    "core.callback": {_CORE: "Callback"},
    "core.data_spec": {_TYPES: "DataSpec ensure_data_spec"},
    "core.engine": {_CORE: "Engine Trace Traces"},
    "core.evaluator": {_TYPES: "Evaluator ensure_evaluator"},
    "core.event": {_CORE: "Event"},
    "core.passes": {
        _CORE: "AlgorithmPass",
        "drivetrain.compat.composer_types": (
            "T sort_to_front sort_to_back sort_selective_backprop_first sort_low_precision_layernorm_last set_filo_order "
            "warn_if_multiple_loss_interpolation"
        ),
    },
    "core.precision": {_TYPES: "Precision get_precision_context"},
    "core.serializable": {_TYPES: "Serializable"},
    "core.state": {"drivetrain.context.state": "State"},
    "core.time": {_CORE: "Time TimeUnit Timestamp ensure_time"},
    "core.types": {_TYPES: "Batch JSON MemoryFormat TrainerMode"},
    "functional": {home: " ".join(names) for home, names in offered(FUNCTIONS).items()},
    "loggers.in_memory_logger": {_TYPES: "InMemoryLogger"},
    "loggers.logger": {_CORE: "Logger", _TYPES: "LoggerDestination"},
    "loggers.logger_destination": {_TYPES: "LoggerDestination"},
    "loss.loss": {_TYPES: "binary_cross_entropy_with_logits loss_registry soft_cross_entropy"},
    "loss.utils": {_BATCH: "infer_target_type ensure_targets_one_hot check_for_index_targets"},
    "models.base": {_TYPES: "ComposerModel"},
    "models.tasks.classification": {_TYPES: "ComposerClassifier"},
    "optim.decoupled_weight_decay": {"drivetrain.optim.optimizers": "DecoupledAdamW DecoupledSGDW"},
    "optim.scheduler": {
        "drivetrain.compat.composer_schedulers": (
            "ComposerScheduler compile_composer_scheduler StepScheduler MultiStepScheduler ConstantScheduler LinearScheduler "
            "ExponentialScheduler CosineAnnealingScheduler CosineAnnealingWarmRestartsScheduler PolynomialScheduler "
            "MultiStepWithWarmupScheduler ConstantWithWarmupScheduler LinearWithWarmupScheduler CosineAnnealingWithWarmupScheduler "
            "PolynomialWithWarmupScheduler"
        )
    },
    "trainer.trainer": {"drivetrain.compat.composer_trainer": "Trainer"},
    "utils.batch_helpers": {_BATCH: "batch_get batch_set"},
    "utils.device": {"drivetrain.runtime.device": "get_device=choose_device"},
    "utils.dist": {
        "drivetrain.runtime.collectives": "all_gather_object=all_gather_values barrier=distributed_barrier",
        _RANKS: "get_global_rank=get_rank get_local_rank get_world_size=get_num_processes",
        "torch.distributed": "is_available is_initialized",
        _TYPES: "get_sampler",
    },
    "utils.iter_helpers": {_TYPES: "ensure_tuple map_collection"},
    "utils.module_surgery": {
        "drivetrain.module.surgery": (
            "ReplacementFunction replace_module_classes count_module_instances update_params_in_optimizer"
        )
    },
    "utils.reproducibility": {_SEEDS: "seed_all=set_seed get_rng_state=capture_rng"},
    "utils.string_enum": {"enum": "StringEnum=StrEnum"},
}

_SURGERY = "drivetrain.surgery.replace_module_classes with your own function"
_FILES = "local paths: checkpoints are folders on a file system; copy them with the client of your storage"
_SHARDING = "Trainer(strategy=['parallel_mode', 'fsdp']), or strategy='auto' to have a plan found"
_CHECKPOINT = "Trainer.train(checkpoint_dir=..., resume_from='auto'), or drivetrain.Checkpointer in a loop of your own"
_STATE_DICT = "drivetrain.Context, whose state_dict() holds model, optimizers, loaders and counters"
_DEVICE = "Trainer(device='cuda') or 'cpu', or drivetrain.runtime.choose_device('auto'), which returns a torch.device"
_METRIC = "Trainer(metrics={'name': ...}) with a torchmetrics metric or a function of (outputs, targets)"
_EXPORT = "torch.export.export(trainer.get_model(), ...), or drivetrain.checkpoint's safetensors export"
_HUGGING_FACE = "the transformers model itself: Trainer(model) understands its batches and its loss"
_DIST = "torch.distributed, or drivetrain's broadcast_from_master and runtime.all_gather_values, which also work in one process"
_SINK = "Recorder(sinks=[...]) in Trainer(loggers=[recorder]), with a sink of your own: drivetrain.record.Sink"
_PROFILER = "torch.profiler.profile around trainer.train(..., limit_train_batches=20)"
_MEMORY = "torch.cuda.memory._record_memory_history, and MemoryMonitor for the numbers"

INSTEAD: dict[str, dict[str, str]] = {
    "algorithms.alibi.attention_surgery_functions.utils": {
        "AlibiReplacementFunction": "drivetrain.algorithms.alibi.algorithm.Policy",
        "zero_and_freeze_expand_position_embeddings": "apply_alibi, which finds the position embeddings itself",
        "register_alibi": "drivetrain.module.attention.register_attention, which gives attention a bias",
    },
    "algorithms.factorize.factorize": {
        "LOG_NUM_CONV2D_REPLACEMENTS_KEY LOG_NUM_LINEAR_REPLACEMENTS_KEY": "drivetrain.surgery.count_module_instances",
    },
    "algorithms.gated_linear_units.gated_linear_units": {
        "from_BertOutput from_BertIntermediate": "drivetrain.algorithms.gated_linear_units.register_feed_forward",
    },
    "algorithms.gyro_dropout.gyro_dropout": {"from_Dropout": "apply_gyro_dropout(model)"},
    "algorithms.stochastic_depth.stochastic_layers": {
        "make_resnet_bottleneck_stochastic": "apply_stochastic_depth(model, target_layer_name='ResNetBottleneck')",
    },
    "algorithms.utils.augmentation_common": {
        "image_as_type map_pillow_function": "drivetrain.algorithms.utils.primitives.as_tensor and as_pil",
    },
    "callbacks.activation_monitor": {"ActivationMonitor": "a callback with forward hooks that calls logger.log_metrics"},
    "callbacks.checkpoint_saver": {"CheckpointSaver": _CHECKPOINT},
    "callbacks.early_stopper": {"EarlyStopper": "drivetrain.callbacks.EarlyStoppingCallback"},
    "callbacks.export_for_inference": {"ExportForInferenceCallback": _EXPORT},
    "callbacks.free_outputs": {"FreeOutputs": "nothing: outputs are released after every step"},
    "callbacks.generate": {"Generate": "a callback whose eval_end(state, logger) generates with state.model"},
    "callbacks.image_visualizer": {"ImageVisualizer": "a callback that calls logger.log_images"},
    "callbacks.load_checkpoint": {"LoadCheckpoint": "Trainer.load_checkpoint before train()"},
    "callbacks.memory_snapshot": {"MemorySnapshot": _MEMORY},
    "callbacks.mlperf": {"MLPerfCallback get_system_description": "the mlperf_logging package in a callback of your own"},
    "callbacks.oom_observer": {"OOMObserver": _MEMORY},
    "callbacks.optimizer_monitor": {"OptimizerMonitor": "LearningRateMonitor, and trainer.last_grad_norm for the gradients"},
    "callbacks.runtime_estimator": {"RuntimeEstimator": "ProgressBarCallback, which shows the time that is left"},
    "callbacks.system_metrics_monitor": {"SystemMetricsMonitor": "ThroughputMonitor and MemoryMonitor"},
    "callbacks.threshold_stopper": {"ThresholdStopper": "a callback that calls state.stop_training()"},
    "checkpoint.download": {"download_file download_and_extract_symlink download_monolithic_checkpoint": _FILES},
    "checkpoint.load": {
        "CheckpointLoadOptions load_checkpoint load_model_checkpoint load_optim_checkpoint torch_set_model_state_dict "
        "torch_set_optimizer_state_dict download_and_load_sharded_state_dict load_resumption_checkpoint": _CHECKPOINT,
    },
    "checkpoint.save": {
        "MODEL_CHECKPOINT_DIRECTORY_NAME MONOLITHIC_MODEL_CHECKPOINT_FILENAME OPTIM_CHECKPOINT_DIRECTORY_NAME "
        "OPTIM_MONO_CHECKPOINT_FILENAME METADATA_CHECKPOINT_FILENAME RESUMPTION_CHECKPOINT_FILENAME CheckpointSaveOptions "
        "save_checkpoint_to_disk save_model_to_disk save_optim_to_disk save_composer_metadata_to_disk save_resumption_state_to_disk "
        "save_state_dict_to_disk is_state_dict_sharded": _CHECKPOINT,
    },
    "checkpoint.state_dict": {
        "get_model_state_dict get_optim_state_dict get_metadata_state_dict get_resumption_state_dict": _STATE_DICT,
    },
    "checkpoint.upload": {"CheckpointUploadCallback upload_file": _FILES},
    "cli.launcher": {"CLEANUP_TIMEOUT main": "torchrun --nproc-per-node=..., or drivetrain launch --nproc-per-node ..."},
    "devices.device": {"Device T_nnModule": _DEVICE},
    **{
        f"devices.device_{name.lower()}": {f"Device{name}": _DEVICE}
        for name in ("CPU", "GPU", "HPU", "MPS", "Neuron", "TPU")
    },
    "distributed.activation_checkpointing": {
        "generate_default_check_fn generate_composer_model_check_fn apply_ac": "Trainer(strategy=['checkpoint'])",
    },
    "distributed.dist_strategy": {
        "DDPSyncStrategy ddp_sync_context prepare_ddp_module": "Trainer(strategy=['parallel_mode']), which wraps in DDP",
        "prepare_fsdp_module": _SHARDING,
        "prepare_tp_module": "Trainer(strategy=['tensor_parallel'])",
    },
    "distributed.fsdp2": {
        "apply_fully_shard prepare_fully_shard sync_module_states create_mixed_precision_policy": _SHARDING,
    },
    "distributed.fsdp2_utils": {
        "legalize_param_sharing_between_modules get_standalone_and_tied_modules check_param_tying sync_optimizer_and_model_params "
        "update_optimizer_modules generate_default_policy generate_composer_model_policy": _SHARDING,
    },
    "distributed.meta_safe_apply": {"meta_safe_apply concatenate_strings": _SHARDING},
    "distributed.mosaic_parallelism": {
        "SHARDING_MAP BACKWARD_PREFETCH_MAP get_mixed_precision get_cpu_offload set_custom_fsdp_module_kwargs": _SHARDING,
    },
    "distributed.param_init": {"meta_init": "with torch.device('meta'): ..."},
    "distributed.prepare_distributed": {
        "log_execution_time get_full_state_dict parallelize_model parallelize_composer_model": _SHARDING,
    },
    "distributed.shared_utils": {
        "get_direct_children_from_composer_model generate_oom_hook add_fsdp_oom_hooks update_sync_module_states_if_needed": _SHARDING,
    },
    "loggers.cometml_logger": {"CometMLLogger": _SINK},
    "loggers.console_logger": {
        "ConsoleLogger": "drivetrain.record.ConsoleSink in a Recorder, or PrintProgressCallback",
        "NUM_EVAL_LOGGING_EVENTS": "nothing: every value is shown when it is logged",
    },
    "loggers.file_logger": {"FileLogger": "drivetrain.Recorder(folder), which writes metrics.jsonl"},
    "loggers.logger": {"format_log_data_value": "str(value)"},
    "loggers.mlflow_logger": {"MLFlowLogger": "drivetrain.record.MlflowSink in Recorder(sinks=[...])"},
    "loggers.mosaicml_logger": {"MosaicMLLogger MOSAICML_PLATFORM_ENV_VAR MOSAICML_ACCESS_TOKEN_ENV_VAR": _SINK},
    "loggers.neptune_logger": {"NeptuneLogger": _SINK},
    "loggers.progress_bar_logger": {"ProgressBarLogger": "drivetrain.callbacks.ProgressBarCallback"},
    "loggers.remote_uploader_downloader": {"RemoteUploaderDownloader": _FILES},
    "loggers.slack_logger": {"SlackLogger": _SINK},
    "loggers.tensorboard_logger": {"TensorboardLogger": "drivetrain.record.TensorBoardSink in Recorder(sinks=[...])"},
    "loggers.wandb_logger": {"WandBLogger": "drivetrain.record.WandbSink in Recorder(sinks=[...])"},
    "loss": {"DiceLoss": "a loss of your own, or one of torchmetrics or monai, as loss_func"},
    "metrics.map": {"MAP": _METRIC},
    "metrics.metrics": {"MIoU Dice CrossEntropy LossMetric": _METRIC},
    "metrics.nlp": {"BinaryF1Score LanguageCrossEntropy MaskedAccuracy LanguagePerplexity": _METRIC},
    "models.huggingface": {
        "HuggingFaceModel peft_installed": _HUGGING_FACE,
        "write_huggingface_pretrained_from_composer_checkpoint": "model.save_pretrained(folder) after trainer.load_checkpoint",
    },
    "models.initializers": {"Initializer": "torch.nn.init with model.apply(function)"},
    "profiler.json_trace_handler": {"JSONTraceHandler": _PROFILER},
    "profiler.json_trace_merger": {"merge_traces": _PROFILER},
    "profiler.marker": {"Marker": "torch.profiler.record_function"},
    "profiler.profiler": {"Profiler": _PROFILER},
    "profiler.profiler_action": {"ProfilerAction": _PROFILER},
    "profiler.profiler_schedule": {"cyclic_schedule": "torch.profiler.schedule"},
    "profiler.system_profiler": {"SystemProfiler": "MemoryMonitor and ThroughputMonitor"},
    "profiler.torch_profiler": {"TorchProfiler": _PROFILER},
    "profiler.trace_handler": {"TraceHandler": _PROFILER},
    "profiler.utils": {"export_memory_timeline_html": _MEMORY},
    "utils.auto_log_hparams": {
        "extract_hparams convert_nested_dict_to_flat_dict convert_flat_dict_to_nested_dict": "logger.log_hyperparameters({...})",
    },
    "utils.checkpoint": {
        "PartialFilePath get_save_filename load_checkpoint save_checkpoint download_checkpoint": _CHECKPOINT,
        "safe_torch_load": "torch.load(path, weights_only=True)",
    },
    "utils.collect_env": {
        "configure_excepthook disable_env_report enable_env_report print_env get_composer_env_dict": "the command drivetrain doctor",
    },
    "utils.compression": {"is_compressed_pt CliCompressor get_compressor KNOWN_COMPRESSORS": _FILES},
    "utils.device": {"is_hpu_installed is_xla_installed": _DEVICE},
    "utils.dist": {
        "all_gather all_reduce broadcast broadcast_object_list": _DIST,
        "get_local_world_size get_node_rank": "the environment variables LOCAL_WORLD_SIZE and GROUP_RANK that torchrun sets",
        "initialize_dist": "drivetrain.init_distributed(), or nothing: the Trainer joins the processes that torchrun started",
    },
    "utils.file_helpers": {
        "FORMAT_NAME_WITH_DIST_AND_TIME_TABLE FORMAT_NAME_WITH_DIST_TABLE create_symlink_file ensure_folder_has_no_conflicting_files "
        "ensure_folder_is_empty extract_path_from_symlink format_name_with_dist format_name_with_dist_and_time get_file is_tar "
        "maybe_create_object_store_from_uri maybe_create_remote_uploader_downloader_from_uri parse_uri validate_credentials": _FILES,
    },
    "utils.fx_utils": {
        "count_op_instances replace_op fuse_parallel_linears apply_stochastic_residual": f"torch.fx itself, or {_SURGERY}",
    },
    "utils.import_helpers": {
        "MissingConditionalImportError": "drivetrain.core.MissingExtra",
        "import_object": "importlib.import_module",
    },
    "utils.inference": {
        "ExportFormat Transform export_for_inference export_with_logger": _EXPORT,
        "quantize_dynamic": "torch.ao.quantization.quantize_dynamic",
    },
    "utils.iter_helpers": {"IteratorFileStream iterate_with_callback": _FILES},
    "utils.misc": {
        "STR_TO_DTYPE": "getattr(torch, 'bfloat16')",
        "ParallelismType is_model_fsdp": _SHARDING,
        "add_vision_dataset_transform": "drivetrain.algorithms.utils.with_transform",
        "create_interval_scheduler": "Trainer.train(eval_interval='1ep', checkpoint_every='1ep')",
        "get_free_tcp_port": "socket, or torchrun --standalone, which chooses a port",
        "is_notebook": "drivetrain.notebook_launcher, which starts processes from a notebook",
        "model_eval_mode": "model.eval() and model.train()",
        "partial_format": "str.format",
        "warning_on_one_line": "warnings.formatwarning",
    },
    "utils.object_store": {"MLFLOW_EXPERIMENT_ID_FORMAT_KEY MLFLOW_RUN_ID_FORMAT_KEY": _FILES},
    "utils.object_store.object_store": {"ObjectStore ObjectStoreTransientError": _FILES},
    "utils.object_store.utils": {"build_remote_backend": _FILES},
    **{
        f"utils.object_store.{name.lower()}_object_store": {f"{name}ObjectStore": _FILES}
        for name in ("GCS", "Libcloud", "MLFlow", "OCI", "S3", "SFTP", "UC")
    },
    "utils.parallelism": {"FSDPConfig FSDP2Config TPConfig ParallelismConfig": _SHARDING},
    "utils.remote_uploader": {"RemoteUploader RemoteFilesExistingCheckStatus": _FILES},
    "utils.reproducibility": {
        "seed_context": "drivetrain.set_seed before, and torch.random.fork_rng around",
        "configure_deterministic_mode": "Trainer(deterministic=True)",
        "get_random_seed": "drivetrain.new_seed() in an experiment, or random.getrandbits(32)",
        "load_rng_state": "drivetrain.runtime.seeds.restore_rng, which takes the state of one process",
        "MAX_SEED": "2**32 - 1",
    },
    "utils.retrying": {"retry": "a loop of your own, or the tenacity package"},
    "utils.warnings": {"VersionedDeprecationWarning": "drivetrain.core.DrivetrainDeprecationWarning"},
}  # fmt: skip
"""What to write instead, by module; a key may list several names."""

_DEEP = {
    "alibi": ("alibi", "attention_surgery_functions", "attention_surgery_functions.utils"),
    "blurpool": ("blurpool", "blurpool_layers"),
    "factorize": ("factorize", "factorize_core", "factorize_modules"),
    "gated_linear_units": ("gated_linear_units", "gated_linear_unit_layers"),
    "stochastic_depth": ("stochastic_depth", "stochastic_layers"),
}
"""Modules of an algorithm's package, where there are others than one of the same name."""
_AT_THE_ROOT = (
    "Algorithm Callback DataSpec Engine Evaluator Event State Time Timestamp TimeUnit Logger ComposerModel Trainer"
).split()
_FROM_COMPOSER_ALGORITHMS = (
    "alibi augmix blurpool channels_last colout cutmix cutout ema factorize gated_linear_units ghost_batchnorm gradient_clipping "
    "gyro_dropout label_smoothing layer_freezing low_precision_groupnorm low_precision_layernorm mixup no_op_model progressive_resizing "
    "randaugment sam selective_backprop seq_length_warmup squeeze_excite stochastic_depth swa weight_standardization"
).split()


class ComposerModule:
    """What one of Composer's modules holds."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, str]] = {}
        """The module and the name behind each public name."""
        self.instead: dict[str, str] = {}
        self.is_package = False


def composer_modules() -> Mapping[str, ComposerModule]:
    """Return all modules of Composer by their path without `composer.`; the empty path is Composer itself."""
    modules: dict[str, ComposerModule] = {"": ComposerModule()}
    for path, homes in {**OFFERED, **_algorithms()}.items():
        for home, text in homes.items():
            for entry in text.split():
                public, _, private = entry.partition("=")
                modules.setdefault(path, ComposerModule()).names[public] = (home, private or public)
    for path, advice in INSTEAD.items():
        for names, text in advice.items():
            modules.setdefault(path, ComposerModule()).instead.update(dict.fromkeys(names.split(), text))
    for path in list(modules):
        for end in (place for place, letter in enumerate(path) if letter == "."):
            modules.setdefault(path[:end], ComposerModule())
    for path in sorted(filter(None, modules), key=lambda path: -path.count(".")):  # the deepest first
        _give_to_parent(modules, path)
    everywhere = {name: home for module in list(modules.values()) for name, home in module.names.items()}
    modules[""].names.update({name: everywhere[name] for name in _AT_THE_ROOT})
    return modules


def _algorithms() -> dict[str, dict[str, str]]:
    """Return the packages of the algorithms and the modules in them."""
    found = {}
    for name in _FROM_COMPOSER_ALGORITHMS:
        tables = (ALGORITHMS, PARTS, FUNCTIONS)
        names = " ".join(entry for table in tables for entry in table.get(name, ()))
        if name == "alibi":
            names += " PolicyRegistry policy_registry"
        for deep in _DEEP.get(name, (name,)):
            found[f"algorithms.{name}.{deep}"] = {f"drivetrain.algorithms.{name}": names}
    return found


def _give_to_parent(modules: dict[str, ComposerModule], path: str) -> None:
    """Let a package offer what its module offers; a name that is also a module of the package stays the module."""
    parent = path.rpartition(".")[0]
    package = modules[parent]
    package.is_package = True
    if not parent:
        return
    for name, home in modules[path].names.items():
        if f"{parent}.{name}" not in modules and not name.startswith("_"):
            package.names.setdefault(name, home)
    for name, text in modules[path].instead.items():
        package.instead.setdefault(name, text)
