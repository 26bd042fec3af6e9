"""`replicate` in a graph of `torch.compile(backend="shoal")`: the training of torch's DDP."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd
from torch._inductor import config as inductor_config
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from harness import ranks
from shoal import replicate
from shoal.compile import backend
from shoal.compile.aot.inner import Task, directly
from shoal.compile.node_kinds import is_wait
from shoal.compile.passes.collectives import collective
from shoal.ddp.bucket import Bucket
from shoal.passes import count_traffic
from zoo import CASES, SAMPLED, assert_same, batches, build, loss_of, trained


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    given = {"cache": False, **options}
    return torch.compile(model, backend="shoal", fullgraph=True, options=given)


class Graphs(dict[str, fx.Graph]):
    """The graphs that ran, by what they are for."""

    def __call__(self, task: Task) -> Any:
        self[task.role.value] = task.module.graph
        return directly(task)


def compare(case: str, *, exact: bool) -> None:
    model: Any = replicate(build(case))
    ours = trained(model, compiled(model))
    assert_same(ours, trained(replicate(build(case))), exact=exact)
    assert_same(ours, trained(DistributedDataParallel(build(case))), exact=exact)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("case", SAMPLED)
def test_twenty_steps_are_those_of_torchs_ddp(case: str) -> None:
    """Bit by bit: two ranks add up in one order only."""
    compare(case, exact=True)


@pytest.mark.soak
@ranks(4, timeout_s=240)
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_on_four_ranks(case: str) -> None:
    compare(case, exact=False)


@ranks(2, timeout_s=180)
def test_gradients_are_few_all_reduces_beside_backward() -> None:
    """As many bytes as one by one; started before the last layers' gradients, waited for late."""
    model: Any = replicate(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    num_bytes = sum(p.nbytes for p in model.parameters())
    counts = {}
    for bucket_mb in (1e-6, 0.02, 25):
        graphs = Graphs()
        eager = AssertionError("what comes averaged is not averaged again")
        with (
            patch.object(backend, "directly", graphs),
            patch.object(Bucket, "launch", side_effect=eager),
        ):
            compiled(model, bucket_mb=bucket_mb)(torch.randn(2, 64)).sum().backward()
        assert count_traffic(graphs["forward"]).num_collectives == 0
        traffic = count_traffic(graphs["backward"])
        assert traffic.num_bytes == num_bytes
        assert traffic.num_waits == traffic.num_collectives
        counts[bucket_mb] = traffic.num_collectives
        nodes = [n for n in graphs["backward"].nodes if n.op == "call_function"]
        starts = [i for i, n in enumerate(nodes) if collective(n) is not None]
        waits = [i for i, n in enumerate(nodes) if is_wait(n)]
        products = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.mm.default]
        assert max(products) < min(waits), "nothing that computes stands behind a wait"
        if bucket_mb < 25:
            assert min(starts) < products[-1], "the last layers' are on their way by then"
    assert counts == {1e-6: 8, 0.02: 4, 25: 1}


@ranks(2, timeout_s=180)
def test_accumulation_without_averages() -> None:
    """What `no_sync` leaves behind is averaged with the next, whoever ran it."""
    ours: Any = replicate(build("mlp"))
    theirs: Any = DistributedDataParallel(build("mlp"))
    run = compiled(ours)

    def step(model: Any, call: Any, data: list[Tensor]) -> list[Tensor]:
        model.zero_grad()
        seen = []
        with model.no_sync():
            for tokens in data[:2]:
                loss_of(call, tokens).backward()
                seen += [p.grad.clone() for p in model.parameters()]
        loss_of(call, data[2]).backward()
        loss_of(call, data[3]).backward()
        return seen + [p.grad for p in model.parameters()]

    for _ in range(2):
        data = list(batches(4))
        for a, b in zip(step(ours, run, data), step(theirs, theirs, data), strict=True):
            torch.testing.assert_close(a, b)


@ranks(2, timeout_s=180)
def test_own_gradients_that_come_after_another_forward() -> None:
    """The last forward decides for all backwards, as without a compiler: nothing stays apart."""
    model: Any = replicate(build("mlp"))
    run = compiled(model)
    first, second = batches(2)
    loss_of(run, first).backward()
    with model.no_sync():
        own = loss_of(run, first)
    averaged = loss_of(run, second)
    own.backward()
    averaged.backward()
    for parameter in model.parameters():
        both = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(both, parameter.grad)
        assert torch.equal(*both)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("hook", ["fp16_compress_hook", "bf16_compress_hook"])
