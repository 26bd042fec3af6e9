"""An optimizer's state under the names of the parameters it belongs to.

    optimizer/<parameter>/<state>     a tensor, such as optimizer/layers.0.weight/exp_avg
    groups                            hyper-parameters of each group, such as lr, as JSON
    values                            state that is a plain number, such as a step count, as JSON

Works for any optimizer whose state is tensors placed like their parameter, single elements, and
plain numbers: AdamW, SGD with momentum, and most others. A checkpoint may come from somebody else:
hyper-parameters are compared with those of the live optimizer, and with what they can be, before
any is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.checkpoint.manifest import JSON, check_json
from shoal.errors import CheckpointError, UsageError
from shoal.sharding_wrapper import parameter_names, wrappers_below
from shoal.tensor.sharded import ShardedTensor

PREFIX = "optimizer/"
"""The names of an optimizer's state begin with this."""

_MEND = "build the optimizer as it was when the checkpoint was saved, or load another one"

_RANGES = {
    **dict.fromkeys(("lr", "initial_lr", "eps", "weight_decay", "momentum"), (0.0, math.inf)),
    "betas": (0.0, 1.0),
}
"""For names that mean the same in all of torch's optimizers: the least, and what is too much."""

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how a step is computed, not what: they stay as the new run chose them."""


def optimizer_tensors(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    """Give the state that there is, to be saved or to be filled in place, and the rest as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, JSON] = {}
    for name, parameter in _named(model, optimizer):
        for state, value in optimizer.state.get(parameter, {}).items():
            key = f"{PREFIX}{name}/{state}"
            if isinstance(value, torch.Tensor):
                _check_placed(key, parameter, value)
                tensors[key] = value
            elif value is None or isinstance(value, bool | int | float | str):
                values[key] = value
            else:
                raise NotImplementedError(
                    f"{key} is a {type(value).__name__}: checkpoints of such optimizer state are "
                    "not supported"
                )
    return tensors, {"groups": groups_of(model, optimizer), "values": values}


def prepare_optimizer(model: nn.Module, optimizer: Optimizer, names: Iterable[str]) -> None:
    """Give the optimizer state for the parameters that have some among the saved `names`.

    An optimizer makes its state in its first step, and what is not there cannot be filled. So the
    parameters that lack it make one with zero gradients at learning rate zero, which changes no
    weight. State that the checkpoint does not have, because no gradient had come yet, is dropped.
    """
    saved = {parsed(name)[0] for name in names if name.startswith(PREFIX)}
    missing: set[torch.Tensor] = set()
    for name, parameter in _named(model, optimizer):
        if name not in saved:
            optimizer.state.pop(parameter, None)
        elif not optimizer.state.get(parameter):
            missing.add(parameter)
    if missing:
        _first_step(optimizer, missing)


def restore_hyper_parameters(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]
) -> None:
    """Set each group's hyper-parameters, and plain numbers of the state, to what was saved.

    Raises CheckpointError, and sets nothing, unless all of them are of the kinds they were.
    """
    check_hyper_parameters(model, optimizer, saved)
    for group, fields in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in fields.items():
            present = group.get(key)
            if key == "params" or key in _HOW:
                continue
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(present, tuple) else value
    if wrappers_below(model):
        return  # plain numbers came with the rest of its state
    parameters = dict(_named(model, optimizer))
    for key, value in saved["values"].items():
        name, state = parsed(key)
        optimizer.state[parameters[name]][state] = value


def check_hyper_parameters(model: nn.Module, optimizer: Optimizer, saved: object) -> None:
    """Raise CheckpointError unless the optimizer can take over all that was saved beside tensors.

    Numbers of the state are compared with those that the optimizer has: see `prepare_optimizer`.
    """
    check_saved_groups(model, optimizer, saved)
    assert isinstance(saved, Mapping)
    known = {name for group in saved["groups"] for name in group["params"]}
    state = dict(_state_by_name(model, optimizer))
    tensors = {name for name, value in state.items() if isinstance(value, torch.Tensor)}
    # Plain numbers of a wrapped model come with the rest of its state.
    values = {} if wrappers_below(model) else {n: state[n] for n in state.keys() - tensors}
    _check_values(saved["values"], values, known, tensors)


