import json
import re
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.report.timeline import (
    StepTimeline,
    draw_timeline,
    lanes,
    list_actions,
    pack,
    read_timeline,
)
from shoal.runtime.recorder import OPTIMIZER, RecordedAction
from shoal.step.action import ActionKind


@st.composite
def performed(draw: st.DrawFn) -> RecordedAction:
    start = draw(st.integers(0, 200))
    return RecordedAction(
        kind=draw(st.sampled_from([*ActionKind, OPTIMIZER])),
        unit=draw(st.sampled_from(["", "layers.0", "layers.1.mlp"])),
        start_us=start,
        end_us=start + draw(st.integers(0, 60)),
    )


@given(st.lists(performed(), max_size=60))
def test_rows_never_overlap_and_lose_nothing(actions: list[RecordedAction]) -> None:
    rows = pack(actions)
    for row in rows:
        assert all(before.end_us <= after.start_us for before, after in pairwise(row))
    assert sorted(map(repr, (one for row in rows for one in row))) == sorted(map(repr, actions))


@given(st.lists(performed(), max_size=60))
def test_rows_are_as_few_as_the_deepest_overlap(actions: list[RecordedAction]) -> None:
    depth = max(
        (sum(o.start_us <= one.start_us < o.end_us for o in actions) for one in actions), default=0
    )
    longer = [one for one in actions if one.duration_us > 0]
    assert len(pack(longer)) == depth


UNDRAWN = {
    ActionKind.WAKE,
    ActionKind.REST,
    ActionKind.FOLLOW,
    ActionKind.REFUSE_CHANGED,
    ActionKind.REFUSE_BLIND,
}


@given(st.lists(performed(), max_size=40))
def test_every_action_is_listed_and_what_takes_time_is_drawn_in_one_lane(
    actions: list[RecordedAction],
) -> None:
    timeline = StepTimeline(step=1, rank=0, actions=tuple(actions))
    made = lanes(timeline)
    assert list(made) == [
        "forward",
        "backward",
        "gather",
        "copy, discard",
        "wait, finish, cancel",
        "reduce",
        "free, keep, drop",
        "take, sum, pack, place",
        "optimizer",
    ]
    drawn = [action for action in actions if action.kind not in UNDRAWN]
    assert sum(len(row) for rows in made.values() for row in rows) == len(drawn)
    if actions:
        assert draw_timeline(timeline).count("data-said=") == len(drawn)
        assert list_actions(timeline).count("<tr><td>") == len(actions)


def test_a_module_lies_above_those_it_contains() -> None:
    outer = RecordedAction(kind=ActionKind.FORWARD, unit="", start_us=0, end_us=10)
    inner = RecordedAction(kind=ActionKind.FORWARD, unit="layers.0", start_us=0, end_us=5)
    assert pack([inner, outer]) == ((outer,), (inner,))


def test_a_label_is_the_whole_name_and_stands_only_where_it_could_fit() -> None:
    lengths = {"layers.3.mlp": 900, "layers.4.mlp": 92, "layers.5.mlp": 8}
    bars: list[RecordedAction] = []
    for unit, length in lengths.items():
        start = bars[-1].end_us if bars else 0.0
        bars.append(
            RecordedAction(
                kind=ActionKind.FORWARD, unit=unit, start_us=start, end_us=start + length
            )
        )
    html = draw_timeline(StepTimeline(step=1, rank=0, actions=tuple(bars)))
    assert re.findall("<b>(.*?)</b>", html) == ["layers.3.mlp", "layers.4.mlp"]
    for unit in lengths:
        assert f'data-said="{unit}\n' in html


def test_a_timeline_is_as_narrow_as_its_page() -> None:
    action = RecordedAction(kind=ActionKind.FORWARD, unit="a", start_us=0, end_us=1)
    html = draw_timeline(StepTimeline(step=1, rank=0, actions=(action,)))
    assert not re.search(r"min-width|width:[0-9.]+px", html)


def test_unreadable_actions_are_named(tmp_path: Path) -> None:
    good = {"kind": "forward", "unit": "a", "start_us": 0, "end_us": 1}
    content = [
        good,
        good | {"kind": "nap"},
        good | {"end_us": -1},
        good | {"start_us": "x"},
        good | {"end_us": float("nan")},
        7,
    ]
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps({"step": 1, "rank": 0, "actions": content}))
    timeline, problems = read_timeline(path)
    assert len(timeline.actions) == 1
    assert [problem.split(":")[0] for problem in problems] == [
        f"timeline.json, action {number}" for number in (2, 3, 4, 5, 6)
    ]


def test_bytes_are_told(tmp_path: Path) -> None:
    action = {"kind": "free", "unit": "a", "start_us": 0, "end_us": 5}
    path = tmp_path / "timeline.json"
    actions = [{**action, "num_bytes": 3 << 20}, {**action, "num_bytes": -1}, action]
    path.write_text(json.dumps({"step": 3, "rank": 0, "actions": actions}))
    timeline, problems = read_timeline(path)
    assert [one.num_bytes for one in timeline.actions] == [3 << 20, 0]
    assert len(problems) == 1
    assert "num_bytes should be a number of bytes" in problems[0]
    assert "a\nfree\n5.00 µs\n3 MiB" in draw_timeline(timeline)
    row = "<tr><td>0.000</td><td>5.00 µs</td><td>free</td><td>a</td><td>3 MiB</td></tr>"
    assert row in list_actions(timeline)


def test_files_of_earlier_runs_are_read(tmp_path: Path) -> None:
    """There the list was called events, and waits had names that the machine does not use."""
    span = {"unit": "a", "start_us": 0, "end_us": 5, "num_bytes": 0}
    kinds = ("forward", "gather", "gather_wait", "reduce", "reduce_wait", "optimizer")
    path = tmp_path / "timeline.json"
    spans = [{"kind": kind, **span} for kind in kinds]
    path.write_text(json.dumps({"step": 3, "rank": 0, "events": spans}))
    timeline, problems = read_timeline(path)
    assert problems == []
    assert [action.kind for action in timeline.actions] == [
        *(ActionKind.FORWARD, ActionKind.GATHER, ActionKind.WAIT),
        *(ActionKind.REDUCE, ActionKind.FINISH, OPTIMIZER),
    ]
