"""The table in the docstring of `phase`, as a test."""

import itertools

import pytest

from shoal.errors import TransitionError
from shoal.runtime.phase import Phase, check_transition

ALLOWED = {
    Phase.SHARDED: {Phase.GATHERING},
    Phase.GATHERING: {Phase.HELD, Phase.SHARDED},
    Phase.HELD: {Phase.FORWARD, Phase.BACKWARD, Phase.SHARDED},
    Phase.FORWARD: {Phase.HELD},
    Phase.BACKWARD: {Phase.HELD},
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(Phase, Phase)))
def test_every_pair(old: Phase, new: Phase) -> None:
    if new in ALLOWED[old]:
        check_transition("blocks.0", old, new)
    else:
        with pytest.raises(TransitionError, match=f"'blocks.0' cannot go from {old} to {new}"):
            check_transition("blocks.0", old, new)
