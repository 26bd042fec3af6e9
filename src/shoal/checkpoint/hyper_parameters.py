"""Saved hyper-parameters against those of a live optimizer: of the same kinds, or refused.

A checkpoint may come from somebody else. Whatever `restore_hyper_parameters` will set is compared
here first, so that nothing is set before everything is known to be right. Both sides are values
that JSON holds, in which a tuple is a list and a tensor of one element a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from shoal.errors import CheckpointError

_MEND = "build the optimizer as it was when the checkpoint was saved, or load another one"


def check_groups(saved: object, here: Sequence[Mapping[str, Any]], required: Iterable[str]) -> None:
    """Raise CheckpointError unless the saved groups can take the place of the present ones.

    `required` are the names of what this optimizer computes with.
    """
    groups = _taken(saved, "groups", list)
    _taken(saved, "values", dict)
    for index, group in enumerate(groups):
        _check_names(index, _taken(group, "params", list))
    _check_parameters([group["params"] for group in groups], [group["params"] for group in here])
    for index, (group, present) in enumerate(zip(groups, here, strict=True)):
        for key in group.keys() - {"params"}:
            _check_field(f"{key!r} of parameter group {index}", group[key], present, key)
        for key in sorted({*required} & present.keys() - group.keys()):
            # A switch may be newer than the checkpoint: it stays as this run chose it.
            if not isinstance(present[key], bool | None):
                raise CheckpointError(
                    f"parameter group {index} of the optimizer has no {key!r} in the checkpoint, "
                    f"and {present[key]!r} here: {_MEND}"
                )


def check_values(
    saved: Mapping[str, Any], here: Mapping[str, Any], known: Set[str], tensors: Set[str]
) -> None:
    """Raise CheckpointError unless the saved plain numbers are of state that there can be.

    `here` is what the live optimizer has, and `known` the names of the parameters it has them for.
    `tensors` are the names of its other state, whose place no number may take.
    """
    for key, value in saved.items():
        parameter, _, state = key.removeprefix(PREFIX).rpartition("/")
        if not key.startswith(PREFIX) or parameter not in known or not state:
            raise CheckpointError(f"{key!r:.200} is not state of a parameter of this optimizer")
        if key in tensors:
            raise CheckpointError(
                f"{key} is {value!r:.100} in the checkpoint, and a tensor here: {_MEND}"
            )
        _check_field(key, value, here, key)
        if key in here and type(value) is not type(here[key]):
            raise CheckpointError(f"{key} is {value!r} in the checkpoint, {here[key]!r} here")
    missing = sorted(here.keys() - saved.keys())
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {missing[0]!r}, which is {here[missing[0]]!r} here: {_MEND}"
        )


PREFIX = "optimizer/"
"""What the names of an optimizer's state begin with."""


def _taken(fields: object, key: str, kind: type) -> Any:
    value = fields.get(key) if isinstance(fields, dict) else None
    if type(value) is not kind:
        raise CheckpointError(
            f"the optimizer in the checkpoint should have {key!r} of type {kind.__name__}, "
            f"got {value!r:.100}"
        )
    return value


def _check_names(index: int, names: Sequence[object]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(
                f"parameter group {index} of the optimizer should list names, got {name!r:.100}"
            )


def _check_parameters(there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> None:
    if len(there) != len(here):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(there)} parameter groups, this one {len(here)}: "
            "build the optimizer with the groups it had when it was saved"
        )
    for index, (saved_names, names) in enumerate(zip(there, here, strict=True)):
        # Their order within a group is no matter: an engine may have one of its own.
        if sorted(saved_names) != sorted(names):
            pairs = zip([*sorted(saved_names), None], [*sorted(names), None], strict=False)
            differing = next(pair for pair in pairs if pair[0] != pair[1])
            raise CheckpointError(
                f"parameter group {index} of the optimizer has {differing[0]!r} in the checkpoint "
                f"where this one has {differing[1]!r}: build the optimizer with the groups that it "
                "had when it was saved"
            )


def _check_field(what: str, there: object, present: Mapping[str, Any], key: str) -> None:
    if key not in present:
        # A scheduler that is not built yet keeps numbers in the groups, such as initial_lr.
        if there is not None and not isinstance(there, bool) and not _is_number(there):
            raise CheckpointError(
                f"{what} is {there!r:.100} in the checkpoint, and not there in this optimizer: "
                f"{_MEND}"
            )
    elif not _fits(there, present[key]):
        raise CheckpointError(
            f"{what} is {there!r:.100} in the checkpoint, {present[key]!r:.100} here: {_MEND}"
        )


def _fits(there: object, here: object) -> bool:
    """Whether a saved value is of the same kind as the present one."""
    if _is_number(here):
        return _is_number(there)
    if isinstance(here, list | tuple):
        return (
            isinstance(there, list | tuple)
            and len(there) == len(here)
            and all(map(_fits, there, here))
        )
    if isinstance(here, Mapping):
        return (
            isinstance(there, Mapping)
            and there.keys() == here.keys()
            and all(_fits(there[key], here[key]) for key in here)
        )
    return type(there) is type(here)


def _is_number(value: object) -> bool:
    """Whether a value is a number that arithmetic can take: no bool, and not without bound."""
    if isinstance(value, int):
        return not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, float) and math.isfinite(value)
