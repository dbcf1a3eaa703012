"""The parameters that every experiment has."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.experiment.parameters import Parameter

MODES = ("off", "warn", "strict")

BOOKKEEPING = frozenset(
    "output_dir debug params_file run_name subprocess local_rank checkpoint resume cuda device distributed node_rank "
    "nproc_per_node nnodes master_addr master_port max_restarts".split()
)
"""Where and how a run happens, not what it computes: they do not make it another run when it is resumed."""


def process_count(value: Any) -> int | str:
    """Read a number of processes, or `auto`."""
    if str(value).strip().lower() == "auto":
        return "auto"
    if isinstance(value, bool | float) or int(value) < 1:
        raise ValueError("give a whole number from 1 on, or auto for one per accelerator")
    return int(value)


def wants_cpu(values: Mapping[str, object]) -> bool:
    """Return whether a run with these values keeps to the CPU, whatever other devices there are."""
    device = values["device"]
    return str(device) == "cpu" or (device in (None, "auto") and not values["cuda"])


def fresh_seed() -> int:
    """Return 32 random bits of the operating system, whatever the state of `random`."""
    return random.SystemRandom().getrandbits(32)


def standard_parameters() -> list[Parameter]:
    """Return new standard parameters, in the order help prints them."""
    return [
        Parameter("output_dir", str, "./output", help="Where run folders are made."),
        Parameter(
            "run_name", str, None, help="Name of the run folder; None: time and a random suffix.", allow_from_file=False
        ),
        Parameter(
            "params_file",
            Path,
            None,
            help="Read parameters from a YAML or JSON file, such as the parameters.yaml of an earlier run. Options given "
            "by hand win. May be repeated; later files win.",
            allow_from_file=False,
        ),
        Parameter("random_seed", int, fresh_seed, help="Seed of all random numbers.", default_help="random 32 bits"),
        Parameter("debug", is_flag=True, help="Log debug messages too."),
        Parameter("checkpoint", Path, None, help="Begin a new run from the state in this checkpoint."),
        Parameter(
            "resume",
            str,
            "never",
            help="never; auto: continue the newest unfinished run with the same parameters; or the folder or short id of a run.",
            allow_from_file=False,
        ),
        Parameter("device", str, "auto", help="Device to compute on: auto, cpu, cuda, cuda:1, mps, ..."),
        Parameter("cuda", is_flag=True, default=True, help="Use CUDA if it is there; given explicitly: insist on it."),
        Parameter(
            "deterministic",
            allowed_values=MODES,
            default="off",
            help="Ask torch for repeatable kernels: warn names the others, strict rejects them.",
        ),
        Parameter("distributed", is_flag=True, help="Run on several processes."),
        Parameter(
            "nproc_per_node",
            process_count,
            1,
            envvar="NPROC_PER_NODE",
            help="Processes to start on this node; auto: one per accelerator.",
        ),
        Parameter("nnodes", int, 1, envvar="NNODES", help="Number of nodes."),
        Parameter("node_rank", int, 0, envvar="NODE_RANK", help="Number of this node, from 0."),
        Parameter("master_addr", str, "127.0.0.1", envvar="MASTER_ADDR", help="Address of node 0."),
        Parameter("master_port", int, 29500, envvar="MASTER_PORT", help="A free port on node 0."),
        Parameter("max_restarts", int, 0, help="How often a group of processes is started again after one has died."),
        Parameter("subprocess", Path, None, allow_from_file=False, hidden=True),
        Parameter("local_rank", int, 0, allow_from_file=False, hidden=True),
    ]
