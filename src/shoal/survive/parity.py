"""Parity: which rank keeps what of the others' bytes, and how lost bytes come back from it.

Each rank's bytes are cut into stripes, and a row takes at most one stripe of a rank. The parities
of a row lie on ranks that have no stripe in it. For four ranks and one parity, then two (`d0` is a
stripe of rank 0; P and Q are parities):

    row     rank 0  1   2   3           row     rank 0  1   2   3
     0         P    d1  d2  d3           0         P    Q   d2  d3
     1         d0   P   d2  d3           1         d0   P   Q   d3
     2         d0   d1  P   d3           2         d0   d1  P   Q
     3         d0   d1  d2  P            3         Q    d1  d2  P

P is the xor of the row, Q its sum in GF(2^8) with weight two to the rank. Bits alone count, so NaN
keeps its payload and every dtype is exact. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.survive.galois import add_up_, inverse, power, scaled, weighted_sum

WORD_BYTES = 8
"""ParityRows are whole words."""

MAX_MEMBERS = 255
"""More have no different weights."""


@dataclass(frozen=True, slots=True, order=True)
class RowPiece:
    """A stripe of one member's bytes, or a parity of a row."""

    row: int
    member: int
    parity: int | None = None
    """Which parity of the row the member keeps; None: it is the member's own bytes."""


