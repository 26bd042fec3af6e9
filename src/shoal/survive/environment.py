"""What a launcher tells a rank through its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.survive.generation import StoreAddress

_MEMBER = "SHOAL_SURVIVE_MEMBER"
_JOINS = "SHOAL_SURVIVE_JOINS"
_NUM_RANKS = "SHOAL_SURVIVE_RANKS"
_PORT = "SHOAL_SURVIVE_PORT"
_HOST = "SHOAL_SURVIVE_HOST"
_PREFIX = "SHOAL_SURVIVE_PREFIX"
_NCCL = {
    # Whoever sees a rank's death in NCCL must not end the process, nor wait to write it down.
    f"TORCH_NCCL_{name}": "0"
    for name in (
        "ASYNC_ERROR_HANDLING",
        "ENABLE_MONITORING",
        "RETHROW_CUDA_ERRORS",
        "PROPAGATE_ERROR",
        "DUMP_ON_TIMEOUT",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This process's place in the job."""

    member: int
    num_ranks: int
    """How many began."""
    joins: bool
    """Whether the others were there before."""
    address: StoreAddress


def of_member(
    member: int, num_ranks: int, address: StoreAddress, *, alone_at: int | None = None
) -> dict[str, str]:
    """The variables of one member; `init_process_group()` finds its own among them.

    One that joins builds its model in a world of its own, in the store of the port `alone_at`: in
    that of the others it would overwrite the address of a rank that they still connect to.
    """
    joins = alone_at is not None
    return {
        "RANK": "0" if joins else str(member),
        "LOCAL_RANK": str(member),
        "WORLD_SIZE": "1" if joins else str(num_ranks),
        "LOCAL_WORLD_SIZE": str(max(num_ranks, member + 1)),
        "MASTER_ADDR": address.host,
        "MASTER_PORT": str(alone_at if joins else address.port),
        # The store is there already, and no rank makes one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(member + 1 if joins else 0),
        **_of_survival(member, num_ranks, address, joins=joins),
    }


def of_guarded(rank: int, num_ranks: int, address: StoreAddress) -> dict[str, str]:
    """The variables of a rank under another launcher, which has set all the others."""
    return _of_survival(rank, num_ranks, address, joins=False)


def _of_survival(
    member: int, num_ranks: int, address: StoreAddress, *, joins: bool
) -> dict[str, str]:
    return {
        **_NCCL,
        _MEMBER: str(member),
        _NUM_RANKS: str(num_ranks),
        _HOST: address.host,
        _PORT: str(address.port),
        _PREFIX: address.prefix,
        _JOINS: "1" if joins else "0",
    }


def membership() -> Membership:
    """What the launcher told this process."""
    member = os.environ.get(_MEMBER)
    if member is None:
        raise UsageError(
            "survive needs a launcher whose ranks may die and whose store lives outside of them: "
            f"{_MEMBER} is not set. Start the program with `python -m shoal.survive --ranks N "
            "program.py`, or by torchrun as `torchrun --nproc-per-node N -m shoal.survive "
            "program.py`"
        )
    return Membership(
        member=int(member),
        num_ranks=int(os.environ[_NUM_RANKS]),
        joins=os.environ[_JOINS] == "1",
        address=StoreAddress(
            host=os.environ[_HOST], port=int(os.environ[_PORT]), prefix=os.environ[_PREFIX]
        ),
    )
