"""What comes out of the cache runs as eager does, and nothing is traced for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compile_compare import BACKEND, Given, Scenario, backward_all, compare, leaf, observe
from pure.compile.programs import RandomProgram, random_programs
from shoal.compile.aot import compiler
from shoal.compile.aot.compiler import AotCompiler
from shoal.compile.aot.lowered import Lowered
from shoal.compile.observe import CompileRecord, forget, records
from shoal.compile.observe.record import CacheUse

pytestmark = pytest.mark.skipif(BACKEND != "shoal", reason="tests the cache of our own backend")

MULTIPLE = (".split(", ".unbind(")


def traced_never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("what is in the cache was traced")


def compare_twice(run: Callable[..., Any], inputs: Callable[[], Any], **options: Any) -> None:
    """Compare with eager cold and warm; the second time without the stages that trace."""
    forget()
    compare(run, inputs, **options)
    cold = records()
    assert cold, "nothing was compiled"
    assert all(one.cache in (CacheUse.STORED, CacheUse.HIT) for one in cold), cold
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "analyse", traced_never)
        patch.setattr(compiler, "capture", traced_never)
        compare(run, inputs, **options)
    warm = records()
    assert [plain(one) for one in warm] == [plain(one) for one in cold]
    assert all(one.cache is CacheUse.HIT and "capture" not in one.seconds for one in warm)


def plain(record: CompileRecord) -> dict[str, Any]:
    """What a record says of the graphs."""
    names = [name for name in CompileRecord.__slots__ if name.startswith(("num_", "saved", "tra"))]
    return {name: getattr(record, name) for name in names}


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
@given(program=random_programs(), scenario=st.sampled_from(["train", "edit", "infer"]))
def test_random_programs(program: RandomProgram, scenario: Scenario) -> None:
    run, inputs = program.load()
    edits = scenario == "edit" and not any(call in program.source for call in MULTIPLE)
    scenarios: tuple[Scenario, ...] = ("train", "edit") if edits else ("train",)
    if scenario == "infer":
        scenarios = ("infer",)
    seen = observe(run, inputs, scenario=scenarios[0], steps=1, backward=backward_all)
    assume(seen[-1].error is None)
    note(program.source)
    ignore = ("*: relation (out*",) if any(c in program.source for c in MULTIPLE) else ()
    compare_or_skip(run, inputs, scenarios=scenarios, ignore=ignore)


def compare_or_skip(run: Callable[..., Any], inputs: Callable[[], Any], **options: Any) -> None:
    """Leave out programs that leave no graph, or that without a cache are refused or differ."""
    forget()
    try:
        compare(run, inputs, options={"cache": False}, **options)
    except AssertionError:
        assume(False)
    assume(bool(records()))
    compare_twice(run, inputs, **options)


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def inner(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.first(x)), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x)
        return y.float().sum(dim=-1) * torch.inf - torch.inf


def module_inputs(**options: Any) -> Callable[[], Given]:
    def make() -> Given:
        model = Block(**options)
        return Given(args=(model, torch.randn(4, 8)), watched=dict(model.named_parameters()))

    return make


def call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_module_with_buffers_dropout_autocast_and_checkpoint(checkpointed: bool) -> None:
    compare_twice(call, module_inputs(checkpointed=checkpointed), scenarios=("train", "infer"))


def test_several_calls_and_grad_modes() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            y = x * 2
        return y.view(-1), (x * y).t()

    compare_twice(program, leaf, steps=3)


@pytest.mark.parametrize("option", [{"partition": "default"}, {"memory_budget": 0.0}])
def test_options_have_entries_of_their_own(option: dict[str, Any]) -> None:
    def program(x: Tensor) -> Tensor:
        return (x.sin().cos() @ x.t().exp()).tanh()

    compare_twice(program, leaf)
    forget()
    compare(program, leaf, options=option)
    assert [one.cache for one in records()] == [CacheUse.STORED] * len(records())
    compare_twice(program, leaf, options=option)


def test_without_cache_nothing_is_read_or_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path / "none"))
    forget()
    compare(torch.sin, leaf, options={"cache": False})
    assert {one.cache for one in records()} == {CacheUse.OFF}
    assert not (tmp_path / "none").exists()


SCRIPT = """
import sys, torch
from shoal.compile.aot import compiler
from shoal.compile.aot.lowered import Lowered
from shoal.compile.aot.compiler import AotCompiler
from shoal.compile.observe import records
if sys.argv[1] == "warm":
    def never(*args, **kwargs): raise AssertionError("traced")
    compiler.analyse = compiler.capture = never
