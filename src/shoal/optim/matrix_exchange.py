"""Steps on whole matrices that are cut over ranks: each is computed once, by one rank.

    shards ── all-to-all ──▶ the owner has the matrix ── compute ── all-to-all ──▶ shards

Each element goes to the owner once, and once back to each rank that has it: what stays on a rank is
not sent. Matrices go in rounds, so that the messages of a round travel while another is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.pending import Pending
from shoal.comm.transport import Transport
from shoal.optim.matrix_places import MatrixCut, owners

ROUND_BYTES = 32 << 20
"""What an owner takes in one round, unless a single matrix is larger."""


class MatrixExchange:
    """Matrices on the ranks of one group."""

    def __init__(
        self, cuts: Sequence[MatrixCut], costs: Sequence[float], wire: torch.dtype
    ) -> None:
        self._cuts, self._wire = cuts, wire
        self._transport = Transport(cuts[0].group)
        self._rank, self._size = self._transport.rank, self._transport.size
        self.owners = owners(costs, cuts)
        """The rank of the group that computes each matrix."""
        self._rounds = self._in_rounds(costs)
        self._device = torch.device("cpu")

    def _in_rounds(self, costs: Sequence[float]) -> list[list[int]]:
        """Each owner's matrices, the dearest first, as many in a round as are small."""
        rounds: list[list[int]] = []
        at, taken = [0] * self._size, [0] * self._size
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            owner, shape = self.owners[index], self._cuts[index].shape
            num_bytes = shape[0] * shape[1] * self._wire.itemsize
            if taken[owner] and taken[owner] + num_bytes > ROUND_BYTES:
                at[owner], taken[owner] = at[owner] + 1, 0
            taken[owner] += num_bytes
            while len(rounds) <= at[owner]:
                rounds.append([])
            rounds[at[owner]].append(index)
        return rounds

    def run(
        self,
        shard_of: Callable[[int], Tensor],
        compute: Callable[[int, Tensor], Tensor],
        put: Callable[[int, Tensor], None],
    ) -> None:
        """Give each matrix, made of shards, to `compute`, and shards of its results to `put`.

        Collective. A shard is this rank's rectangles one after another, as 1-D tensor.
        """
        gathering = self._gather(self._rounds[0], shard_of) if self._rounds else None
        returning = None
        for number, matrices in enumerate(self._rounds):
            assert gathering is not None
            wholes = gathering()
            if number + 1 < len(self._rounds):
                gathering = self._gather(self._rounds[number + 1], shard_of)
            results = {index: compute(index, whole) for index, whole in wholes.items()}
            following = self._give_back(matrices, results, put)
            if returning is not None:
                returning()
            returning = following
        if returning is not None:
            returning()

    def _gather(
        self, matrices: Sequence[int], shard_of: Callable[[int], Tensor]
    ) -> Callable[[], dict[int, Tensor]]:
        """Start to send shards to owners; what is returned gives this rank's matrices whole."""
        shards = {index: shard_of(index).to(self._wire) for index in matrices}
        self._device = next(iter(shards.values())).device
        sent: list[list[Tensor]] = [[] for _ in range(self._size)]
        targets: list[list[Tensor]] = [[] for _ in range(self._size)]
        wholes: dict[int, Tensor] = {}
        for index in matrices:
            cut, owner = self._cuts[index], self.owners[index]
            copy = cut.copy_of(owner)
            if owner != self._rank:
                if cut.copy_of(self._rank) == copy:
                    sent[owner].append(shards[index])
                continue
            wholes[index] = whole = shards[index].new_empty(cut.shape)
            for rank in range(self._size):
                if cut.copy_of(rank) == copy:
                    parts = [whole[region.slices] for region in cut.regions_of(rank)]
                    if rank != self._rank:
                        targets[rank] += parts
                    else:
                        _fill(parts, shards[index])
        wait = self._swap(matrices, sent, targets, "shards to the owners of matrices")

        def finish() -> dict[int, Tensor]:
            wait()
            return wholes

        return finish

    def _give_back(
        self,
        matrices: Sequence[int],
        results: dict[int, Tensor],
        put: Callable[[int, Tensor], None],
    ) -> Callable[[], None]:
        """Start to send results to all who have a part; what is returned puts this rank's."""
        sent: list[list[Tensor]] = [[] for _ in range(self._size)]
        targets: list[list[Tensor]] = [[] for _ in range(self._size)]
        shards: dict[int, Tensor] = {}
        for index in matrices:
            cut, owner = self._cuts[index], self.owners[index]
            if owner == self._rank:
                result = results[index].to(self._wire)
                for rank in range(self._size):
                    parts = [result[r.slices].reshape(-1) for r in cut.regions_of(rank)]
                    if rank == self._rank:
                        shards[index] = torch.cat(parts) if parts else result.new_empty(0)
                    else:
                        sent[rank] += parts
                continue
            numel = cut.numel_on(self._rank)
            shards[index] = torch.empty(numel, dtype=self._wire, device=self._device)
            targets[owner].append(shards[index])
        wait = self._swap(matrices, sent, targets, "results to the shards of matrices")

        def finish() -> None:
            wait()
            for index in matrices:
                put(index, shards[index])

        return finish

    def _swap(
        self,
        matrices: Sequence[int],
        sent: list[list[Tensor]],
        targets: list[list[Tensor]],
        reason: str,
    ) -> Callable[[], object]:
        """Start an all-to-all; what is returned waits, and fills the targets."""
        if all(self._stays(index) for index in matrices):
            return lambda: None
        parts = [part.reshape(-1) for one in sent for part in one]
        numels = [sum(part.numel() for part in one) for one in targets]
        received = torch.empty(sum(numels), dtype=self._wire, device=self._device)
        pending: Pending = self._transport.all_to_all(
            received,
            torch.cat(parts) if parts else received.new_empty(0),
            numels,
            [sum(part.numel() for part in one) for one in sent],
            reason=reason,
        )
        return lambda: _fill([part for one in targets for part in one], pending.wait())

    def _stays(self, index: int) -> bool:
        """Whether the owner is the only rank that has any of a matrix; so all ranks see it."""
        cut, owner = self._cuts[index], self.owners[index]
        return all(rank == owner or not cut.numel_on(rank) for rank in range(self._size))


def _fill(targets: Sequence[Tensor], flat: Tensor) -> None:
    """Copy what came, one after another, to where it belongs."""
    pieces = flat.split([target.numel() for target in targets]) if targets else ()
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece.view(target.shape))
