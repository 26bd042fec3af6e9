"""Full precision in evaluations, for models that train in less."""

from __future__ import annotations

from shoal.runtime.module_state import state_of
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.wrapper.base import Wrapper, wrappers_below
from shoal.wrapper.precision import policy_of


def follow_modes(root: Wrapper) -> None:
    """Let each wrapper compute in its own precision in training, and in the parameters' in eval.

    All at once and before any runs, because a unit is gathered before its module is called.
    """
    for one in wrappers_below(root):
        state = state_of(one)
        assert state is not None
        if one._is_in_full_precision is not one.training:
            continue
        one._is_in_full_precision = not one.training
        policy = policy_of(one.mixed_precision) if one.training else MixedPrecisionPolicy()
        state.policy = policy
        if one._unit is not None:
            one._unit.compute_by(policy)
        if one.training:
            one._buffers_cast.cast()
        else:
            one._buffers_cast.restore()
