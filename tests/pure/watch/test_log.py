"""The log of collectives: what others can read of a rank, dead or alive."""

from typing import ClassVar

import pytest
import torch

from shoal.watch.log import ENDED, IN_STREAM, CollectiveLog, read_log


def test_the_log_can_be_read_by_others_while_it_is_written(tmp_path):
    path = tmp_path / "rank-0.collectives"
    log = CollectiveLog(path)
    assert read_log(path) == []
    log.add("0", "the gather of unit 'a'", "8 of float32")
    log.add("1", "the all-reduce of unit 'a'", "4 of float32")
    log.add("0", "the gather of unit 'b'", "8 of float32")
    found = read_log(path)
    assert found == log.entries()
    assert [(entry.group, entry.number, entry.what[-3:]) for entry in found] == [
        ("0", 1, "'a'"),
        ("1", 1, "'a'"),
        ("0", 2, "'b'"),
    ]


def test_it_remembers_the_last_ones_in_order():
    log = CollectiveLog()
    for number in range(1000):
        log.add("0", f"gather {number}", "1 of int64")
    numbers = [entry.number for entry in log.entries()]
    assert numbers == list(range(1000 - len(numbers) + 1, 1001))
    assert len(numbers) == 128


def test_a_name_without_end_costs_its_line_only():
    log = CollectiveLog()
    log.add("0", "x" * 1000, "1 of int64")
    log.add("0", "short", "1 of int64")
    assert [entry.what for entry in log.entries()] == ["short"]


def test_digests_are_of_what_and_in_which_order_but_not_of_where():
    logs = [CollectiveLog() for _ in range(4)]
    for log, group, whats in zip(logs, "0170", ("ab", "ab", "ab", "ba"), strict=True):
        for what in whats:
            log.add(group, what, "1 of int64")
    first, second, third, fourth = (log.take_digest() for log in logs)
    assert first == second == third != fourth
    assert {log.take_digest() for log in logs} == {0}, "asked again, nothing has happened since"


def test_there_may_be_no_log(tmp_path):
    assert read_log(tmp_path / "nobody") == []


class FakeEvent:
    """Stands for a CUDA event: it is over when told."""

    all: ClassVar[list["FakeEvent"]] = []

    def __init__(self) -> None:
        FakeEvent.all.append(self)
        self.is_over = False

    def record(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(FakeEvent, "all", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return FakeEvent.all


def test_collectives_in_streams_begin_and_end(events):
    """They may end in any order, and nobody waits for one."""
    log = CollectiveLog()
    for what in "abc":
        log.add("0", what, "1 of int64")
        log.put_in_stream()
    log.add("0", "d", "1 of int64")
    assert [entry.state for entry in log.entries()] == [IN_STREAM] * 3 + [""]
    events[1].is_over = True
    assert [entry.state for entry in log.entries()] == [IN_STREAM, ENDED, IN_STREAM, ""]
    events[0].is_over = events[2].is_over = True
    assert [entry.state for entry in log.entries()] == [ENDED] * 3 + [""]
    log.add("0", "e", "1 of int64")
    log.put_in_stream()
    assert len(events) == 3, "events are used again"
    assert log.entries()[-1].state == IN_STREAM


def test_several_in_flight_are_told_apart(events):
    log = CollectiveLog()
    lines = [log.add("0", what, "1 of int64") for what in "abc"]
    log.put_in_stream(lines[1])
    log.put_in_stream(lines[0])
    assert [entry.state for entry in log.entries()] == [IN_STREAM, IN_STREAM, ""]
    events[0].is_over = True
    assert [entry.state for entry in log.entries()] == [IN_STREAM, ENDED, ""]


def test_an_end_that_comes_late_leaves_the_lines_of_others_alone(events):
    log = CollectiveLog()
    log.add("0", "old", "1 of int64")
    log.put_in_stream()
    for number in range(200):
        log.add("0", f"new {number}", "1 of int64")
    events[0].is_over = True
    assert {entry.state for entry in log.entries()} == {""}
