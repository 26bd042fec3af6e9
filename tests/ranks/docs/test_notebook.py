"""The notebook of `examples/` runs from top to bottom, and is stored without what it printed."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[3] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_in_order(path, capsys):
    cells = json.loads(path.read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in codes)
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in codes:
        exec("".join(cell["source"]), names)
    assert "gather" in capsys.readouterr().out
    actions = names["actions"]
    assert isinstance(actions, list)
    assert "gather 1" in actions
