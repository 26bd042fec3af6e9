"""Collectives over flat tensors, on any c10d process group.

    Transport(group).all_gather(output, shard)  ->  Pending  ->  wait()  ->  output

Every collective is asynchronous and answers with one `Pending`. Those of a training step go to the
group's own methods, since c10d's functions check again what was checked here. They can be prepared,
so that the checks are made once for many launches.

What a backend lacks is served here rather than by the caller:

- gloo's all-gather and reduce-scatter are slow: here they are an all-to-all (`gloo`);
- gloo lacks AVG in some releases, and PREMUL_SUM: here they are SUM, then a multiplication;
- gloo and NCCL refuse some element types (float8, int16, complex, …): where a collective only moves
  data, here they travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shoal._torch import collectives
from shoal.comm import gloo, observer
from shoal.comm.calls import Reduction
from shoal.comm.messages import backends_of
from shoal.comm.pending import Pending, Prepared, Started, launch
from shoal.comm.python_group import PythonGroup
from shoal.errors import MeshError, UsageError

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


class Transport:
    """The collectives of one process group, for flat contiguous tensors."""

    __slots__ = ("_backends", "_gather", "_scatters", "_swap", "group", "rank", "size")

    def __init__(self, group: ProcessGroup) -> None:
        if not isinstance(group, ProcessGroup):
            raise MeshError(
                f"expected a process group that this rank belongs to, got {group!r}: "
                "make the group with new_group or a DeviceMesh, and use it on its members only"
            )
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._backends = backends_of(group)
        self._gather = collectives.gather_method(group)
        self._scatters: dict[str, Callable[[Tensor, Tensor], dist.Work]] = {}
        self._swap = collectives.all_to_all_method(group)

    def all_gather(self, output: Tensor, input: Tensor, *, reason: str = "all-gather") -> Pending:
        """Concatenate every rank's `input`, in rank order, into `output`."""
        return self.prepare_all_gather(output, input, reason=reason).launch()

    def prepare_all_gather(
        self, output: Tensor, input: Tensor, *, reason: str = "all-gather"
    ) -> Prepared:
        """Check an all-gather that will be launched many times."""
        self._check(reason, output, input)
        self._check_numel(reason, "output", output.numel(), self.size * input.numel())
        sent, received = _as_carried(input), _as_carried(output)
        if self._is_on_gloo(input) and input.is_cpu:
            ways = (self._swap, self._gather)
            start = partial(gloo.start_gather, *ways, received, sent, self.size)
            return Prepared(output, reason, start, self.group)
        gather = self._gather
        return Prepared(output, reason, lambda: (gather(received, sent), None), self.group)

    def gather_in_stream(
        self, output: Tensor, input: Tensor, *, reason: str = "all-gather"
    ) -> Callable[[], None]:
        """Prepare to gather on the current CUDA stream, in order with what it was given."""
        received, sent, group = _as_carried(output), _as_carried(input), self.group
        if isinstance(group, PythonGroup):
            run = group.gather_in_stream(received, sent)
        else:
            run = partial(collectives.gather_method(group, asynchronous=False), received, sent)
        return partial(observer.run_in_stream, reason, group, output, run)

    def reduce_scatter_in_stream(
        self, op: Reduction, *, reason: str = "reduce-scatter"
    ) -> Callable[[Tensor, Tensor], None]:
        """A function of (output, input) that reduces on the current CUDA stream; checks nothing."""
        group = self.group
        if isinstance(group, PythonGroup):
            run = group.reduce_scatter_in_stream(op)
        else:
            run = collectives.scatter_method(group, op, asynchronous=False)

        def reduce_scatter(output: Tensor, input: Tensor) -> None:
            observer.run_in_stream(reason, group, output, run, output, input)

        return reduce_scatter

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: Reduction = ReduceOp.SUM,
        *,
        reason: str = "reduce-scatter",
    ) -> Pending:
        """Reduce every rank's `input` and keep this rank's piece of the result in `output`."""
        return self.prepare_reduce_scatter(output, input, op, reason=reason).launch()

    def prepare_reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: Reduction = ReduceOp.SUM,
        *,
        reason: str = "reduce-scatter",
    ) -> Prepared:
        """Check a reduce-scatter that will be launched many times."""
        self._check(reason, output, input)
        self._check_numel(reason, "input", input.numel(), self.size * output.numel())
        self._check_reducible(reason, input, op)
        if self._is_on_gloo(input):
            ways = (self._swap, self._scatter_by(op))
            start = partial(gloo.start_reduce_scatter, *ways, output, input, op, self.size)
            return Prepared(output, reason, start, self.group)
        scatter = self._scatter_by(op)
        return Prepared(output, reason, lambda: (scatter(output, input), None), self.group)

    def _scatter_by(self, op: Reduction) -> Callable[[Tensor, Tensor], dist.Work]:
        key = str(op)
        method = self._scatters.get(key)
        if method is None:
            method = collectives.scatter_method(self.group, op)
            if op in (ReduceOp.SUM, ReduceOp.AVG):  # others may carry a factor
                self._scatters[key] = method
        return method

    def all_reduce(
        self, tensor: Tensor, op: Reduction = ReduceOp.SUM, *, reason: str = "all-reduce"
    ) -> Pending:
        """Reduce `tensor` over all ranks, in place."""
        return self.prepare_all_reduce(tensor, op, reason=reason).launch()

    def prepare_all_reduce(
        self, tensor: Tensor, op: Reduction = ReduceOp.SUM, *, reason: str = "all-reduce"
    ) -> Prepared:
        """Check an all-reduce that will be launched many times."""
        self._check(reason, tensor)
        self._check_reducible(reason, tensor, op)
        finish: Callable[[], object] | None = None
        if self._is_on_gloo(tensor):
            if op == ReduceOp.AVG:
                op, finish = ReduceOp.SUM, partial(tensor.div_, self.size)
            elif op == ReduceOp.PREMUL_SUM:
                op, finish = ReduceOp.SUM, partial(tensor.mul_, collectives.premultiplier(op))
        reduce = collectives.all_reduce_method(self.group, op)
        return Prepared(tensor, reason, lambda: (reduce(tensor), finish), self.group)

    def broadcast(self, tensor: Tensor, source: int, *, reason: str = "broadcast") -> Pending:
        """Overwrite `tensor` with the one of rank `source` of this group."""
        self._check(reason, tensor)
        if not 0 <= source < self.size:
            raise UsageError(f"{reason}: source must be a rank in [0, {self.size}), got {source}")
        sent, group = _as_carried(tensor), self.group

        def start() -> Started:
            return dist.broadcast(sent, group_src=source, group=group, async_op=True), None

        return launch(reason, group, tensor, start)

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
        splits = (
            self._splits(reason, "output", output, received, output_numels),
            self._splits(reason, "input", input, sent, input_numels),
        )
        group = self.group

        def start() -> Started:
            return dist.all_to_all_single(received, sent, *splits, group=group, async_op=True), None

        return launch(reason, group, output, start, same_size=False)

    def _is_on_gloo(self, tensor: Tensor) -> bool:
        return self._backends.get(tensor.device.type) == "gloo"

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
        _check_flat(reason, "output", output)
        if input is None:
            return
        _check_flat(reason, "input", input)
        if output.dtype != input.dtype or output.device != input.device:
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
        if not tensor.dtype.is_floating_point and op == ReduceOp.AVG:
            raise UsageError(f"{reason}: AVG of {tensor.dtype} is not whole; reduce with SUM")


def _check_flat(reason: str, name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise UsageError(
            f"{reason}: {name} must be one-dimensional and contiguous, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}; pass tensor.view(-1)"
        )


def _as_carried(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)
