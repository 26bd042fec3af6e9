"""The launcher unpickles nothing: what could do so is not even imported by its modules."""

import ast
from pathlib import Path

import pytest

import shoal.train

FOLDER = Path(shoal.train.__file__).parent
FORBIDDEN = ("pickle", "marshal", "shelve", "multiprocessing", "torch.distributed.elastic")


@pytest.mark.parametrize("name", ["launch", "failure", "run_folder", "environment"])
def test_the_launcher_has_no_use_for_pickles(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = [
        module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in [getattr(node, "module", None) or "", *(each.name for each in node.names)]
    ]
    assert not [module for module in imported if module.startswith(FORBIDDEN)]
    assert not [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "TCPStore"
    ]
