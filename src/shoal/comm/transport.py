"""Collectives over flat tensors, on any c10d process group.

    Transport(group).all_gather(output, shard)  ->  Pending  ->  wait()  ->  output

Every collective is asynchronous and answers with one `Pending`. What a backend lacks is served
here rather than by the caller:

- gloo's reduce-scatter moves twice its bytes: here it is an all-to-all, then a local reduction in
  rank order, measured twice as fast;
- gloo lacks AVG in some releases: here it is SUM, then a division;
- gloo and NCCL refuse some element types (float8, int16, complex, …): where a collective only moves
  data, here they travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shoal import _torch
from shoal.comm.calls import Reduction
from shoal.comm.reduction import reduce_in_order
from shoal.errors import MeshError, RankError, ShoalError, UsageError

# Every backend carries these as they are; everything else travels as bytes.
_CARRIED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


class Waitable(Protocol):
    """What a collective in flight must offer: c10d's `Work` does."""

    def wait(self) -> object:
        """Wait for the collective."""
        ...


class Pending:
    """One collective in flight: its output, why it was asked for, and the wait for it.

    On CPU `wait` blocks the host. On CUDA it makes the *current stream* wait, so that stream may
    read the output afterwards and the host runs on. Waiting again is free; it does not order a
    second stream.
    """

    __slots__ = ("_finish", "_work", "output", "reason")

    def __init__(
        self,
        output: Tensor,
        work: Waitable | None,
        reason: str,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.output = output
        self.reason = reason
        self._work = work
        self._finish = finish

    @property
    def waited(self) -> bool:
        """Whether somebody has waited for it already."""
        return self._work is None

    def wait(self) -> Tensor:
        """Make the output readable here, and return it."""
        work = self._work
        if work is None:
            return self.output
        try:
            work.wait()
        except ShoalError:
            raise
        except RuntimeError as error:
            raise RankError(
                f"{self.reason} failed while waiting for the other ranks: {error}"
            ) from error
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
        # Dropping these releases the buffers that the collective kept alive.
        self._work = self._finish = None
        return self.output

    def __repr__(self) -> str:
        state = "done" if self.waited else "in flight"
        return f"Pending({self.reason}, {tuple(self.output.shape)}, {state})"


class Transport:
    """The collectives of one process group, for flat contiguous tensors."""

    __slots__ = ("_backends", "group", "rank", "size")

    def __init__(self, group: ProcessGroup) -> None:
        if not isinstance(group, ProcessGroup):
            raise MeshError(
                f"expected a process group that this rank belongs to, got {group!r}: "
                "make the group with new_group or a DeviceMesh, and use it on its members only"
            )
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        # "cpu:gloo,cuda:nccl" -> which backend serves which device type
        pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._backends = dict(pairs)

    def all_gather(self, output: Tensor, input: Tensor, *, reason: str = "all-gather") -> Pending:
        """Concatenate every rank's `input`, in rank order, into `output`."""
        self._check(reason, output, input)
        self._check_numel(reason, "output", output.numel(), self.size * input.numel())
        sent, received = _as_carried(input), _as_carried(output)
        work = _torch.all_gather_flat(received, sent, self.group)
        return Pending(output, work, reason)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: Reduction = ReduceOp.SUM,
        *,
        reason: str = "reduce-scatter",
    ) -> Pending:
        """Reduce every rank's `input` and keep this rank's piece of the result in `output`."""
        self._check(reason, output, input)
        self._check_numel(reason, "input", input.numel(), self.size * output.numel())
        self._check_reducible(reason, input, op)
        if self._backends.get(input.device.type) == "gloo":
            return self._exchange_and_reduce(output, input, op, reason)
        work = _torch.reduce_scatter_flat(output, input, op, self.group)
        return Pending(output, work, reason)

    def all_reduce(
        self, tensor: Tensor, op: Reduction = ReduceOp.SUM, *, reason: str = "all-reduce"
    ) -> Pending:
        """Reduce `tensor` over all ranks, in place."""
        self._check(reason, tensor)
        self._check_reducible(reason, tensor, op)
        finish: Callable[[], object] | None = None
        if op == ReduceOp.AVG and self._backends.get(tensor.device.type) == "gloo":
            op, finish = ReduceOp.SUM, partial(tensor.div_, self.size)
        carried_op = cast("ReduceOp.RedOpType", op)  # torch's stub forgets PREMUL_SUM
        work = dist.all_reduce(tensor, op=carried_op, group=self.group, async_op=True)
        return Pending(tensor, work, reason, finish)

    def broadcast(self, tensor: Tensor, source: int, *, reason: str = "broadcast") -> Pending:
        """Overwrite `tensor` with the one of rank `source` of this group."""
        self._check(reason, tensor)
        if not 0 <= source < self.size:
            raise UsageError(f"{reason}: source must be a rank in [0, {self.size}), got {source}")
        work = dist.broadcast(
            _as_carried(tensor), group_src=source, group=self.group, async_op=True
        )
        return Pending(tensor, work, reason)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_numels: Sequence[int] | None = None,
        input_numels: Sequence[int] | None = None,
        *,
        reason: str = "all-to-all",
    ) -> Pending:
        """Send the i-th piece of `input` to rank i, and receive rank i's as the i-th of `output`.

        Pieces are equal unless their sizes are given.
        """
        self._check(reason, output, input)
        received, sent = _as_carried(output), _as_carried(input)
        work = dist.all_to_all_single(
            received,
            sent,
            self._splits(reason, "output", output, received, output_numels),
            self._splits(reason, "input", input, sent, input_numels),
            group=self.group,
            async_op=True,
        )
        return Pending(output, work, reason)

    def _exchange_and_reduce(
        self, output: Tensor, input: Tensor, op: Reduction, reason: str
    ) -> Pending:
        # gloo reduces the whole input on every rank and keeps a piece: twice the bytes, measured
        # 2 × the time at 4 MiB. Exchanging pieces also fixes the order of summation.
        pieces = torch.empty_like(input)
        work = dist.all_to_all_single(pieces, input, group=self.group, async_op=True)
        reduce = partial(reduce_in_order, pieces.chunk(self.size), op, output)
        return Pending(output, work, reason, reduce)

    def _splits(
        self, reason: str, name: str, tensor: Tensor, carried: Tensor, numels: Sequence[int] | None
    ) -> list[int] | None:
        if numels is None:
            if tensor.numel() % self.size:
                raise UsageError(
                    f"{reason}: {name} of {tensor.numel()} elements cannot be cut into {self.size} "
                    f"equal pieces; pass {name}_numels"
                )
            return None
        if len(numels) != self.size or min(numels) < 0:
            raise UsageError(
                f"{reason}: {name}_numels must give a size for each of {self.size} ranks, "
                f"got {list(numels)}"
            )
        self._check_numel(reason, name, tensor.numel(), sum(numels))
        bytes_per_element = tensor.element_size() // carried.element_size()
        return [numel * bytes_per_element for numel in numels]

    def _check(self, reason: str, output: Tensor, input: Tensor | None = None) -> None:
        for name, tensor in (("output", output), ("input", input)):
            if tensor is not None and (tensor.dim() != 1 or not tensor.is_contiguous()):
                raise UsageError(
                    f"{reason}: {name} must be one-dimensional and contiguous, got shape "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}; pass tensor.view(-1)"
                )
        if input is not None and (output.dtype != input.dtype or output.device != input.device):
            raise UsageError(
                f"{reason}: output and input must share dtype and device, got "
                f"{output.dtype} on {output.device} and {input.dtype} on {input.device}"
            )

    def _check_numel(self, reason: str, name: str, numel: int, expected: int) -> None:
        if numel != expected:
            raise UsageError(
                f"{reason} on rank {self.rank} of {self.size}: {name} has {numel} elements, "
                f"expected {expected}"
            )

    def _check_reducible(self, reason: str, tensor: Tensor, op: Reduction) -> None:
        if tensor.dtype not in _CARRIED:
            raise NotImplementedError(
                f"{reason}: no backend reduces {tensor.dtype}; convert it to a wider type first"
            )
        if op == ReduceOp.AVG and not tensor.dtype.is_floating_point:
            raise UsageError(f"{reason}: AVG of {tensor.dtype} is not whole; reduce with SUM")


def _as_carried(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)
