"""A replicated module around its forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch import autograd, dynamo, traces
from shoal.comm.transport import Transport
from shoal.ddp.broadcast import broadcast
from shoal.ddp.comm_hook import Hook
from shoal.ddp.graph_reducer import GraphReducer
from shoal.ddp.reducer import Reducer

_REPLICA = "_shoal_replica"


class Replica:
    """A replicated module: its reducers, its buffers, its hooks around forward."""

    def __init__(
        self,
        module: nn.Module,
        reducer: Reducer,
        transport: Transport,
        buffers: Sequence[tuple[nn.Module, str]],
    ) -> None:
        self.reducer = reducer
        self.averages = True
        """Whether gradients of the forwards to come are averaged."""
        self.transport = transport
        self._buffers = tuple(buffers)
        self.have_buffers_changed = True
        """Whether ranks may have buffers of their own, so that the next forward shares rank 0's."""
        self.in_graph = GraphReducer(module, reducer.parameters, transport)
        reducer.average_traced = self.in_graph.average_traced

    def attach(self, module: nn.Module) -> None:
        """Stand around the module's calls."""
        # Past nn.Module's own bookkeeping, and out of its state.
        vars(module)[_REPLICA] = self
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._after)

    def broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers. Collective."""
        if self._buffers:
            # By name, since a module may put other tensors in their place.
            found = (module._buffers.get(name) for module, name in self._buffers)
            buffers = [buffer for buffer in found if buffer is not None]
            broadcast(buffers, self.transport, reason="buffers of rank 0")

    def _before(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        if not (torch.compiler.is_compiling() and _is_captured()):
            self._before_eager()

    def _after(self, _: nn.Module, __: tuple[Any, ...], output: object) -> None:
        if not (torch.compiler.is_compiling() and _is_captured()):
            self._after_eager(output)

    @dynamo.unwrapped_by_dynamo
    def _before_eager(self) -> None:
        if autograd.inside_backward() or autograd.inside_function_transform():
            return  # a checkpoint recomputes; what `torch.func` makes is each rank's own
        is_averaged = torch.is_grad_enabled() and self.averages
        if torch.is_grad_enabled():
            # Forward decides for its backward, wherever that is called.
            self.reducer.begin_forward(averages=self.averages, in_graph=False)
        if is_averaged:
            self.reducer.before_forward()
        # A forward that is averaged has left ranks with buffers of their own.
        if self.have_buffers_changed:
            self.broadcast_buffers()
        self.have_buffers_changed = is_averaged

    @dynamo.unwrapped_by_dynamo
    def _after_eager(self, output: object) -> None:
        if not self.averages or not torch.is_grad_enabled():
            return
        if not (autograd.inside_backward() or autograd.inside_function_transform()):
            self.reducer.after_forward(output)

    def enter_graph(self, module: nn.Module) -> dict[str, Tensor]:
        """By name what stands for the parameters in a graph. Traced: what is read is guarded."""
        trains, reducer = torch.is_grad_enabled(), self.reducer
        averages = trains and self.averages
        # What a rank has accumulated by itself is for the reducer to average, with the rest.
        by_graph = averages and self.in_graph.can_average and not reducer.has_own
        if trains:
            reducer.begin_forward(averages=self.averages, in_graph=by_graph)
        if self.have_buffers_changed and self._buffers:
            found = [module._buffers[name] for module, name in self._buffers]
            self.in_graph.share([buffer for buffer in found if buffer is not None])
        self.have_buffers_changed = averages
        return self.in_graph.parameters(module) if by_graph else {}


@dynamo.constant_in_graph
def _is_captured() -> bool:
    """Whether a graph that is being traced takes the averages in."""
    return dynamo.tracing_backend() == "shoal"


class ReplicatedModule(nn.Module):
    """The methods that `replicate` adds to a module's class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the class without replicas, as when a container is sliced."""
        return cls.__mro__[2](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; in a graph of shoal's, with parameters whose gradients are averaged."""
        replica: Replica = self.__dict__[_REPLICA]
        if torch.compiler.is_compiling() and _is_captured():
            with traces.parameters_replaced(self, replica.enter_graph(self)):
                return super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Say whether the backward of the forwards to come averages gradients.

        Without, they accumulate on each rank; the next backward that averages takes all of them.
        """
        _replica(self).averages = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forwards in here accumulate gradients without averaging them."""
        replica = _replica(self)
        before, replica.averages = replica.averages, False
        try:
            yield
        finally:
            replica.averages = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` average buckets; it returns a future of the average.

        The contract is that of torch's `DistributedDataParallel`, and its hooks work:
        `torch.distributed.algorithms.ddp_comm_hooks`.
        """
        replica = _replica(self)
        replica.reducer.average_by(state, hook)
        replica.in_graph.average_by(state, hook)


def _replica(module: nn.Module) -> Replica:
    return vars(module)[_REPLICA]


def replicas_of(model: nn.Module) -> list[Replica]:
    """The replicas of the replicated modules in a model."""
    found = (vars(module).get(_REPLICA) for module in model.modules())
    return [replica for replica in found if replica is not None]
