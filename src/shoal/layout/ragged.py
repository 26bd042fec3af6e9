"""The ragged packing: parameters streamed one after another through the ranks' buffers.

rank 0  | a a a a a a | b b . |     a parameter goes on at the start of the next rank's buffer;
rank 1  | b b b b b b b b . . |     where its quanta do not fill a buffer, the rest is a gap
rank 2  | b b | c c c c c c c |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.errors import UsageError
from shoal.layout.packing import Packing, shard_step_bytes
from shoal.layout.piece import Piece
from shoal.layout.region import Region, flat_regions, flat_span
from shoal.layout.spec import ALIGN_NUMEL, ParamSpec, round_up
from shoal.layout.stripe import Stripe


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRun:
    """The way of one parameter through the ranks; counts are elements.

    `first` elements lie on rank `rank` from `offset_bytes` on, then `later` on each following
    rank, from the start of its buffer, until none is left. The start is a multiple of `align`.
    """

    rank: int
    offset_bytes: int
    first: int
    later: int
    align: int = ALIGN_NUMEL

    def __post_init__(self) -> None:
        if min(self.rank, self.offset_bytes) < 0 or min(self.first, self.later) < 1:
            raise UsageError(f"a run starts in the world and moves on at each rank, got {self}")
        if self.align < 1 or self.align % ALIGN_NUMEL != 0:
            raise UsageError(f"expected an alignment in steps of {ALIGN_NUMEL}, got {self.align}")

    def rank_of(self, element: int) -> int:
        """The rank that holds an element."""
        if element < self.first:
            return self.rank
        return self.rank + 1 + (element - self.first) // self.later

    def bounds(self, rank: int, numel: int) -> tuple[int, int]:
        """Which of `numel` elements a rank holds: from, to."""
        if rank < self.rank:
            return 0, 0
        hops = rank - self.rank
        start = 0 if hops == 0 else self.first + (hops - 1) * self.later
        stop = self.first + hops * self.later
        return min(start, numel), min(stop, numel)

    def offset_bytes_on(self, rank: int) -> int:
        """Where the elements on a rank start in its buffer."""
        return self.offset_bytes if rank == self.rank else 0

    def end(self, param: ParamSpec) -> tuple[int, int]:
        """The last rank that holds an element, and the byte of its buffer after it."""
        rank = self.rank_of(param.numel - 1)
        start, stop = self.bounds(rank, param.numel)
        return rank, self.offset_bytes_on(rank) + (stop - start) * param.itemsize

    def used_bytes(self, param: ParamSpec) -> int:
        """How large a shard must be for this parameter, on whichever rank needs most."""
        on_first = self.offset_bytes + min(self.first, param.numel) * param.itemsize
        on_later = min(self.later, max(param.numel - self.first, 0)) * param.itemsize
        return max(on_first, on_later)

    def is_one_run(self, param: ParamSpec, shard_bytes: int) -> bool:
        """Whether no gap lies between the parameter's elements in the gathered buffer."""
        if param.numel <= self.first:
            return True
        fills_first = self.offset_bytes + self.first * param.itemsize == shard_bytes
        fills_later = self.later * param.itemsize == shard_bytes
        return fills_first and (fills_later or param.numel <= self.first + self.later)


RUN_OF_NOTHING = ParamRun(rank=0, offset_bytes=0, first=1, later=1)
"""The run of a parameter with no element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedPacking(Packing):
    """A stream of parameters; where `by_rows`, local tensors keep all dims but the first."""

    runs: tuple[ParamRun, ...]
    by_rows: bool = False

    def __post_init__(self) -> None:
        Packing.__post_init__(self)
        self._check_one_each("runs", self.runs)
        end = (0, 0)
        for param, run in zip(self.params, self.runs, strict=True):
            if param.numel == 0:
                continue
            start = (run.rank, run.offset_bytes)
            if start < end or run.offset_bytes % (run.align * param.itemsize) != 0:
                raise UsageError(f"parameter {param.name!r} cannot start at {start}, after {end}")
            end = run.end(param)
            if run.used_bytes(param) > self.shard_bytes or end[0] >= self.world_size:
                raise UsageError(
                    f"parameter {param.name!r} does not fit: it ends at {end} of "
                    f"{self.world_size} ranks with {self.shard_bytes} bytes each"
                )
            if self.by_rows and any(
                count % param.row_numel != 0 and count < param.numel
                for count in (run.first, run.later)
            ):
                raise UsageError(f"parameter {param.name!r} is cut inside a row")

    def piece(self, index: int, rank: int) -> Piece:
        """See `Packing.piece`."""
        param, run = self._param(index), self.runs[index]
        self._check_rank(rank)
        start, stop = run.bounds(rank, param.numel)
        shape: tuple[int, ...] = (stop - start,)
        if self.by_rows and param.shape:
            shape = ((stop - start) // max(param.row_numel, 1), *param.shape[1:])
        elif self.by_rows and start < stop:
            shape = ()
        return Piece(
            offset_bytes=run.offset_bytes_on(rank),
            shape=shape,
            regions=flat_regions(param.shape, start, stop),
        )

    def holders(self, index: int, region: Region) -> range:
        """See `Packing.holders`."""
        self._check_region(index, region)
        run = self.runs[index]
        start, stop = flat_span(self.params[index].shape, region)
        return range(run.rank_of(start), run.rank_of(stop - 1) + 1) if start < stop else range(0)

    def stripes(self, index: int) -> tuple[Stripe, ...]:
        """See `Packing.stripes`: the first rank, full later ranks, the last rank."""
        param, run = self._param(index), self.runs[index]
        num_whole, rest = divmod(max(param.numel - run.first, 0), run.later)
        blocks = (
            (run.rank, 1, min(run.first, param.numel)),
            (run.rank + 1, num_whole, run.later),
            (run.rank + 1 + num_whole, 1, rest),
        )
        return tuple(
            Stripe(
                first_rank=first_rank,
                num_ranks=num_ranks,
                shard_offset=run.offset_bytes_on(first_rank) // param.itemsize,
                full_offset=run.bounds(first_rank, param.numel)[0],
                numel=numel,
            )
            for first_rank, num_ranks, numel in blocks
            if num_ranks * numel > 0
        )

    def gathered_offset(self, index: int) -> int | None:
        """See `Packing.gathered_offset`."""
        param, run = self._param(index), self.runs[index]
        if not run.is_one_run(param, self.shard_bytes):
            return None
        return run.rank * self.shard_bytes + run.offset_bytes

    def standing_for(self, params: Sequence[ParamSpec]) -> RaggedPacking:
        """See `Packing.standing_for`; when all itemsizes change alike, offsets scale with them."""
        self._check_one_each("params", params)
        runs: list[ParamRun] = []
        rank = end = shard_bytes = 0
        for before, param, run in zip(self.params, params, self.runs, strict=True):
            if param.numel == 0:
                runs.append(RUN_OF_NOTHING)
                continue
            end = end if run.rank == rank else 0
            each = before.numel // param.numel
            run = replace(
                run,
                offset_bytes=round_up(end, run.align * param.itemsize),
                first=max(run.first // each, 1),
                later=max(run.later // each, 1),
            )
            runs.append(run)
            shard_bytes = max(shard_bytes, run.used_bytes(param))
            rank, end = run.end(param)
        return RaggedPacking(
            params=tuple(params),
            world_size=self.world_size,
            shard_bytes=round_up(shard_bytes, shard_step_bytes(params)),
            runs=tuple(runs),
            by_rows=self.by_rows,
        )
