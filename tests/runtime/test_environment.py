import pytest

from drivetrain.core.errors import DistributedError
from drivetrain.runtime.environment import first_slurm_host, launched_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29501",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_NUM_NODES": "2",
}


def without(env: dict, *names: str, **changes: str) -> dict:
    return {name: value for name, value in env.items() if name not in names} | changes


def test_process_without_a_launcher_has_no_world():
    assert launched_world({"HOME": "/", "LOCAL_RANK": "0", "MASTER_PORT": "1"}) is None


def test_torchrun_world_is_read_whole():
    world = launched_world(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (5, 8, 1, 4)
    assert (world.master_addr, world.master_port, world.launcher) == ("node-a", 29501, "torchrun")


@pytest.mark.parametrize("env", [without(TORCHRUN, "LOCAL_RANK"), without(TORCHRUN, LOCAL_RANK="-1")])
def test_missing_local_rank_follows_from_rank_and_local_world(env):
    assert launched_world(env).local_rank == 1
    assert launched_world(without(env, "LOCAL_WORLD_SIZE")).local_rank == 5


@pytest.mark.parametrize(
    ("env", "names"),
    [
        (without(TORCHRUN, "RANK"), ["WORLD_SIZE='8'", "no RANK"]),
        (without(TORCHRUN, "WORLD_SIZE"), ["RANK='5'", "no WORLD_SIZE"]),
        (without(TORCHRUN, RANK="8"), ["RANK=8", "WORLD_SIZE=8"]),
        (without(TORCHRUN, RANK="-1"), ["RANK='-1'"]),
        (without(TORCHRUN, RANK="one"), ["RANK='one'"]),
        (without(TORCHRUN, WORLD_SIZE="0"), ["WORLD_SIZE='0'"]),
        (without(TORCHRUN, LOCAL_RANK="4"), ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        (without(TORCHRUN, MASTER_PORT="http"), ["MASTER_PORT='http'"]),
        (without(SRUN, SLURM_PROCID="4"), ["SLURM_PROCID=4", "SLURM_NTASKS=4"]),
        (without(SRUN, WORLD_SIZE="8"), ["WORLD_SIZE=8", "SLURM_NTASKS=4"]),
    ],
)
def test_world_that_contradicts_itself_is_refused_with_its_variables(env, names):
    with pytest.raises(DistributedError) as caught:
        launched_world(env)
    assert all(name in str(caught.value) for name in names), str(caught.value)


def test_srun_step_is_joined_through_its_first_node():
    world = launched_world(SRUN)
    assert (world.rank, world.world_size, world.local_rank, world.launcher) == (3, 4, 1, "slurm")
    assert world.master_addr == "gpu003"
    ports = {launched_world(without(SRUN, SLURM_PROCID=str(rank))).master_port for rank in range(4)}
    assert len(ports) == 1 and 1024 < ports.pop() < 32768
    assert launched_world(without(SRUN, SLURM_STEP_ID="1")).master_port != world.master_port


def test_srun_on_one_node_talks_to_itself_and_obeys_a_given_address():
    assert launched_world(without(SRUN, SLURM_STEP_NUM_NODES="1")).master_addr == "127.0.0.1"
    given = launched_world(without(SRUN, MASTER_ADDR="head", MASTER_PORT="4000", WORLD_SIZE="4"))
    assert (given.rank, given.master_addr, given.master_port) == (3, "head", 4000)


@pytest.mark.parametrize(
    "env",
    [
        without(SRUN, "SLURM_STEP_ID"),  # the batch script itself
        without(SRUN, SLURM_JOB_NAME="interactive"),
        without(SRUN, SLURM_JOB_NAME="bash"),
        without(SRUN, SLURM_PTY_PORT="40000"),
        without(SRUN, "SLURM_NTASKS"),
    ],
)
def test_batch_scripts_and_interactive_shells_are_no_tasks(env):
    assert launched_world(env) is None


def test_torchrun_inside_srun_wins():
    assert launched_world(SRUN | TORCHRUN).rank == 5


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-head-17@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_ranks_of_mpirun_train_together_and_not_each_for_itself():
    world = launched_world(OPEN_MPI)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 1, 2)
    assert (world.launcher, world.master_addr) == ("mpi", None)  # nobody knows the host of rank 0
    given = launched_world(OPEN_MPI | {"MASTER_ADDR": "head"})
    assert given.master_addr == "head" and 15000 <= given.master_port < 30000
    assert launched_world(OPEN_MPI | {"MASTER_PORT": "4000"}).master_port == 4000
    assert launched_world(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-head-18@1"}).master_port != world.master_port
    assert launched_world(without(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="4")).master_addr == "127.0.0.1"
    alone = launched_world(MPICH)
    assert (alone.rank, alone.local_rank, alone.master_addr, alone.master_port) == (1, 1, "127.0.0.1", None)
    assert launched_world(MPICH | TORCHRUN).launcher == "torchrun"
    with pytest.raises(DistributedError, match="WORLD_SIZE=8 and PMI_SIZE=2"):
        launched_world(MPICH | {"WORLD_SIZE": "8"})


def test_daemons_of_mpirun_in_a_slurm_job_are_not_its_ranks():
    assert launched_world(SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8"}).launcher == "mpi"
    assert launched_world(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "slurm"  # srun --mpi=pmi2
    cray = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"}
    assert launched_world(SRUN | cray).master_addr == "gpu003"  # srun knows the first host


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu-[07-09,12],x", "gpu-07"),
        ("r[1,3]-ib", "r1-ib"),
        ("r[1-2]n[03-9]x,y", "r1n03x"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes, first):
    assert first_slurm_host(nodes) == first
