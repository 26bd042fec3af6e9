"""Adafactor on sharded parameters: sums over rows and columns are sums over ranks.

    squares of this rank's elements ── all-reduce ──▶ means of rows and columns, everywhere
    updates of this rank's elements ── all-reduce ──▶ their norms

Two small collectives in a step, whatever the number of parameters: no matrix travels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shoal.comm.transport import Transport
from shoal.layout.buffer import region_views
from shoal.layout.region import Region
from shoal.optim.local_tensors import local_of
from shoal.optim.matrix_places import cut_of, is_range


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, where no rank has all of a parameter; the numbers are its, but rounding.

    optimizer = shoal.optim.Adafactor(model.parameters(), lr=1e-2)

    It takes torch's arguments. In state dicts the factors of a sharded parameter are DTensors that
    every rank has. With replicas and another layout than `Even`, pass the mesh that `fully_shard`
    was given. All ranks must have gradients for the same parameters.
    """

    _mesh: DeviceMesh | None = None

    def __init__(
        self, params: Iterable[Any], *args: Any, mesh: DeviceMesh | None = None, **options: Any
    ) -> None:
        super().__init__(params, *args, **options)
        self._mesh = mesh

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Collective, unless every parameter is whole where it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            _Work(f"parameter {number} of group {index} of Adafactor", p, group, self._mesh)
            for index, group in enumerate(self.param_groups)
            for number, p in enumerate(group["params"])
            if p.grad is not None or (is_range(p) and p.requires_grad)
        ]
        _add_over_ranks(work, [one.squares() for one in work])
        _add_over_ranks(work, [one.prepare(self.state[one.parameter]) for one in work])
        for one in work:
            one.move()
        return loss


class _Work:
    """One parameter in one step."""

    def __init__(
        self, name: str, parameter: Tensor, group: Mapping[str, Any], mesh: DeviceMesh | None
    ) -> None:
        self.parameter, self._options = parameter, group
        cut = cut_of(name, parameter, mesh)
        self.group: ProcessGroup | None = None if cut is None else cut.group
        self._shape = tuple(parameter.shape) if cut is None else cut.shape
        self._is_matrix = len(self._shape) > 1
        self._root = math.sqrt(math.prod(self._shape))
        regions = (Region.whole(self._shape),)
        self.counts = True
        """Whether sums over ranks take this rank's elements: those of one copy."""
        if cut is not None:
            rank = cut.group.rank()
            regions, self.counts = cut.regions_of(rank), cut.copy_of(rank) == cut.copy_of(0)
        self._regions = regions
        self._local = local_of(parameter.detach())
        grad = torch.zeros_like(self._local) if parameter.grad is None else local_of(parameter.grad)
        self._grad = -grad if group["maximize"] else grad

    def _parts(self, local: Tensor) -> list[tuple[Region, Tensor]]:
        return region_views(local, self._regions) if self._regions else []

    def squares(self) -> list[Tensor]:
        """The sum of the parameter's squares, and of the gradient's by rows and columns."""
        self._total = _square(self._local)
        self._by_rows = self._local.new_zeros((*self._shape[:-1], 1) if self._is_matrix else ())
        self._by_columns = self._by_rows.new_zeros((*self._shape[:-2], 1, *self._shape[-1:]))
        if not self._is_matrix:
            return [self._total]
        for region, part in self._parts(self._grad):
            squares, slices = part.square(), region.slices
            self._by_rows[slices[:-1]] += squares.sum(-1, keepdim=True)
            self._by_columns[(*slices[:-2], slice(None), slices[-1])] += squares.sum(
                -2, keepdim=True
            )
        return [self._total, self._by_rows, self._by_columns]

    def prepare(self, state: dict[str, Any]) -> list[Tensor]:
        """Renew the state, and make the update; returns the sum of its squares."""
        if not state:
            self._begin(state)
        options = self._options
        state["step"] += 1
        step, lr = float(state["step"]), float(options["lr"])
        renewal = step ** options["beta2_decay"]
        eps1, eps2 = options["eps"]
        eps1 = torch.finfo(self._local.dtype).eps if eps1 is None else eps1
        size = self._total.sqrt().item() / self._root
        self._rate = max(eps2, size) * min(lr, 1 / math.sqrt(step))
        self._local.mul_(1 - lr * options["weight_decay"])
        if self._is_matrix:
            rows, columns = (local_of(state[key]) for key in ("row_var", "col_var"))
            rows.lerp_(self._by_rows / self._shape[-1], renewal)
            columns.lerp_(self._by_columns / self._shape[-2], renewal)
            estimate = self._estimate(rows, columns, eps1)
        else:
            variance = local_of(state["variance"])
            estimate = variance.lerp_(self._grad.square(), renewal).clone()
        self._update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(self._grad)
        self._size = _square(self._update)
        return [self._size]

    def _estimate(self, rows: Tensor, columns: Tensor, eps1: float) -> Tensor:
        """This rank's elements of the product of both factors."""
        estimate = torch.empty_like(self._grad)
        means = rows.mean(dim=-2, keepdim=True).clamp_(min=eps1)
        for region, part in self._parts(estimate):
            slices = region.slices
            product = rows[slices[:-1]] * columns[(*slices[:-2], slice(None), slices[-1])]
            part.copy_(product / means[slices[:-2]])
        return estimate

    def _begin(self, state: dict[str, Any]) -> None:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        if self._is_matrix:
            kept = {"row_var": self._by_rows, "col_var": self._by_columns}
            for key, like in kept.items():
                zeros = torch.zeros_like(like)
                state[key] = zeros if self.group is None else _on_all(zeros, self.group)
        else:
            state["variance"] = torch.zeros_like(self.parameter.detach())

    def move(self) -> None:
        """Change this rank's elements."""
        size = self._size.sqrt().item() / self._root
        self._local.add_(self._update, alpha=-self._rate / max(1.0, size / self._options["d"]))


def _square(local: Tensor) -> Tensor:
    return torch.linalg.vector_norm(local).square()


def _on_all(value: Tensor, group: ProcessGroup) -> DTensor:
    mesh = _mesh_of(group, value.device.type)
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


@functools.lru_cache(maxsize=16)
def _mesh_of(group: ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


def _add_over_ranks(work: Sequence[_Work], sums: Sequence[list[Tensor]]) -> None:
    """Add tensors up over the ranks that share their parameters, in one collective per group."""
    by_group: dict[ProcessGroup, list[tuple[_Work, list[Tensor]]]] = {}
    for one, tensors in zip(work, sums, strict=True):
        if one.group is not None and one.group.size() > 1:
            by_group.setdefault(one.group, []).append((one, tensors))
    for group, found in by_group.items():
        tensors = [tensor for _, some in found for tensor in some]
        for one, some in found:
            for tensor in some if not one.counts else ():
                tensor.zero_()
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        Transport(group).all_reduce(flat, reason="the sums of squares of Adafactor").wait()
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
