"""Formats of few bits: what they round to, by definition and by exhaustion."""

import pytest
import torch

from shoal.errors import UsageError
from shoal.low_precision import MXFP8, NVFP4, Float8, GatherFormat

FORMATS: list[GatherFormat] = [Float8(), Float8(64), MXFP8(), NVFP4(), NVFP4(64)]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def weights(rows: int = 8, row: int = 256) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, row, generator=generator) * torch.logspace(-3, 2, rows)[:, None]


def nearest(values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The nearest of a few numbers, by trying all; of two, the one with an even place."""
    distances = (values.abs()[..., None] - numbers).abs()
    odd = torch.arange(len(numbers)) % 2 * 1e-3
    return numbers[(distances + odd).argmin(-1)].copysign(values)


def bytes_of(form: GatherFormat, tensor: torch.Tensor) -> int:
    return sum(p.numel() * p.element_size() for p in form.encode(tensor.view(-1), tensor.shape[-1]))


@pytest.mark.parametrize(
    ("form", "share"), [(Float8(), 0.50), (MXFP8(), 0.52), (NVFP4(), 0.28)], ids=repr
)
def test_bytes_beside_bf16(form: GatherFormat, share: float) -> None:
    x = weights(8, 4096)
    assert bytes_of(form, x) / (2 * x.numel()) == pytest.approx(share, abs=0.005)
    expected = sum(x.numel() // part.each * part.dtype.itemsize for part in form.parts(4096))
    assert bytes_of(form, x) == expected


@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_errors_are_those_of_the_number_of_bits(form: GatherFormat) -> None:
    x = weights()
    error = (form.round_trip(x) - x).norm(dim=1) / x.norm(dim=1)
    bound = 0.12 if isinstance(form, NVFP4) else 0.03
    assert error.max() < bound
    assert error.min() > 0  # it does round


def test_mx_blocks_have_the_smallest_power_of_two_that_holds_them() -> None:
    blocks = weights(64, 32)
    scales = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True) / 448))
    expected = (blocks / scales).to(torch.float8_e4m3fn).float() * scales
    assert torch.equal(MXFP8().round_trip(blocks), expected)


def test_powers_of_two_come_back() -> None:
    x = 2.0 ** torch.arange(-10, 10).repeat_interleave(32).view(20, 32)
    for form in FORMATS:
        if form.encodes(x.shape, x.dtype) and not isinstance(form, Float8):
            torch.testing.assert_close(form.round_trip(x), x, rtol=2e-7, atol=0)


def test_four_bits_are_the_nearest_numbers() -> None:
    steps = torch.arange(-192, 192) / 32  # all ties among them
    x = torch.cat([steps.view(-1, 12), torch.full((32, 4), 6.0)], dim=1)
    # A block whose largest is 6, in a row whose largest is 2688 = 6 * 448, has scales of one.
    x = torch.cat([x, torch.full((32, 16), 2688.0)], dim=1)
    assert torch.equal(NVFP4().round_trip(x)[:, :12], nearest(x, E2M1)[:, :12])


@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_zeros_stay_and_what_is_not_finite_is_seen(form: GatherFormat) -> None:
    x = weights()
    x[0], x[1, 5], x[2, 7] = 0, torch.inf, torch.nan
    x[3] *= 1e-42
    found = form.round_trip(x)
    assert torch.equal(found[0], x[0])
    assert found[1, 5].isnan()
    assert found[2, 7].isnan()
    assert found[3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_other_dtypes_are_rounded_once(form: GatherFormat, dtype: torch.dtype) -> None:
    x = weights()
    assert torch.equal(form.round_trip(x, dtype), form.round_trip(x).to(dtype))


@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_vectors_and_short_rows_travel_as_they_are(form: GatherFormat) -> None:
    for shape in [(64,), (8, 3), (64, 8, 3, 3), (), (0, 64)]:
        assert not form.encodes(shape, torch.float32), shape
        x = torch.randn(shape)
        assert torch.equal(form.round_trip(x), x)
    assert form.encodes((3, 2, 64), torch.float32)
    assert not form.encodes((3, 64), torch.int64)
    assert not form.encodes((3, 64), torch.complex64)


@pytest.mark.parametrize("group", [0, 8, 24, -16, 16.0, True])
def test_groups_are_whole_blocks(group: object) -> None:
    for kind in (Float8, NVFP4):
        with pytest.raises(UsageError, match=f"{kind.__name__} takes a group of 16"):
            kind(group)
