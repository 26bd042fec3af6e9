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
    member: int, num_ranks: int, port: int, *, joins: bool, host: str = "127.0.0.1"
) -> dict[str, str]:
    """The variables of one member; `init_process_group()` finds its own among them."""
    return {
        "RANK": "0" if joins else str(member),
        "LOCAL_RANK": str(member),
        # A process that joins builds its model in a world of its own.
        "WORLD_SIZE": "1" if joins else str(num_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # The store is there already, and no rank makes one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(member + 1 if joins else 0),
        _MEMBER: str(member),
        _NUM_RANKS: str(num_ranks),
        _HOST: host,
        _PORT: str(port),
        _JOINS: "1" if joins else "0",
    }


def membership() -> Membership:
    """What the launcher told this process."""
    member = os.environ.get(_MEMBER)
    if member is None:
        raise UsageError(
            "survive needs a launcher whose ranks may die and whose store lives outside of them: "
            f"{_MEMBER} is not set. Start the program with `python -m shoal.survive --ranks N "
            "program.py`, or `shoal train --survive`; under torchrun all ranks are ended when "
            "one dies"
        )
    return Membership(
        member=int(member),
        num_ranks=int(os.environ[_NUM_RANKS]),
        joins=os.environ[_JOINS] == "1",
        address=StoreAddress(host=os.environ[_HOST], port=int(os.environ[_PORT])),
    )