def check_saved_groups(model: nn.Module, optimizer: Optimizer, saved: object) -> None:
    """Raise CheckpointError unless the saved groups can take the place of the present ones."""
    here = groups_of(model, optimizer)
    groups = _taken(saved, "groups", list)
    _taken(saved, "values", dict)
    for index, group in enumerate(groups):
        for name in _taken(group, "params", list):
            if not isinstance(name, str):
                raise CheckpointError(
                    f"parameter group {index} of the optimizer should list names, got {name!r:.100}"
                )
    _check_parameters([group["params"] for group in groups], [group["params"] for group in here])
    required = optimizer.defaults.keys() - _HOW
    for index, (group, present) in enumerate(zip(groups, here, strict=True)):
        for key in group.keys() - {"params"}:
            _check_field(f"{key!r} of parameter group {index}", group[key], present, key)
        for key in sorted(required & present.keys() - group.keys()):
            # A switch may be newer than the checkpoint: it stays as this run chose it.
            if not isinstance(present[key], bool | None):
                raise CheckpointError(
                    f"parameter group {index} of the optimizer has no {key!r} in the checkpoint, "
                    f"and {present[key]!r} here: {_MEND}"
                )
    for index, (group, fields) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, value in fields.items():
            if isinstance(group.get(key), torch.Tensor):
                _check_holds(f"{key!r} of parameter group {index}", group[key], value)


def _check_holds(what: str, present: torch.Tensor, value: float) -> None:
    """Raise CheckpointError unless a tensor of one element can take a number."""
    try:
        torch.full_like(present, value)
    except RuntimeError as error:
        raise CheckpointError(
            f"{what} is {value!r:.100} in the checkpoint, and a tensor of {present.dtype} here: "
            f"{error}"
        ) from error


def check_states(model: nn.Module, optimizer: Optimizer, names: Set[str]) -> None:
    """Raise CheckpointError if a checkpoint lacks state that the optimizer makes."""
    for name, _ in _state_by_name(model, optimizer):
        if name not in names:
            raise CheckpointError(f"the checkpoint lacks {name}: {_MEND}")


def parsed(key: str) -> tuple[str, str]:
    """The parameter, and the kind of its state, that a name in a checkpoint stands for."""
    name, _, kind = key.removeprefix(PREFIX).rpartition("/")
    return name, kind


def _state_by_name(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """All state that there is, by its names in a checkpoint."""
    owners = parameter_names(model)
    for parameter, state in optimizer.state.items():
        for name in owners.get(parameter, ()):
            for kind, value in state.items():
                yield f"{PREFIX}{name}/{kind}", value


def _named(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    names = _known_names(model, optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter][0], parameter


def _known_names(model: nn.Module, optimizer: Optimizer) -> dict[torch.Tensor, tuple[str, ...]]:
    """The names of the model's parameters; raises unless all of the optimizer's are among them."""
    names = parameter_names(model)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"parameter group {index} of the optimizer holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not one of the model: build the optimizer "
                    "from the parameters of this model, after sharding it"
                )
    return names


def groups_of(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's hyper-parameters as JSON, with names in the place of parameters."""
    names = _known_names(model, optimizer)
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        fields: dict[str, Any] = {"params": [n for p in group["params"] for n in names[p]]}
        for key, value in group.items():
            if key == "params" or key in _HOW:
                continue
            fields[key] = value.item() if isinstance(value, torch.Tensor) else value
            check_json(fields[key], f"{key} of parameter group {index}")
        groups.append(fields)
    return groups


def _check_placed(key: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse state that differs from rank to rank without saying so: rank 0's would be saved."""
    sharded = (DTensor, ShardedTensor)
    if isinstance(parameter, sharded) and not isinstance(value, sharded) and value.numel() > 1:
        raise NotImplementedError(
            f"{key} is a plain tensor of shape {tuple(value.shape)} for a sharded parameter: only "
            "tensors sharded like it and single elements are supported"
        )


def _first_step(optimizer: Optimizer, missing: Set[torch.Tensor]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter in missing else None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _check_values(
    saved: Mapping[str, Any], here: Mapping[str, Any], known: Set[str], tensors: Set[str]
) -> None:
    """Raise CheckpointError unless the saved plain numbers are of state that there can be.

    `here` is what the live optimizer has, and `known` the names of the parameters it has them for.
    `tensors` are the names of its other state, whose place no number may take.
    """
    for key, value in saved.items():
        parameter, state = parsed(key)
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


def _taken(fields: object, key: str, kind: type) -> Any:
    value = fields.get(key) if isinstance(fields, dict) else None
    if type(value) is not kind:
        raise CheckpointError(
            f"the optimizer in the checkpoint should have {key!r} of type {kind.__name__}, "
            f"got {value!r:.100}"
        )
    return value


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
    # An optimizer that has such numbers itself gives the name another meaning.
    elif not _can_be(key, there) and _can_be(key, present[key]):
        raise CheckpointError(
            f"{what} is {there!r:.100} in the checkpoint, which it cannot be: load another one"
        )


def _can_be(name: str, value: object) -> bool:
    """Whether a hyper-parameter, or each of several, is in the range of its name."""
    values = value if isinstance(value, list | tuple) else [value]
    least, too_much = _RANGES.get(name, (-math.inf, math.inf))
    return all(least <= one < too_much for one in values if isinstance(one, int | float))


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
