"""Which variables of the environment say that this process is one of a group."""

from __future__ import annotations

import pytest

from apportion.errors import OptionError
from apportion.launching.joined import FIRST_PORT, NUM_PORTS, first_host, joined, port_of

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "77",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}


def test_nothing_is_no_group() -> None:
    assert joined({}) is None
    assert joined({"RANK": "0"}) is None


@pytest.mark.parametrize(
    ("env", "launcher", "place", "address"),
    [
        (TORCHRUN, "torchrun", (3, 4, 1, 2), "node0"),
        (SLURM, "Slurm", (3, 4, 1, 2), "gpu07"),
        (OPEN_MPI, "Open MPI", (1, 2, 1, 2), "127.0.0.1"),
        (PMI, "MPI", (1, 2, 1, 2), "127.0.0.1"),
    ],
)
def test_launchers(env: dict[str, str], launcher: str, place: tuple[int, ...], address: str) -> None:
    group = joined(env)
    assert group is not None
    assert group.launcher == launcher
    assert (group.rank, group.world_size, group.local_rank, group.local_world_size) == place
    assert group.master_addr == address
    assert group.env()["RANK"] == str(group.rank)
    again = joined(group.env())
    assert again is not None
    assert again.master_port == group.master_port


def test_all_ranks_of_a_step_agree_on_the_port() -> None:
    ports = {joined(SLURM | {"SLURM_PROCID": str(rank)}).master_port for rank in range(4)}  # type: ignore[union-attr]
    assert len(ports) == 1
    assert FIRST_PORT <= ports.pop() < FIRST_PORT + NUM_PORTS
    assert port_of("slurm 77.0") != port_of("slurm 77.1")


@pytest.mark.parametrize(
    "env",
    [
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"},  # the batch script itself
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_shell_inside_an_allocation_is_no_group(env: dict[str, str]) -> None:
    assert joined(env) is None


def test_torchrun_with_one_process_is_a_group() -> None:
    group = joined({"RANK": "0", "WORLD_SIZE": "1"})
    assert group is not None
    assert group.world_size == 1


@pytest.mark.parametrize(
    ("env", "what"),
    [
        (TORCHRUN | {"RANK": "4"}, "rank 4 does not exist in a group of 4"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x', not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "but not MASTER_PORT"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "nothing says where rank 0 is"),
    ],
)
def test_contradictions_are_refused(env: dict[str, str], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        joined(env)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("", ""),
        ("a", "a"),
        ("a,b", "a"),
        ("a[03-05,9],b", "a03"),
        ("n[1,3].lan", "n1.lan"),
        ("x-y[10-12]", "x-y10"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
