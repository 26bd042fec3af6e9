"""The place of a process that SLURM's `srun` started, in the variables that torchrun would set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping

from shoal.errors import UsageError

_NEEDED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
"""Below those that systems hand out by themselves."""


def announce(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Does so in a task of `srun` with several tasks, unless they are set already (by torchrun), and
    says whether. Call it before `init_process_group`.
    """
    if "RANK" in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return False
    for name, value in torchrun_variables(environ).items():
        environ.setdefault(name, value)
    return True


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun, from those of a task of `srun`."""
    missing = [name for name in _NEEDED if name not in environ]
    if missing:
        raise UsageError(
            f"SLURM_STEP_NUM_TASKS is set but {', '.join(missing)} is not: start one task for each "
            "rank with srun, or run torchrun on each node"
        )
    node = int(environ.get("SLURM_NODEID", "0"))
    tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    if node >= len(tasks):
        raise UsageError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE names {len(tasks)} nodes"
        )
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": next(hosts(environ["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": str(_FIRST_PORT + (job * 7 + step) % _NUM_PORTS),
    }


def tasks_per_node(counts: str) -> list[int]:
    """One number for each node: "4(x2),1" is [4, 4, 1]."""
    found: list[int] = []
    for part in counts.split(","):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if matched is None:
            raise UsageError(f"expected tasks per node such as '4(x2),1', got {counts!r}")
        found += [int(matched[1])] * int(matched[2] or 1)
    return found


def hosts(nodes: str) -> Iterator[str]:
    """Each host of a list such as "gpu[01-03,7],login"."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if ",".join(parts) != nodes:
        raise UsageError(f"expected a list of nodes such as 'gpu[01-03,7],login', got {nodes!r}")
    for part in parts:
        yield from _expanded(part)


def _expanded(part: str) -> Iterator[str]:
    """The hosts of one name with any number of brackets."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise UsageError(f"expected numbers in the brackets of the node list, got {part!r}")
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(f"{before}{number:0{len(first)}}{after}")
