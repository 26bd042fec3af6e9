"""Parity brings back any one or any two lost ranks, bit by bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.survive import galois
from shoal.survive.parity import ParityRows, RowPiece, padded


def slow_product(a: int, b: int) -> int:
    result = 0
    for bit in range(8):
        if b >> bit & 1:
            result ^= a << bit
    for bit in reversed(range(8, 16)):
        if result >> bit & 1:
            result ^= 0x11D << (bit - 8)
    return result


def test_the_field_is_that_of_its_polynomial():
    for a, b in itertools.product(range(256), range(0, 256, 7)):
        assert galois.product(a, b) == slow_product(a, b)
    assert len({galois.power(n) for n in range(255)}) == 255
    assert all(galois.product(a, galois.inverse(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        galois.inverse(0)


@pytest.mark.parametrize("weight", [0, 1, 2, 3, 29, 128, 255])
def test_words_are_multiplied_byte_by_byte(weight):
    every_byte = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([slow_product(b, weight) for b in range(256)], dtype=torch.uint8)
    found = galois.scaled(every_byte.view(torch.int64), weight).view(torch.uint8)
    assert torch.equal(found, expected)


def protect(datas: list[torch.Tensor], stripes: ParityRows) -> list[torch.Tensor]:
    """What each member keeps, made only of what is sent to it."""
    rooms = [padded(data, stripes) for data in datas]
    kept = []
    for receiver in range(stripes.num_members):
        arrived = {
            stripe: rooms[sender][stripes.span(stripe)]
            for sender in range(stripes.num_members)
            for stripe in stripes.sent(sender, receiver)
        }
        parts = []
        for own in stripes.kept_by(receiver):
            row = [(m, arrived[RowPiece(own.row, m)]) for m in stripes.members_in(own.row)]
            parts.append(stripes.encode(own.parity, row))
        kept.append(torch.cat(parts))
    return kept


def rebuild(lost, rooms, kept, stripes) -> dict[int, torch.Tensor]:
    """The lost members' bytes; nothing of theirs is read."""
    found = {member: torch.full_like(rooms[0], 0xAA) for member in lost}
    for row in range(stripes.num_members):
        needed = stripes.needed(row, lost)
        if not needed:
            continue
        assert stripes.mender(row, lost) not in lost
        pieces = {}
        for stripe in needed:
            assert stripe.member not in lost
            memory = rooms if stripe.parity is None else kept
            pieces[stripe] = memory[stripe.member][stripes.span(stripe)]
        for stripe, piece in stripes.mend(row, lost, pieces).items():
            found[stripe.member][stripes.span(stripe)] = piece
    return found


@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_parities=st.sampled_from([1, 2]), num_bytes=st.integers(0, 200))
def test_any_lost_members_come_back(data, num_parities, num_bytes):
    num_members = data.draw(st.integers(num_parities + 1, 8))
    stripes = ParityRows(num_members=num_members, num_parities=num_parities, num_bytes=num_bytes)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    datas = [
        torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        for _ in range(num_members)
    ]
    kept = protect(datas, stripes)
    rooms = [padded(one, stripes) for one in datas]
    for num_lost in range(1, num_parities + 1):
        for lost in itertools.combinations(range(num_members), num_lost):
            found = rebuild(lost, rooms, kept, stripes)
            for member in lost:
                assert torch.equal(found[member], rooms[member]), (lost, member)


@pytest.mark.parametrize("num_parities", [1, 2])
@pytest.mark.parametrize("num_members", [3, 4, 5, 8, 64])
def test_parities_lie_where_none_of_their_data_is(num_members, num_parities):
    stripes = ParityRows(num_members=num_members, num_parities=num_parities, num_bytes=1000)
    for row in range(num_members):
        keepers = {stripes.keeper(row, parity) for parity in range(num_parities)}
        assert len(keepers) == num_parities
        assert keepers.isdisjoint(stripes.members_in(row))
        assert len(stripes.members_in(row)) == stripes.num_stripes
    for member in range(num_members):
        rows = [stripes.row_of(member, n) for n in range(stripes.num_stripes)]
        assert [stripes.number_in(row, member) for row in rows] == [*range(stripes.num_stripes)]
        sent = [s for other in range(num_members) for s in stripes.sent(member, other)]
        assert len(sent) == num_parities * stripes.num_stripes
        assert not stripes.sent(member, member)


def test_floats_keep_their_bits():
    values = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 3.0])
    values.view(torch.int32)[0] = 0x7FC12345
    datas = [values.view(torch.uint8), (values * 2).view(torch.uint8), values.view(torch.uint8)]
    stripes = ParityRows(num_members=3, num_parities=1, num_bytes=20)
    rooms = [padded(one, stripes) for one in datas]
    found = rebuild((0,), rooms, protect(datas, stripes), stripes)
    assert found[0][:20].view(torch.int32).tolist() == values.view(torch.int32).tolist()


def test_more_losses_than_parities_are_refused():
    stripes = ParityRows(num_members=4, num_parities=1, num_bytes=64)
    with pytest.raises(UsageError, match="2 ranks of a protection group of 4 are lost"):
        stripes.needed(0, (0, 1))


@pytest.mark.parametrize(
    ("num_members", "num_parities", "message"),
    [(1, 1, "needs 2 to 255"), (2, 2, "needs 3 to 255"), (256, 1, "got 256"), (4, 3, "1 or 2")],
)
def test_groups_that_cannot_be_formed_are_refused(num_members, num_parities, message):
    with pytest.raises(UsageError, match=message):
        ParityRows(num_members=num_members, num_parities=num_parities, num_bytes=8)
