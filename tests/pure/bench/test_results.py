import json
from pathlib import Path

import pytest

from pure.bench.samples import make_missing, make_record, make_results
from shoal.bench.cases import CASES
from shoal.bench.results import Status, describe_case, read_results, write_results
from shoal.errors import UsageError


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    results = make_results(
        make_record("plain", 30.0),
        make_record("fsdp2", 86.0),
        make_missing("shoal", Status.FAILED, "rank 0: out of memory"),
    )
    path = tmp_path / "new" / "folder" / "results.json"
    write_results(results, path)
    assert read_results(path) == results
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_cases_can_be_described_in_json() -> None:
    described = describe_case(CASES[0])
    assert json.loads(json.dumps(described)) == described
    assert described["hidden_dim"] == 5376
    assert described["network"] == {"name": "free", "bandwidth_gb_per_s": None, "latency_us": 0.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not JSON", "is not JSON"),
        ('{"schema": 7}', "has schema 7, this version of shoal reads 2"),
        ("[1]", "has schema None"),
        ('{"schema": 1, "quick": false}', "is not a results file"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_results(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read results file .*gone\.json: No such file"):
        read_results(tmp_path / "gone.json")


def test_results_cannot_hold_a_run_twice() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        make_results(make_record("plain", 1.0), make_record("plain", 2.0))


def test_figures_and_reasons_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="figures exactly if it is ok"):
        make_missing("plain", Status.OK, "why")
