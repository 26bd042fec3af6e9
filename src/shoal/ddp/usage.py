"""Which parameters a backward uses: on this rank by its graph, on any rank by a bitmap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.comm.pending import Pending
from shoal.comm.transport import Transport


class Usage:
    """The parameters that this rank, and any rank, has used since gradients were averaged."""

    __slots__ = ("_device", "_pending", "_transport", "_unused", "_used", "is_settled")

    def __init__(self, num_parameters: int, device: torch.device, transport: Transport) -> None:
        self._used = bytearray(num_parameters)
        self._device = device
        self._transport = transport
        self._pending: Pending | None = None
        self._unused: frozenset[int] = frozenset()
        self.is_settled = False
        """Whether it is known for good: every step will be as the last one was."""

    def note(self, number: int) -> None:
        """A backward has come to a parameter, whether gradients are averaged or not."""
        self._used[number] = 1

    def launch(self) -> None:
        """Ask all ranks. Collective."""
        used = torch.tensor(list(self._used), dtype=torch.int32, device=self._device)
        self._pending = self._transport.all_reduce(used, ReduceOp.MAX, reason="used parameters")

    def unused_everywhere(self) -> frozenset[int]:
        """The parameters that no rank has used; their gradients stay as they are."""
        if self.is_settled:
            return self._unused
        assert self._pending is not None
        used = self._pending.wait()
        # A rank that has used all of them need not read, for which a GPU would have to stop.
        counts = () if all(self._used) else used.tolist()
        self._unused = frozenset(number for number, count in enumerate(counts) if not count)
        self._pending = None
        self._used = bytearray(len(self._used))
        return self._unused


def reached(outputs: Sequence[Tensor], numbers: Mapping[Tensor, int]) -> Iterator[int]:
    """The numbers of the parameters in the graph of some outputs, each as it is found.

    The first is near the outputs, as a rule. What a reentrant checkpoint recomputes is not in the
    graph yet.
    """
    seen: set[Any] = set()
    queue: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        parameter = getattr(node, "variable", None)
        number = None if parameter is None else numbers.get(parameter)
        if number is not None:
            yield number
        queue.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
