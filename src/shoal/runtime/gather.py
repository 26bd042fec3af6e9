"""How a unit's shards become gathered bytes: copy in, cast, an all-gather of each section.

`reshard_after_forward=n`: after forward each rank keeps its piece of the full parameters for a
group of n ranks (`PostForward`), and backward gathers within that group: more memory, less
communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shoal._torch import distributed_tensor, kernels
from shoal.comm import observer
from shoal.comm.calls import Pair
from shoal.comm.pending import Pending, Prepared
from shoal.comm.transport import Transport
from shoal.layout import Even
from shoal.layout.buffer import gathered_rows, shard_of, shard_views
from shoal.layout.packing import Packing
from shoal.low_precision import Wire
from shoal.mesh import FSDPMeshInfo
from shoal.runtime.arena import Arena, Buffer
from shoal.runtime.full import FullParameters
from shoal.runtime.policy import AllGather
from shoal.runtime.streams import Streams, no_wait

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit


class Stored(Protocol):
    """What a rank sends: bytes, and where in them parameters lie."""

    @property
    def buffer(self) -> torch.Tensor:
        """The bytes."""
        ...

    @property
    def packing(self) -> Packing:
        """How they are laid out."""
        ...


class KeptShards:
    """This rank's shards in the dtype of compute, or encoded, written once per change of them.

    Otherwise every gather reads the shards, in forward and again in backward. These are written
    when shards have changed, and gathers send what was written then.
    """

    def __init__(
        self,
        shards: Stored,
        packing: Packing,
        rank: int,
        device: torch.device,
        wire: Wire | None = None,
    ) -> None:
        self.packing = packing if wire is None else wire.packing
        """How they are laid out."""
        self.buffer = torch.zeros(self.packing.shard_bytes, dtype=torch.uint8, device=device)
        self._stored, self._stored_packing, self._rank = shards.buffer, shards.packing, rank
        self._wire = wire
        self._version: object = None
        self._is_unsent = False
        """Whether no gather has sent what an optimizer's step wrote."""
        self._was_in_vain = False
        """Whether that was written over before."""

    def write(self, version: object) -> None:
        """A gather is about to send a version: write it, unless it is there."""
        if version != self._version:
            self._was_in_vain |= self._is_unsent
            self._write(version)
        self._is_unsent = False

    def write_early(self, version: object) -> None:
        """An optimizer's step has made a version: write it, so that no gather waits for a cast.

        Not if nobody has sent what was written last, as between the steps of two optimizers; nor
        ever again if that was written over, as where weights are clamped after each step.
        """
        if version != self._version and not self._is_unsent and not self._was_in_vain:
            self._write(version)
            self._is_unsent = True

    def forget(self) -> None:
        """Whatever the shards are now, the next gather writes it."""
        self._version = None
        self._is_unsent = False

    @torch.no_grad()
    def _write(self, version: object) -> None:
        self._version = None  # until it is written
        # From the host in two steps: a copy that casts on the way is made by it, and it waits.
        stored = self._stored.to(self.buffer.device, non_blocking=True)
        if self._wire is not None:
            locals_ = shard_views(self._stored_packing, self._rank, stored)
            self._wire.encode(locals_, self._rank, self.buffer)
            self._version = version
            return
        ends = ((self.packing, self.buffer), (self._stored_packing, stored))
        if all(len({param.dtype for param in packing.params}) == 1 for packing, _ in ends):
            into, source = (buffer.view(packing.params[0].dtype) for packing, buffer in ends)
            into.copy_(source)
        else:
            into, source = (shard_views(packing, self._rank, buffer) for packing, buffer in ends)
            kernels.foreach_copy(into, source)
        self._version = version


