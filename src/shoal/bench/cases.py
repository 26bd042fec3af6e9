"""What is measured: the cases B1–B6, as frozen values.

B1–B5 are one process that plays rank 0 of N on a modelled network. B6 is two real gloo ranks of one
thread each. B1–B5 compute in bf16 and reduce in fp32. B6 is fp32 throughout, because bf16 is
slow on CPUs and would hide the engines, and its vocabulary is small for the same reason.

A `Run` is one cell of the matrix: a case, by an engine, in a mode, on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import torch

from shoal.bench.model import ModelShape
from shoal.comm.network import FREE, INFINIBAND, NVLINK, Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How many steps a run takes."""

    warmup: int
    """Untimed steps first: prefetch orders and the allocator settle in them."""
    steps: int
    """Timed forward+backward steps per round."""
    rounds: int
    """How often the timed steps are repeated; engines take turns round by round."""
    optimizer_steps: int
    """Timed optimizer steps per round."""

    def __post_init__(self) -> None:
        for name in ("warmup", "steps", "rounds", "optimizer_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One piece of work that every engine does alike."""

    name: str
    family: str
    """The name that selects it together with its siblings: B1 for B1-8, B1-64 and B1-1024."""
    title: str
    shape: ModelShape
    batch_size: int
    """Per rank."""
    seq_len: int
    world_size: int
    network: Network | None
    """The modelled network; None for real gloo ranks on CPU."""
    mixed_precision: bool
    """bf16 compute and fp32 reduction; fp32 everywhere if not."""
    pace: Pace
    gib_each: float
    """What an engine needs, or a little more than most. On a GPU with less than that for each, the
    engines that wait for their turn give up the memory that only steps need."""
    fill: bool = False
    """Whether the modelled network writes every gather in timed steps too, by kernels."""
    quick: bool = False
    """Scaled down until it shows that the machinery works, and nothing else."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.name.startswith(self.family):
            raise ValueError(f"case {self.name!r} does not begin with its family {self.family!r}")

    def quickly(self) -> Case:
        """The same case, small enough for a laptop's CPU."""
        return replace(
            self,
            title=f"scaled down from: {self.title}",
            shape=ModelShape(dim=64, num_layers=4, num_heads=2, vocab_size=512),
            batch_size=2,
            seq_len=64,
            pace=Pace(warmup=2, steps=3, rounds=2, optimizer_steps=2),
            quick=True,
        )


_PACE = Pace(warmup=6, steps=6, rounds=6, optimizer_steps=2)
_LONG_STEPS = replace(_PACE, steps=4, rounds=4)
_CPU_PACE = Pace(warmup=5, steps=5, rounds=8, optimizer_steps=2)

_LARGE = ModelShape(dim=2048, num_layers=16, num_heads=16, vocab_size=32_000)
_LARGER = ModelShape(dim=4096, num_layers=16, num_heads=32, vocab_size=32_000)
_SMALL = ModelShape(dim=512, num_layers=24, num_heads=8, vocab_size=32_000)
_CPU_WIDE = ModelShape(dim=256, num_layers=8, num_heads=4, vocab_size=512)
_CPU_DEEP = ModelShape(dim=64, num_layers=24, num_heads=2, vocab_size=512)


def _large_on_free_network(world_size: int) -> Case:
    return Case(
        name=f"B1-{world_size}",
        family="B1",
        title=f"0.93 B parameters, free network, N = {world_size}",
        shape=_LARGE,
        batch_size=2,
        seq_len=2048,
        world_size=world_size,
        network=FREE,
        mixed_precision=True,
        pace=_PACE,
        gib_each=12,
    )


_B1 = _large_on_free_network(8)
_B6 = Case(
    name="B6a",
    family="B6",
    title="CPU, 2 gloo ranks, compute-bound",
    shape=_CPU_WIDE,
    batch_size=4,
    seq_len=64,
    world_size=2,
    network=None,
    mixed_precision=False,
    pace=_CPU_PACE,
    gib_each=0,
)

CASES: tuple[Case, ...] = (
    _B1,
    _large_on_free_network(64),
    _large_on_free_network(1024),
    replace(
        _B1,
        name="B2",
        family="B2",
        title="0.93 B parameters, NVLink model, N = 8",
        network=NVLINK,
    ),
    replace(
        _B1,
        name="B3",
        family="B3",
        title="0.93 B parameters at batch 8, InfiniBand model, N = 64",
        batch_size=8,
        world_size=64,
        network=INFINIBAND,
        pace=_LONG_STEPS,
        gib_each=34,
    ),
    replace(
        _B1,
        name="B4",
        family="B4",
        title="small and host-bound, free network, N = 8",
        shape=_SMALL,
        batch_size=1,
        seq_len=512,
        gib_each=2,
    ),
    replace(
        _B1,
        name="B5",
        family="B5",
        title="3.45 B parameters, NVLink model, N = 8: memory",
        shape=_LARGER,
        batch_size=1,
        network=NVLINK,
        pace=_LONG_STEPS,
        gib_each=24,
    ),
    _B6,
    replace(
        _B6,
        name="B6b",
        title="CPU, 2 gloo ranks, host-bound",
        shape=_CPU_DEEP,
        batch_size=2,
        seq_len=32,
    ),
)
"""In the order in which they are run and shown."""


DeviceType = Literal["cpu", "cuda"]


class Mode(StrEnum):
    """Whether, and how, the model is compiled."""

    EAGER = "eager"
    """As written."""
    COMPILED = "compiled"
    """By Inductor: the whole model for `plain` and `ddp`, each block for the sharded engines."""
    CUDAGRAPHS = "cudagraphs"
    """The whole model, replayed from CUDA graphs: the limit of the host-bound case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A case by an engine in a mode, on a device: one set of processes."""

    case: Case
    engine: str
    mode: Mode
    device_type: DeviceType

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return torch.bfloat16 if self.case.mixed_precision else torch.float32

    def __str__(self) -> str:
        return f"{self.case.name} {self.engine} {self.mode}"


def device_type_of(case: Case, *, cuda: bool) -> DeviceType:
    """CUDA where there is one, except for the cases of real gloo ranks."""
    return "cuda" if cuda and case.network is not None else "cpu"
