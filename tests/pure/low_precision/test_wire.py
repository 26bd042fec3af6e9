"""What ranks send in a format, in every layout: decoded, it is the round trip of the parameters."""

import pytest
import torch

from shoal.errors import UsageError
from shoal.layout import Block, Even, Flat, Layout, ParamSpec, Rows, Whole
from shoal.layout.buffer import full_tensors, shard_of, shard_views
from shoal.low_precision import MXFP8, NVFP4, Float8, GatherFormat, Wire

FORMATS: list[GatherFormat] = [Float8(), Float8(32), MXFP8(), NVFP4(), NVFP4(64)]
SHAPES = {"w": (13, 64), "b": (13,), "conv": (6, 2, 3, 3), "experts": (3, 4, 128), "n": ()}
SHAPES |= {"odd": (5, 7), "v": (9, 64), "empty": (0, 64)}


def parameters(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def arrived(
    layout: Layout,
    form: GatherFormat,
    world_size: int,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], Wire]:
    """Gather by hand: every rank's row, and what one of them makes of all rows."""
    specs = [ParamSpec.of(name, tensor) for name, tensor in tensors.items()]
    stored = layout.pack(specs, world_size).in_sections()
    compute = stored.with_dtypes([dtype] * len(specs))
    wire = Wire(compute, form)
    rows = torch.zeros(world_size * wire.row_bytes, dtype=torch.uint8)
    for rank in range(world_size):
        row = rows[rank * wire.row_bytes : (rank + 1) * wire.row_bytes]
        shard = shard_of(stored, rank, list(tensors.values()))
        wire.encode(shard_views(stored, rank, shard), rank, row)
    gathered = torch.zeros(compute.gathered_bytes, dtype=torch.uint8)
    wire.decoder(rows, gathered)()
    return full_tensors(compute, gathered), wire


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", [Even(), Rows(), Block(128), Whole()], ids=repr)
@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_what_arrives_is_the_round_trip(
    form: GatherFormat, layout: Layout, world_size: int, dtype: torch.dtype
) -> None:
    tensors = parameters(SHAPES)
    found, _ = arrived(layout, form, world_size, tensors, dtype)
    for (name, tensor), got in zip(tensors.items(), found, strict=True):
        assert torch.equal(got, form.round_trip(tensor, dtype)), name


@pytest.mark.parametrize("form", [Float8(32), MXFP8()], ids=repr)
def test_inner_dims(form: GatherFormat) -> None:
    tensors = parameters({"w": (5, 128), "e": (4, 6, 32), "v": (7, 96)})
    found, _ = arrived(Even((1, 1, 0)), form, 2, tensors, torch.bfloat16)
    for tensor, got in zip(tensors.values(), found, strict=True):
        assert torch.equal(got, form.round_trip(tensor, torch.bfloat16))


def test_units_with_nothing_to_send() -> None:
    found, wire = arrived(Even(), MXFP8(), 2, {"w": torch.empty(0, 64)}, torch.bfloat16)
    assert found[0].shape == (0, 64)
    assert wire.row_bytes == 0


def test_large_parameters_that_are_sections() -> None:
    tensors = parameters({"w": (2048, 1024), "b": (64,), "v": (66, 64)})
    found, wire = arrived(Even(), MXFP8(), 4, tensors, torch.bfloat16)
    for tensor, got in zip(tensors.values(), found, strict=True):
        assert torch.equal(got, MXFP8().round_trip(tensor, torch.bfloat16))
    assert wire.row_bytes * 4 < 0.52 * sum(2 * tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("layout", "form", "world_size"),
    [
        (Flat(), MXFP8(), 4),
        (Flat(), NVFP4(), 3),
        (Block(16), MXFP8(), 4),
        (Block(32), NVFP4(), 2),
        (Block(32), Float8(), 2),
        (Even(1), MXFP8(), 4),
        (Even(1), Float8(), 2),
    ],
    ids=repr,
)
def test_what_shares_a_scale_is_not_cut(
    layout: Layout, form: GatherFormat, world_size: int
) -> None:
    spec = ParamSpec(name="w", shape=(7, 64), dtype=torch.bfloat16)
    packing = layout.pack([spec], world_size)
    with pytest.raises(UsageError, match=r"parameter 'w' of shape \(7, 64\)"):
        Wire(packing, form)