class Gather:
    """The all-gather of one unit, prepared once and launched in every step.

    Where shards have to be cast, or come from another device, they are written straight to this
    rank's place in the output, from where the collective sends them.
    """

    def __init__(
        self,
        unit: str,
        shards: Stored,
        packing: Packing,
        output: torch.Tensor,
        transport: Transport | None,
        streams: Streams,
    ) -> None:
        self._reason = f"the gather of unit {unit!r}"
        self.streams = streams
        self._output = output
        self._transport = transport
        rank, size = (0, 1) if transport is None else (transport.rank, transport.size)
        itemsize = output.dtype.itemsize
        spans = [(part.start // itemsize, part.stop // itemsize) for part in packing.sections]
        outputs = [output[size * start : size * stop] for start, stop in spans]
        self._mine = [
            one[rank * (stop - start) : (rank + 1) * (stop - start)]
            for one, (start, stop) in zip(outputs, spans, strict=True)
        ]
        stored = shards.buffer
        is_as_stored = packing is shards.packing and stored.device == output.device
        self._copy_in: Callable[[], object] | None = None
        if not is_as_stored or size == 1:
            self._copy_in = self._copy_of(shards, packing, rank)
        self._prepared: Prepared | None = None
        self._pairs: list[Pair] = []
        if transport is not None and size > 1 and output.numel() > 0:
            flat = stored.view(output.dtype) if is_as_stored else None
            sent = self._mine if flat is None else [flat[start:stop] for start, stop in spans]
            pairs = list(zip(outputs, sent, strict=True))
            self._prepared = transport.prepare_all_gathers(output, pairs, reason=self._reason)
            self._in_stream = transport.gather_in_stream(output, pairs, reason=self._reason)
            self._pairs = pairs

    def let_go(self) -> None:
        """Give back what only the way needed, which is nothing: bytes come to where they stay."""

    @property
    def sent(self) -> list[torch.Tensor]:
        """What this rank gives to each part of the gather; nothing where it is alone."""
        return [sent for _, sent in self._pairs]

    @property
    def received(self) -> list[torch.Tensor]:
        """The parts, each the same of all ranks."""
        return [received for received, _ in self._pairs]

    def _copy_of(self, shards: Stored, packing: Packing, rank: int) -> Callable[[], object]:
        """What writes the shards to this rank's places."""
        before = {param.dtype for param in shards.packing.params}
        after = {param.dtype for param in packing.params}
        is_cast = packing is not shards.packing
        if is_cast and max(len(before), len(after)) > 1:
            sources = shard_views(shards.packing, rank, shards.buffer)
            targets = [self._place_of(packing, index, rank) for index in range(len(sources))]
            return lambda: kernels.foreach_copy(targets, sources)
        stored, targets = shards.buffer.view(before.pop() if is_cast else torch.uint8), self._mine
        if not is_cast:
            targets = [target.view(torch.uint8) for target in targets]
        widths = [target.numel() for target in targets]
        if stored.device == targets[0].device and len(targets) > 1:
            sources = list(stored.split(widths))
            return lambda: kernels.foreach_copy(targets, sources)
        if stored.device != targets[0].device and is_cast:
            # In two steps: a copy that casts on the way is made by the host, which waits.
            device = targets[0].device
            return lambda: kernels.foreach_copy(
                targets, list(stored.to(device, non_blocking=True).split(widths))
            )
        pairs = list(zip(targets, stored.split(widths), strict=True))
        return lambda: [target.copy_(source, non_blocking=True) for target, source in pairs]

    def _place_of(self, packing: Packing, index: int, rank: int) -> torch.Tensor:
        """Where a parameter's piece goes in this rank's places."""
        section, piece = packing.section_of(index), packing.piece(index, rank)
        mine = self._mine[packing.sections.index(section)].view(torch.uint8)
        start, param = piece.offset_bytes - section.start, packing.params[index]
        return (
            mine[start : start + piece.numel * param.itemsize].view(param.dtype).view(piece.shape)
        )

    def launch(
        self,
        custom: AllGather | None,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> Callable[[], object]:
        """Start it, beside compute; returns what makes the current stream (or the host) wait.

        `before` is done first, in order with it, and `after` when the bytes are there. Nothing here
        requires a gradient, so autograd records nothing in any mode.
        """
        lane = self.streams.gathering
        if lane is None:
            if before is not None:
                before()
            wait = self._launch(custom)
            return wait if after is None else partial(_in_order, wait, after)
        with lane:
            if before is not None:
                before()
            if self._copy_in is not None:
                self._copy_in()
            if self._prepared is not None:
                if custom is None:
                    self._in_stream()
                else:
                    self._run_custom(custom)
            if after is not None:
                after()
            mark = lane.mark()
        return partial(lane.join, mark)

    def _launch(self, custom: AllGather | None) -> Callable[[], object]:
        if self._copy_in is not None:
            self._copy_in()
        if self._prepared is None:
            return no_wait
        if custom is not None:
            return self._run_custom(custom).wait
        return self._prepared.launch().wait

    def _run_custom(self, custom: AllGather) -> Pending:
        assert self._transport is not None
        output, size = self._output, self._transport.size
        launched = observer.launching(self._reason, self._transport.group, output)
        with torch.no_grad():
            sent = [sent for _, sent in self._pairs]
            given = custom.allocate((output.numel(),), dtype=output.dtype, device=output.device)
            whole = sent[0] if len(sent) == 1 else torch.cat(sent)
            work = custom(given, whole, self._transport.group, async_op=True)

        def copy_out() -> None:
            columns = given.view(size, -1).split([one.numel() for one in sent], dim=1)
            for (into, _), rows in zip(self._pairs, columns, strict=True):
                into.view(size, -1).copy_(rows)

        pending = Pending(output, work, self._reason, copy_out, launched)
        if self.streams.gathering is not None:
            pending.wait()
        return pending


class EncodedGather:
    """The gather of one unit in a format of few bits: encoded shards travel, and are decoded.

    What travels needs memory of its own, from the launch until somebody has waited.
    """

    def __init__(
        self,
        unit: str,
        shards: Stored,
        wire: Wire,
        output: torch.Tensor,
        transport: Transport | None,
        streams: Streams,
        arena: Arena,
    ) -> None:
        self._received = Buffer(wire.packing.gathered_bytes, arena)
        rank = 0 if transport is None else transport.rank
        rows = self._received.bytes
        self._row = rows[rank * wire.row_bytes : (rank + 1) * wire.row_bytes]
        place = Staged(buffer=self._row, packing=wire.packing)
        self._gather = Gather(unit, place, wire.packing, rows, transport, streams)
        self._decode = wire.decoder(rows, output.view(torch.uint8))
        self._wire, self._shards, self._rank = wire, shards, rank
        self._received.settle()
        self._has_memory = False

    @property
    def streams(self) -> Streams:
        """Where it runs."""
        return self._gather.streams

    @streams.setter
    def streams(self, streams: Streams) -> None:
        self._gather.streams = streams

    @property
    def sent(self) -> list[torch.Tensor]:
        """What this rank gives; nothing where it is alone."""
        return self._gather.sent

    @property
    def received(self) -> list[torch.Tensor]:
        """What all ranks gave."""
        return self._gather.received

    def launch(
        self, custom: AllGather | None, before: Callable[[], object] | None = None
    ) -> Callable[[], object]:
        """See `Gather.launch`."""
        self._received.fill()
        self._has_memory = True
        return self._gather.launch(custom, partial(self._encode, before), self._decoded)

    @torch.no_grad()
    def _encode(self, before: Callable[[], object] | None) -> None:
        if before is not None:
            before()
        stored, packing = self._shards.buffer, self._shards.packing
        if packing is self._wire.packing:
            self._row.copy_(stored)
            return
        stored = stored.to(self._row.device, non_blocking=True)
        self._wire.encode(shard_views(packing, self._rank, stored), self._rank, self._row)

    @torch.no_grad()
    def _decoded(self) -> None:
        self._decode()

    def let_go(self) -> None:
        """Give the memory of what has travelled back, once the current stream has waited."""
        if self._has_memory:
            self._received.empty()
            self._has_memory = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Bytes to send that are no unit's shards, as they lie."""

    buffer: torch.Tensor
    packing: Packing


def _in_order(*steps: Callable[[], object]) -> None:
    for step in steps:
        step()


class PostForward:
    """What a unit keeps after forward."""

    def __init__(self, unit: Unit, info: FSDPMeshInfo) -> None:
        self._unit = unit
        self._info = info
        self._transport = Transport(info.shard_process_group)
        self._packing: Packing | None = None
        self._shard: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None

    @property
    def is_active(self) -> bool:
        """Whether the parameters are resharded here now."""
        return self._shard is not None

    def keep(self, full: FullParameters) -> None:
        """Keep this rank's piece of the full parameters, and register it on the modules."""
        members = self._unit.shards.members
        datas = [
            member.wrapping.packed(parameter.detach())
            for member, parameter in zip(members, full.parameters, strict=True)
        ]
        if self._packing is None or self._packing.params != self._unit.compute_packing.params:
            params = self._unit.compute_packing.params
            self._packing = Even().pack(params, self._transport.size)
        self._shard = shard_of(self._packing, self._transport.rank, datas)
        views = shard_views(self._packing, self._transport.rank, self._shard)
        for member, data, view in zip(members, datas, views, strict=True):
            if not member.sharded.dim():
                member.register(member.sharded)
                continue
            spec = distributed_tensor.dtensor_spec(
                self._info.mesh,
                (Replicate(), Shard(0)),
                data.shape,
                torch.empty(data.shape, device="meta").stride(),
                data.dtype,
            )
            parameter = nn.Parameter(
                distributed_tensor.dtensor(view, spec), requires_grad=member.sharded.requires_grad
            )
            member.register(parameter)

    def launch(self) -> Pending:
        """Start to gather the pieces within the smaller group."""
        assert self._shard is not None
        assert self._packing is not None
        num_bytes = self._packing.gathered_bytes
        self._gathered = torch.empty(num_bytes, dtype=torch.uint8, device=self._shard.device)
        reason = f"the gather of unit {self._unit.name!r} after its forward"
        return self._transport.all_gather(self._gathered, self._shard, reason=reason)

    def restore(self, full: FullParameters) -> None:
        """Make the full parameters from what was gathered."""
        assert self._gathered is not None
        assert self._packing is not None
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, data in enumerate(full.revive()):
            rows = gathered_rows(self._packing, self._gathered, index)
            for stripe in self._packing.stripes(index):
                targets.append(stripe.of_full(data.view(-1)))
                sources.append(stripe.of_rows(rows))
        with torch.no_grad():
            if targets:
                kernels.foreach_copy(targets, sources)
            full.turn()
        self.drop()

    def drop(self) -> None:
        """Free the pieces."""
        self._shard = self._gathered = None
