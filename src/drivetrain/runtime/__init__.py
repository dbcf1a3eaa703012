"""Where this process runs: device, ranks, process group, launching, seeds, and the run it belongs to.

These are plain functions that read the environment or torch and keep almost no state, so that every folder above gets the same
answer, with or without other processes.
"""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".collectives": (
            "agree_any all_gather_values broadcast_from_master control_group distributed_barrier gather_rows start_agree_any"
        ).split(),
        ".device": ["choose_device", "device_memory", "usable_cpus"],
        ".environment": ["LaunchedWorld", "in_launched_process", "launched_world"],
        ".group": ["destroy_group", "init_distributed"],
        ".launch": ["WorkerFailed", "notebook_launcher"],  # `launch` itself is drivetrain.runtime.launch.launch
        ".ranks": (
            "clear_data_ranks data_group data_rank get_local_rank get_num_processes get_rank is_distributed is_master "
            "num_data_ranks set_data_ranks"
        ).split(),
        ".run": ["ExperimentRun", "Run", "current_run", "set_current_run"],
        ".seeds": "capture_rng derive_seed reseed_rank restore_rng seed_worker set_deterministic set_seed".split(),
        ".signals": ["StopSignals"],
    },
)
