"""Collectives found in graphs, with what belongs to them."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm_graphs import all_reduce, capture, comm, gather, integers, name, scatter, wait
from shoal.comm.collectives import Kind as CommKind
from shoal.errors import UsageError
from shoal.passes import Traffic, count_traffic
from shoal.passes.ddp_fusion import CommBlock, get_all_comm_blocks, get_comm_block


def blocks_of(fn, *args):
    return get_all_comm_blocks(capture(fn, *args).graph)


def test_a_block_holds_collective_wait_and_views():
    def fn(x: Tensor) -> Tensor:
        first, second = wait(all_reduce(x)).view(2, 6).split(1)
        return first.t() + second.reshape(6, 1)

    (block,) = blocks_of(fn, integers(3, 4))
    assert block.key.kind is CommKind.ALL_REDUCE
    assert block.shape == torch.Size([3, 4])
    assert [node.op for node in block.inputs] == ["placeholder"]
    assert block.comm_node.target is comm.all_reduce.default
    assert [node.target for node in block.wait_nodes] == [comm.wait_tensor.default]
    assert block.node_list[0] is block.comm_node
    assert len(block.node_list) == 2 + 6  # view, split, two items, t, view
    assert all(
        user.target is torch.ops.aten.add.Tensor for out in block.outputs for user in out.users
    )
    assert block.num_bytes == 48


def test_kinds_and_keys():
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        started = [
            *(all_reduce(x), all_reduce(x, "max"), all_reduce(y)),
            *(gather(x), scatter(x), comm.broadcast(x, 0, name())),
            comm.all_to_all_single(x, [4], [4], name()),
        ]
        return [wait(one) for one in started]

    blocks = blocks_of(fn, integers(4), integers(4, dtype=torch.bfloat16))
    assert [block.key.kind for block in blocks] == [
        *([CommKind.ALL_REDUCE] * 3),
        *(CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER, CommKind.BROADCAST, CommKind.ALL_TO_ALL),
    ]
    assert len({block.key for block in blocks}) == len(blocks)
    assert [block.key.reduce_op for block in blocks[:5]] == ["sum", "max", "sum", None, "sum"]
    assert {block.key.dtype for block in blocks} == {torch.float32, torch.bfloat16}
    assert {block.key.group for block in blocks} == {(name(),)}
    assert {block.key.device for block in blocks} == {torch.device("cpu")}


def test_groups_are_told_apart():
    other = dist.new_group([0]).group_name

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return wait(all_reduce(x)), wait(comm.all_reduce(x, "sum", other))

    first, second = blocks_of(fn, integers(4))
    assert first.key != second.key


def test_coalesced_collectives_give_one_wait_for_each_result():
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        several = comm.all_reduce_coalesced([x, y], "sum", name())
        alone = comm.all_reduce_coalesced([x], "sum", name())
        gathered = comm.all_gather_into_tensor_coalesced([x, y], 1, name())
        return [wait(one) for one in (several[1], several[0], *alone, *gathered)]

    blocks = blocks_of(fn, integers(4), integers(2, 3))
    assert [len(block.wait_nodes) for block in blocks] == [2, 1, 2]
    assert blocks[0].shape == [torch.Size([4]), torch.Size([2, 3])]


def test_waits_are_in_the_order_of_the_results():
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [wait(one) for one in comm.all_reduce_coalesced([x, y], "sum", name())]

    graph = capture(fn, integers(4), integers(2, 3)).graph
    first = next(node for node in graph.nodes if node.target is operator.getitem)
    with graph.inserting_after(first):
        again = graph.node_copy(first)  # now the last of the collective's users
    first.replace_all_uses_with(again)
    graph.erase_node(first)
    (block,) = get_all_comm_blocks(graph)
    assert [node.args[0].args[1] for node in block.wait_nodes] == [0, 1]


def test_in_place_and_legacy_operators():
    def fn(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        reduced = wait(comm.all_reduce_(x.clone(), "sum", name()))
        gathered = wait(comm.all_gather_into_tensor_out(x, 1, name(), out=out))
        return reduced, gathered

    first, second = blocks_of(fn, integers(4), integers(4))
    assert first.key.kind is CommKind.ALL_REDUCE
    assert [node.name for node in second.inputs] == ["x_1"], "what is sent, not where it goes"


def test_torch_distributed_calls_are_counted_and_left_alone():
    def fn(x: Tensor) -> Tensor:
        x = x * 2
        dist.all_reduce(x)
        return x + 1

    graph = capture(fn, integers(4)).graph
    assert count_traffic(graph) == Traffic(num_collectives=1, num_bytes=16)
    assert get_all_comm_blocks(graph) == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: all_reduce(x),
        lambda x: (lambda started: (wait(started), wait(started)))(all_reduce(x)),
        lambda x: (lambda started: (wait(started), started))(all_reduce(x)),
        lambda x: (lambda started: wait(started[0]) + started[1])(
            comm.all_reduce_coalesced([x, x + 1], "sum", name())
        ),
    ],
    ids=["never", "twice", "and used", "one of two"],
)
def test_what_is_not_waited_for_once_is_no_block(fn):
    graph = capture(fn, integers(4)).graph
    assert get_all_comm_blocks(graph) == []
    started = [node for node in graph.nodes if "all_reduce" in str(node.target)]
    assert [get_comm_block(node) for node in started] == [None]


def test_other_nodes_have_no_block():
    graph = capture(lambda x: x + 1, integers(4)).graph
    assert [get_comm_block(node) for node in graph.nodes] == [None] * 3


def test_operators_and_filter_choose():
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [wait(all_reduce(x)), wait(gather(x)), wait(all_reduce(y))]

    graph = capture(fn, integers(4), integers(2)).graph
    reduces = get_all_comm_blocks(graph, (comm.all_reduce.default,))
    assert [block.shape.numel() for block in reduces] == [4, 2]

    def small(block: CommBlock) -> bool:
        return block.num_bytes < 16

    (block,) = get_all_comm_blocks(graph, (comm.all_reduce.default,), comm_filter=small)
    assert block.shape == torch.Size([2])


def test_names_of_nodes_do_not_matter():
    def fn(x: Tensor) -> Tensor:
        return wait(all_reduce(x)).view(-1)

    graph = capture(fn, integers(2, 2)).graph
    for i, node in enumerate(graph.nodes):
        node.name = f"split_{i}"
    (block,) = get_all_comm_blocks(graph)
    assert len(block.node_list) == 3


def test_missing_metadata_is_named():
    graph = capture(lambda x: wait(all_reduce(x)), integers(2)).graph
    next(iter(graph.nodes)).meta.clear()
    with pytest.raises(UsageError, match=r"x_1 gives in its metadata \('val'\)"):
        get_all_comm_blocks(graph)


def test_bytes_are_the_larger_side():
    def fn(x: Tensor) -> list[Tensor]:
        big = comm.all_gather_into_tensor(x, 4, name())
        return [wait(big), wait(comm.reduce_scatter_tensor(x, "sum", 4, name()))]

    assert [block.num_bytes for block in blocks_of(fn, integers(8))] == [128, 32]
