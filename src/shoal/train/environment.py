"""The environment variables that training reads or sets: all of them, and only here."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError

_STORE = "SHOAL_STORE"
_TERMINAL = "SHOAL_TERMINAL"
_SRUN = "SLURM_STEP_NUM_TASKS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands among the ranks of its job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __post_init__(self) -> None:
        if not (
            0 <= self.local_rank < self.local_world_size <= self.world_size
            and 0 <= self.rank < self.world_size
        ):
            raise UsageError(f"RANK, WORLD_SIZE and their LOCAL_ kin contradict each other: {self}")


def place() -> Place | None:
    """Return this process's place as torchrun, its like or `srun` announce it; None outside."""
    if _SRUN in os.environ:
        from shoal.mesh import slurm  # imports torch, for which `--help` shall not wait

        slurm.announce()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if not {"RANK", "WORLD_SIZE"} & found.keys():
        return None
    missing = [name for name in names if name not in found]
    if missing:
        raise UsageError(
            f"{' and '.join(found)} are set but {', '.join(missing)} is not: start the ranks with "
            f"torchrun, or unset them to let shoal launch its own"
        )
    try:
        numbers = {name.lower(): int(found[name]) for name in names}
    except ValueError:
        raise UsageError(f"expected numbers in {', '.join(names)}; got {found}") from None
    return Place(**numbers)


def of_rank(
    rank: int, num_ranks: int, *, meeting: Mapping[str, str], reply: Path, restarts: Restarts
) -> dict[str, str]:
    """Return the environment of a rank that shoal launches on this machine.

    It finds its place, its reply file and its restarts as it would under torchrun; `meeting` says
    where the ranks meet.
    """
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        **meeting,
        "TORCHELASTIC_ERROR_FILE": str(reply),
        "TORCHELASTIC_RESTART_COUNT": str(restarts.count),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts.limit),
    }


def meeting_in(store: Path) -> dict[str, str]:
    """Let ranks meet through a file."""
    return {_STORE: str(store)}


def terminal() -> int | None:
    """Return the descriptor of the launcher's stdout, which whoever leads writes to."""
    number = os.environ.get(_TERMINAL, "")
    return int(number) if number.isdecimal() else None


def showing_on(descriptor: int) -> dict[str, str]:
    """Tell a rank the descriptor that it has inherited for when it leads."""
    return {_TERMINAL: str(descriptor)}


def store_file() -> Path | None:
    """Return the file through which the ranks of shoal's launcher meet; None under torchrun."""
    name = os.environ.get(_STORE)
    return Path(name) if name else None


def reply_file() -> Path | None:
    """Return the file in which a launcher looks for a rank's error, if there is one."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often the launcher has started the ranks again, and how often it would."""

    count: int
    limit: int


def restarts() -> Restarts:
    """Return what the launcher of this process tells; none where there is no launcher."""
    count, limit = (
        os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    if not (count.isdecimal() and limit.isdecimal()):
        raise UsageError(
            f"expected numbers in TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_MAX_RESTARTS; got "
            f"{count!r} and {limit!r}"
        )
    return Restarts(count=int(count), limit=int(limit))


def job_id() -> str:
    """Return the name that the launcher gave to all starts of one job; "" where it gave none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name  # torchrun's word for no name


def threads_are_set() -> bool:
    """Tell whether the user chose a number of CPU threads."""
    return "OMP_NUM_THREADS" in os.environ


def traceback_wanted() -> bool:
    """Tell whether errors shall show their traceback."""
    return os.environ.get("SHOAL_TRACEBACK", "0") not in ("", "0")


def stay_on_loopback() -> None:
    """Make gloo and NCCL listen and connect on loopback unless the user chose an interface.

    Ranks of one machine need no other, and others could connect to it. Without this gloo follows
    the host name, which leads into a VPN on some machines and nowhere on others.
    """
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):
        if loopback in names:
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
            return
