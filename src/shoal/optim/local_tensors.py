"""How the tensors that an optimizer holds lie on ranks, by their types.

A step that never looks across elements may work on this rank's parts, if parameters, gradients and
states lie alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal._torch import distributed_tensor
from shoal.tensor.sharded import ShardedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """How tensors of one type lie on ranks."""

    local: Callable[[Any], Tensor] | None
    """What gives this rank's part; None where a tensor is all there is."""
    place: Callable[[Any], object]
    """What must be equal in tensors that are added element by element."""
    spec: Callable[[Any], object]
    """What says the place, and is often the same object in every step."""
    holds: type
    """The type of gradients and moments."""

    def locals_of(self, tensors: list[Any]) -> list[Tensor]:
        """This rank's parts."""
        return tensors if self.local is None else [*map(self.local, tensors)]

    def are_alike(self, some: list[Any], others: list[Any]) -> bool:
        """Whether two lists of tensors lie alike, one by one."""
        return [*map(self.place, some)] == [*map(self.place, others)]


TENSOR_TYPES: dict[type, TensorType] = {
    DTensor: TensorType(
        local=distributed_tensor.local_tensor,
        place=distributed_tensor.place_getter,
        spec=distributed_tensor.spec_of,
        holds=DTensor,
    ),
    ShardedTensor: TensorType(
        local=attrgetter("local"),
        place=attrgetter("placement"),
        spec=attrgetter("placement"),
        holds=ShardedTensor,
    ),
    nn.Parameter: TensorType(
        local=None,
        place=attrgetter("layout", "shape"),
        spec=attrgetter("layout"),  # shapes are the parameters': autograd takes no others
        holds=Tensor,
    ),
}


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    kind = TENSOR_TYPES.get(type(tensor))
    return tensor if kind is None or kind.local is None else kind.local(tensor)
