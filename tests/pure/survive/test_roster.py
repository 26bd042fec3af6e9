"""Members agree on one decision, whoever dies while they do."""

import threading

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.survive.roster import (
    Decision,
    Event,
    EventKind,
    EventLog,
    Footing,
    Protected,
    Roster,
    choose,
    members_after,
)

FOUR = {1: Protected(members=(0, 1, 2, 3), num_parities=1)}


def footing(whole: int, generation: int = 1) -> Footing:
    return Footing(generation=generation, whole=whole)


def test_members_come_and_go_in_the_order_of_the_log():
    events = [
        Event(kind=EventKind.LOST, member=1),
        Event(kind=EventKind.JOINED, member=4),
        Event(kind=EventKind.LOST, member=0),
        Event(kind=EventKind.LEAVES, member=2),
    ]
    assert [members_after(4, events[:n]) for n in range(5)] == [
        (0, 1, 2, 3),
        (0, 2, 3),
        (0, 2, 3, 4),
        (2, 3, 4),
        (3, 4),
    ]


@given(wholes=st.lists(st.integers(5, 6), min_size=3, max_size=3))
def test_the_least_whole_version_of_the_survivors_is_chosen(wholes):
    offers = {member: [footing(whole)] for member, whole in zip((0, 2, 3), wholes, strict=True)}
    decision = choose(offers, FOUR, (0, 2, 3), 1)
    assert decision == Decision(members=(0, 2, 3), num_events=1, footing=footing(min(wholes)))
    assert Decision.from_json(decision.to_json()) == decision


@pytest.mark.parametrize(
    ("offers", "members", "expected"),
    [
        ({0: [footing(3)], 1: [footing(3)]}, (0, 1), None),  # two are lost, one can be rebuilt
        (
            {0: [footing(3)], 2: [], 3: [footing(3)]},
            (0, 2, 3),
            None,
        ),  # before somebody's first parity
        (
            {0: [footing(3)], 2: [footing(3)], 3: [footing(3)], 4: []},
            (0, 2, 3, 4),
            footing(3),
        ),  # one joins
    ],
)
def test_what_cannot_be_rebuilt_is_not_chosen(offers, members, expected):
    assert choose(offers, FOUR, members, 2).footing == expected


def test_an_older_generation_counts_until_the_newer_one_is_protected():
    generations = {**FOUR, 2: Protected(members=(0, 2, 3), num_parities=1)}
    old_and_new = [footing(7), footing(7, generation=2)]
    # Nobody else is lost: the new one needs all of its parities.
    assert choose(
        {0: old_and_new, 2: [footing(7)], 3: old_and_new}, generations, (0, 2, 3), 1
    ).footing == footing(7)
    new = footing(7, generation=2)
    assert choose(dict.fromkeys((0, 2, 3), old_and_new), generations, (0, 2, 3), 1).footing == new
    # A second one dies: from the old generation, that would be two.
    assert choose({0: [footing(7)], 2: old_and_new}, generations, (0, 2), 2).footing is None
    assert choose({0: [new], 2: old_and_new}, generations, (0, 2), 2).footing == new


def test_all_survivors_get_the_same_decision():
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    connect = lambda: dist.TCPStore("localhost", server.port, is_master=False)  # noqa: E731
    found: dict[int, Decision] = {}

    def survive(member: int) -> None:
        store = connect()
        roster = Roster(store, EventLog(store), member, 4)
        roster.offer(2, [footing(8 + member % 2)])
        decision = None
        while decision is None:
            decision = roster.try_to_decide(2, FOUR)
        found[member] = decision

    threads = [threading.Thread(target=survive, args=(member,)) for member in (0, 2, 3)]
    for thread in threads:
        thread.start()
    log = EventLog(server)
    assert not found  # nobody decides while it is not known that 1 is gone
    log.post(Event(kind=EventKind.LOST, member=1))
    for thread in threads:
        thread.join(20)
    assert len(found) == 3
    assert set(found.values()) == {Decision(members=(0, 2, 3), num_events=1, footing=footing(8))}
    log.post(Event(kind=EventKind.LOST, member=0))
    late = Roster(server, EventLog(server), 2, 4)
    assert late.try_to_decide(2, FOUR) == found[2]  # what was decided stays
    assert late.decided(3) is None
