"""Casts and copies go into containers of any class, and come out as the same."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from shoal.runtime.module_state import Reach, map_tensors

Pair = namedtuple("Pair", "left right")


class Typed(NamedTuple):
    left: torch.Tensor
    right: int = 3


class Doubled(Pair):
    """Its constructor does not take its fields."""

    __slots__ = ()

    def __new__(cls, one: torch.Tensor) -> Doubled:
        return super().__new__(cls, one, one)


class Tagged(list[Any]):
    def __init__(self, *, items: list[Any], tag: str) -> None:
        super().__init__(items)
        self.tag = tag


@dataclass(frozen=True, slots=True)
class Frozen:
    left: torch.Tensor
    right: Any = None


ONE = torch.ones(2)
VALUES = {
    "tuple": (ONE, 1),
    "namedtuple": Pair(ONE, {"deep": [ONE]}),
    "NamedTuple": Typed(ONE),
    "namedtuple with a constructor": Doubled(ONE),
    "list with attributes": Tagged(items=[ONE, "kept"], tag="kept"),
    "frozen dataclass": Frozen(ONE, [ONE]),
    "OrderedDict": OrderedDict(b=ONE, a=2),
    "defaultdict": defaultdict(list, a=ONE),
    "result of an operator": torch.max(torch.ones(2, 2), dim=0),
}


@pytest.mark.parametrize("kind", VALUES)
def test_containers_keep_their_class(kind: str) -> None:
    value = VALUES[kind]
    found = map_tensors(lambda tensor: tensor.double(), value)
    assert type(found) is type(value)
    assert getattr(found, "tag", None) == getattr(value, "tag", None)
    tensors = Reach.of(found).tensors
    assert len(tensors) == len(Reach.of(value).tensors) > 0
    assert all(tensor.dtype is torch.float64 for tensor in tensors)
    assert all(tensor.dtype is not torch.float64 for tensor in Reach.of(value).tensors)
