"""A compilation is no silence."""

import time

import pytest

from shoal.train.observe.compiling import telling_compilation


def test_it_says_that_it_begins_how_far_it_is_and_how_long_it_took():
    notes: list[str] = []
    with telling_compilation(notes.append, every_s=0.01):
        deadline = time.monotonic() + 5
        while len(notes) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert notes[0].startswith("compiling … the first step takes longer")
    assert notes[1].startswith("compiling … 0 graphs, ")
    assert notes[-1].startswith("compiled: 0 graphs, ")
    heard = len(notes)
    time.sleep(0.03)
    assert len(notes) == heard


def test_of_a_compilation_that_fails_the_error_alone_is_told():
    notes: list[str] = []
    with pytest.raises(RuntimeError, match="no"), telling_compilation(notes.append):
        raise RuntimeError("no")
    assert len(notes) == 1
