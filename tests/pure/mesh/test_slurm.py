"""What `srun` says of its tasks, as torchrun would say it."""

import pytest

from shoal.errors import UsageError
from shoal.integrations.slurm import announce
from shoal.mesh.slurm import hosts, tasks_per_node

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08],fat1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_gets_the_variables_of_torchrun() -> None:
    environ = dict(TASK)
    assert announce(environ)
    assert {name: environ[name] for name in environ.keys() - TASK.keys()} == {
        "RANK": "5",
        "WORLD_SIZE": "9",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20_000 + (4711 * 7 + 1) % 20_000),
    }


def test_all_tasks_of_a_step_meet_at_one_address_and_steps_at_different_ones() -> None:
    last = TASK | {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    other = TASK | {"SLURM_STEP_ID": "2"}
    found = []
    for environ in (dict(TASK), last, other):
        announce(environ)
        found.append((environ["MASTER_ADDR"], environ["MASTER_PORT"]))
    assert found[0] == found[1]
    assert found[2] != found[0]
    assert last["LOCAL_WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TASK | {"RANK": "0"},  # torchrun inside of a task
        TASK | {"SLURM_STEP_NUM_TASKS": "1"},  # which starts its own ranks
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # the batch script
    ],
)
def test_nothing_changes_elsewhere(environ: dict[str, str]) -> None:
    before = dict(environ)
    assert not announce(environ)
    assert environ == before


def test_addresses_that_are_set_stay() -> None:
    environ = TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    announce(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("node1", ["node1"]),
        ("a,b-c", ["a", "b-c"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09].x", ["r1n08.x", "r1n09.x", "r2n08.x", "r2n09.x"]),
    ],
)
def test_lists_of_nodes(nodes: str, expected: list[str]) -> None:
    assert list(hosts(nodes)) == expected


@pytest.mark.parametrize("nodes", ["gpu[1-2", "gpu[a-b]", "a,,b", "gpu]1["])
def test_broken_lists_of_nodes(nodes: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        list(hosts(nodes))


def test_tasks_per_node() -> None:
    assert tasks_per_node("2") == [2]
    assert tasks_per_node("4(x2),1") == [4, 4, 1]
    with pytest.raises(UsageError, match="such as '4\\(x2\\),1', got 'four'"):
        tasks_per_node("four")


def test_half_of_the_variables() -> None:
    environ = {name: TASK[name] for name in TASK if name != "SLURM_LOCALID"}
    with pytest.raises(UsageError, match="SLURM_LOCALID is not: start one task for each rank"):
        announce(environ)
