from dataclasses import replace
from pathlib import Path

import pytest

from pure.bench.samples import make_missing, make_record, make_results
from shoal.bench.cases import Mode
from shoal.bench.results import Results, Status, merge, merge_files, write_results
from shoal.errors import UsageError

EARLY, LATE = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"


def merged(*results: Results) -> Results:
    return merge([(f"{index}.json", one) for index, one in enumerate(results)], "the command")


def milliseconds(results: Results, engine: str, case: str = "B4") -> float:
    record = results.find(case, engine, Mode.EAGER)
    assert record is not None
    assert record.figures is not None
    return record.figures.forward_backward_ms


def test_files_are_joined_and_remember_where_runs_came_from(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    write_results(make_results(make_record("plain", 30.0), created=LATE), paths[0])
    write_results(make_results(make_record("fsdp2", 80.0), created=EARLY), paths[1])
    results = merge_files(paths, "shoal bench --merge a.json b.json")
    assert results.merged_by == "shoal bench --merge a.json b.json"
    files = {record.engine: results.sources[record.source].file for record in results.records}
    assert files == {"plain": "a.json", "fsdp2": "b.json"}


def test_merging_a_merged_file_keeps_the_first_names() -> None:
    once = merged(make_results(make_record("plain", 30.0)), make_results(make_record("ddp", 31.0)))
    twice = merged(once, make_results(make_record("fsdp1", 99.0)))
    assert [source.file for source in twice.sources] == ["0.json", "1.json", "1.json"]
    assert milliseconds(twice, "ddp") == 31.0


def test_the_newest_wins_whatever_the_order() -> None:
    early = make_results(make_record("plain", 30.0), created=EARLY)
    late = make_results(make_record("plain", 33.0), created=LATE)
    assert milliseconds(merged(early, late), "plain") == 33.0
    assert milliseconds(merged(late, early), "plain") == 33.0


def test_a_failure_never_hides_a_figure() -> None:
    good = make_results(make_record("plain", 30.0), created=EARLY)
    failed = make_results(make_missing("plain", Status.FAILED, "out of memory"), created=LATE)
    assert milliseconds(merged(good, failed), "plain") == 30.0


def test_a_failure_replaces_an_older_refusal() -> None:
    refused = make_results(make_missing("plain", Status.UNSUPPORTED, "no CUDA"), created=EARLY)
    failed = make_results(make_missing("plain", Status.FAILED, "out of memory"), created=LATE)
    assert merged(refused, failed).records[0].reason == "out of memory"


def test_quick_and_full_are_never_mixed() -> None:
    full, quick = make_results(make_record("plain", 1.0)), make_results(quick=True)
    with pytest.raises(UsageError, match=r"these are quick: 1\.json"):
        merged(full, quick)
    assert merged(quick, quick).quick


def test_two_versions_of_a_case_are_refused() -> None:
    first = make_results(make_record("plain", 1.0))
    second = replace(
        make_results(make_record("fsdp2", 2.0)), cases={"B4": {"name": "B4", "title": "another"}}
    )
    with pytest.raises(UsageError, match="measure it again with one version"):
        merged(first, second)


def test_the_number_of_steps_may_differ() -> None:
    first = replace(make_results(make_record("plain", 1.0)), cases={"B4": {"pace": {"steps": 1}}})
    second = replace(make_results(make_record("ddp", 2.0)), cases={"B4": {"pace": {"steps": 9}}})
    assert len(merged(first, second).records) == 2


def test_two_devices_or_torches_in_one_case_are_refused() -> None:
    here = make_results(make_record("plain", 1.0))
    with pytest.raises(UsageError, match=r"a GPU with torch .* and on a CPU with torch"):
        merged(here, make_results(make_record("fsdp2", 2.0, device="a CPU")))
    other = make_results(make_record("fsdp2", 2.0))
    source = replace(other.sources[0], host=replace(other.sources[0].host, torch="2.11.0"))
    with pytest.raises(UsageError, match=r"2\.11\.0"):
        merged(here, replace(other, sources=(source,)))
    elsewhere = make_results(make_record("plain", 1.0, case="B6a", device="a CPU"))
    assert len(merged(here, elsewhere).records) == 2
