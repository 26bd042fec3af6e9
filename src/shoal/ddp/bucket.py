"""Gradients that travel together: one flat tensor, with a view for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from shoal._torch import cuda, kernels
from shoal.comm.pending import Pending, Prepared
from shoal.comm.transport import Transport

Named: TypeAlias = tuple[str, nn.Parameter]


class Bucket:
    """Some parameters' gradients, from the first that is ready until all are averaged.

    The memory stays from step to step, so that the all-reduce is checked once.
    """

    def __init__(
        self,
        place: tuple[int, int],
        members: tuple[int, ...],
        named: Sequence[Named],
        transport: Transport,
    ) -> None:
        self.index, num_buckets = place
        self.is_last = self.index == num_buckets - 1
        self.parameters = parameters = [parameter for _, parameter in named]
        first = parameters[0]
        self.members = members
        """Numbers of its parameters."""
        self.missing = len(members)
        """How many of its gradients are not ready yet in this backward."""
        self.is_launched = False
        numels = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(numels), dtype=first.dtype, device=first.device)
        pieces = self.flat.split(numels)
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        names = [name for name, _ in named]
        self._gradients = list(zip(members, names, parameters, self.views, strict=True))
        self._pending: Pending | None = None
        self.group = transport.group
        self.reason = f"all-reduce of bucket {self.index} ({named[0][0]} to {named[-1][0]})"
        # No backend adds complex numbers up.
        real = torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat
        self._divisor, self._average = _averaging(transport, real, self.reason)
        is_cuda = first.device.type == "cuda"
        self._streams: set[torch.cuda.Stream] | None = set() if is_cuda else None
        self._index_of_device = first.device.index or 0

    def note_stream(self) -> None:
        """A gradient was made on the current stream, which is not always the same one."""
        if self._streams is not None:
            self._streams.add(cuda.stream_in_use(self._index_of_device).stream)

    def launch(self, hook: Callable[[Bucket], Pending] | None) -> None:
        """Copy the gradients here, and start to average them: by a hook, or an all-reduce."""
        self.is_launched = True
        with torch.no_grad():
            self._fill()
            if hook is not None:
                self._pending = hook(self)
            elif self._average is not None:
                if self._divisor != 1:
                    self.flat.div_(self._divisor)
                self._pending = self._average.launch()

    def _fill(self) -> None:
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for _, _, parameter, view in self._gradients:
            grad = parameter.grad
            if grad is view:
                continue  # autograd has added to it right here
            if grad is None:
                view.zero_()
                continue
            sources.append(grad if grad.layout is torch.strided else grad.to_dense())
            targets.append(view)
        self._order_streams(sources)
        if sources:
            kernels.foreach_copy(targets, sources)

    def _order_streams(self, sources: Sequence[Tensor]) -> None:
        """Read gradients after the streams that made them; keep their memory until then."""
        if not self._streams:
            return
        current = cuda.stream_in_use(self._index_of_device).stream
        others = self._streams - {current}
        self._streams.clear()
        for stream in others:
            current.wait_stream(stream)
        if others:
            for source in sources:
                source.record_stream(current)

    def wait(self) -> None:
        """Make the averages readable here."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def deliver(self, *, as_views: bool, skipped: frozenset[int]) -> None:
        """Put the averages on the parameters, but for those that no rank has used."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for number, _, parameter, view in self._gradients:
            grad = parameter.grad
            if number in skipped or grad is view:
                continue
            if as_views:
                parameter.grad = view
            elif grad is None or grad.layout is not torch.strided:
                parameter.grad = view.clone()
            else:
                sources.append(view)
                targets.append(grad)
        if sources:
            with torch.no_grad():
                kernels.foreach_copy(targets, sources)

    def forget(self) -> None:
        """Be ready for another backward; a collective that is still in flight is waited for."""
        if self._streams is not None:
            self._streams.clear()
        self.is_launched = False
        self.wait()


def _averaging(transport: Transport, flat: Tensor, reason: str) -> tuple[int, Prepared | None]:
    """The divisor before an all-reduce, and the all-reduce; None if there is none.

    Dividing first keeps 16-bit sums in range; NCCL does it on its way.
    """
    if transport.size == 1 or not flat.numel():
        return 1, None
    if flat.device.type == "cpu":
        return transport.size, transport.prepare_all_reduce(flat, ReduceOp.SUM, reason=reason)
    return 1, transport.prepare_all_reduce(flat, ReduceOp.AVG, reason=reason)
