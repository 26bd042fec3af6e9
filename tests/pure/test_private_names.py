"""Torch's private corners are as they were when the adapter was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from private_names import CUDA, private_names, release

STORED = Path(__file__).parent / "torch_names" / f"{release()}.json"


@pytest.mark.skipif(not STORED.exists(), reason=f"nobody wrote down torch {release()}'s names")
def test_they_are_what_was_written_down() -> None:
    found, stored = private_names(), json.loads(STORED.read_text(encoding="utf-8"))
    changed = {
        name: (stored.get(name, "not written down"), found.get(name, "not used any more"))
        for name in sorted(found.keys() | stored.keys())
        if CUDA not in name and stored.get(name) != found.get(name)
    }
    assert not changed, "expected, found; tests/private_names.py says how to write them down"


def test_most_of_the_adapter_is_read() -> None:
    """A reader that finds nothing would never complain."""
    names = private_names()
    assert len(names) > 100
    assert names["torch._foreach_copy_"] == "builtin_function_or_method"
    assert "gm" in names["torch._inductor.compile_fx.compile_fx_inner"]
    assert "absent" not in names.values()
