"""Lists of tensors: the multi-tensor and the fused steps of optimizers.

Lists are unwrapped once per call. Tensors at one index belong together: a parameter, its gradient,
its state; they are cut alike, or all plain, or single numbers such as a step count. At other
indices there may be DTensors, whose local tensors take part in the same call.

torch's own optimizers group their lists by device and dtype before a step. `grouped` unwraps there,
so that torch need not carry hundreds of tensors of a subclass to Python and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from shoal._torch import distributed_tensor, operators
from shoal.errors import UsageError
from shoal.tensor.copy_and_fill import copy_into
from shoal.tensor.sharded import DeviceDtype, Handler, Op, ShardedTensor, like, like_each
from shoal.tensor.unsupported import check_plain, differently_cut, unsupported

Lists: TypeAlias = list[list[Any]]
TensorGroups: TypeAlias = dict[DeviceDtype, tuple[Lists, list[int]]]
"""For each kind the parts of all lists, and where in the lists they were."""

ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    )
)
"""Modules whose steps never look across elements, and write only into the tensors of the lists.

Any other optimizer (Adafactor has means over rows) gets the sharded tensors, whose operations
know about the other ranks.
"""

_FOREACH = "_foreach_"
_REDUCTIONS = frozenset({"max", "norm", "powsum"})


def is_foreach_elementwise(op: Op) -> bool:
    """Whether an operation does to each tensor of a list what an element-wise one does."""
    packet, _, overload = op.__name__.partition(".")
    if not packet.startswith(_FOREACH) or "out" in overload:
        return False
    single = packet.removeprefix(_FOREACH).removesuffix("_")
    if single == "zero":
        return True
    packets = getattr(torch.ops.aten, single, None)
    return (
        packets is not None
        and single not in _REDUCTIONS
        and any(torch.Tag.pointwise in getattr(packets, o).tags for o in packets.overloads())
    )


def foreach(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a multi-tensor operation on the local tensors."""
    examples, local_args = unwrap_lists(op, args)
    results = op(*local_args, **kwargs)
    if not results:
        return results
    if len(results) > len(examples):
        taken = iter(results)
        results = [[next(taken) for _ in range(count)] for count in _counts(examples)]
        return [
            like_each(example, locals_)
            if isinstance(example, ShardedTensor)
            else _like(example, locals_[0])
            for example, locals_ in zip(examples, results, strict=True)
        ]
    return [_like(example, local) for example, local in zip(examples, results, strict=True)]


def _like(example: Tensor, local: Tensor) -> Tensor:
    """A result that lies as its example does."""
    if isinstance(example, ShardedTensor):
        return like(example, local)
    if not isinstance(example, DTensor):
        return local
    spec = distributed_tensor.spec_of(example)
    if local.dtype is not example.dtype:
        spec = distributed_tensor.dtensor_spec(
            spec.mesh, spec.placements, example.shape, example.stride(), local.dtype
        )
    return distributed_tensor.dtensor(local, spec)


