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
from shoal.comm.imagined_device import Lane
from shoal.comm.pending import Pending, Prepared
from shoal.comm.transport import Transport
from shoal.layout import Even, Flat
from shoal.layout.buffer import gathered_rows, shard_of, shard_views
from shoal.layout.packing import Packing
from shoal.layout.strides import row_major
from shoal.low_precision import Wire
from shoal.mesh import FSDPMeshInfo
from shoal.runtime.arena import Arena, Buffer
from shoal.runtime.full import FullParameters
from shoal.runtime.parameter_wrapping import bytes_of
from shoal.runtime.policy import AllGather
from shoal.runtime.streams import CudaLane, Streams, no_wait

if TYPE_CHECKING:
    from shoal.runtime.shards import Member
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


class ShardCopy:
    """A rank's shards on their way from the host to the device, where a gather reads them.

    Compute allocates the memory, the copying lane fills it, the gathering lane reads it. It goes
    back to compute when compute has waited for the gather, or for the copy that was given up.
    """

    def __init__(self, shards: Stored, streams: Streams) -> None:
        stored = shards.buffer
        self.packing = shards.packing
        self.buffer = torch.empty(stored.shape, dtype=stored.dtype, device=streams.device)
        self._lane = streams.copying
        """Who works with the memory: what fills it, and then what reads it."""
        self._mark: torch.cuda.Event | None = None
        if self._lane is None:
            self.buffer.copy_(stored)
            return
        with self._lane:
            self.buffer.copy_(stored, non_blocking=True)
            self._mark = self._lane.mark()

    def precede(self, lane: Lane) -> None:
        """Let the lane of gathers, which reads it, come after the copy."""
        if self._lane is not None:
            assert isinstance(lane, CudaLane)
            assert self._mark is not None
            lane.follow(self._lane, self._mark)
            self._lane, self._mark = lane, None

    def discard(self) -> None:
        """Let compute come after whoever works with it, so that the memory can be used again."""
        if self._lane is not None:
            self._lane.join(self._mark or self._lane.mark())


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
    rank's place in the output, from where the collective sends them. With `reads_copies` they may
    be copied to the device before there is an output.
    """

    def __init__(
        self,
        unit: str,
        shards: Stored,
        packing: Packing,
        output: torch.Tensor,
        transport: Transport | None,
        streams: Streams,
        *,
        reads_copies: bool = False,
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
        is_as_stored = is_as_stored and not reads_copies
        self._packing, self._rank = packing, rank
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
        copied: ShardCopy | None = None,
    ) -> Callable[[], object]:
        """Start it, beside compute; returns what makes the current stream (or the host) wait.

        `before` is done first, in order with it, and `after` when the bytes are there. A copy of
        the shards is read instead of them, and must stay until the gather was waited for. Nothing
        here requires a gradient, so autograd records nothing in any mode.
        """
        lane = self.streams.gathering
        copy_in = self._copy_in
        if copied is not None:
            copy_in = self._copy_of(copied, self._packing, self._rank)
        if lane is None:
            if before is not None:
                before()
            wait = self._launch(custom, copy_in)
            return wait if after is None else partial(_in_order, wait, after)
        with lane:
            if before is not None:
                before()
            if copied is not None:
                copied.precede(lane)
            if copy_in is not None:
                copy_in()
            if self._prepared is not None:
                if custom is None:
                    self._in_stream()
                else:
                    self._run_custom(custom)
            if after is not None:
                after()
            mark = lane.mark()
        return partial(lane.join, mark)

    def _launch(
        self, custom: AllGather | None, copy_in: Callable[[], object] | None
    ) -> Callable[[], object]:
        if copy_in is not None:
            copy_in()
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
        self,
        custom: AllGather | None,
        before: Callable[[], object] | None = None,
        *,
        copied: ShardCopy | None = None,
    ) -> Callable[[], object]:
        """See `Gather.launch`."""
        self._received.fill()
        self._has_memory = True
        return self._gather.launch(custom, partial(self._encode, before, copied), self._decoded)

    @torch.no_grad()
    def _encode(self, before: Callable[[], object] | None, copied: ShardCopy | None) -> None:
        if before is not None:
            before()
        lane = self.streams.gathering
        if copied is not None and lane is not None:
            copied.precede(lane)
        shards = copied or self._shards
        stored, packing = shards.buffer, shards.packing
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
        """Keep this rank's piece of the full parameters.

        With `Even` the modules show it, as torch's do; otherwise they show the shards. Parameters
        with gather hooks are not kept: their own hooks gather them again.
        """
        unit = self._unit
        packing = self._packing_of(unit.compute_packing)
        datas = [
            torch.empty(param.shape, dtype=param.dtype, device=unit.device)
            if index in unit.shards.extended
            else member.wrapping.packed(bytes_of(parameter.detach()))
            for index, (member, parameter, param) in enumerate(
                zip(unit.shards.members, full.parameters, packing.params, strict=True)
            )
        ]
        self._shard = shard_of(packing, self._transport.rank, datas)
        views = shard_views(packing, self._transport.rank, self._shard)
        for index, (member, data, view) in enumerate(
            zip(unit.shards.members, datas, views, strict=True)
        ):
            is_shown = index not in unit.shards.extended and self._can_show(member)
            member.register(self._shown(member, data, view) if is_shown else member.sharded)

    def _packing_of(self, full: Packing) -> Packing:
        """How the pieces are packed; in rows, where the modules show them."""
        if self._packing is None or self._packing.params != full.params:
            layout = Even() if isinstance(self._unit.layout, Even) else Flat()
            self._packing = layout.pack(full.params, self._transport.size)
        return self._packing

    def _can_show(self, member: Member) -> bool:
        """Whether a piece is a chunk of rows of the whole parameter."""
        is_even = isinstance(self._unit.layout, Even)
        return is_even and not member.wrapping.is_distributed and bool(member.sharded.dim())

    def _shown(self, member: Member, data: torch.Tensor, view: torch.Tensor) -> nn.Parameter:
        spec = distributed_tensor.dtensor_spec(
            self._info.mesh,
            (Replicate(), Shard(0)),
            data.shape,
            row_major(data.shape),
            data.dtype,
        )
        shown = distributed_tensor.dtensor(view, spec)
        return nn.Parameter(shown, requires_grad=member.sharded.requires_grad)

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
            if full.extension is not None:
                full.extension.finish()
        self.drop()

    def drop(self) -> None:
        """Free the pieces."""
        self._shard = self._gathered = None
