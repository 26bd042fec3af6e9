"""The part of communication that lies under compute, against time counted in small ticks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.report.overlap import common, length, overlapped_share, union
from shoal.runtime.recorder import EXPOSED, RecordedAction
from shoal.step.action import ActionKind

KINDS = (ActionKind.GATHER, ActionKind.REDUCE, ActionKind.WAIT, ActionKind.FORWARD)


@st.composite
def an_action(draw: st.DrawFn) -> RecordedAction:
    start = draw(st.integers(0, 40))
    end = start + draw(st.integers(0, 12))
    return RecordedAction(
        kind=draw(st.sampled_from(KINDS)), unit="a", start_us=float(start), end_us=float(end)
    )


def ticks(actions: list[RecordedAction]) -> set[int]:
    return {t for one in actions for t in range(int(one.start_us), int(one.end_us))}


@given(st.lists(an_action(), max_size=12))
def test_shares_are_those_of_counted_ticks(actions: list[RecordedAction]) -> None:
    waiting = ticks([one for one in actions if one.kind in EXPOSED])
    for kind in (ActionKind.GATHER, ActionKind.REDUCE):
        flying = ticks([one for one in actions if one.kind == kind])
        found = overlapped_share(actions, kind)
        if flying:
            assert found == pytest.approx(len(flying - waiting) / len(flying))
        else:
            assert found is None


@given(st.lists(an_action(), max_size=8), st.lists(an_action(), max_size=8))
def test_unions_and_what_they_share(
    first: list[RecordedAction], second: list[RecordedAction]
) -> None:
    assert length(union(first)) == len(ticks(first))
    assert length(common(union(first), union(second))) == len(ticks(first) & ticks(second))
