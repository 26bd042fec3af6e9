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

`COLLECTIVES` says of each kind what it costs, and which methods of a process group start it.
`OPERATORS` says which operator of torch's dispatcher is which collective, and how to read its
arguments. Process groups, the modelled network, the graph passes and their costs read these two.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What is known of one kind."""

    methods: tuple[str, ...]
    """What starts it: the methods of a process group, as they are called since torch 2.13."""
    num_transfers: int = 1
    """How often the whole buffer goes over one rank's link, on a ring of very many ranks."""
    in_pieces: bool = False
    """Whether a rank keeps its own piece, so that a ring of N ranks sends (N - 1) / N of that."""
    reduces: bool = False
    """Whether ranks combine their numbers."""

    def bytes_sent(self, num_bytes: int, num_ranks: int | None = None) -> float:
        """What one rank sends, if the whole buffer has `num_bytes`; None is very many ranks."""
        share = 1 - 1 / num_ranks if self.in_pieces and num_ranks is not None else 1.0
        return self.num_transfers * share * num_bytes


COLLECTIVES: Mapping[Kind, Collective] = {
    Kind.ALL_GATHER: Collective(
        methods=("allgather", "all_gather_single", "all_gather_single_coalesced"), in_pieces=True
    ),
    Kind.REDUCE_SCATTER: Collective(
        methods=("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
        in_pieces=True,
        reduces=True,
    ),
    # Around the ring twice: reduced, then gathered.
    Kind.ALL_REDUCE: Collective(
        methods=("allreduce", "allreduce_coalesced"), num_transfers=2, in_pieces=True, reduces=True
    ),
    Kind.BROADCAST: Collective(methods=("broadcast",)),
    Kind.REDUCE: Collective(methods=("reduce",), reduces=True),
    Kind.ALL_TO_ALL: Collective(methods=("alltoall", "all_to_all_single"), in_pieces=True),
    Kind.GATHER: Collective(methods=("gather",), in_pieces=True),
    Kind.SCATTER: Collective(methods=("scatter",), in_pieces=True),
    Kind.BARRIER: Collective(methods=("barrier",), num_transfers=0),
    Kind.SEND: Collective(methods=("send",)),
    Kind.RECEIVE: Collective(methods=("recv", "recv_anysource")),
    Kind.MESSAGES: Collective(methods=()),
}


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
