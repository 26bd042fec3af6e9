"""Operators that encode a shard for its gather, and decode what was gathered."""

from __future__ import annotations

import pytest
import torch

from shoal.compile.lowering.encoded_rows import EncodedRows
from shoal.errors import InvariantError
from shoal.layout import Even, ParamSpec
from shoal.layout.buffer import full_tensors, shard_of
from shoal.low_precision import MXFP8, Float8, GatherFormat

SPECS = [
    ParamSpec(name="w", shape=(4, 64), dtype=torch.float32),
    ParamSpec(name="b", shape=(5,), dtype=torch.float32),
]
STORED = Even().pack(SPECS, 2)
IN_COMPUTE = STORED.with_dtypes([torch.bfloat16] * 2)


def encoded(form: GatherFormat, rank: int = 0) -> EncodedRows:
    return EncodedRows(STORED, IN_COMPUTE, form, rank)


@pytest.mark.parametrize("form", [Float8(), MXFP8()], ids=repr)
def test_rows_become_what_a_round_trip_leaves(form: GatherFormat) -> None:
    tensors = [torch.randn(spec.shape) for spec in SPECS]
    each = [encoded(form, rank) for rank in range(2)]
    rows = [one.encode(shard_of(STORED, rank, tensors)) for rank, one in enumerate(each)]
    fulls = full_tensors(IN_COMPUTE, each[0].decode(torch.cat(rows)))
    for full, tensor in zip(fulls, tensors, strict=True):
        assert torch.equal(full, form.round_trip(tensor, torch.bfloat16))


def test_torch_takes_them_for_what_they_do() -> None:
    one = encoded(MXFP8())
    row = one.encode(torch.zeros(STORED.shard_bytes, dtype=torch.uint8))
    checks = ("test_schema", "test_faketensor")
    shard = torch.zeros(STORED.shard_bytes, dtype=torch.uint8)
    given = {
        torch.ops.shoal.encode_row.default: (shard, one.key, row.numel()),
        torch.ops.shoal.decode_rows.default: (row.repeat(2), one.key, IN_COMPUTE.gathered_bytes),
    }
    for operator, arguments in given.items():
        found = torch.library.opcheck(operator, arguments, test_utils=checks)
        assert found == dict.fromkeys(checks, "SUCCESS")


def test_a_graph_whose_units_are_gone_says_so() -> None:
    key = encoded(MXFP8()).key
    with pytest.raises(InvariantError, match="no unit of this process is laid out"):
        torch.ops.shoal.encode_row(torch.zeros(8, dtype=torch.uint8), key, 8)
