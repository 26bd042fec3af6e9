"""Gradients between backward and step: `clip_grad_norm_`, and a gradient scaler for shards."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import sharded_grad_scaler as by_torch

from shoal.doors.fsdp1.root import ready
from shoal.doors.fsdp1.tensor_parallel import groups_of, spec_of
from shoal.doors.fsdp1.unit import WrappedUnit
from shoal.doors.fsdp1.wrapper import Wrapper, wrappers_below
from shoal.runtime.parameter_wrapping import bytes_of

_Groups = tuple[dist.ProcessGroup, ...]
_Piece = tuple[_Groups, torch.Tensor | None]
"""Some elements of a gradient, if there is one, and the groups of ranks that hold the rest."""


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
        by_groups = _grads_of(self)
        if not any(by_groups):
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        # Of the parameters, since all ranks have the same: one without gradients sums with others.
        wide = any(parameter.dtype is torch.float64 for parameter in self.parameters())
        dtype = torch.float64 if wide else torch.float32
        norm = _Norm(float(norm_type), dtype, self.compute_device)
        parts = [norm.part(grads) for grads in by_groups.values()]
        for groups, part in zip(by_groups, parts, strict=True):
            for group in groups:
                dist.all_reduce(part, norm.reduce_op, group=group)
        total = norm.of(parts)
        grads = [grad for some in by_groups.values() for grad in some]
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


def _grads_of(root: Wrapper) -> dict[_Groups, list[torch.Tensor]]:
    """Pieces of gradients by the groups of ranks that hold the rest of them; none for whole ones.

    Groups are there also if this rank has no gradient of theirs: other ranks may have.
    """
    found: dict[_Groups, list[torch.Tensor]] = {(): []}
    of_wrappers: set[nn.Parameter] = set()
    pieces: list[_Piece] = []
    for one in wrappers_below(root):
        if one._unit is not None:
            of_wrappers.update(one._unit.sharded_parameters())
            pieces.extend(_pieces(one, one._unit))
    for parameter in root.parameters():
        if parameter not in of_wrappers:  # `fully_shard`, or nobody, has sharded it
            grad = None if parameter.grad is None else bytes_of(parameter.grad)
            pieces.append((groups_of(spec_of(parameter)), grad))
    for groups, grad in pieces:
        held = found.setdefault(groups, [])
        if grad is not None and grad.numel() > 0:
            held.append(grad)
    return found


def _pieces(wrapper: Wrapper, unit: WrappedUnit) -> Iterator[_Piece]:
    """The gradients of a unit, in as many pieces as their elements have kinds of groups."""
    own = () if unit.transport is None else (unit.transport.group,)
    flat, grads = wrapper._flat_members, [p.grad for p in unit.sharded_parameters()]
    if flat is None:
        for one, grad in zip(wrapper._user_parameters, grads, strict=True):
            yield own + groups_of(one.before), grad
    elif all(one.before is None for one in flat.members):
        yield own, grads[0]
    else:
        for one, elements in flat.ranges(unit.own_range(0)):
            piece = None if grads[0] is None else grads[0].view(-1)[elements]
            yield own + groups_of(one.before), piece


class _Norm:
    """A norm whose parts are computed apart: as powers that are added, or as extremes."""

    def __init__(self, order: float, dtype: torch.dtype, device: torch.device) -> None:
        if order == 0:
            raise ValueError("clip_grad_norm_ takes a norm_type other than 0, which is no norm")
        self._order, self._dtype, self._device = order, dtype, device
        extreme = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
        self.reduce_op = extreme if math.isinf(order) else dist.ReduceOp.SUM

    def part(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The contribution of some gradients, in fp32, or in fp64 if any parameter has it."""
        if not grads:
            nothing = math.inf if self._order == -math.inf else 0.0
            return torch.tensor(nothing, dtype=self._dtype, device=self._device)
        norms = [torch.linalg.vector_norm(g, self._order, dtype=self._dtype) for g in grads]
        stacked = torch.stack([norm.to(self._device) for norm in norms])
        norm = torch.linalg.vector_norm(stacked, self._order)
        return norm if math.isinf(self._order) else norm**self._order

    def of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of everything that contributed."""
        stacked = torch.stack(list(parts))
        if math.isinf(self._order):
            return stacked.amax() if self._order > 0 else stacked.amin()
        return stacked.sum() ** (1.0 / self._order)


class ShardedGradScaler(by_torch.ShardedGradScaler):
    """torch's scaler, which waits for the tensors that it reads and writes on the host.

    It looks for infinities in the gradients that an optimizer holds, whichever API sharded them,
    and lets the ranks agree on the result.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        # torch begins to copy both to the host, and goes on there at once: offloaded gradients
        # would be multiplied by what is not there yet, and the late copy clears a flag that is set.
        if not inv_scale.is_cpu and _has_grads_on_host(optimizer):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def _has_grads_on_host(optimizer: torch.optim.Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(p.grad is not None and p.grad.is_cpu for p in parameters)
