import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pure.bench.samples import make_missing, make_record, make_results
from shoal.bench.results import Record, Status, read_results, write_results
from shoal.cli.bench import main
from shoal.cli.main import main as shoal
from shoal.errors import UsageError


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cases", "B7"], r"unknown case B7\. There are B1, B2, .*B6b\."),
        (["--engines", "plain,fsdp"], r"unknown engine fsdp\. Did you mean fsdp[12]\?"),
        (["--modes", "compile"], r"unknown mode compile\. Did you mean compiled\?"),
        (["--case", "B1"], r"unknown flag --case\. Did you mean --cases\?"),
        (["--cases", ","], "expected names with commas"),
        (["--repeats", "0"], "expected a whole number of at least 1, got '0'"),
        (["--merge", "gone.json"], r"cannot read results file gone\.json"),
        (["--merge", "gone.json", "--cases", "B1"], "--merge measures nothing, so --cases"),
    ],
)
def test_wrong_input_gets_one_message(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        main(argv)


def test_the_command_answers_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal(["bench", "--cases", "B9"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_results_that_cannot_be_written_are_noticed_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write results to .*--out"):
        main(["--cases", "B6a", "--out", str(tmp_path / "file" / "results.json")])


def test_merge_writes_and_prints_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "both.json")]
    write_results(make_results(make_record("plain", 30.0)), Path(paths[0]))
    write_results(make_results(make_record("fsdp2", 81.0)), Path(paths[1]))
    assert main(["--merge", *paths[:2], "--out", paths[2]]) == 0
    assert "2.70†" in capsys.readouterr().out
    both = read_results(Path(paths[2]))
    assert [record.engine for record in both.records] == ["plain", "fsdp2"]
    assert both.merged_by is not None
    assert both.merged_by == f"shoal bench --merge {paths[0]} {paths[1]}", "and no --out"


def test_a_failed_run_makes_the_command_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: object, **options: object) -> list[Record]:
        return [make_record("plain", 30.0), make_missing("fsdp2", Status.FAILED, "[/rank0] fell")]

    monkeypatch.setattr("shoal.cli.bench.measure", measure)
    out = tmp_path / "results.json"
    assert main(["--cases", "B4", "--out", str(out)]) == 1
    assert "failed B4 fsdp2 eager: [/rank0] fell" in capsys.readouterr().out
    assert [record.status for record in read_results(out).records] == [Status.OK, Status.FAILED]


def test_an_interrupted_command_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: object, **options: object) -> Iterator[Record]:
        yield make_record("plain", 30.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.bench.measure", measure)
    out = tmp_path / "results.json"
    assert shoal(["bench", "--cases", "B4", "--out", str(out)]) == 130
    assert [record.engine for record in read_results(out).records] == ["plain"]


def test_cases_that_need_cuda_are_listed_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "results.json"
    assert main(["--cases", "B1,B5", "--engines", "plain", "--out", str(out)]) == 0
    assert "needs CUDA" in capsys.readouterr().out
    assert {record.case for record in read_results(out).records} == {
        "B1-8",
        "B1-64",
        "B1-1024",
        "B5",
    }


def test_names_in_merged_files_reach_the_terminal_as_letters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = replace(make_record("plain", 30.0), engine="[/red]\x1b[31m")
    write_results(make_results(named), tmp_path / "a.json")
    assert main(["--merge", str(tmp_path / "a.json"), "--out", str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "[/red][31m" in out
    assert "\x1b" not in out


def test_results_that_are_no_file_or_nest_without_end_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000)
    for name, message in (("pipe", "it is a pipe"), ("deep", "is not JSON")):
        with pytest.raises(UsageError, match=message):
            read_results(tmp_path / name)
