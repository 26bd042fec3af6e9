"""The table of collectives is complete, and agrees with torch and with groups written in Python."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives  # registers the operators
from torch.distributed import ProcessGroup

from shoal._torch import collectives as torch_collectives
from shoal.comm.collectives import NAMESPACES, OPERATORS, WAITS, Kind, bytes_sent
from shoal.comm.python_group import PythonGroup

METHODS = {
    *("allgather", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast"),
    *("alltoall", "all_to_all_single", "gather", "scatter"),
    *("barrier", "send", "recv", "recv_anysource"),
}
"""What starts collectives: the methods of a process group, as they are called since torch 2.13."""


def test_every_kind_has_an_operator() -> None:
    assert {operator.kind for operator in OPERATORS.values()} == set(Kind)


@pytest.mark.parametrize(
    ("kind", "sent_by_4", "sent_by_many"),
    [
        (Kind.ALL_GATHER, 300, 400),
        (Kind.REDUCE_SCATTER, 300, 400),
        (Kind.ALL_REDUCE, 600, 800),
        (Kind.BROADCAST, 400, 400),
        (Kind.SEND, 400, 400),
        (Kind.BARRIER, 0, 0),
    ],
)
def test_what_a_rank_sends(kind: Kind, sent_by_4: int, sent_by_many: int) -> None:
    assert bytes_sent(kind, 400, 4) == sent_by_4
    assert bytes_sent(kind, 400) == sent_by_many


def test_groups_answer_every_method_under_both_names() -> None:
    before = torch_collectives.RENAMED
    for method in (*METHODS, *before):
        own = vars(PythonGroup)[method]
        if method in before:
            assert vars(PythonGroup)[before[method]] is own
    found = {name for name in METHODS if hasattr(ProcessGroup, name)}
    found |= {name for name in METHODS if hasattr(ProcessGroup, before.get(name, name))}
    assert found == METHODS, "torch calls them something else"


def test_operators_are_those_of_torch_and_read_what_the_table_says() -> None:
    schemas = {schema.name: schema for schema in torch._C._jit_get_all_schemas()}
    for name, operator in OPERATORS.items():
        if name not in schemas:
            continue
        arguments = [argument.name for argument in schemas[name].arguments]
        assert operator.reads is None or operator.reads in arguments, name
    for name in (
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::reduce_scatter_tensor",
        "c10d::allreduce_",
        "c10d::_allgather_base_",
    ):
        assert name in schemas


def test_no_operator_of_the_namespaces_is_missing() -> None:
    """A release of torch that adds a collective is seen here."""
    functional = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("_c10d_functional::")
        and not schema.name.startswith("_c10d_functional::_")
    }
    assert functional - set(OPERATORS) - WAITS == set()
    assert {"c10d", "_c10d_functional", "_dtensor"} <= NAMESPACES
