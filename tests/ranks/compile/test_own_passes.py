"""Passes that a user adds, takes out or gets wrong, by the backend's option `passes`."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from shoal import compile_step, fully_shard, replicate
from shoal.passes import Pass, Pipeline, Traffic, count_traffic
from zoo import Model, assert_same, batches, build, loss_of, trained

BUCKETS = ("bucket_all_gathers", "bucket_reduce_scatters", "bucket_all_reduces")


class Counting:
    """Edits a pipeline: a pass at the end counts, and buckets are left out if asked to."""

    def __init__(self, *, buckets: bool = True) -> None:
        self.buckets = buckets
        self.seen: list[Traffic] = []

    def __call__(self, passes: Pipeline) -> Pipeline:
        for name in () if self.buckets else BUCKETS:
            passes = passes.without(name)
        return passes.after("overlap", Pass(name="count", run=self._count))

    def _count(self, graph: fx.Graph) -> None:
        self.seen.append(count_traffic(graph))


def sharded() -> Model:
    model = build("mlp")
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def compiled(model: Any, passes: Any) -> Any:
    torch._dynamo.reset()
    options = {"passes": passes, "cache": False}
    return torch.compile(model, backend="shoal", fullgraph=True, options=options)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("engine", ["shards", "replicas"])
def test_a_user_takes_buckets_out_and_counts_on_both_graphs(engine: str) -> None:
    def make() -> Any:
        return sharded() if engine == "shards" else replicate(build("mlp"))

    expected = trained(make(), num_steps=2)
    forward_backward = {}
    for buckets in (True, False):
        model, passes = make(), Counting(buckets=buckets)
        assert_same(trained(model, compiled(model, passes), 2), expected)
        forward_backward[buckets] = [one.num_collectives for one in passes.seen]
    if engine == "shards":  # three units; the root stays gathered for backward
        assert forward_backward == {True: [1, 2], False: [3, 5]}
    else:
        assert forward_backward == {True: [0, 1], False: [0, len(list(model.parameters()))]}


@ranks(2, timeout_s=180)
def test_in_a_whole_step() -> None:
    model, passes = sharded(), Counting(buckets=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_step(
        model,
        lambda output, tokens: loss_of(lambda _: output, tokens),
        optimizer,
        options={"passes": passes},
    )
    for tokens in batches(2):
        step(tokens, tokens)
    (one,) = passes.seen
    assert one.num_collectives == 3 + 3, "a gather and a reduction for each of three units"


def give_nothing(passes: Pipeline) -> Any:
    return None


def put_late(passes: Pipeline) -> Pipeline:
    return passes.without(BUCKETS[0]).after("overlap", passes.passes[0])


def swallow(passes: Pipeline) -> Pipeline:
    def cut(graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        output.args = (tuple(output.args[0])[:-1],)  # pyright: ignore

    return passes.before("overlap", Pass(name="cut", run=cut))


NONSENSE = (
    (give_nothing, "returned None"),
    (put_late, "bucket_all_gathers requires 'no pass has put collectives in order'"),
    (swallow, "pass cut broke the graph: expected the"),
    ("overlap", "must be a function that takes a Pipeline .* got 'overlap'"),
)


@ranks(2, timeout_s=180)
def test_nonsense_is_refused_on_every_rank() -> None:
    model = fully_shard(nn.Linear(4, 4))
    for passes, words in NONSENSE:
        with pytest.raises(Exception, match=words):
            compiled(model, passes)(torch.ones(2, 4))


@ranks(4, timeout_s=180)
def test_a_pass_that_raises_on_one_rank_stops_all_at_once() -> None:
    """The others would wait minutes for what it sends; also those that share no group with it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for culprit in (1, 0):
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        is_culprit = dist.get_rank() == culprit

        def passes(given: Pipeline, is_culprit: bool = is_culprit) -> Pipeline:
            if is_culprit:
                raise ValueError("no idea")
            return given

        begin = time.monotonic()
        expected = "ValueError: no idea" if is_culprit else f"rank {culprit} raised in its passes"
        with pytest.raises(Exception, match=expected):
            compiled(model, passes)(torch.ones(2, 4))
        assert time.monotonic() - begin < 60
    # What they agree on afterwards is not mixed up with that.
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    compiled(model, lambda given: given)(torch.ones(2, 4)).sum().backward()


@ranks(2, timeout_s=180)
def test_ranks_with_other_passes_are_named() -> None:
    """One rank with buckets, the other without: found before anybody waits in a collective."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    run = compiled(model, Counting(buckets=dist.get_rank() == 0))
    with pytest.raises(Exception, match="rank 0 and rank 1 have captured graphs with different"):
        run(torch.ones(2, 4))
