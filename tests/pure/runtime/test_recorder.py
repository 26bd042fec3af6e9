import pytest
import torch

from shoal.runtime.recorder import OPTIMIZER, RecordedAction, Recorder
from shoal.step.action import ActionKind
from shoal.step.unit_step import UnitStep


def perform(recorder: Recorder, *actions: tuple[ActionKind, UnitStep], num_bytes: int = 0) -> None:
    for kind, unit in actions:
        action = unit.do(kind)
        running = recorder.begin(action)
        running.num_bytes = num_bytes
        recorder.end(action, running)


def ended(recorder: Recorder) -> list[str]:
    return [f"{action.kind} {action.unit}" for action in recorder.actions()]


def test_times_are_microseconds() -> None:
    recorder = Recorder(torch.device("cpu"))
    start = recorder.mark()
    recorder.add(OPTIMIZER, "optimizer", start, recorder.mark())
    (action,) = recorder.actions()
    assert (action.kind, action.unit) == (OPTIMIZER, "optimizer")
    assert 0 <= action.start_us <= action.end_us
    assert action.duration_us == action.end_us - action.start_us


def test_an_action_cannot_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match="ends before it starts"):
        RecordedAction(kind=ActionKind.FORWARD, unit="a", start_us=2.0, end_us=1.0)


def test_what_another_action_ends_is_told_when_it_has_ended() -> None:
    recorder, a, b = Recorder(torch.device("cpu")), UnitStep("a"), UnitStep("b")
    perform(recorder, (ActionKind.GATHER, a), (ActionKind.GATHER, b))
    assert ended(recorder) == []
    perform(recorder, (ActionKind.WAIT, a), (ActionKind.FORWARD, a))
    assert ended(recorder) == ["gather a", "wait a"]
    perform(recorder, (ActionKind.CANCEL, b), (ActionKind.FREE, a))
    assert ended(recorder) == ["gather a", "gather b", "wait a", "forward a", "cancel b", "free a"]
    times = {f"{one.kind} {one.unit}": one for one in recorder.actions()}
    assert times["gather a"].end_us == times["wait a"].end_us
    assert times["forward a"].end_us == times["free a"].start_us
    assert [one.kind for one in recorder.actions({ActionKind.FREE})] == [ActionKind.FREE]


def test_reductions_of_one_unit_end_in_order() -> None:
    recorder, a = Recorder(torch.device("cpu")), UnitStep("a")
    perform(recorder, (ActionKind.REDUCE, a), num_bytes=1)
    perform(recorder, (ActionKind.REDUCE, a), num_bytes=2)
    perform(recorder, (ActionKind.FINISH, a))
    assert [(one.kind, one.num_bytes) for one in recorder.actions()] == [
        ("reduce", 1),
        ("finish", 0),
    ]
    perform(recorder, (ActionKind.FINISH, a))
    assert [one.num_bytes for one in recorder.actions({ActionKind.REDUCE})] == [1, 2]


def test_a_step_that_was_given_up_ends_nothing_of_the_next() -> None:
    recorder, a = Recorder(torch.device("cpu")), UnitStep("a")
    perform(recorder, (ActionKind.REDUCE, a), num_bytes=1)
    recorder.forget_open()
    perform(recorder, (ActionKind.REDUCE, a), num_bytes=2)
    perform(recorder, (ActionKind.FINISH, a))
    assert [one.num_bytes for one in recorder.actions({ActionKind.REDUCE})] == [2]


def test_it_prints_as_plans_do() -> None:
    recorder, a = Recorder(torch.device("cpu")), UnitStep("a")
    perform(recorder, (ActionKind.GATHER, a), (ActionKind.WAIT, a))
    perform(recorder, (ActionKind.FREE, a), num_bytes=3 << 19)
    assert str(recorder).splitlines() == [
        "    gather  a",
        "      wait  a",
        "      free  a  1.5 MiB",
    ]
