"""`docs/compose.md` says what the markers of tests say, and nothing else."""

from pathlib import Path

import pytest

import compose
from compose import COLUMNS, FEATURES, NOT_APPLICABLE, PAGE, REASONS, WrongMarkerError


def test_the_page_is_what_the_tests_claim() -> None:
    written = compose.page(compose.cells(compose.claims()))
    assert PAGE.read_text(encoding="utf-8") == written, "run python tests/compose.py"


def test_few_cells_do_not_apply() -> None:
    assert all(f in FEATURES and c in COLUMNS for f, c in NOT_APPLICABLE)
    assert set(NOT_APPLICABLE.values()) == set(REASONS)
    assert len(NOT_APPLICABLE) <= 0.15 * len(FEATURES) * len(COLUMNS)


def _claims(folder: Path, marker: str) -> list[compose.Claim]:
    tests = folder / "tests"
    tests.mkdir()
    (tests / "test_one.py").write_text(f"import pytest\n{marker}\ndef test_it(): pass\n")
    return compose.claims(tests)


def test_a_marker_claims_its_cells(tmp_path: Path) -> None:
    marker = '@pytest.mark.compose("LBFGS", "wrapper", "every layout")'
    found = compose.cells(_claims(tmp_path, marker))
    columns = ["wrapper", "Even", "Flat", "Rows", "Block", "Whole"]
    assert [*found] == [("LBFGS", column) for column in columns]
    text = compose.page(found)
    assert '[tested](../tests/test_one.py "test_it")' in text
    assert f"| tested | {len(columns)} |" in text


def test_what_passes_speaks_louder_than_what_is_refused(tmp_path: Path) -> None:
    refusal = '@pytest.mark.compose("LBFGS", "Rows", "TP", refused="why")'
    claims = _claims(tmp_path, refusal + '\n@pytest.mark.compose("LBFGS", "Rows")')
    found = compose.cells(claims)
    assert found["LBFGS", "Rows"].refused is None
    assert found["LBFGS", "TP"].refused == "why"
    assert "| refused | 1 |" in compose.page(found)


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ('("no such thing", "TP")', "no feature 'no such thing'"),
        ('("LBFGS", "nowhere")', "no column 'nowhere'"),
        ('("LBFGS", COLUMN)', "plain strings"),
        ('("LBFGS")', "expected a feature, columns"),
        ('("experts", "EP")', "does not apply"),
    ],
)
def test_markers_that_cannot_be_are_named(tmp_path: Path, marker: str, words: str) -> None:
    with pytest.raises(WrongMarkerError, match=words) as caught:
        compose.cells(_claims(tmp_path, f"@pytest.mark.compose{marker}"))
    assert "test_it" in str(caught.value)
