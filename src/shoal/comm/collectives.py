"""The table of collectives: what each moves, and under which names torch knows it. Pure data.

    kind            a rank gives    a rank gets
    all_gather      a tensor        a piece from each rank
    reduce_scatter  a piece each    its piece, reduced
    all_reduce      a tensor        the tensor, reduced
    broadcast       a tensor        the root's tensor
    reduce          a tensor        the tensor, reduced, at the root
    all_to_all      a piece each    a piece from each rank
    gather          a tensor        a piece from each rank, at the root
    scatter         pieces at root  its piece
    barrier         nothing         nothing
    send, receive   a tensor        a tensor, between two ranks
    messages        several sends and receives in one launch

`bytes_sent` says what a collective of a kind costs. `OPERATORS` says which operator of torch's
dispatcher is which collective, and how to read its arguments. Process groups, the modelled network,
the graph passes and their costs read these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Which collective."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"
    SEND = "send"
    RECEIVE = "receive"
    MESSAGES = "messages"


_NUM_TRANSFERS = {Kind.ALL_REDUCE: 2, Kind.BARRIER: 0}
"""How often the whole buffer goes over one rank's link, if not once.

An all-reduce goes around the ring twice: reduced, then gathered.
"""
_IN_PIECES = frozenset(
    {
        *(Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE),
        *(Kind.ALL_TO_ALL, Kind.GATHER, Kind.SCATTER),
    }
)
"""A rank keeps its own piece of these: on a ring of N ranks it sends (N - 1) / N of the buffer."""


def bytes_sent(kind: Kind, num_bytes: int, num_ranks: int | None = None) -> float:
    """What one rank sends, if the whole buffer has `num_bytes`; None is very many ranks."""
    share = 1 - 1 / num_ranks if kind in _IN_PIECES and num_ranks is not None else 1.0
    return _NUM_TRANSFERS.get(kind, 1) * share * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What is known of an operator that communicates."""

    kind: Kind
    coalesced: bool = False
    """Takes several tensors and gives several."""
    writes: bool = False
    """Its results lie in memory that it is given."""
    awaited: bool = True
    """Its results are there after a wait in the graph; without, it ends before the next node."""
    reads: str | None = None
    """The argument that is sent; None means the first."""


def _functional() -> dict[str, Operator]:
    """The operators of functional collectives: they give new tensors, and are waited for."""
    operators = {
        "all_reduce": Operator(kind=Kind.ALL_REDUCE),
        "all_reduce_": Operator(kind=Kind.ALL_REDUCE, writes=True),
        "all_reduce_coalesced": Operator(kind=Kind.ALL_REDUCE, coalesced=True),
        "all_reduce_coalesced_": Operator(kind=Kind.ALL_REDUCE, coalesced=True, writes=True),
        "all_gather_into_tensor": Operator(kind=Kind.ALL_GATHER),
        "all_gather_into_tensor_out": Operator(kind=Kind.ALL_GATHER, writes=True),
        "all_gather_into_tensor_coalesced": Operator(kind=Kind.ALL_GATHER, coalesced=True),
        "reduce_scatter_tensor": Operator(kind=Kind.REDUCE_SCATTER),
        "reduce_scatter_tensor_out": Operator(kind=Kind.REDUCE_SCATTER, writes=True),
        "reduce_scatter_tensor_coalesced": Operator(kind=Kind.REDUCE_SCATTER, coalesced=True),
        "all_to_all_single": Operator(kind=Kind.ALL_TO_ALL),
        "broadcast": Operator(kind=Kind.BROADCAST),
        "broadcast_": Operator(kind=Kind.BROADCAST, writes=True),
        "isend": Operator(kind=Kind.SEND),
        "irecv": Operator(kind=Kind.RECEIVE),
        "batch_p2p_ops": Operator(kind=Kind.MESSAGES, coalesced=True, writes=True, reads="tensors"),
    }
    spaces = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
    return {f"{space}::{name}": op for space in spaces for name, op in operators.items()}


def _of_process_groups() -> dict[str, Operator]:
    """The operators under `torch.distributed`'s own calls: they write, and wait for themselves."""
    sent = {
        "allreduce_": (Kind.ALL_REDUCE, None),
        "allreduce_coalesced_": (Kind.ALL_REDUCE, None),
        "allgather_": (Kind.ALL_GATHER, "input_tensors"),
        "_allgather_base_": (Kind.ALL_GATHER, "input_tensor"),
        "allgather_coalesced_": (Kind.ALL_GATHER, "input_list"),
        "allgather_into_tensor_coalesced_": (Kind.ALL_GATHER, "inputs"),
        "reduce_scatter_": (Kind.REDUCE_SCATTER, "input_tensors"),
        "_reduce_scatter_base_": (Kind.REDUCE_SCATTER, "input_tensor"),
        "reduce_scatter_tensor_coalesced_": (Kind.REDUCE_SCATTER, "inputs"),
        "alltoall_": (Kind.ALL_TO_ALL, "input_tensors"),
        "alltoall_base_": (Kind.ALL_TO_ALL, "input"),
        "broadcast_": (Kind.BROADCAST, None),
        "reduce_": (Kind.REDUCE, None),
        "gather_": (Kind.GATHER, "input_tensors"),
        "scatter_": (Kind.SCATTER, "input_tensors"),
        "send": (Kind.SEND, None),
        "recv_": (Kind.RECEIVE, None),
        "recv_any_source_": (Kind.RECEIVE, None),
        "barrier": (Kind.BARRIER, None),
        "monitored_barrier_": (Kind.BARRIER, None),
    }
    return {
        f"c10d::{name}": Operator(
            kind=kind, coalesced=True, writes=True, awaited=False, reads=reads
        )
        for name, (kind, reads) in sent.items()
    }


OPERATORS: Mapping[str, Operator] = {
    **_functional(),
    **_of_process_groups(),
    "_dtensor::shard_dim_alltoall": Operator(kind=Kind.ALL_TO_ALL, awaited=False),
}
"""By the name of its schema; a row that a release of torch lacks never matches."""

WAITS = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
"""The operators that wait for a functional collective."""

NAMESPACES = frozenset(name.partition("::")[0] for name in OPERATORS)
"""Where operators that communicate are, those that only wait included."""
