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


@dataclass
class Output(OrderedDict[str, Any]):
    """As outputs of Transformers: fields that are items too."""

    loss: torch.Tensor
    logits: torch.Tensor

    def __post_init__(self) -> None:
        super().__init__(loss=self.loss, logits=self.logits)

    def __reduce__(self) -> Any:
        return Output, (self.loss, self.logits)

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("not allowed")


def test_a_dataclass_that_is_a_dict_has_the_same_new_tensor_twice() -> None:
    old = Output(torch.ones(1), torch.ones(2))
    new = map_tensors(lambda tensor: tensor.to(torch.bfloat16), old)
    assert type(new) is Output
    assert old["loss"].dtype is old.loss.dtype is torch.float32
    for name in ("loss", "logits"):
        assert new[name] is getattr(new, name)
        assert new[name].dtype is torch.bfloat16
