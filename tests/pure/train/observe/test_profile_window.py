"""`--profile`: which steps are profiled, and what is written."""

import gzip
import json

import pytest
import torch

from shoal.errors import UsageError
from shoal.train.config import RunConfig
from shoal.train.observe.profile_window import ProfileWindow


def run_steps(folder, steps: range, taken: range) -> list[int]:
    """The steps that were profiled, of those that a run takes."""
    window = ProfileWindow(steps, folder, 3, torch.device("cpu"))
    profiled = []
    for step in taken:
        window.before(step)
        with torch.profiler.record_function(f"in step {step}"):
            torch.ones(2) + 1
        if window.is_open:
            profiled.append(step)
        window.after(step)
    window.close()
    return profiled


def names_in(folder) -> set[str]:
    with gzip.open(folder / "rank-3.json.gz") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (range(1, 9), [3, 4]),  # all of it
        (range(4, 9), [4]),  # a run that was resumed inside of the window
        (range(1, 4), [3]),  # one that ends in it
        (range(5, 9), []),
    ],
)
def test_the_steps_of_the_window_are_in_the_trace(tmp_path, taken, expected):
    assert run_steps(tmp_path / "profile", range(3, 5), taken) == expected
    if not expected:
        assert not (tmp_path / "profile").exists()
        return
    steps = {name for name in names_in(tmp_path / "profile") if name.startswith("in step")}
    assert steps == {f"in step {step}" for step in expected}


@pytest.mark.parametrize("text", ["", "20", "5:3", "0:2", "a:b", "3:", ":3", "1:2:3"])
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(UsageError, match="--profile: expected FIRST:LAST, two steps such as 20:25"):
        RunConfig(profile=text)


def test_a_range_has_both_its_ends():
    assert list(RunConfig(profile="20:22").profiled_steps) == [20, 21, 22]
    assert not RunConfig().profiled_steps
