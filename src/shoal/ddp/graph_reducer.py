"""Gradients averaged inside a captured graph: an all-reduce for each of them, as ordinary nodes.

    parameter ──────────────────────────────────────────────── forward
    its gradient ── (cast) ── wait ── all-reduce ── divide ── (cast) ── gradient   backward

Each stands where its gradient is there; passes over the graph make few of many. A graph is the same
on all ranks, so a parameter that it does not use is unused on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal._torch import collectives, dynamo, wrapping
from shoal.comm.transport import Transport
from shoal.ddp.comm_hook import Hook

_SOURCE = 0


class GraphReducer:
    """How a graph averages gradients, and gives all ranks the buffers of the first."""

    def __init__(
        self, module: nn.Module, trained: Iterable[nn.Parameter], transport: Transport
    ) -> None:
        self.wire: torch.dtype | None = None
        """The dtype in which gradients travel; None for their own."""
        self.can_average = True
        """Whether a graph can do what the communication hook does."""
        names = _all_names(module, frozenset(trained))
        # A constant while tracing: a guard for each name would cost more than the graph.
        self._names = dynamo.constant_in_graph(lambda: names)
        self._group, self._size = transport.group, transport.size
        self._averaged = dynamo.allowed_in_graph(lambda tensor: _Averaged.apply(tensor, self))
        self.average_traced = dynamo.allowed_in_graph(self.average)
        """The mean of a gradient, where a backward is traced by itself (compiled autograd)."""
        self._of_first_rank = dynamo.allowed_in_graph(
            lambda tensor: collectives.broadcast_in_graph(tensor, _SOURCE, self._group)
        )

    def average_by(self, state: object, hook: Hook) -> None:
        """Do what a communication hook does, where a graph can.

        Known are those of torch's that send gradients in another dtype, in the module's own group.
        """
        self.wire = wrapping.compressing_hooks().get(hook)
        group = dist.group.WORLD if state is None else state
        self.can_average = self.wire is not None and group is self._group

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """By name what stands for the parameters in a graph. Traced: what is read is guarded."""
        tensors: dict[str, Tensor] = {}
        assert self.wire is None or self.wire.is_floating_point
        for names in self._names():
            owner, _, own_name = names[0].rpartition(".")
            parameter = getattr(module.get_submodule(owner), own_name)
            if parameter.requires_grad:
                averaged = self._averaged(parameter)
                for name in names:
                    tensors[name] = averaged
        return tensors

    def share(self, buffers: Sequence[Tensor]) -> None:
        """Overwrite buffers with those of the first rank, one broadcast for each kind. Traced."""
        if self._size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in buffers:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        with torch.no_grad():
            for alike in kinds.values():
                flat = self._of_first_rank(torch.cat([one.reshape(-1) for one in alike]))
                pieces = flat.split([one.numel() for one in alike])
                for buffer, piece in zip(alike, pieces, strict=True):
                    buffer.copy_(piece.view(buffer.shape))

    def average(self, grad: Tensor) -> Tensor:
        """The mean of a gradient over the ranks. Collective."""
        if not self.can_average:
            raise NotImplementedError(
                "shoal: a communication hook other than fp16_compress_hook and bf16_compress_hook "
                "cannot be part of a traced backward; run backward without compiled autograd"
            )
        if self._size == 1:
            return grad
        # Divided first, which keeps 16-bit sums in range.
        sent = grad.to(self.wire or grad.dtype) / self._size
        return collectives.all_reduce_in_graph(sent, self._group).to(grad.dtype)


class _Averaged(torch.autograd.Function):
    """A parameter as it is, whose derivative is averaged."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, how: GraphReducer) -> Tensor:  # type: ignore[override]
        ctx.how = how
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.how.average(grad), None


def _all_names(module: nn.Module, chosen: frozenset[nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    """For each of some parameters all names that it has in a module."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in chosen:
            names.setdefault(parameter, []).append(name)
    return tuple(map(tuple, names.values()))
