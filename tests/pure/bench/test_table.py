from dataclasses import replace
from io import StringIO

from rich.console import Console

from pure.bench.samples import (
    make_b1,
    make_b1_results,
    make_missing,
    make_record,
    make_results,
)
from shoal.bench.cases import Mode
from shoal.bench.results import Results, Status, merge
from shoal.bench.table import describe_record, render


def text(results: Results) -> str:
    console = Console(file=StringIO(), width=160, color_system=None)
    console.print(render(results))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def cells(results: Results, engine: str) -> list[str]:
    row = next(line for line in text(results).splitlines() if f" {engine} " in line and "│" in line)
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_ratios_are_to_plain_and_to_fsdp2() -> None:
    results = make_results(
        make_record("plain", 30.0), make_record("fsdp2", 90.0), make_record("shoal", 45.0)
    )
    assert cells(results, "plain")[3:6] == ["30.0", "1.00", "0.33 (0.33)"]
    assert cells(results, "shoal") == [
        "",
        "shoal",
        "eager",
        "45.0",
        "1.50 (1.50)",
        "0.50 (0.50)",
        "22.5",
        "0.25",
        "11.30 / 17.10",
        "74 · 1.5 MB",
    ]


def test_without_a_reference_there_is_no_ratio() -> None:
    results = make_results(make_record("shoal", 45.0), make_missing("plain", Status.FAILED, "no"))
    assert cells(results, "shoal")[4:6] == ["–", "–"]


def test_a_reference_from_elsewhere_is_marked() -> None:
    plain, shoal = make_results(make_record("plain", 30.0)), make_results(make_record("shoal", 45))
    results = merge([("a", plain), ("b", shoal)], "merge")
    assert cells(results, "shoal")[4] == "1.50†"
    assert "† not within rounds: the reference was measured by another call" in text(results)
    assert "†" not in text(plain)


def test_the_limit_for_sharded_engines_stands_under_them() -> None:
    plain, shoal = make_b1("plain", 40.0), make_b1("shoal", 44.0)
    results = make_b1_results(plain, shoal, make_b1("ddp", 40.5))
    assert cells(results, "floor")[2:5] == ["eager", "41.4", "1.04"]
    assert cells(results, "floor")[-1] == "49 · 7,062.7 MB"
    assert "§" not in text(results), "DDP has whole parameters, and another limit"
    assert "no floor" not in text(results)


def test_better_than_the_limit_is_marked() -> None:
    results = make_b1_results(make_b1("plain", 40.0), make_b1("shoal", 41.0))
    assert cells(results, "shoal")[3:5] == ["41.0§", "1.02 (1.02)§"]
    assert "§ better than the floor" in text(results)


def test_a_floor_of_a_host_bound_case_counts_launches() -> None:
    plain = make_b1("plain", 40.0)
    assert plain.figures is not None
    busy = replace(plain, figures=replace(plain.figures, host_ms=39.0))
    assert "the host is the limit, 39.0 of plain's 40.0 ms; sharding's 83" in text(
        make_b1_results(busy)
    )
    assert "the host is the limit" not in text(make_b1_results(plain))


def test_without_a_floor_the_reason_is_told() -> None:
    results = make_results(make_record("plain", 30.0))
    assert "no floor for B4 eager: the memory bandwidth of a GPU is not in" in text(results)
    assert "│ floor " not in text(results)


def test_failures_and_refusals_are_shown_with_their_reason() -> None:
    results = make_results(
        make_record("plain", 30.0),
        make_missing("ddp", Status.UNSUPPORTED, "cannot"),
        make_missing("fsdp1", Status.FAILED, "rank 0: out of memory"),
    )
    assert cells(results, "ddp")[3:] == ["–"] * 7
    assert cells(results, "fsdp1")[3:] == ["failed", *["–"] * 6]
    assert "– B4 ddp eager: cannot" in text(results)
    assert "failed B4 fsdp1 eager: rank 0: out of memory" in text(results)


def test_what_nobody_can_do_takes_one_line() -> None:
    refused = [
        make_missing(engine, Status.UNSUPPORTED, "no", Mode.CUDAGRAPHS)
        for engine in ("plain", "ddp")
    ]
    results = make_results(make_record("plain", 30.0), *refused)
    rows = [line for line in text(results).splitlines() if "│ cudagraphs │" in line]
    assert len(rows) == 1
    assert "│ –      │ cudagraphs" in rows[0]
    assert "B4 plain cudagraphs … B4 ddp cudagraphs (2 runs): no" in text(results)


def test_cases_come_in_their_own_order() -> None:
    names = ("B6a", "B1-1024", "B1-8")
    shown = text(make_results(*(make_record("plain", 1.0, case=name) for name in names)))
    assert shown.index("B1-8") < shown.index("B1-1024") < shown.index("B6a")


def test_quick_says_so() -> None:
    assert "not a measurement" in text(make_results(make_record("plain", 1.0), quick=True))
    assert "not a measurement" not in text(make_results(make_record("plain", 1.0)))


def test_one_line_per_run() -> None:
    assert describe_record(make_record("plain", 30.0)).split() == [
        "B4",
        "plain",
        "eager",
        "30.00",
        "ms",
    ]
    failed = make_missing("ddp", Status.FAILED, "Traceback\nRuntimeError: no")
    assert describe_record(failed).endswith("failed: RuntimeError: no")