def test_compressed_gradients_travel_so_in_the_graph(hook: str) -> None:
    ours, theirs = replicate(build("mlp")), replicate(build("mlp"))
    for model in (ours, theirs):
        model.register_comm_hook(None, getattr(default_hooks, hook))
    graphs = Graphs()
    with patch.object(backend, "directly", graphs):
        assert_same(trained(ours, compiled(ours), 3), trained(theirs, None, 3))
    sent = {
        node.args[0].meta["val"].dtype
        for node in graphs["backward"].nodes
        if collective(node) is not None
    }
    assert sent == {torch.float16 if hook.startswith("fp16") else torch.bfloat16}


@ranks(2, timeout_s=180)
def test_other_hooks_run_outside_of_the_graph() -> None:
    calls: Counter[str] = Counter()

    def hook(state: str, bucket: Any) -> torch.futures.Future[Tensor]:
        calls[state] += 1
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    ours, theirs = replicate(build("mlp")), DistributedDataParallel(build("mlp"))
    ours.register_comm_hook("ours", hook)
    graphs = Graphs()
    with patch.object(backend, "directly", graphs):
        assert_same(trained(ours, compiled(ours), 3), trained(theirs, None, 3))
    assert calls["ours"] == 3
    assert count_traffic(graphs["backward"]).num_collectives == 0


@ranks(2, timeout_s=180)
def test_hooks_on_gradients_see_averages_and_unused_parameters_stay_without() -> None:
    model: Any = build("mlp")
    model.unused = nn.Parameter(torch.ones(3))
    replicate(model)
    run, seen = compiled(model), []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss_of(run, next(batches(1))).backward()
    both = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(both, seen[0])
    assert torch.equal(*both)
    assert model.unused.grad is None


@ranks(2, timeout_s=180)
def test_evaluation_and_eager_steps_in_between() -> None:
    """A compiled step, an evaluation, an eager step: each as if it were alone."""
    ours, theirs = replicate(build("batch norm")), DistributedDataParallel(build("batch norm"))
    run = compiled(ours)
    for number, tokens in enumerate(batches(4)):
        calls = [(ours, run if number % 2 == 0 else ours), (theirs, theirs)]
        losses = []
        for model, call in calls:
            model.zero_grad()
            loss_of(call, tokens).backward()
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(call, tokens))
            model.train()
        assert torch.equal(*losses)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(a, b)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("backend_name", ["eager", "aot_eager"])
def test_a_backward_that_is_traced_by_itself(backend_name: str) -> None:
    """Compiled autograd traces hooks too: they average in its graph, whoever compiles that."""
    ours: Any = replicate(build("mlp"))
    theirs: Any = DistributedDataParallel(build("mlp"))

    def compiler(graph: fx.GraphModule) -> Any:
        return torch.compile(graph, backend=backend_name, fullgraph=True)

    torch._dynamo.reset()
    # Of torch's own, which looks at what it captures.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    first, second = batches(2)
    for model in (ours, theirs):
        is_ours = model is ours
        with compiled_autograd._enable(compiler) if is_ours else nullcontext():
            with model.no_sync():
                loss_of(model, first).backward()
            loss_of(model, second).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    # And without: nothing of it is left.
    for model in (ours, theirs):
        model.zero_grad()
        loss_of(model, first).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@ranks(2, timeout_s=180)
def test_graphs_captured_while_backwards_are_traced_by_themselves() -> None:
    """Tracing differentiates; that is no backward of the program's, and is not captured."""
    ours: Any = replicate(build("mlp"))
    theirs: Any = DistributedDataParallel(build("mlp"))
    run = compiled(ours)
    (tokens,) = batches(1)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        loss_of(run, tokens).backward()
    loss_of(theirs, tokens).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@ranks(2, timeout_s=180)
def test_programs_that_ask_for_it_have_such_backwards_fused_by_inductor() -> None:
    """By the setting that torch's own replicas look at; nobody else's Inductor is told anything."""
    for mode, fuses in (("ddp_optimizer", False), ("python_reducer", True)):
        with (
            torch._dynamo.config.patch(optimize_ddp=mode),
            inductor_config.patch(_fuse_ddp_communication=False, _fuse_ddp_bucket_size=25),
        ):
            replicate(build("mlp"), bucket_cap_mb=7)
            assert inductor_config._fuse_ddp_communication == fuses
            assert inductor_config._fuse_ddp_bucket_size == (7 if fuses else 25)
