"""The protocol of versions, over every interleaving of a small world and all moments of a death."""

import pytest

from shoal.errors import InvariantError
from shoal.survive.versions import Offer, StateSource, Versions, agreed

STEPS = ("send", "protect", "say", "confirm", "begin_keep", "end_keep", "begin_apply", "end_apply")
"""What each rank does, again and again. `send` gives the others what they need for their parity."""


class World:
    """Some ranks, each at some number of instructions into its program."""

    def __init__(self, places: tuple[int, ...]) -> None:
        self.places = places

    def may_go_on(self, rank: int) -> bool:
        """Whether the next instruction of a rank does not have to wait for another rank."""
        done, what = divmod(self.places[rank], len(STEPS))
        if STEPS[what] == "protect":  # all have sent theirs of this version
            return all(place > done * len(STEPS) + STEPS.index("send") for place in self.places)
        if STEPS[what] == "confirm":
            return all(place > done * len(STEPS) + STEPS.index("say") for place in self.places)
        return True


def state_at(place: int) -> tuple[Versions, dict[int, int], dict[str, int | None]]:
    """Run one rank's program up to a place: protocol, parity slots, what memory really holds."""
    versions, slots = Versions(), {}
    memory: dict[str, int | None] = {"live": 0, "copy": None}
    for count in range(place):
        version, what = divmod(count, len(STEPS))
        name = STEPS[what]
        if name in ("send", "say"):
            if name == "send":  # from now on the place of the parity is written
                slots[versions.slot_of(version)] = -1
        else:
            getattr(versions, name)()
        if name == "protect":
            slots[versions.slot_of(version)] = version
        elif name == "begin_keep":
            memory["copy"] = None
        elif name == "end_keep":
            memory["copy"] = memory["live"]
        elif name == "begin_apply":
            memory["live"] = None
        elif name == "end_apply":
            memory["live"] = version + 1
    return versions, slots, memory


def reachable(num_ranks: int, num_versions: int) -> set[tuple[int, ...]]:
    end = num_versions * len(STEPS)
    start = (0,) * num_ranks
    found, open_ = {start}, [start]
    while open_:
        places = open_.pop()
        world = World(places)
        for rank in range(num_ranks):
            if places[rank] < end and world.may_go_on(rank):
                after = (*places[:rank], places[rank] + 1, *places[rank + 1 :])
                if after not in found:
                    found.add(after)
                    open_.append(after)
    return found


@pytest.mark.parametrize(("num_ranks", "num_versions"), [(2, 4), (3, 3), (4, 2)])
def test_survivors_agree_whenever_any_rank_dies(num_ranks, num_versions):
    end = num_versions * len(STEPS)
    states = {place: state_at(place) for place in range(end + 1)}
    num_undone = num_kept = 0
    for places in reachable(num_ranks, num_versions):
        for dead in range(num_ranks):
            survivors = [p for rank, p in enumerate(places) if rank != dead]
            offers = [states[place][0].offer for place in survivors]
            if None in offers:  # before the first parity there is nothing to rebuild from
                assert min(places) <= STEPS.index("protect")
                continue
            version = agreed(offers)
            for place in survivors:
                versions, slots, memory = states[place]
                assert versions.has_parity_of(version)
                assert slots[versions.slot_of(version)] == version
                source = versions.source_of(version)
                assert memory["live" if source is StateSource.LIVE else "copy"] == version
                num_kept += source is StateSource.KEPT
                num_undone += versions.newest > version
            # No more than the step in progress is lost.
            assert version >= max(states[p][0].newest for p in survivors) - 1
    assert num_undone
    assert num_kept


def test_overwriting_the_copy_too_early_loses_versions():
    """The test above can fail: a rank that does not ask the others overwrites what they need."""
    early, late = Versions(), Versions()
    for versions in (early, late):
        for name in ("protect", "confirm", "begin_keep", "end_keep", "begin_apply", "end_apply"):
            getattr(versions, name)()
    early.protect()
    with pytest.raises(InvariantError, match="version 1 that is not known to be protected"):
        early.begin_keep()
    early._confirmed = 1  # as if it did not ask
    early.begin_keep()
    early.end_keep()
    version = agreed([early.offer, late.offer])
    assert version == 0
    with pytest.raises(InvariantError, match="agreed on version 0"):
        early.source_of(version)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["begin_apply"], "no protected copy is kept"),
        (["confirm"], "whose parity is not whole here"),
        (["protect", "begin_keep"], "not known to be protected"),
        (["protect", "confirm", "begin_apply"], "no protected copy"),
        (
            ["protect", "confirm", "begin_keep", "end_keep", "begin_apply", "protect"],
            "half written",
        ),
    ],
)
def test_moves_out_of_order_are_refused(steps, message):
    versions = Versions()
    *before, last = steps
    for step in before:
        getattr(versions, step)()
    with pytest.raises(InvariantError, match=message):
        getattr(versions, last)()


def test_the_least_whole_parity_is_agreed_on():
    offers = [Offer(live=4, kept=3, whole=4), Offer(live=4, kept=3, whole=3)]
    assert agreed(offers) == 3
