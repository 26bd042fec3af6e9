"""Torch knows the backend in a source folder too, where no entry point tells it."""

import os
import subprocess
import sys

SCRIPT = """
from importlib import metadata
installed = metadata.entry_points
metadata.entry_points = lambda **by: (
    metadata.EntryPoints() if by.get("group") == "torch_dynamo_backends" else installed(**by)
)
import torch
import shoal.compile
print(torch.compile(lambda x: x + 1, backend="shoal", fullgraph=True)(torch.ones(1)).item())
"""


def test_importing_the_compiler_registers_it() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "2.0\n", done.stderr
