"""Clipping gradients by their norm, which no rank can compute alone."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from shoal.wrapper.base import Wrapper, wrappers_below
from shoal.wrapper.root import ready


class Clipping(Wrapper):
    """The method of the wrapper that clips gradients."""

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients down if their norm, taken over all ranks, exceeds `max_norm`.

        Returns that norm, in the widest dtype of the gradients. Every rank must call it.
        """
        if not ready(self).is_root:
            raise RuntimeError(
                "`clip_grad_norm_()` should only be called on the root FSDP instance, whose norm "
                "is that of all gradients"
            )
        sharded, whole = _grads_of(self)
        if not sharded:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        norm = _Norm(float(norm_type), self.compute_device)
        parts = [norm.part(grads) for grads in sharded.values()]
        for group, part in zip(sharded, parts, strict=True):
            dist.all_reduce(part, norm.reduce_op, group=group)
        total = norm.of([*parts, norm.part(whole)])
        grads = [grad for some in (*sharded.values(), whole) for grad in some]
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.device, grad.dtype))
        if self.cpu_offload.offload_params:
            total = total.cpu()
        if not grads:
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {self.rank} with no gradients -- returning "
                f"the total norm in the default dtype {total.dtype}",
                stacklevel=2,
            )
            return total
        return total.to(functools.reduce(torch.promote_types, (grad.dtype for grad in grads)))


def _grads_of(
    root: Wrapper,
) -> tuple[dict[dist.ProcessGroup, list[torch.Tensor]], list[torch.Tensor]]:
    """Pieces of gradients by the ranks that hold the rest of them, and whole gradients.

    A group is there also if this rank has no gradient in it: the others may have.
    """
    sharded: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    of: dict[nn.Parameter, dist.ProcessGroup] = {}
    for one in wrappers_below(root):
        unit = one._unit
        if unit is not None and unit.transport is not None:
            sharded.setdefault(unit.transport.group, [])
            of.update(dict.fromkeys(unit.sharded_parameters(), unit.transport.group))
    whole: list[torch.Tensor] = []
    for parameter in root.parameters():
        if parameter.grad is not None:
            group = of.get(parameter)
            (whole if group is None else sharded[group]).append(parameter.grad)
    return sharded, whole


class _Norm:
    """A norm whose parts are computed apart: as powers that are added, or as extremes."""

    def __init__(self, order: float, device: torch.device) -> None:
        if order == 0:
            raise ValueError("clip_grad_norm_ takes a norm_type other than 0, which is no norm")
        self._order, self._device = order, device
        extreme = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
        self.reduce_op = extreme if math.isinf(order) else dist.ReduceOp.SUM

    def part(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """What some gradients contribute, in fp32, whatever their dtype."""
        if not grads:
            return torch.tensor(math.inf if self._order == -math.inf else 0.0, device=self._device)
        norms = torch.stack(
            [
                torch.linalg.vector_norm(grad, self._order, dtype=torch.float32).to(self._device)
                for grad in grads
            ]
        )
        norm = torch.linalg.vector_norm(norms, self._order)
        return norm if math.isinf(self._order) else norm**self._order

    def of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of everything that contributed."""
        stacked = torch.stack(list(parts))
        if math.isinf(self._order):
            return stacked.amax() if self._order > 0 else stacked.amin()
        return stacked.sum() ** (1.0 / self._order)
