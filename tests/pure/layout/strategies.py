"""Parameters, layouts and worlds for property tests, and the tensors to try them on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shoal.layout import Block, Even, Flat, Layout, Packing, ParamSpec, Region, Rows, Whole
from shoal.layout.even import EvenPacking

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.int8,
    torch.int64,
    torch.complex64,
    torch.complex128,
]

MAX_NUMEL = 3000


def profile(max_examples: int) -> settings:
    """The same examples on every run."""
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


worlds = st.integers(1, 9)

any_shapes = (
    st.lists(st.one_of(st.integers(0, 6), st.sampled_from([7, 16, 19, 33, 64])), max_size=4)
    .map(tuple)
    .filter(lambda shape: math.prod(shape) <= MAX_NUMEL)
)
# Pieces are aligned to 16 elements, so only larger tensors cross from rank to rank.
matrix_shapes = st.tuples(st.integers(4, 40), st.integers(3, 70))
shapes = st.one_of(any_shapes, matrix_shapes)


@st.composite
def param_lists(draw: st.DrawFn) -> list[ParamSpec]:
    kind = draw(st.sampled_from([any_shapes, matrix_shapes, shapes]))
    kinds = draw(st.lists(st.tuples(kind, st.sampled_from(DTYPES)), max_size=5))
    return [
        ParamSpec(name=f"p{index}", shape=shape, dtype=dtype)
        for index, (shape, dtype) in enumerate(kinds)
    ]


@st.composite
def layouts_for(draw: st.DrawFn, params: list[ParamSpec]) -> Layout:
    dims = tuple(draw(st.integers(0, max(len(param.shape) - 1, 0))) for param in params)
    block = Block(draw(st.sampled_from([3, 8, 40, 55, 128, 150])))
    return draw(
        st.sampled_from(
            [Even(), Even(dims), Flat(), Flat(spreads=True), Rows(), Rows(), block, Whole()]
        )
    )


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    params = draw(param_lists())
    packing = draw(layouts_for(params)).pack(params, draw(worlds))
    if not isinstance(packing, EvenPacking) or draw(st.booleans()):
        return packing
    with patch("shoal.layout.even.ALONE_NUMEL", draw(st.sampled_from([1, 64, 500]))):
        return packing.in_sections()


def gathered_from(packing: Packing, shards: list[torch.Tensor]) -> torch.Tensor:
    """What collectives make of all ranks' shard buffers."""
    return torch.cat(
        [shard[part.start : part.stop] for part in packing.sections for shard in shards]
    )


@st.composite
def packing_pairs(draw: st.DrawFn) -> tuple[Packing, Packing]:
    params = draw(param_lists())
    src = draw(layouts_for(params)).pack(params, draw(worlds))
    dst = draw(layouts_for(params)).pack(params, draw(worlds))
    return src, dst


@dataclass(frozen=True)
class Held:
    """Who holds what of one parameter of a packing; ranks beyond its world hold nothing."""

    packing: Packing
    index: int

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        if rank >= self.packing.world_size:
            return ()
        return self.packing.piece(self.index, rank).regions

    def holders(self, region: Region) -> range:
        return self.packing.holders(self.index, region)


def random_tensors(params: list[ParamSpec] | tuple[ParamSpec, ...]) -> list[torch.Tensor]:
    """Tensors of random bits, so NaNs, infinities and denormals too."""
    generator = torch.Generator().manual_seed(0)
    return [_random(param, generator) for param in params]


def _random(param: ParamSpec, generator: torch.Generator) -> torch.Tensor:
    high = 2 if param.dtype == torch.bool else 256
    raw = torch.randint(0, high, (param.nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(param.dtype).view(param.shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert bits(a) == bits(b)


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParamSpec:
    return ParamSpec(name=name, shape=shape, dtype=dtype)


def transformer_block() -> list[ParamSpec]:
    """A Llama-like block: rows of 8 KiB and of 21.5 KiB, vectors between them."""
    sizes = {
        "attention_norm": (4096,),
        "wq": (4096, 4096),
        "wk": (1024, 4096),
        "wv": (1024, 4096),
        "wo": (4096, 4096),
        "mlp_norm": (4096,),
        "w1": (11008, 4096),
        "w3": (11008, 4096),
        "w2": (4096, 11008),
    }
    return [spec(name, *shape, dtype=torch.bfloat16) for name, shape in sizes.items()]
