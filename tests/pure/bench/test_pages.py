"""What documents say is what was measured."""

import json
import runpy
from pathlib import Path

import pytest

from pure.bench.samples import (
    make_b1,
    make_b1_results,
    make_missing,
    make_record,
    make_results,
)
from shoal.bench.cases import Mode
from shoal.bench.figures import Gathers
from shoal.bench.results import Status, write_results
from shoal.bench.table import stored_results, write_tables
from shoal.errors import UsageError

ROOT = Path(__file__).parents[3]
PAGE = "before\n<!-- shoal bench: {} -->\nold\n<!-- end -->\nafter\n"


@pytest.mark.parametrize("page", ["README.md", "docs/bench.md"])
def test_documents_quote_the_stored_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- shoal bench: " in text
    written = write_tables(text, stored_results(ROOT / "benchmarks" / "results"))
    assert text == written, "run: python benchmarks/tables.py"


def test_the_picture_of_the_hosts_cost_is_of_the_stored_result() -> None:
    scaling = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"))
    (*_, newest) = sorted((ROOT / "benchmarks" / "results").glob("*-scaling-cpu.json"))
    drawn = scaling["draw"](json.loads(newest.read_text())["figures"])
    assert (ROOT / "docs" / "images" / "scaling.svg").read_text() == drawn
    page = (ROOT / "docs" / "bench.md").read_text()
    assert "(images/scaling.svg)" in page
    assert newest.name in page


def table(results, what: str) -> list[str]:
    text = write_tables(PAGE.format(what), results)
    assert text.startswith(f"before\n<!-- shoal bench: {what} -->\n\n")
    assert text.endswith("\n<!-- end -->\nafter\n")
    assert "old" not in text
    assert write_tables(text, results) == text
    return [line for line in text.splitlines() if line.startswith(("|", "Not", "a "))]


def test_engines_are_rows_and_cases_are_columns() -> None:
    results = make_results(
        make_record("shoal", 45.0),
        make_record("plain", 30.0),
        make_record("plain", 10.0, case="B1-8"),
        make_record("shoal", 11.0, case="B1-8", gathers=Gathers.WRITTEN),
        make_record("fsdp2", 90.0),
        make_record("plain", 20.0, mode=Mode.COMPILED),
        make_missing("ddp", Status.FAILED, "no"),
    )
    assert table(results, "ratios eager")[:5] == [
        "|  | B1-8 | B4 |",
        "| --- | --- | --- |",
        "| plain | 1.00 | 1.00 |",
        "| fsdp2 | – | 3.00 (3.00) |",
        "| shoal | 1.10 (1.10)‡ | 1.50 (1.50) |",
    ]
    assert "| shoal | 11.0‡ | 45.0 |" in table(results, "milliseconds eager")
    assert "| fsdp2 | – | 11.30 / 17.10 |" in table(results, "memory eager")
    assert "| plain, compiled | – | 20.0 |" in table(results, "milliseconds eager,compiled")
    assert table(results, "ratios cudagraphs") == ["Not measured yet."]
    assert table(None, "ratios eager") == ["Not measured yet."]


def test_floors_are_a_row_and_a_table_of_their_own() -> None:
    results = make_b1_results(make_b1("plain", 40.0), make_b1("shoal", 41.0))
    assert table(results, "ratios eager")[-1] == "| *floor* | 1.04 |"
    assert table(results, "milliseconds eager,compiled")[-2:] == [
        "| shoal, eager | 41.0§ |",
        "| *floor*, eager | 41.4 |",
    ]
    names, _, row = table(results, "floors eager")
    told = dict(zip(names.split(" | "), row.split(" | "), strict=True))
    assert told["forward"] == "≈ 13.3"
    assert told["gradients"] == "1.26"
    assert told["floor"] == "41.4"
    assert table(make_results(make_record("plain", 30.0)), "floors eager") == ["Not measured yet."]


def test_it_says_where_figures_come_from(tmp_path: Path) -> None:
    write_results(make_results(make_record("plain", 30.0)), tmp_path / "here.json")
    (tmp_path / "other.json").write_text('{"ms": 3}')
    results = stored_results(tmp_path)
    assert table(results, "ratios eager")[-1] == "a GPU, torch 2.13.0: `here.json`."
    assert stored_results(tmp_path / "nowhere") is None


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(
        UsageError, match="no table of speeds: there are ratios, milliseconds, memory, floors"
    ):
        write_tables(PAGE.format("speeds eager"), None)