Pieces: TypeAlias = Mapping[RowPiece, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRows:
    """How the bytes of a protection group's members are cut into rows."""

    num_members: int
    num_parities: int
    num_bytes: int
    """Of the member that has most; all are taken to have so many."""

    def __post_init__(self) -> None:
        if self.num_parities not in (1, 2):
            raise UsageError(f"expected 1 or 2 parities, got {self.num_parities}")
        if not self.num_parities < self.num_members <= MAX_MEMBERS:
            raise UsageError(
                f"a protection group with {self.num_parities} parities needs "
                f"{self.num_parities + 1} to {MAX_MEMBERS} ranks, got {self.num_members}: take "
                "more ranks, or fewer parities"
            )
        if self.num_bytes < 0:
            raise UsageError(f"expected num_bytes of 0 or more, got {self.num_bytes}")

    @property
    def num_stripes(self) -> int:
        """How many stripes a member's bytes are cut into."""
        return self.num_members - self.num_parities

    @property
    def stripe_bytes(self) -> int:
        """The size of one stripe."""
        unit = self.num_stripes * WORD_BYTES
        return -(-self.num_bytes // unit) * WORD_BYTES

    @property
    def padded_bytes(self) -> int:
        """The size of all stripes of a member."""
        return self.num_stripes * self.stripe_bytes

    @property
    def parity_bytes(self) -> int:
        """What a member keeps of the others, for one version."""
        return self.num_parities * self.stripe_bytes

    def row_of(self, member: int, number: int) -> int:
        """The row that takes the stripe of that number."""
        return (member + 1 + number) % self.num_members

    def number_in(self, row: int, member: int) -> int | None:
        """Which of its stripes a member has in a row; None where it may keep a parity of it."""
        number = (row - member - 1) % self.num_members
        return number if number < self.num_stripes else None

    def keeper(self, row: int, parity: int) -> int:
        """Who keeps a parity of a row."""
        return (row + parity) % self.num_members

    def members_in(self, row: int) -> list[int]:
        """Whose stripes a row has."""
        return [m for m in range(self.num_members) if self.number_in(row, m) is not None]

    def kept_by(self, member: int) -> list[RowPiece]:
        """The parities that a member keeps, in the order in which they lie in its memory."""
        return [
            RowPiece((member - parity) % self.num_members, member, parity)
            for parity in range(self.num_parities)
        ]

    def span(self, stripe: RowPiece) -> slice:
        """Where a stripe lies in its member's padded bytes, or in what it keeps of others."""
        if stripe.parity is not None:
            number: int | None = stripe.parity
        else:
            number = self.number_in(stripe.row, stripe.member)
        if number is None:
            raise UsageError(f"member {stripe.member} has no stripe in row {stripe.row}")
        return slice(number * self.stripe_bytes, (number + 1) * self.stripe_bytes)

    def sent(self, sender: int, receiver: int) -> list[RowPiece]:
        """What one member sends another so that it can make its parities, in order."""
        return [
            RowPiece(kept.row, sender)
            for kept in self.kept_by(receiver)
            if self.number_in(kept.row, sender) is not None
        ]

    def encode(self, parity: int, pieces: Iterable[tuple[int, Tensor]]) -> Tensor:
        """A parity of a row's stripes, given with whose they are."""
        words = [(member, _words(piece)) for member, piece in pieces]
        if parity == 0:
            (_, first), *others = words
            total = add_up_(first.clone(), [piece for _, piece in others])
        else:
            total = weighted_sum(words)
        return total.view(torch.uint8)

    def mender(self, row: int, lost: Sequence[int]) -> int:
        """Who makes the lost stripes of a row: the first of those left that keep a parity of it."""
        for parity in range(self.num_parities):
            if self.keeper(row, parity) not in lost:
                return self.keeper(row, parity)
        raise UsageError(f"row {row} has lost all of its parities with the ranks {list(lost)}")

    def lost_in(self, row: int, lost: Sequence[int]) -> list[RowPiece]:
        """The stripes of a row that went with the lost members."""
        return [RowPiece(row, m) for m in sorted(lost) if self.number_in(row, m) is not None]

    def needed(self, row: int, lost: Sequence[int]) -> list[RowPiece]:
        """What the mender of a row needs: all that is left of it, and as many parities as lost."""
        self.check_can_mend(lost)
        parities = [
            RowPiece(row, self.keeper(row, parity), parity)
            for parity in range(self.num_parities)
            if self.keeper(row, parity) not in lost
        ]
        num_lost = len(self.lost_in(row, lost))
        left = [RowPiece(row, m) for m in self.members_in(row) if m not in lost]
        return left + parities[:num_lost] if num_lost else []

    def check_can_mend(self, lost: Sequence[int]) -> None:
        """Refuse more losses than there are parities."""
        if len(lost) > self.num_parities:
            raise UsageError(
                f"{len(lost)} ranks of a protection group of {self.num_members} are lost, and "
                f"its parities can rebuild {self.num_parities}"
            )

    def mend(self, row: int, lost: Sequence[int], pieces: Pieces) -> dict[RowPiece, Tensor]:
        """The lost stripes of a row, of what `needed` names."""
        missing = self.lost_in(row, lost)
        left = [(s.member, _words(p)) for s, p in pieces.items() if s.parity is None]
        rests: dict[int, Tensor] = {}
        for stripe, piece in pieces.items():
            if stripe.parity == 0:
                rests[0] = add_up_(_words(piece).clone(), [piece for _, piece in left])
            elif stripe.parity == 1:
                rests[1] = _words(piece).clone()
                if left:
                    rests[1].bitwise_xor_(weighted_sum(left))
        found = _solve([stripe.member for stripe in missing], rests)
        return {s: words.view(torch.uint8) for s, words in zip(missing, found, strict=True)}


def _solve(members: Sequence[int], rests: Mapping[int, Tensor]) -> list[Tensor]:
    """Pieces of one or two members, of what is left of parities without all others."""
    if not members:
        return []
    if len(members) == 1:
        (member,) = members
        return [rests[0] if 0 in rests else scaled(rests[1], power(-member))]
    first, second = members
    total, weighted = rests[0], rests[1]
    # weighted = a x + b y and total = x + y, so weighted + b total = (a + b) x.
    a, b = power(first), power(second)
    mixed = scaled(total, b).bitwise_xor_(weighted)
    one = scaled(mixed, inverse(a ^ b))
    return [one, total.bitwise_xor(one)]


def _words(piece: Tensor) -> Tensor:
    return piece.view(torch.int64)


def padded(data: Tensor, rows: ParityRows) -> Tensor:
    """A member's bytes with zeros up to whole stripes."""
    room = torch.zeros(rows.padded_bytes, dtype=torch.uint8, device=data.device)
    room[: data.numel()].copy_(data)
    return room
