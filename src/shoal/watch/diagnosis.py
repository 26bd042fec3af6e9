"""Why ranks do not meet, found by comparing what each of them launched.

The collectives of a group are numbered on every rank. Two ranks whose entries of one number differ
have left each other there, whatever hung later; where none differ, the rank whose numbers end
first did not come.

    group 0       rank 0                 rank 1
    number 7      gather of unit 'a'     gather of unit 'a'
    number 8      gather of unit 'b'     gather of unit 'c'       rank 1 skipped 'b', or
    number 9      gather of unit 'c'     ...                      launched it out of order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from shoal.watch.account import Account
from shoal.watch.log import LoggedCollective, log_path, logged_ranks, read_log

_MOST = 8
"""As many ranks are told of; thousands may miss the one that is gone."""

Numbered: TypeAlias = Mapping[int, LoggedCollective]
"""The collectives of one group that a rank launched, by their numbers."""


def diagnose(accounts: Sequence[Account]) -> str:
    """Say which rank left the others, where, and what it did instead."""
    by_rank = {account.rank: account for account in accounts}
    groups = {name: ranks for account in accounts for name, ranks in account.groups.items()}
    members = {
        name: {rank: by_rank[rank] for rank in ranks if rank in by_rank}
        for name, ranks in groups.items()
    }
    found = [text for name, own in members.items() for text in _in_group(name, own)]
    silent = [account for account in accounts if account.is_silent]
    found += [_silence(account) for account in silent]
    if not found:
        found = [text for name, own in members.items() for text in _behind(name, own)]
    if not found:
        found = [_waiting(account) for account in accounts if account.waits_for]
    if not found:
        return "all ranks answer, and none of them waits for another"
    found = list(dict.fromkeys(found))
    more = [f"and {len(found) - _MOST} more like these"] if len(found) > _MOST else []
    return "\n".join(found[:_MOST] + more)


def differences(logs: Mapping[int, Sequence[LoggedCollective]]) -> str:
    """Say in which collectives ranks differ that cannot be asked any more, given their logs."""
    groups = dict.fromkeys(entry.group for entries in logs.values() for entry in entries)
    found = []
    for name in groups:
        members = {
            rank: numbered for rank, entries in logs.items() if (numbered := _of(name, entries))
        }
        found += _first_difference(members)
    return "\n".join(found[:_MOST])


def post_mortem(folder: Path | str, ranks: Iterable[int] | None = None) -> str:
    """Say which rank launched another collective than the others; nothing if none did.

    `folder` is the one that the ranks' `Watchdog` was given; all ranks that left a log there are
    compared unless `ranks` names some.
    """
    folder = Path(folder)
    compared = logged_ranks(folder) if ranks is None else ranks
    return differences({rank: read_log(log_path(folder, rank)) for rank in compared})


def _in_group(name: str, accounts: Mapping[int, Account]) -> list[str]:
    """Compare the ranks of one group."""
    entries = {rank: _of(name, account.entries) for rank, account in accounts.items()}
    different = _first_difference(entries)
    if different:
        return different
    last = max((max(numbers) for numbers in entries.values() if numbers), default=0)
    absent = [rank for rank, found in entries.items() if max(found, default=0) < last]
    return [_absence(rank, entries, last, accounts) for rank in absent]


def _behind(name: str, accounts: Mapping[int, Account]) -> list[str]:
    """Compare how many collectives torch has counted in a group: some are in no log."""
    counts = {rank: own.counts[name] for rank, own in accounts.items() if name in own.counts}
    most = max(counts.values(), default=0)
    ahead = [rank for rank, count in counts.items() if count == most]
    return [
        f"rank {rank} has launched {count} collectives of group {name} by torch's count, "
        f"{_ranks(ahead)} {most}{_meanwhile(accounts[rank])}"
        for rank, count in counts.items()
        if count < most
    ]


def _of(group: str, entries: Sequence[LoggedCollective]) -> Numbered:
    return {entry.number: entry for entry in entries if entry.group == group}


def _first_difference(entries: Mapping[int, Numbered]) -> list[str]:
    """Find the first number at which ranks launched different things, and name who did."""
    # What the logs of all still hold; a rank that launched nothing at all has not come to 1.
    first = max((min(numbers) for numbers in entries.values() if numbers), default=1)
    last = max((max(numbers) for numbers in entries.values() if numbers), default=0)
    for number in range(first, last + 1):
        there = {rank: found[number] for rank, found in entries.items() if number in found}
        if len({(entry.what, entry.size) for entry in there.values()}) > 1:
            return _difference(number, there, entries)
    return []


def _difference(
    number: int, there: Mapping[int, LoggedCollective], entries: Mapping[int, Numbered]
) -> list[str]:
    """Name the ranks that are alone with what they launched."""
    counts = Counter((entry.what, entry.size) for entry in there.values())
    usual = max(there.values(), key=lambda entry: counts[entry.what, entry.size])
    others = [rank for rank, entry in there.items() if entry == usual]
    texts = []
    for rank, entry in there.items():
        if entry == usual:
            continue
        did = _manner(entry, usual, entries[rank], entries[others[0]])
        texts.append(
            f"rank {rank} {did}: its collective {number} of group {entry.group} was {entry}, that "
            f"of {_ranks(others)} was {usual}"
        )
    return texts


def _manner(
    entry: LoggedCollective, usual: LoggedCollective, own: Numbered, theirs: Numbered
) -> str:
    """In which way a rank left the others."""
    if entry.what == usual.what:
        return f"launched {entry.what} with another size"
    if usual.what in _after(entry.number, own):
        return f"launched {usual.what} out of order"
    if entry.what in _after(entry.number, theirs):
        return f"skipped {usual.what}"
    return f"launched {entry.what} instead of {usual.what}"


def _after(number: int, entries: Numbered) -> set[str]:
    return {entry.what for later, entry in entries.items() if later > number}


def _absence(
    rank: int, entries: Mapping[int, Numbered], last: int, accounts: Mapping[int, Account]
) -> str:
    """Say of a rank that has stopped before the others what it does."""
    number = max(entries[rank], default=0) + 1
    there = {other: found[number] for other, found in entries.items() if number in found}
    if not there:  # the others' logs have forgotten what came right after
        there = {other: found[last] for other, found in entries.items() if last in found}
    entry = next(iter(there.values()))
    waited_s = max(accounts[other].waited_s for other in there)
    text = (
        f"rank {rank} did not come to {entry}, collective {entry.number} of group {entry.group}, "
        f"for which {_ranks(list(there))} waited {waited_s:.1f} s"
    )
    return text + _meanwhile(accounts[rank])


def _meanwhile(account: Account) -> str:
    """Say what a rank that did not come does instead."""
    if account.is_silent:
        return "; it does not answer"
    if account.waits_for:
        return f"; it waits for {account.waits_for}{_at(account)}"
    return f"; it does something else{_at(account)}"


def _silence(account: Account) -> str:
    last = f"; the last that it launched was {account.entries[-1]}" if account.entries else ""
    return (
        f"rank {account.rank} does not answer: its process is gone or stopped, or its host "
        f"cannot be reached{last}"
    )


def _waiting(account: Account) -> str:
    return (
        f"rank {account.rank} has waited {account.waited_s:.1f} s for "
        f"{account.waits_for}{_at(account)}"
    )


def _at(account: Account) -> str:
    return f", at {' < '.join(account.stack)}" if account.stack else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
