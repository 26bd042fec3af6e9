"""Parameters that stay plain tensors: the user's own objects, whose bytes come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import eq
from typing import ClassVar

import torch
from torch import nn

from shoal.runtime.form import Form, local_grad
from shoal.wrapper.distributed import Spec, whole


def _identity(tensor: torch.Tensor) -> object:
    """Where a tensor lies; without elements that is nowhere, but it can be moved and cast."""
    return tensor.data_ptr() or (tensor.device, tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForm(Form):
    """A parameter that is one rank's elements in one dim, or all of them in its own shape."""

    identity: ClassVar[Callable[[torch.Tensor], object]] = _identity
    is_same: ClassVar[Callable[[object, object], bool]] = eq

    shape: torch.Size | None
    """The shape of the parameter where every rank has all of it."""
    before: Spec = None
    """How the full parameter is distributed over other axes."""
    is_flat: bool = False
    """Whether it is the flat parameter of a unit, of which every rank has a gradient and optimizer
    state, even if without elements."""

    def adopt(self, original: nn.Parameter, local: torch.Tensor) -> nn.Parameter:
        """See `Form.adopt`: the object stays, so that whoever holds it holds the shard."""
        if self.before is not None:  # a DTensor stays one
            return nn.Parameter(self.shard(local), requires_grad=original.requires_grad)
        original.data = self.shard(local)
        return original

    def full(self, data: torch.Tensor) -> torch.Tensor:
        """See `Form.full`."""
        return whole(data, self.before)

    def grad_data(self, grad: torch.Tensor) -> torch.Tensor:
        """See `Form.grad_data`."""
        return grad if self.before is None else local_grad(grad, self.before)

    def shard(self, local: torch.Tensor) -> torch.Tensor:
        """See `Form.shard`."""
        return local if self.shape is None else local.view(self.shape)

    def grad(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor | None:
        """See `Form.grad`; a rank without elements has none, unless the parameter is flat."""
        return self.shard(local) if self.is_flat or local.numel() > 0 else None

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `Form.local_of`."""
        return tensor

    def rehome(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `Form.rehome`."""
        tensor.data = self.shard(local)

    def follow(self, tensor: torch.Tensor) -> Form:
        """See `Form.follow`."""
        return self


def before_of(form: Form) -> Spec:
    """How a parameter of a wrapper is distributed over other axes."""
    assert isinstance(form, PlainForm)
    return form.before
