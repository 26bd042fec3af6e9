import math
from pathlib import Path

import pytest

from shoal.report.metrics import Metrics, ResumeRecord, read_metrics


def read(tmp_path: Path, text: str) -> Metrics:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    return read_metrics(path)


def test_records_come_in_the_order_of_steps_and_the_last_run_of_a_step_counts(
    tmp_path: Path,
) -> None:
    metrics = read(
        tmp_path,
        '{"kind":"step","step":2,"loss":9}\n'
        '{"kind":"step","step":3,"loss":8}\n'
        '{"kind":"step","step":1,"loss":7, "memory_bytes":[1,null]}\n'
        "\n"
        '{"kind":"validation","step":2,"loss":6}\n'
        '{"kind":"step","step":2,"loss":5}\n',
    )
    assert [(record.step, record.loss) for record in metrics.steps] == [(1, 7), (2, 5), (3, 8)]
    assert [(record.step, record.loss) for record in metrics.validations] == [(2, 6)]
    assert metrics.num_ranks == 2
    assert math.isnan(metrics.steps[0].memory_bytes[1])
    assert metrics.problems == ()


def test_nan_null_and_absent_numbers_are_nan(tmp_path: Path) -> None:
    metrics = read(
        tmp_path,
        '{"kind":"step","step":1,"loss":NaN,"lr":null}\n'
        '{"kind":"step","step":2,"loss":null,"grad_norm":null}\n'
        '{"kind":"validation","step":2,"loss":null}\n',
    )
    assert metrics.problems == ()
    assert math.isnan(metrics.steps[0].loss)
    assert math.isnan(metrics.steps[1].loss)
    assert math.isnan(metrics.steps[1].grad_norm)
    assert math.isnan(metrics.validations[0].loss)
    assert math.isnan(metrics.steps[0].lr)
    assert math.isnan(metrics.steps[0].step_ms)


def test_resumes_tell_how_the_number_of_ranks_changed(tmp_path: Path) -> None:
    metrics = read(
        tmp_path,
        '{"kind":"step","step":1,"loss":1,"memory_bytes":[5,5]}\n'
        '{"kind":"resume","step":1,"num_ranks":2}\n'
        '{"kind":"step","step":2,"loss":1,"memory_bytes":[5,5]}\n'
        '{"kind":"resume","step":2,"num_ranks":4}\n'
        '{"kind":"step","step":3,"loss":1}\n'
        '{"kind":"resume","step":2}\n'
        '{"kind":"step","step":3,"loss":1,"memory_bytes":[5,5,5]}\n'
        '{"kind":"resume","step":3,"num_ranks":8}\n',
    )
    assert metrics.resumes == (ResumeRecord(step=1, num_ranks=2), ResumeRecord(step=2))
    assert metrics.rank_counts == (2, 3)
    assert metrics.problems == ()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense", "not JSON"),
        ('{"kind":"step","step":1,"loss":', "not JSON"),
        ("[1, 2]", "expected an object"),
        ('{"kind":"nap","step":1,"loss":1}', "expected kind"),
        ('{"kind":"step","step":"1","loss":1}', "expected a step number, got '1'"),
        ('{"kind":"step","step":true,"loss":1}', "expected a step number"),
        ('{"kind":"step","step":-1,"loss":1}', "expected a step number"),
        ('{"kind":"step","step":1}', "no loss"),
        ('{"kind":"step","step":1,"loss":"low"}', "loss should be a number"),
        ('{"kind":"resume","num_ranks":2}', "expected a step number"),
        ('{"kind":"resume","step":2,"num_ranks":0}', "num_ranks should be a whole number above 0"),
        ('{"kind":"step","step":1,"loss":1,"lr":[]}', "lr should be a number"),
        ('{"kind":"step","step":1,"loss":1,"memory_bytes":7}', "memory_bytes should be a list"),
        ('{"kind":"step","step":1,"loss":1' + "0" * 400 + "}", "too large"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_malformed_line_is_named_and_the_others_are_read(
    tmp_path: Path, line: str, why: str
) -> None:
    good = '{"kind":"step","step":%d,"loss":1}\n'
    metrics = read(tmp_path, good % 1 + line + "\n" + good % 3)
    assert [record.step for record in metrics.steps] == [1, 3]
    (problem,) = metrics.problems
    assert problem.startswith("metrics.jsonl, line 2: ")
    assert why in problem
