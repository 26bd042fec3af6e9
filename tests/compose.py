"""What composes with what: features against doors, layouts and meshes, read off the tests.

    @pytest.mark.compose("0-d parameters", "fully_shard", "wrapper", "every layout")
    @pytest.mark.compose("0-d parameters", "TP", refused="a ShardedTensor has no other axes")

A cell is claimed by the marker of a test, and by nothing else: the source of the tests is read, no
test is run or imported. `python tests/compose.py` writes the page; a test compares the two.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compose.md"

GROUPS = {
    "every door": ("fully_shard", "wrapper", "replicate", "compiled"),
    "every layout": ("Even", "Flat", "Rows", "Block", "Whole"),
    "every mesh": ("HSDP", "TP", "EP", "PP"),
}
"""In a marker, for those of several columns that apply to the feature."""
GROUPS["everywhere"] = (*itertools.chain(*GROUPS.values()), "offload", "checkpoint")
COLUMNS = (*GROUPS["everywhere"][:-2], "fp8", "offload", "checkpoint")

FEATURES = (
    "mixed precision",
    "gradient accumulation",
    "activation checkpointing",
    "autocast",
    "frozen parameters",
    "unused parameters",
    "meta-device initialisation",
    "full parameters",
    "clipping by norm",
    "gradient scaling",
    "communication hooks",
    "tied parameters in one unit",
    "tied parameters across units",
    "non-contiguous parameters",
    "complex parameters",
    "uneven shards along any dim",
    "0-d parameters",
    "sparse gradients",
    "several dtypes in one unit",
    "tensors with gather hooks",
    "DTensor parameters",
    "gradient penalties",
    "torch.func",
    "reshard_after_forward as a number",
    "uneven inputs",
    "experts",
    "Adam and AdamW",
    "SGD, fused too",
    "other element-wise optimizers",
    "Adafactor",
    "LBFGS",
    "Muon",
    "low-precision gathers",
    "quantised reductions",
    "scheduled offload",
    "distant replicas",
)

REASONS = {
    "same": "the feature is the column",
    "own layout": "this door has a layout of its own",
    "no such setting": "this door has no such setting, and torch's has none",
    "nothing is cut": "replicas keep whole parameters",
    "outside": "the graph has no part in it",
    "no parameters": "it concerns no parameters, so that a checkpoint has nothing of it",
    "torch's own": "torch's tensor parallelism, or its pipelines, cannot do it without sharding",
}
"""Why a cell may be not applicable."""

NOT_APPLICABLE: dict[tuple[str, str], str] = {
    ("full parameters", "replicate"): "nothing is cut",
    ("full parameters", "compiled"): "outside",
    ("meta-device initialisation", "compiled"): "outside",
    ("clipping by norm", "checkpoint"): "no parameters",
    ("autocast", "checkpoint"): "no parameters",
    ("communication hooks", "checkpoint"): "no parameters",
    ("activation checkpointing", "checkpoint"): "no parameters",
    ("gradient penalties", "checkpoint"): "no parameters",
    ("torch.func", "checkpoint"): "no parameters",
    ("reshard_after_forward as a number", "wrapper"): "no such setting",
    ("reshard_after_forward as a number", "replicate"): "nothing is cut",
    ("reshard_after_forward as a number", "checkpoint"): "no parameters",
    ("tensors with gather hooks", "wrapper"): "no such setting",
    ("tensors with gather hooks", "replicate"): "nothing is cut",
    ("uneven shards along any dim", "wrapper"): "own layout",
    ("uneven shards along any dim", "replicate"): "nothing is cut",
    **{("uneven shards along any dim", c): "own layout" for c in GROUPS["every layout"][1:]},
    ("DTensor parameters", "TP"): "same",
    ("experts", "EP"): "same",
    ("low-precision gathers", "fp8"): "same",
    ("low-precision gathers", "replicate"): "nothing is cut",
    ("gradient penalties", "TP"): "torch's own",
    ("gradient penalties", "PP"): "torch's own",
    ("torch.func", "TP"): "torch's own",
    ("torch.func", "EP"): "torch's own",
    ("torch.func", "PP"): "torch's own",
    ("torch.func", "compiled"): "outside",
    ("LBFGS", "PP"): "torch's own",
    ("scheduled offload", "offload"): "same",
    ("distant replicas", "HSDP"): "same",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a test says of one cell."""

    feature: str
    column: str
    test: str
    path: str
    refused: str | None

    def __str__(self) -> str:
        link = f'({Path("..") / self.path} "{self.test}")'
        return f"[tested]{link}" if self.refused is None else f"[refused]{link}: {self.refused}"


