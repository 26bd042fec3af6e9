"""LBFGS on sharded parameters: torch's own algorithm, over vectors that ranks have parts of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.transport import Transport
from shoal.optim.local_tensors import local_of
from shoal.optim.matrix_places import cut_of, group_of


class LBFGS(torch.optim.LBFGS):
    """torch's LBFGS, where no rank has all of a parameter; the numbers are its, but for rounding.

    optimizer = shoal.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    optimizer.step(closure)

    Every rank's closure returns the loss of its own rows. The search goes by the mean over ranks,
    which `step` returns, so that all ranks search alike. Each product of two directions is a
    collective of one number. With replicas of whole parameters, or of another layout than `Even`,
    pass the mesh of all ranks. States are lists of vectors, which checkpoints do not take.
    """

    def __init__(
        self, params: Iterable[Any], *args: Any, mesh: DeviceMesh | None = None, **options: Any
    ) -> None:
        super().__init__(params, *args, **options)
        self._parameters: list[Tensor] = self.param_groups[0]["params"]
        self._ranks = _SummedOverRanks.of(self._parameters, mesh)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # pyright: ignore
        """Take a step. Collective."""
        return super().step(lambda: self._ranks.mean(closure()))

    def _gather_flat_grad(self) -> Any:
        pieces = []
        for parameter in self._parameters:
            grad = parameter.grad
            if grad is not None and grad.is_sparse:
                grad = grad.to_dense()
            local = local_of(parameter.detach())
            pieces.append(_real(torch.zeros_like(local) if grad is None else local_of(grad)))
        return _Vector(torch.cat([piece.reshape(-1) for piece in pieces]), self._ranks)

    def _add_grad(self, step_size: Any, update: _Vector) -> None:
        locals_ = self._locals()
        parts = update.local.split([local.numel() for local in locals_])
        for local, part in zip(locals_, parts, strict=True):
            local.add_(part.view(local.shape), alpha=float(step_size))

    def _locals(self) -> list[Tensor]:
        return [_real(local_of(parameter.detach())) for parameter in self._parameters]

    def _clone_param(self) -> list[Tensor]:
        return [local.clone() for local in self._locals()]

    def _set_param(self, params_data: Sequence[Tensor]) -> None:
        for local, data in zip(self._locals(), params_data, strict=True):
            local.copy_(data)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _SummedOverRanks:
    """Who has the elements of all parameters, laid end to end."""

    transport: Transport | None
    """All of them; None if everything is whole here."""
    copies: Tensor
    """On how many ranks each of this rank's elements is."""

    @classmethod
    def of(cls, parameters: Sequence[Tensor], mesh: DeviceMesh | None) -> _SummedOverRanks:
        cuts = [cut_of(f"parameter {i} of LBFGS", p, mesh) for i, p in enumerate(parameters)]
        groups: list[ProcessGroup] = [cut.group for cut in cuts if cut is not None]
        if not groups and mesh is not None:  # replicas, whose losses differ
            groups = [group_of(mesh)]
        group = max(groups, key=lambda group: group.size(), default=None)
        size = 1 if group is None else group.size()
        parts: list[Tensor] = []
        for parameter, cut in zip(parameters, cuts, strict=True):
            local = _real(local_of(parameter.detach()))
            copies = float(size)
            if cut is not None:
                on_group = sum(cut.numel_on(rank) for rank in range(cut.group.size()))
                copies = on_group / math.prod(cut.shape) * size / cut.group.size()
            parts.append(torch.full((local.numel(),), copies, device=local.device))
        transport = None if group is None or size == 1 else Transport(group)
        return cls(transport=transport, copies=torch.cat(parts))

    def sum(self, elements: Tensor) -> Tensor:
        """The sum of a vector's elements, each counted once."""
        return self._reduced((elements / self.copies).sum(), ReduceOp.SUM)

    def max(self, elements: Tensor) -> Tensor:
        """The largest of a vector's elements, none of which is below zero."""
        return self._reduced(torch.cat([elements, elements.new_zeros(1)]).max(), ReduceOp.MAX)

    def mean(self, loss: Tensor) -> Tensor:
        """The mean over ranks."""
        if self.transport is None:
            return loss
        return self._reduced(loss.detach().clone(), ReduceOp.SUM) / self.transport.size

    def _reduced(self, number: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.transport is not None:
            self.transport.all_reduce(number.view(1), op, reason="a product of LBFGS").wait()
        return number


class _Vector:
    """A vector of which this rank has a part, with the operations that torch's LBFGS uses."""

    def __init__(self, local: Tensor, ranks: _SummedOverRanks) -> None:
        self.local, self.ranks = local, ranks

    def _like(self, local: Tensor) -> _Vector:
        return _Vector(local, self.ranks)

    def abs(self) -> _Vector:
        return self._like(self.local.abs())

    def neg(self) -> _Vector:
        return self._like(self.local.neg())

    def sub(self, other: _Vector) -> _Vector:
        return self._like(self.local - other.local)

    def mul(self, factor: Any) -> _Vector:
        return self._like(self.local * factor)

    def add_(self, other: _Vector, *, alpha: Any) -> _Vector:
        self.local.add_(other.local, alpha=float(alpha))
        return self

    def copy_(self, other: _Vector) -> _Vector:
        self.local.copy_(other.local)
        return self

    def clone(self, **_: Any) -> _Vector:
        return self._like(self.local.clone())

    def dot(self, other: _Vector) -> Tensor:
        return self.ranks.sum(self.local * other.local)

    def sum(self) -> Tensor:
        return self.ranks.sum(self.local)

    def max(self) -> Tensor:
        return self.ranks.max(self.local)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if func is not torch.mul:
            return NotImplemented
        return args[0].mul(args[1])
