"""Backward of a compiled DDP: our passes beside torch's on the same graph, and eager DDP."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode
from torch._inductor.fx_passes import ddp_fusion as theirs
from torch._inductor.virtualized import V
from torch.nn.parallel import DistributedDataParallel

from harness import ranks
from shoal.compile.passes.ddp_fusion import drop_copies
from shoal.passes import check_graph, count_traffic
from shoal.passes import ddp_fusion as ours

QUIET = pytest.mark.filterwarnings("ignore")
"""Tracing torch's reducer warns of what it does itself."""
BUCKET_MB = 0.5


@contextlib.contextmanager
def compiled_backward(change: Callable[[fx.GraphModule], None]) -> Iterator[None]:
    """Capture backward as one graph, change it, and run it node by node."""

    def compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        change(module)
        module.recompile()
        return module.forward

    backend = aot_autograd(fw_compiler=compiler)
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    with enable(lambda graph: torch.compile(graph, fullgraph=True, backend=backend)):
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(520, 520), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(520, 1, bias=False))


def batches() -> list[Tensor]:
    torch.manual_seed(1 + torch.distributed.get_rank())
    return [torch.randn(8, 520) for _ in range(2)]


def train(change: Callable[[fx.GraphModule], None]) -> list[Tensor]:
    """Accumulated gradients of two batches: the first makes them, the second adds to them."""
    torch._dynamo.reset()
    model = DistributedDataParallel(network())
    compiled = torch.compile(model, backend="eager")
    for batch in batches():
        with compiled_backward(change):
            compiled(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def eager() -> list[Tensor]:
    model = DistributedDataParallel(copy.deepcopy(network()))
    for batch in batches():
        model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def by_torch(kind: str, counts: list[int]) -> Callable[[fx.GraphModule], None]:
    def change(module: fx.GraphModule) -> None:
        drop_copies(module.graph)  # as Inductor does before it calls torch's pass
        held = [node.meta["val"] for node in module.graph.nodes if "val" in node.meta]
        with V.set_fake_mode(detect_fake_mode(held)):
            theirs.fuse_ddp_communication(module.graph, [f"fuse_ddp_with_{kind}_op"], BUCKET_MB)
        counts.append(counters["inductor"]["ddp_buckets"])
        counts.append(count_traffic(module.graph).num_collectives)

    return change


def by_shoal(kind: str, counts: list[int]) -> Callable[[fx.GraphModule], None]:
    def change(module: fx.GraphModule) -> None:
        before = count_traffic(module.graph)
        passes = [f"fuse_ddp_with_{kind}_op", "schedule_comm_wait"]
        ours.fuse_ddp_communication(module.graph, passes, BUCKET_MB)
        check_graph(module.graph)
        after = count_traffic(module.graph)
        assert before.num_collectives == 5
        assert after.num_bytes == before.num_bytes
        assert after.max_in_flight_bytes == after.num_bytes, "all waits are in the end"
        counts.append(counters["inductor"]["ddp_buckets"])
        counts.append(after.num_collectives)

    return change


@QUIET
@ranks(2, fresh=True, timeout_s=180)
def test_gradients_and_buckets_are_torchs():
    torch._dynamo.config.optimize_ddp = "python_reducer"
    expected_counts: list[int] = []
    expected, plain = train(by_torch("concat", expected_counts)), eager()
    assert expected_counts == [2, 2, 2, 2]
    for kind in ("concat", "coalesced"):
        counts: list[int] = []
        for one, other, same in zip(train(by_shoal(kind, counts)), expected, plain, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, same)
        assert counts == expected_counts
