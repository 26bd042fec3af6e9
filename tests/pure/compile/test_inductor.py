"""What Inductor is told of a graph: what stays where it is, what may be written over.

Most of it without Inductor: a stand-in takes what it would be told, and runs the graph.
"""

from __future__ import annotations

import itertools
import shutil
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from oracle import batches, build, loss_of, shard
from shoal._torch import compilers, traces
from shoal.comm.modelled import FREE, init_modelled
from shoal.compile.aot.graph_code import DirectGraph
from shoal.layout import Flat

OPTIONS = {"inner": "inductor", "cache": False}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")


class Told(list[dict[str, Any]]):
    """What a stand-in for Inductor was told, graph by graph."""

    def of(self, backward: bool) -> dict[str, Any]:
        return next(one for one in self if one["backward"] is backward)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """A stand-in that writes over what it may write over, once it has read it."""
    seen = Told()

    def stand_in(module: GraphModule, inputs: Sequence[Any], **what: Any) -> Callable[..., Any]:
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        seen.append({**what, "names": names, "inputs": inputs, "module": module})
        run = DirectGraph(module)

        def call(given: list[Any]) -> list[Any]:
            spent = [given[at] for at in what.get("donated", ())]
            results = run(given)
            for one in spent:
                one.fill_(1e6)
            return results

        return call

    monkeypatch.setattr(compilers, "inductor", stand_in)
    return seen


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 8), nn.Tanh())


def gradients(loss: Tensor, model: nn.Module, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **options))


def test_parameters_stay_where_they_are_and_data_does_not(told: Told) -> None:
    model = network()
    torch.compile(model, backend="shoal", options=OPTIONS)(torch.randn(4, 8)).sum().backward()
    forward, backward = told.of(False), told.of(True)
    fixed = [tuple(forward["inputs"][at].shape) for at in forward["fixed"]]
    assert sorted(fixed) == sorted(tuple(p.shape) for p in model.parameters())
    kept = {backward["names"][at] for at in backward["fixed"]}
    assert kept <= {forward["names"][at] for at in forward["fixed"]}
    assert len(kept) >= 1
    tangent = len(backward["names"]) - 1
    assert list(backward["handed"]) == list(range(tangent))


def test_shards_stay_where_they_are(told: Told) -> None:
    """A recorded graph reads a unit's shard in place: nobody copies parameters in each step."""
    init_modelled(2, FREE, "cpu")
    try:
        model = shard(build(), layout=Flat())
        (_, part), *_ = batches(1, 0, 2)
        run: Any = torch.compile(model, backend="shoal", options=OPTIONS)
        loss_of(run, part).backward()
    finally:
        dist.destroy_process_group()
    forward = told.of(False)
    moving = set(range(len(forward["names"]))) - set(forward["fixed"])
    assert {forward["inputs"][at].dtype for at in moving} <= {torch.int64}
    assert len(forward["fixed"]) == 4  # three blocks, and what is left


def test_gradients_are_laid_out_as_traced(told: Told) -> None:
    model = network()
    torch.compile(model, backend="shoal", options=OPTIONS)(torch.randn(4, 8)).sum().backward()
    backward = told.of(True)
    outputs = backward["module"].graph.output_node().args[0]
    assert backward["num_visible"] == len(outputs)


def donated_by_torch(model: nn.Module, *args: Tensor) -> list[tuple[Any, ...]]:
    """Shapes of what torch's own runtime lets Inductor write over."""
    from torch._inductor import compile_fx

    found: list[tuple[Any, ...]] = []

    def inner(module: GraphModule, inputs: Sequence[Any], **what: Any) -> Any:
        if what.get("is_backward"):
            metadata = traces.TracingContext.get().fw_metadata
            assert metadata is not None
            found.extend(_kind(inputs[at]) for at in metadata.bw_donated_idxs or ())
        run = DirectGraph(module)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(module, list(inputs), inner_compile=inner)

    torch.compile(model, backend=backend)(*args).sum().backward()
    torch._dynamo.reset()
    return found


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.numel(), tensor.dtype)


def test_what_may_be_written_over_is_what_torch_lets_it(told: Told) -> None:
    x = torch.randn(4, 8)
    theirs = donated_by_torch(network(), x)
    torch.compile(network(), backend="shoal", options=OPTIONS)(x).sum().backward()
    backward = told.of(True)
    ours = [_kind(backward["inputs"][at]) for at in backward["donated"]]
    assert sorted(ours, key=str) == sorted(theirs, key=str)
    assert ours


