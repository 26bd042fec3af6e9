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

from shoal._torch import collectives, groups
from shoal.comm import gloo, observer
from shoal.comm.calls import Pair, Reduction
from shoal.comm.messages import backends_of
from shoal.comm.pending import Pending, Prepared, Started, launch, together
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
        if "gloo" in self._backends.values():
            groups.pause_at_exit()
        self._gather = collectives.gather_method(group)
        self._scatters: dict[str, Callable[[Tensor, Tensor], dist.Work]] = {}
        self._swap = collectives.all_to_all_method(group)

    def all_gather(self, output: Tensor, input: Tensor, *, reason: str = "all-gather") -> Pending:
        """Concatenate every rank's `input`, in rank order, into `output`."""
        return self.prepare_all_gathers(output, [(output, input)], reason=reason).launch()

    def prepare_all_gathers(
        self, output: Tensor, pairs: Sequence[Pair], *, reason: str = "all-gather"
    ) -> Prepared:
        """Check all-gathers into parts of `output` that will be launched together, many times."""
        starts: list[Callable[[], Started]] = []
        for received, sent in pairs:
            self._check(reason, received, sent)
            self._check_numel(reason, "output", received.numel(), self.size * sent.numel())
            starts.append(self._gathering(_as_carried(received), _as_carried(sent)))
        start = starts[0] if len(starts) == 1 else partial(_start_all, starts)
        return Prepared(output, reason, start, self.group)

    def _gathering(self, received: Tensor, sent: Tensor) -> Callable[[], Started]:
        if self._is_on_gloo(sent) and sent.is_cpu:
            ways = (self._swap, self._gather)
            return partial(gloo.start_gather, *ways, received, sent, self.size)
        gather = self._gather
        return lambda: (gather(received, sent), None)

    def gather_in_stream(
        self, output: Tensor, pairs: Sequence[Pair], *, reason: str = "all-gather"
    ) -> Callable[[], None]:
        """Prepare to gather into parts of `output` by one launch, in order with the CUDA stream."""
        carried = [(_as_carried(received), _as_carried(sent)) for received, sent in pairs]
        group = self.group
        if isinstance(group, PythonGroup):
            run = group.gather_in_stream(carried)
        else:
            run = collectives.gather_in_stream(group, carried)
        return partial(observer.run_in_stream, reason, group, output, run)

    def reduce_scatter_in_stream(
        self, op: Reduction, *, reason: str = "reduce-scatter"
    ) -> Callable[[Tensor, Sequence[Pair]], None]:
        """A function that reduces into parts of an output by one launch on the current CUDA stream.

        It checks nothing.
        """
        group = self.group
        if isinstance(group, PythonGroup):
            run = group.reduce_scatter_in_stream(op)
        else:
            run = collectives.scatter_in_stream(group, op)

        def reduce_scatter(output: Tensor, pairs: Sequence[Pair]) -> None:
            observer.run_in_stream(reason, group, output, run, pairs)

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
        return self.reduce_scatters(output, [(output, input)], op, reason=reason)

    def reduce_scatters(
        self,
        output: Tensor,
        pairs: Sequence[Pair],
        op: Reduction = ReduceOp.SUM,
        *,
        reason: str = "reduce-scatter",
    ) -> Pending:
        """Reduce inputs into parts of `output`, launched together."""
        starts: list[Callable[[], Started]] = []
        for kept, input in pairs:
            self._check(reason, kept, input)
            self._check_numel(reason, "input", input.numel(), self.size * kept.numel())
            self._check_reducible(reason, input, op)
            starts.append(self._scattering(kept, input, op))
        start = starts[0] if len(starts) == 1 else partial(_start_all, starts)
        return launch(reason, self.group, output, start)

    def _scattering(self, output: Tensor, input: Tensor, op: Reduction) -> Callable[[], Started]:
        scatter = self._scatter_by(op)
        if self._is_on_gloo(input):
            ways = (self._swap, scatter)
            return partial(gloo.start_reduce_scatter, *ways, output, input, op, self.size)
        return lambda: (scatter(output, input), None)

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


def _start_all(starts: Sequence[Callable[[], Started]]) -> Started:
    return together([start() for start in starts])


def _check_flat(reason: str, name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise UsageError(
            f"{reason}: {name} must be one-dimensional and contiguous, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}; pass tensor.view(-1)"
        )


def _as_carried(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)