def _foreach_copy(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Copy each source into its target; a source may be whole where the target is sharded."""
    targets, sources, *rest = args
    if all(
        isinstance(target, ShardedTensor)
        and isinstance(source, ShardedTensor)
        and hasattr(target, "local")
        and target.placement.agrees(source.placement)
        for target, source in zip(targets, sources, strict=True)
    ):
        op([t.local for t in targets], [s.local for s in sources], *rest, **kwargs)
        return
    for target, source in zip(targets, sources, strict=True):
        copy_into(op, (target, source, *rest), {})


def _fused(num_lists: int) -> Handler:
    """Make the handler of a fused step in place; lists after the first so many are step counts."""

    def step(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        examples, local_args = unwrap_lists(op, args[:num_lists])
        counts = args[num_lists:]
        if len(local_args[0]) > len(examples):
            counts = tuple(_repeated(each, _counts(examples)) for each in counts)
        operators.binding(op)(*local_args, *counts, **kwargs)

    return step


def unwrap_lists(op: Op, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Any]]:
    """Give the first list of tensors, and the arguments with local tensors in place of all."""
    examples: list[Any] = []
    placements: list[Any] = []
    local_args: list[Any] = []
    for arg in args:
        if not isinstance(arg, list) or not arg or not isinstance(arg[0], Tensor):
            local_args.append(arg)
            continue
        try:
            found = [tensor.placement for tensor in arg]
            local = [tensor.local for tensor in arg]
        except AttributeError:
            # Some are plain: rare enough to be looked at one by one.
            return _unwrap_mixed(op, args)
        if not examples:
            examples, placements = arg, found
        elif found != placements:
            for first, second in zip(examples, arg, strict=True):
                if not first.placement.agrees(second.placement):
                    raise differently_cut(op, first, second)
        local_args.append(local)
    return examples, local_args


def _unwrap_mixed(op: Op, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Any]]:
    """Do as `unwrap_lists` does where some tensors are plain, or have several local shards.

    A tensor with several shards takes as many places in the lists, and so does what belongs to it.
    """
    lists = [a for a in args if isinstance(a, list) and a and isinstance(a[0], Tensor)]
    examples: list[Tensor] = []
    for column in zip(*lists, strict=True):
        sharded = [tensor for tensor in column if isinstance(tensor, ShardedTensor)]
        if not sharded:
            examples.append(_check_column(op, column))
            continue
        examples.append(sharded[0])
        for tensor in column:
            if not isinstance(tensor, ShardedTensor):
                check_plain(op, sharded[0], tensor)
            elif not tensor.placement.agrees(sharded[0].placement):
                raise differently_cut(op, sharded[0], tensor)
    counts = _counts(examples)
    return examples, [_repeated(arg, counts) for arg in args]


def _check_column(op: Op, column: Sequence[Tensor]) -> Tensor:
    """An example of tensors that belong together, none of which is a ShardedTensor."""
    distributed = [tensor for tensor in column if isinstance(tensor, DTensor)]
    if not distributed:
        return column[0]
    example = distributed[0]
    if any(isinstance(placement, Partial) for placement in example.placements):
        raise unsupported(
            op, f"a DTensor has the placements {example.placements}; redistribute it first"
        )
    for tensor in column:
        is_alike = (
            distributed_tensor.place_getter(tensor) == distributed_tensor.place_getter(example)
            if isinstance(tensor, DTensor)
            else tensor.dim() == 0
        )
        if not is_alike:
            raise UsageError(
                f"{op} needs DTensors placed alike, got {_described(example)} and "
                f"{_described(tensor)}: redistribute one of them"
            )
    return example


def _described(tensor: Tensor) -> str:
    where = f"{tensor.placements} on {tensor.device_mesh}" if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)} {where or 'of a plain tensor'}"


def _counts(examples: Sequence[Tensor]) -> list[int]:
    """How many local tensors each tensor has on this rank."""
    return [len(each.locals) if isinstance(each, ShardedTensor) else 1 for each in examples]


def _repeated(arg: Any, counts: Sequence[int]) -> Any:
    """A list with local tensors in place of sharded ones, and the rest as often as they need it."""
    if not isinstance(arg, list) or len(arg) != len(counts):
        return arg
    repeated: list[Any] = []
    for each, count in zip(arg, counts, strict=True):
        if isinstance(each, ShardedTensor):
            repeated += each.locals
        else:
            repeated += [
                distributed_tensor.local_tensor(each) if isinstance(each, DTensor) else each
            ] * count
    return repeated


def grouped(module: str, lists: Lists) -> TensorGroups | None:
    """Group the local tensors for a module's step; None where torch shall group what it has."""
    if module not in ELEMENTWISE or not lists[0]:
        return None
    if not isinstance(lists[0][0], ShardedTensor):
        return _grouped_by_class(lists)
    try:
        placements = [tensor.placement for tensor in lists[0]]
        kinds = [tensor.kind for tensor in lists[0]]
        local_lists: Lists = []
        for tensors in lists:
            if not tensors or _are_step_counts(tensors):
                local_lists.append([*tensors])
                continue
            # What differs goes the slow way, which says what, or finds that cuts agree.
            if [tensor.placement for tensor in tensors] != placements:
                return None
            if [tensor.kind for tensor in tensors] != kinds:
                return None
            local_lists.append([tensor.local for tensor in tensors])
    except AttributeError:
        return _grouped_by_class(lists)
    return _by_kind(kinds, local_lists)


def _grouped_by_class(lists: Lists) -> TensorGroups | None:
    """Do as `grouped` does where DTensors, or plain tensors, stand beside ShardedTensors."""
    if not any(isinstance(tensor, ShardedTensor) for tensor in lists[0]):
        return None
    parameters = [*map(_local_and_place, lists[0])]
    if any(local is None for local, _ in parameters):  # a rank has several shards of it
        return None
    local_lists: Lists = []
    for tensors in lists:
        if not tensors or _are_step_counts(tensors):
            local_lists.append([*tensors])
            continue
        found = [*map(_local_and_place, tensors)]
        if [place for _, place in found] != [place for _, place in parameters]:
            return None
        local_lists.append([local for local, _ in found])
    return _by_kind([(local.device, local.dtype) for local, _ in parameters], local_lists)


def _local_and_place(tensor: Any) -> tuple[Any, object]:
    """A tensor's local one, and what its gradient and its state must have in common with it."""
    if isinstance(tensor, DTensor):
        local = distributed_tensor.local_tensor(tensor)
        return local, (local.dtype, distributed_tensor.place_getter(tensor))
    if isinstance(tensor, ShardedTensor):
        local = getattr(tensor, "local", None)
        return local, (tensor.dtype, tensor.placement)
    return tensor, None if tensor is None else (tensor.dtype, tensor.shape)


def _by_kind(kinds: list[DeviceDtype], lists: Lists) -> TensorGroups:
    if kinds.count(kinds[0]) == len(kinds):
        return {kinds[0]: (lists, [*range(len(kinds))])}
    found: dict[DeviceDtype, list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    return {
        kind: ([[tensors[i] for i in indices] if tensors else [] for tensors in lists], indices)
        for kind, indices in found.items()
    }


def _are_step_counts(tensors: list[Any]) -> bool:
    return {*map(type, tensors)} == {Tensor} and not any(map(Tensor.dim, tensors))


HANDLERS: dict[str, Handler] = {
    "_foreach_copy_": _foreach_copy,
    "_fused_adam_": _fused(5),
    "_fused_adamw_": _fused(5),
    "_fused_adagrad_": _fused(3),
    "_fused_sgd_": _fused(3),
}
