import json
import re
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.report.timeline import StepTimeline, draw_timeline, lanes, pack, read_timeline
from shoal.runtime.events import Event, EventKind


@st.composite
def events(draw: st.DrawFn) -> Event:
    start = draw(st.integers(0, 200))
    return Event(
        kind=draw(st.sampled_from(EventKind)),
        unit=draw(st.sampled_from(["", "layers.0", "layers.1.mlp"])),
        start_us=start,
        end_us=start + draw(st.integers(0, 60)),
    )


@given(st.lists(events(), max_size=60))
def test_rows_never_overlap_and_lose_nothing(spans: list[Event]) -> None:
    rows = pack(spans)
    for row in rows:
        assert all(before.end_us <= after.start_us for before, after in pairwise(row))
    assert sorted(map(repr, (event for row in rows for event in row))) == sorted(map(repr, spans))


@given(st.lists(events(), max_size=60))
def test_rows_are_as_few_as_the_deepest_overlap(spans: list[Event]) -> None:
    depth = max(
        (sum(o.start_us <= span.start_us < o.end_us for o in spans) for span in spans), default=0
    )
    longer = [span for span in spans if span.duration_us > 0]
    assert len(pack(longer)) == depth


@given(st.lists(events(), max_size=40))
def test_every_span_is_drawn_in_one_lane(spans: list[Event]) -> None:
    made = lanes(StepTimeline(step=1, rank=0, events=tuple(spans)))
    assert list(made) == [
        "forward",
        "backward",
        "gathers in flight",
        "waits",
        "reduces in flight",
        "optimizer",
    ]
    assert sum(len(row) for rows in made.values() for row in rows) == len(spans)
    if spans:
        drawing = draw_timeline(StepTimeline(step=1, rank=0, events=tuple(spans)))
        assert drawing.count("data-said=") == len(spans)


def test_a_module_lies_above_those_it_contains() -> None:
    outer = Event(kind=EventKind.FORWARD, unit="", start_us=0, end_us=10)
    inner = Event(kind=EventKind.FORWARD, unit="layers.0", start_us=0, end_us=5)
    assert pack([inner, outer]) == ((outer,), (inner,))


def test_a_label_is_the_whole_name_and_stands_only_where_it_could_fit() -> None:
    lengths = {"layers.3.mlp": 900, "layers.4.mlp": 92, "layers.5.mlp": 8}
    spans: list[Event] = []
    for unit, length in lengths.items():
        start = spans[-1].end_us if spans else 0.0
        spans.append(
            Event(kind=EventKind.FORWARD, unit=unit, start_us=start, end_us=start + length)
        )
    html = draw_timeline(StepTimeline(step=1, rank=0, events=tuple(spans)))
    assert re.findall("<b>(.*?)</b>", html) == ["layers.3.mlp", "layers.4.mlp"]
    for unit in lengths:
        assert f'data-said="{unit}\n' in html


def test_a_timeline_is_as_narrow_as_its_page() -> None:
    span = Event(kind=EventKind.FORWARD, unit="a", start_us=0, end_us=1)
    html = draw_timeline(StepTimeline(step=1, rank=0, events=(span,)))
    assert not re.search(r"min-width|width:[0-9.]+px", html)


def test_unreadable_spans_are_named(tmp_path: Path) -> None:
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
    path.write_text(json.dumps({"step": 1, "rank": 0, "events": content}))
    timeline, problems = read_timeline(path)
    assert len(timeline.events) == 1
    assert [problem.split(":")[0] for problem in problems] == [
        f"timeline.json, span {number}" for number in (2, 3, 4, 5, 6)
    ]


def test_bytes_of_collectives_are_told(tmp_path: Path) -> None:
    span = {"kind": "gather", "unit": "a", "start_us": 0, "end_us": 5}
    path = tmp_path / "timeline.json"
    spans = [{**span, "num_bytes": 3 << 20}, {**span, "num_bytes": -1}, span]
    path.write_text(json.dumps({"step": 3, "rank": 0, "events": spans}))
    timeline, problems = read_timeline(path)
    assert [event.num_bytes for event in timeline.events] == [3 << 20, 0]
    assert len(problems) == 1
    assert "num_bytes should be a number of bytes" in problems[0]
    assert "3 MiB" in draw_timeline(timeline)
