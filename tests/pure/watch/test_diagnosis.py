"""What is concluded from the accounts of ranks."""

from shoal.watch.account import Account
from shoal.watch.diagnosis import diagnose, differences
from shoal.watch.log import LoggedCollective


def launched(*whats: str, group: str = "0", first: int = 1, size: str = "4 of float32") -> tuple:
    return tuple(
        LoggedCollective(group=group, number=number, what=what, size=size)
        for number, what in enumerate(whats, start=first)
    )


def account(rank: int, entries: tuple, ranks: tuple = (0, 1, 2), **others) -> Account:
    groups = {entry.group: ranks for entry in entries}
    return Account(rank=rank, entries=entries, groups=groups, **others)


def test_a_rank_that_did_not_come_is_named_with_where_it_is():
    text = diagnose(
        [
            account(0, launched("a", "b"), waits_for="b", waited_s=3.0),
            account(1, launched("a"), stack=("loader.py:3 read",)),
            account(2, launched("a", "b"), waits_for="b", waited_s=2.0),
        ]
    )
    assert text == (
        "rank 1 did not come to b (4 of float32), collective 2 of group 0, for which ranks 0, 2 "
        "waited 3.0 s; it does something else, at loader.py:3 read"
    )


def test_the_first_difference_counts_and_not_what_hung_later():
    text = diagnose(
        [
            account(0, launched("a", "b", "c", "d")),
            account(1, launched("a", "c", "d")),
            account(2, launched("a", "b", "c", "d")),
        ]
    )
    assert text.startswith("rank 1 skipped b: its collective 2 of group 0 was c (4 of float32)")
    assert text.count("\n") == 0


def test_an_order_of_its_own_and_a_size_of_its_own():
    swapped = [account(rank, launched("a", "b")) for rank in (0, 2)]
    text = diagnose([*swapped, account(1, launched("b", "a"))])
    assert "rank 1 launched a out of order" in text
    large = account(1, launched("a", "b", size="9 of float32"))
    assert "rank 1 launched a with another size" in diagnose([*swapped, large])


def test_logs_that_have_forgotten_their_beginning_are_compared_where_both_remember():
    text = diagnose(
        [
            account(0, launched("g", "h", "i", first=7)),
            account(1, launched("f", "g", "h", first=6)),
            account(2, launched("g", "h", "i", first=7)),
        ]
    )
    assert text.startswith("rank 1 did not come to i (4 of float32), collective 9 of group 0")


def test_where_logs_agree_torch_has_counted():
    same = launched("a")
    ahead = [account(rank, same, counts={"0": 7}, waits_for="the sum") for rank in (0, 2)]
    behind = account(1, same, counts={"0": 5}, stack=("loader.py:3 read",))
    assert diagnose([*ahead, behind]) == (
        "rank 1 has launched 5 collectives of group 0 by torch's count, ranks 0, 2 7; it does "
        "something else, at loader.py:3 read"
    )
    even = [account(rank, same, counts={"0": 7}, waits_for="the sum") for rank in range(3)]
    assert diagnose(even).startswith("rank 0 has waited 0.0 s for the sum")
    gone = Account(rank=2, entries=same, is_silent=True)
    assert diagnose([ahead[0], behind, gone]).startswith("rank 2 does not answer")


def test_groups_are_compared_by_themselves():
    """Ranks of a mesh with two axes use groups of their own names."""
    text = diagnose(
        [
            account(0, launched("a", "b", group="1"), (0, 1)),
            account(1, launched("a", "b", group="1"), (0, 1)),
            account(2, launched("a", "b", group="2"), (2, 3)),
            account(3, launched("a", group="2"), (2, 3)),
        ]
    )
    assert text.startswith("rank 3 did not come to b (4 of float32), collective 2 of group 2")
    assert "rank 0" not in text


def test_silence_is_told_with_the_last_word():
    silent = Account(rank=1, entries=launched("a", "b"), is_silent=True)
    text = diagnose([account(0, launched("a", "b"), (0, 1)), silent])
    assert "rank 1 does not answer" in text
    assert "the last that it launched was b (4 of float32)" in text


def test_where_nothing_was_launched_those_who_wait_are_told():
    waiting = Account(rank=0, waits_for="the barrier", waited_s=4.0)
    assert diagnose([waiting, Account(rank=1)]) == "rank 0 has waited 4.0 s for the barrier"
    assert diagnose([Account(rank=0)]) == "all ranks answer, and none of them waits for another"


def test_thousands_of_ranks_make_no_thousands_of_lines():
    silent = [Account(rank=rank, is_silent=True) for rank in range(1, 1000)]
    lines = diagnose([Account(rank=0), *silent]).splitlines()
    assert len(lines) == 9
    assert lines[-1] == "and 991 more like these"


def test_an_account_survives_its_journey():
    sent = account(1, launched("a"), waits_for="b", waited_s=1.5, stack=("x:1 f",))
    assert Account.from_json(sent.to_json()) == sent


def test_logs_of_the_dead_show_where_they_parted():
    logs = {0: launched("a", "b"), 1: launched("a", "b", size="9 of float32"), 2: launched("a")}
    logs[1] = (*launched("a"), *launched("b", size="9 of float32", first=2))
    text = differences(logs)
    assert text.startswith("rank 1 launched b with another size: its collective 2 of group 0")
    assert differences({0: launched("a", "b"), 1: launched("a")}) == ""
