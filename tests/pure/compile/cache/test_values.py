"""Values survive a file exactly, and a file can hold no others."""

from __future__ import annotations

import json
import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.immutable_collections import immutable_list

from shoal.compile.cache.errors import DamagedError, NotExactError
from shoal.compile.cache.values import decode, encode

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.sampled_from(
        [
            *(torch.float32, torch.int64, torch.bfloat16, torch.complex64),
            *(torch.device("cpu"), torch.device("cuda", 3), torch.strided, torch.sparse_coo),
            *(torch.contiguous_format, torch.channels_last, torch.preserve_format),
            *(torch.ops.aten.add.Tensor, torch.ops.prims.iota.default, operator.getitem),
            torch.Size([2, 0, 5]),
        ]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal down to types, signs of zero, and what is no number."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return a == b


@given(VALUES)
def test_values_come_back(value: Any) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    assert same(decode(json.loads(text)), value)


def test_lists_of_graphs_are_lists() -> None:
    assert encode(immutable_list([1, (2,)])) == [1, {"tuple": [2]}]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        object(),
        {1: 2},
        {1, 2},
        b"bytes",
        print,
        lambda: None,
        operator.attrgetter,
        torch.Generator(),
        torch.ops.aten.add,
    ],
    ids=repr,
)
def test_what_is_not_exact_is_refused(value: Any) -> None:
    with pytest.raises(NotExactError):
        encode(value)


@pytest.mark.parametrize(
    "described",
    [
        {"dtype": "load"},
        {"dtype": "ops"},
        {"layout": "float32"},
        {"function": "attrgetter"},
        {"function": "__import__"},
        {"op": "load_library"},
        {"op": "aten.add"},
        {"op": "aten.add.__class__"},
        {"op": "aten.add.Nonsense"},
        {"op": "os.system.default"},
        {"higher_order": "cond"},
        {"float": "1e5"},
        {"device": "moon"},
        {"node": "x"},
        {"tuple": "x"},
        {"tuple": [1], "size": [1]},
        {"size": ["x"]},
        {"slice": [1]},
        {"dict": [[1, 2]]},
        {"complex": [1, 2]},
        {"object": []},
        {},
        math.nan,
    ],
    ids=repr,
)
def test_what_a_file_cannot_say_is_refused(described: Any) -> None:
    with pytest.raises(DamagedError):
        decode(described)