def test_what_others_see_is_not_written_over(told: Told) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        seen = (x @ w).sigmoid()
        return seen, (seen @ w).sigmoid().sum()

    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    seen, loss = torch.compile(program, backend="shoal", options=OPTIONS)(x, w)
    before, data = seen.detach().clone(), x.clone()
    loss.backward()
    assert torch.equal(seen, before)
    assert torch.equal(x, data)
    assert told.of(True)["donated"]


def test_a_backward_that_is_repeated_finds_everything(told: Told) -> None:
    model = network()
    run = torch.compile(model, backend="shoal", options=OPTIONS)
    x = torch.randn(4, 8)
    expected = gradients(model(x).sum(), model)
    for order in itertools.product([True, False], repeat=2):
        loss = run(x).sum()
        for keeps in (*order, False):
            if keeps:
                found = gradients(loss, model, retain_graph=True)
                assert all(map(torch.allclose, found, expected))
        assert all(map(torch.allclose, gradients(loss, model), expected))
    assert [bool(one.get("donated")) for one in told if one["backward"]] in (
        [[True, False], [False, True]]
    )


def test_hooks_that_hold_what_was_saved_find_it_unchanged(told: Told) -> None:
    held: list[tuple[Tensor, Tensor]] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append((tensor, tensor.clone()))
        return tensor

    model = network()
    run = torch.compile(model, backend="shoal", options=OPTIONS)
    run(torch.randn(4, 8)).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        run(torch.randn(4, 8)).sum().backward()
    assert held
    assert all(torch.equal(now, before) for now, before in held)


def test_a_second_backward_is_an_error_as_without_a_compiler(told: Told) -> None:
    model = network()
    loss = torch.compile(model, backend="shoal", options=OPTIONS)(torch.randn(4, 8)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("keeps", [False, True])
def test_what_was_saved_is_free_once_the_graph_let_go_of_it(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    alive: list[bool] = []

    def stand_in(module: GraphModule, inputs: Sequence[Any], **what: Any) -> Callable[..., Any]:
        run = DirectGraph(module)

        def call(given: list[Any]) -> list[Any]:
            if what["backward"]:
                watched = [weakref.ref(given[at].untyped_storage()) for at in activations]
                copies = [one.clone() for one in given]
                given.clear()
                alive.extend(one() is not None for one in watched)
                return run(copies)
            return run(given)

        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        activations = [at for at, one in enumerate(names) if "primals" not in one][:-1]
        return call

    monkeypatch.setattr(compilers, "inductor", stand_in)
    model = network()
    run = torch.compile(model, backend="shoal", options=OPTIONS)
    loss = run(torch.randn(4, 8)).sum()
    gradients(loss, model, retain_graph=keeps)
    assert alive
    assert any(alive) is keeps


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 50))


def cross_entropy(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, wanted: F.cross_entropy(model(tokens), wanted)


@needs_compiler
def test_training_by_inductor_is_that_of_the_program() -> None:
    """Gradients of a cross entropy, some of them in the memory of activations."""
    model = language_model()
    run = torch.compile(cross_entropy(model), backend="shoal", options={"inner": "inductor"})
    tokens, wanted = torch.randint(50, (2, 8))
    loss = run(tokens, wanted)
    expected = cross_entropy(model)(tokens, wanted)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(gradients(loss, model), gradients(expected, model), strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code that Inductor generates."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    return codes


@pytest.mark.soak
@needs_compiler
def test_inductor_generates_as_much_as_for_torch(generated: list[str]) -> None:
    """Allocations, views, kernels and calls of libraries, forward and backward."""
    from torch._inductor import config

    counts: list[dict[str, int]] = []
    for backend, options in (("inductor", {}), ("shoal", OPTIONS)):
        torch._dynamo.reset()
        generated.clear()
        model = language_model()
        with config.patch(fx_graph_cache=False):
            run = torch.compile(cross_entropy(model), backend=backend, options=options)
            run(*torch.randint(50, (2, 8))).backward()
        called = "".join(code[code.index("def call") :] for code in generated)
        words = ("empty_strided", "reinterpret_tensor(", "extern_kernels.", "cpp_fused", "reuse")
        counts.append({word: called.count(word) for word in words})
    theirs, ours = counts
    assert all(ours[word] <= theirs[word] for word in theirs if word != "reuse"), (ours, theirs)
    assert ours["reuse"] >= theirs["reuse"]