class WrongMarkerError(ValueError):
    """A marker that names what the table does not have."""


def claims(tests: Path = ROOT / "tests") -> list[Claim]:
    """Every marker of every test below a folder, in the order of their paths."""
    found: list[Claim] = []
    for path in sorted(tests.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.compose(" in source:
            found += _claims_in(ast.parse(source), path.relative_to(tests.parent).as_posix())
    return found


def _claims_in(tree: ast.Module, path: str) -> Iterator[Claim]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and _is_ours(decorator.func):
                    yield from _claims_of(decorator, node.name, path)


def _is_ours(called: ast.expr) -> bool:
    return ast.unparse(called) == "pytest.mark.compose"


def _claims_of(marker: ast.Call, test: str, path: str) -> Iterator[Claim]:
    where = f"{path}: {test}"
    try:
        feature, *columns = [ast.literal_eval(arg) for arg in marker.args]
        options = {str(word.arg): ast.literal_eval(word.value) for word in marker.keywords}
    except ValueError as error:
        raise WrongMarkerError(f"{where}: a marker takes plain strings: {error}") from None
    if not columns or options.keys() - {"refused"}:
        raise WrongMarkerError(f"{where}: expected a feature, columns, and maybe refused='why'")
    if feature not in FEATURES:
        raise WrongMarkerError(f"{where}: there is no feature {feature!r} in tests/compose.py")
    for column in columns_of(feature, columns):
        if column not in COLUMNS:
            raise WrongMarkerError(f"{where}: there is no column {column!r} in tests/compose.py")
        refused = options.get("refused")
        yield Claim(feature=feature, column=column, test=test, path=path, refused=refused)


def columns_of(feature: str, columns: Iterable[str]) -> Iterator[str]:
    """The columns that a marker names for a feature."""
    for column in columns:
        if column in GROUPS:
            yield from (one for one in GROUPS[column] if (feature, one) not in NOT_APPLICABLE)
        else:
            yield column


def cells(found: list[Claim]) -> dict[tuple[str, str], Claim]:
    """The claim that speaks for each cell: of several the first; a test that passes wins."""
    best: dict[tuple[str, str], Claim] = {}
    for claim in sorted(found, key=lambda c: (c.refused is not None, c.path, c.test)):
        cell = claim.feature, claim.column
        if cell in NOT_APPLICABLE:
            raise WrongMarkerError(
                f"{claim.path}: {claim.test} claims {cell}, which tests/compose.py says does not "
                f"apply: {REASONS[NOT_APPLICABLE[cell]]}"
            )
        best.setdefault(cell, claim)
    return best


def page(found: Mapping[tuple[str, str], Claim]) -> str:
    """The page that says it."""
    total = len(FEATURES) * len(COLUMNS)
    refused = sum(claim.refused is not None for claim in found.values())
    applicable = total - len(NOT_APPLICABLE)
    counts = [
        ("tested", len(found) - refused, total),
        ("refused", refused, applicable),
        ("untested", applicable - len(found), applicable),
        ("not applicable", len(NOT_APPLICABLE), total),
    ]
    lines = [
        _INTRODUCTION,
        "| | cells | |",
        "|---|---|---|",
        *(
            f"| {what} | {num} | {100 * num / of:.0f} % of {_WHOLE[of == total]} |"
            for what, num, of in counts
        ),
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *(_row(feature, found) for feature in FEATURES),
        "",
        "Not applicable, because:",
        "",
        *(f"- *{name}*: {reason}" for name, reason in REASONS.items()),
        "",
    ]
    return "\n".join(lines)


_WHOLE = {True: "all", False: "those that apply"}
_INTRODUCTION = """\
# What composes with what

A cell links to a test that claims it with `@pytest.mark.compose`. *Untested* says that no test
does: it may work. The page is written by `python tests/compose.py`, and a test compares the two.

Cells of `test_compositions.py` are trained beside the unsharded model. Of its columns `make test`
tries fully_shard, wrapper, replicate and Flat, and `make soak` all others.
"""


def _row(feature: str, found: Mapping[tuple[str, str], Claim]) -> str:
    return f"| {feature} | " + " | ".join(_cell(feature, c, found) for c in COLUMNS) + " |"


def _cell(feature: str, column: str, found: Mapping[tuple[str, str], Claim]) -> str:
    if (feature, column) in found:
        return str(found[feature, column])
    if (feature, column) in NOT_APPLICABLE:
        return f"*{NOT_APPLICABLE[feature, column]}*"
    return "untested"


if __name__ == "__main__":
    PAGE.write_text(page(cells(claims())), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
