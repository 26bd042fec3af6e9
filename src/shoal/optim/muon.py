"""Muon on sharded matrices, each computed by one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shoal._torch import optimizers
from shoal.optim.local_tensors import TENSOR_TYPES, local_of
from shoal.optim.matrix_exchange import MatrixExchange
from shoal.optim.matrix_places import MatrixCut, cut_of


class Muon(torch.optim.Muon):
    """torch's Muon, to the bit given equal gradients, where no rank has all of a matrix.

    optimizer = shoal.optim.Muon(matrices, lr=2e-2)

    It takes torch's arguments, and gives torch's state dicts, whose momentum is placed like the
    parameter. Layouts and axes of a mesh do not matter: momentum is kept by those who have a part,
    the matrix travels to one rank in bfloat16, in which Muon computes, and its update back. With
    `layout=Whole()` nothing travels, where that deals work out fairly.

    With replicas and another layout than `Even`, pass the mesh that `fully_shard` was given: else
    each replica computes all of its matrices. Matrices that are cut count as having a gradient of
    zeros where they have none, because other ranks may have one.
    """

    _mesh: DeviceMesh | None = None
    _known: _Travels | None = None
    """Who computes what, found in the first step; pickles and copies find it anew."""

    def __init__(
        self, params: Iterable[Any], *args: Any, mesh: DeviceMesh | None = None, **options: Any
    ) -> None:
        super().__init__(params, *args, **options)
        self._mesh = mesh

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Collective, unless every matrix is whole where it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group_of: dict[Any, dict[str, Any]] = {
            p: group for group in self.param_groups for p in group["params"]
        }
        trained = [p for p in group_of if p.requires_grad]
        places = [TENSOR_TYPES[type(p)].spec(p) for p in trained]
        if self._known is None or not self._known.hold_for(trained, places):
            self._known = _Travels(trained, places, self._mesh)
        for parameter in self._known.here:
            if parameter.grad is not None:
                group = group_of[parameter]
                direction = self._direction(parameter, group).view(parameter.shape)
                self._move(parameter, group, _whole(direction, group))
        for exchange, found in self._known.exchanges:
            exchange.run(
                lambda i, found=found: self._direction(found[i], group_of[found[i]]).reshape(-1),
                lambda i, whole, found=found: _whole(whole, group_of[found[i]]),
                lambda i, shard, found=found: self._move(found[i], group_of[found[i]], shard),
            )
        return loss

    def _direction(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """This rank's part of what is to be made orthogonal; keeps the momentum."""
        state, grad = self.state[parameter], parameter.grad
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter if grad is None else grad)
        momentum = local_of(state["momentum_buffer"])
        local = torch.zeros_like(momentum) if grad is None else local_of(grad)
        momentum.lerp_(local, 1 - group["momentum"])
        return local.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _move(self, parameter: Tensor, group: Mapping[str, Any], update: Tensor) -> None:
        local, lr = local_of(parameter.detach()), float(group["lr"])
        local.mul_(1 - lr * group["weight_decay"])
        adjusted = optimizers.muon_lr(lr, group["adjust_lr_fn"], parameter.shape)
        local.add_(update.reshape(local.shape), alpha=-adjusted)


class _Travels:
    """Which parameters are whole here, and which travel among which ranks."""

    def __init__(
        self, parameters: Sequence[Tensor], places: Sequence[object], mesh: DeviceMesh | None
    ) -> None:
        self._seen = [*parameters, *places]
        self.here: list[Tensor] = []
        by_group: dict[ProcessGroup, list[tuple[Tensor, MatrixCut]]] = {}
        for number, parameter in enumerate(parameters):
            cut = cut_of(f"parameter {number} of Muon", parameter, mesh)
            if cut is None or cut.group.size() == 1:
                self.here.append(parameter)
            else:
                by_group.setdefault(cut.group, []).append((parameter, cut))
        self.exchanges = [
            (
                MatrixExchange(
                    [cut for _, cut in found],
                    [_cost(cut.shape) for _, cut in found],
                    torch.bfloat16,
                ),
                [parameter for parameter, _ in found],
            )
            for found in by_group.values()
        ]

    def hold_for(self, parameters: Sequence[Tensor], places: Sequence[object]) -> bool:
        """Whether these are the very parameters, and lie where they lay."""
        now = [*parameters, *places]
        return len(now) == len(self._seen) and all(map(is_, now, self._seen))


def _whole(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    return optimizers.orthogonalised(
        matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )


def _cost(shape: tuple[int, ...]) -> float:
    """What the products of one iteration cost: two of (m, n) with (m, m), and one of (m, m)."""
    m, n = min(shape), max(shape)
    return float(m * m * (2 * n + m))
