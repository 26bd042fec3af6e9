import pytest
import torch

from shoal.runtime.events import Event, EventKind, Recorder


def test_spans_become_events_in_microseconds() -> None:
    recorder = Recorder(torch.device("cpu"))
    start = recorder.mark()
    recorder.span(EventKind.GATHER, "blocks.0", start, recorder.mark())
    (event,) = recorder.events()
    assert (event.kind, event.unit) == (EventKind.GATHER, "blocks.0")
    assert 0 <= event.start_us <= event.end_us
    assert event.duration_us == event.end_us - event.start_us


def test_an_event_cannot_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match="ends before it starts"):
        Event(kind=EventKind.FORWARD, unit="a", start_us=2.0, end_us=1.0)