def program(x, y):
    x.mul_(2)
    z = torch.nn.functional.dropout(x[1:] * y.sum(), 0.5)
    return z, z.view(-1), x, (y * float("inf")).relu()
torch.manual_seed(0)
x, y = torch.randn(4, 6), torch.randn(3, requires_grad=True)
out = torch.compile(program, backend="shoal", fullgraph=True)(x, y)
(out[0].sum() + out[3].nan_to_num(1).sum()).backward()
print(*(one.cache for one in records()), file=sys.stderr)
print([one.tolist() for one in (*out, x, y.grad)], torch.get_rng_state().sum().item())
"""


def test_another_process_finds_it(tmp_path) -> None:
    source = Path(__file__).parents[4] / "src"
    env = {**os.environ, "PYTHONPATH": str(source), "SHOAL_CACHE_DIR": str(tmp_path)}
    seen = []
    for how, use in (("cold", "stored"), ("warm", "hit")):
        done = subprocess.run(
            [sys.executable, "-c", f"import shoal\n{SCRIPT}", how],
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.split() == [use]
        seen.append(done.stdout)
    assert seen[0] == seen[1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_gets_the_graphs_of_the_cache() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = F.dropout(x @ w, 0.5).relu()
        return checkpoint(lambda z: F.dropout(z.sin(), 0.5) * 2, y, use_reentrant=False)

    def inputs() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)

    options = {"inner": "inductor"}
    compare_twice(program, inputs, scenarios=("train",), options=options, tolerance=1e-5)


def test_a_damaged_file_is_traced_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path))
    for damage in (b"", b"{}\n[]", b"not ours"):
        forget()
        compare(torch.sin, leaf, scenarios=("train",))
        (file,) = tmp_path.iterdir()
        file.write_bytes(damage)
        forget()
        compare(torch.sin, leaf, scenarios=("train",))
        assert [one.cache for one in records()] == [CacheUse.STORED]
        assert file.read_bytes() != damage


def test_a_folder_that_cannot_be_written_to_stops_nobody(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path / "file" / "folder"))
    forget()
    compare(torch.sin, leaf, scenarios=("train",))
    (record,) = records()
    assert record.cache is CacheUse.REFUSED
    assert "cannot be written to" in record.cache_note


class Wrong(torch.autograd.Function):
    """A square with a derivative that is not its own, so that a lost one shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 5 * grad * x


def test_a_derivative_of_the_programs_own() -> None:
    compare_twice(lambda x: Wrong.apply(x).sin(), leaf)


def test_collectives(monkeypatch) -> None:
    def program(x: Tensor) -> Tensor:
        return functional_collectives.all_reduce(x * 2, "sum", dist.group.WORLD).sin()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        seen: list[list[Any]] = []

        def build(self: AotCompiler, lowered: Lowered) -> Any:
            nodes = (*lowered.forward.graph.nodes, *lowered.backward.graph.nodes)
            seen.append([str(node.meta["val"]) for node in nodes])
            return plain_build(self, lowered)

        plain_build = AotCompiler.build
        monkeypatch.setattr(AotCompiler, "build", build)
        compare_twice(program, leaf, scenarios=("train",))
        assert records()[0].num_collectives == 2
        assert seen[0] == seen[1], "ranks compare what they send, wherever it comes from"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("inner", ["direct", "inductor"])
def test_a_number_that_changes_is_not_that_of_another_call(inner: str) -> None:
    """From its second value on it is an input, and what read it holds for that value alone."""

    def scaled(x: Tensor, number: float) -> Tensor:
        return F.layer_norm(x, (4,), eps=number) * number

    torch._dynamo.reset()
    call = torch.compile(scaled, backend="shoal", options={"inner": inner})
    x = torch.randn(3, 4)
    for number in (0.5, 0.7, 0.3, 0.25, 0.7):
        torch.testing.assert_close(call(x, number), scaled(x, number))


def test_a_schedule_of_dropout() -> None:
    torch._dynamo.reset()
    module = nn.Dropout()
    call = torch.compile(module, backend="shoal")
    x = torch.ones(10_000)
    for p in (0.5, 0.7, 0.3, 0.0, 0.1, 1.0, 0.3):
        module.p = p
        torch.manual_seed(0)
        expected = module(x)
        torch.manual_seed(0)
        assert torch.equal(call(x), expected), p
