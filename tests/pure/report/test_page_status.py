import math
from pathlib import Path

import pytest

from pure.report.runs import make_run, step_line
from shoal.report import write_report
from shoal.report.page import RunStatus, status
from shoal.report.recorded_run import read_recorded_run

NAN = math.nan


@pytest.mark.parametrize(
    ("losses", "wanted", "expected"),
    [
        ([3.0, 2.0], 2, RunStatus(text="finished, 2 steps", good=True)),
        ([3.0], 1, RunStatus(text="finished, 1 step", good=True)),
        ([3.0, 2.0], 1_200, RunStatus(text="stopped at step 2 of 1,200", good=False)),
        ([3.0, 2.0], None, RunStatus(text="last step 2", good=True)),
        ([], 120, RunStatus(text="no step of 120 recorded", good=False)),
        ([], None, RunStatus(text="no step recorded", good=False)),
        (
            [3.0, NAN, 2.0, NAN, NAN],
            9,
            RunStatus(
                text="stopped at step 5 of 9; the loss is not a finite number since step 4",
                good=False,
            ),
        ),
        (
            [3.0, math.inf],
            2,
            RunStatus(
                text="finished, 2 steps; the loss is not a finite number in the last step",
                good=False,
            ),
        ),
        ([3.0, NAN, 2.0], 3, RunStatus(text="finished, 3 steps", good=True)),
    ],
)
def test_the_last_step_is_compared_with_the_config(
    tmp_path: Path, losses: list[float], wanted: int | None, expected: RunStatus
) -> None:
    lines = [step_line(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    run = make_run(tmp_path, lines=lines, config={"run": {"steps": wanted}})
    assert status(read_recorded_run(run)) == expected


def test_the_page_says_it_below_the_name(tmp_path: Path) -> None:
    lines = [step_line(1), step_line(2, loss=None)]
    html = write_report(make_run(tmp_path, lines=lines, config={"run": {"steps": 3}})).read_text()
    assert '<p class="status unfinished">stopped at step 2 of 3; the loss' in html
    assert "step 2; last finite 5.000 at 1" in html
