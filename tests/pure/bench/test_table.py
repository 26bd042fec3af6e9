from io import StringIO

from rich.console import Console

from pure.bench.samples import make_missing, make_record, make_results
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
    assert cells(results, "plain")[3:6] == ["30.0", "1.00", "0.33"]
    assert cells(results, "shoal") == [
        "",
        "shoal",
        "eager",
        "45.0",
        "1.50",
        "0.50",
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
    assert "† the reference was measured by another call" in text(results)
    assert "†" not in text(plain)


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
