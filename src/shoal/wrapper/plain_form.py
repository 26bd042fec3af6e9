"""Parameters that stay plain tensors: the user's own objects, whose bytes come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import eq
from typing import ClassVar

import torch
from torch import nn

from shoal.runtime.form import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForm(Form):
    """A parameter that is one rank's elements in one dim, or all of them in its own shape."""

    identity: ClassVar[Callable[[torch.Tensor], object]] = torch.Tensor.data_ptr
    is_same: ClassVar[Callable[[object, object], bool]] = eq

    shape: torch.Size | None
    """The shape of the parameter where every rank has all of it."""

    def adopt(self, original: nn.Parameter, local: torch.Tensor) -> nn.Parameter:
        """See `Form.adopt`: the object stays, so that whoever holds it holds the shard."""
        original.data = self.shard(local)
        return original

    def shard(self, local: torch.Tensor) -> torch.Tensor:
        """See `Form.shard`."""
        return local if self.shape is None else local.view(self.shape)

    def grad(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor | None:
        """See `Form.grad`; where a rank has no elements there is no gradient either."""
        return self.shard(local) if local.numel() > 0 else None

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `Form.local_of`."""
        return tensor

    def rehome(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `Form.rehome`."""
        tensor.data = self.shard(local)

    def follow(self, tensor: torch.Tensor) -> Form:
        """See `Form.follow`."""
        return self
