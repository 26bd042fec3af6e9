"""How much memory a step takes, from the allocator's own statistics, as rank 0 of 8.

Parameters outweigh activations here by far, so what the engine holds is what is seen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_engine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shoal.fsdp as shoal_engine
from gpu.runtime.conftest import Join
from harness import nccl_ranks
from oracle import batches, build, loss_of, shard
from shoal.fsdp import MixedPrecisionPolicy
from shoal.layout import Even, Flat, Layout, Whole
from shoal.runtime.module_state import state_of

SIZE = 8
DIM, HIDDEN = 1024, 4096
NUM_BLOCKS = 6
NUM_TOKENS = 64
MIB = 1 << 20
SLACK = 3 * MIB
"""For what is rounded up: every allocation, the padding between parameters."""
FULL = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def sharded(engine: Any, **options: Any) -> Any:
    with torch.device("cuda"):
        model = Model()
    for block in model.blocks:
        engine.fully_shard(block, **options)
    return engine.fully_shard(model, **options)


def inputs() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, DIM, device="cuda")


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of what a step has to hold, from the model alone."""

    floor: int
    """What is allocated when there is no model: cuBLAS keeps its workspaces."""
    activations: int
    shards: int
    unit_numel: int
    """Parameters of a block: the largest unit."""

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Sizes:
        """Run the plain model once, in the dtype of compute."""
        with torch.device("cuda"):
            model = Model().to(dtype)
        x = inputs().to(dtype)
        model(x).backward()  # workspaces, in this thread and in autograd's
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = model(x)
        activations = torch.cuda.memory_allocated() - before
        numel = sum(p.numel() for p in model.parameters())
        unit_numel = sum(p.numel() for p in model.blocks[0].parameters())
        del model, x, loss
        settle()
        return cls(
            floor=torch.cuda.memory_allocated(),
            # Backward has gradients of a block's activations beside what forward saved.
            activations=activations + 2 * activations // NUM_BLOCKS,
            shards=4 * numel // SIZE,
            unit_numel=unit_numel,
        )

    def peak(self, policy: MixedPrecisionPolicy) -> int:
        """The most that a step with one gather and one reduction in flight may take."""
        compute = (policy.param_dtype or torch.float32).itemsize
        reduce = (policy.reduce_dtype or policy.param_dtype or torch.float32).itemsize
        parameters = 2 * self.unit_numel * compute  # one unit computes, the next is gathered
        grads = self.unit_numel * compute  # of the unit that computes
        matrix = self.unit_numel * reduce  # what the unit before is reduced from
        row = matrix // SIZE
        return (
            self.floor
            + 2 * self.shards  # parameters and gradients
            + parameters
            + grads
            + matrix
            + row
            + self.activations
            + SLACK
        )


def peak_of(model: nn.Module, num_steps: int = 4) -> int:
    """The most that was allocated in a step that was run before."""
    x = inputs()
    for _ in range(num_steps):
        torch.cuda.reset_peak_memory_stats()
        model(x).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def report(what: str, num_bytes: int, limit: int) -> str:
    return f"{what} {num_bytes / MIB:.1f} MiB, expected at most {limit / MIB:.1f} MiB"


@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
@pytest.mark.parametrize("policy", [FULL, HALF], ids=["fp32", "bf16"])
def test_the_peak_of_a_step(join: Join, layout: Layout, policy: MixedPrecisionPolicy) -> None:
    join()
    limit = Sizes.measure(policy.param_dtype or torch.float32).peak(policy)
    peak = peak_of(sharded(shoal_engine, layout=layout, mp_policy=policy))
    assert peak <= limit, report("a step takes", peak, limit)


@pytest.mark.parametrize("precise", [True, False])
def test_the_peak_is_not_above_that_of_torch(join: Join, precise: bool) -> None:
    dtypes = {} if precise else {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    peaks: list[int] = []
    for engine in (torch_engine, shoal_engine):
        join()
        model = sharded(engine, mp_policy=engine.MixedPrecisionPolicy(**dtypes))
        peaks.append(peak_of(model))
        del model
    assert peaks[1] <= peaks[0] + SLACK, report("shoal takes", peaks[1], peaks[0])


@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_parameters_are_freed_between_steps(join: Join, layout: Layout) -> None:
    join()
    expected = Sizes.measure(torch.float32)
    model = sharded(shoal_engine, layout=layout)
    peak_of(model)
    settle()
    state = state_of(model)
    assert state is not None
    assert state.context is not None
    kept = state.context.arena.num_bytes
    # A unit or two and a matrix may stay for the next step; the model does not.
    assert kept <= 3 * 4 * expected.unit_numel + SLACK
    allocated = torch.cuda.memory_allocated()
    row = 4 * expected.unit_numel // SIZE  # the modelled network remembers its last output
    limit = expected.floor + expected.shards + kept + row + SLACK
    assert allocated <= limit, report("between steps there are", allocated, limit)


def segments() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {
        "device allocations": stats["segment.all.allocated"],
        "device frees": stats["segment.all.freed"],
        "reserved bytes": stats["reserved_bytes.all.current"],
        "retries": stats["num_alloc_retries"],
    }


def two_axes() -> dict[str, Any]:
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    return {"mesh": mesh, "mp_policy": HALF}


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "even": lambda: {"layout": Even()},
    "even in bf16": lambda: {"layout": Even(), "mp_policy": HALF},
    "flat in bf16": lambda: {"layout": Flat(), "mp_policy": HALF},
    "whole": lambda: {"layout": Whole()},
    "two axes": two_axes,
    "fewer ranks after forward": lambda: {"reshard_after_forward": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_replayed_steps_take_no_more_from_the_device(
    join: Join, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nor do they leave anything behind, or need the allocator to watch a second stream."""
    join()
    model = sharded(shoal_engine, **OPTIONS[name]())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = inputs()
    monkeypatch.setattr(torch.Tensor, "record_stream", _refuse)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before, allocated = segments(), torch.cuda.memory_allocated()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    assert segments() == before
    assert torch.cuda.memory_allocated() == allocated


def test_collectives_of_ones_own_leave_nothing_behind(join: Join) -> None:
    """Memory that a process group allocates for each gather and reduction goes back to it."""
    join()
    model = sharded(shoal_engine)
    for module in (model, *model.blocks):
        module.set_allocate_memory_from_process_group_for_comm(True)
    peak_of(model, num_steps=3)
    allocated = torch.cuda.memory_allocated()
    peak_of(model, num_steps=3)
    assert torch.cuda.memory_allocated() <= allocated


def test_full_parameters_are_given_back(join: Join) -> None:
    """Holding the whole model once, to export it, must not keep its memory for good."""
    join()
    model = sharded(shoal_engine)
    peak_of(model)
    settle()
    before = torch.cuda.memory_allocated()
    with shoal_engine.full_parameters(model):
        whole = sum(4 * p.numel() for p in model.parameters())
        assert torch.cuda.memory_allocated() - before > whole / 2
    settle()
    assert torch.cuda.memory_allocated() - before < whole / 4


def _refuse(*_: object) -> None:
    raise AssertionError("a tensor was recorded on a second stream")


@nccl_ranks(2)
def test_steps_on_nccl_leave_nothing_behind() -> None:
    model = shard(build(device="cuda"))
    ((_, part),) = batches(1, torch.distributed.get_rank(), 2, "cuda")
    seen: list[int] = []
    for _ in range(6):
        loss_of(model, part).backward()
        model.zero_grad()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert len(set(seen[2:])) == 1, seen
