"""What a program leaves for its caller to see, as plain values that can be compared.

A `Stage` is one moment of a run (after forward, after backward): the facts of every visible tensor,
how those tensors alias each other, the random state and the modes of the thread. Only what a
program can rely on is taken: of a version counter, whether it moved; of a storage, who shares it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Modes = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One tensor as its holder sees it."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    history: str
    is_inference: bool
    bumped: bool
    values: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One moment of a run; `error` ends the run there."""

    name: str
    tensors: Mapping[str, Facts] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    relations: Mapping[str, str] = field(default_factory=dict)
    rng: Tensor | None = None
    modes: Modes = ()
    error: Exception | None = None


def leaves_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and constant inside `value`, each under a name that says where it is."""
    if isinstance(value, Tensor):
        yield name, value
        if is_traceable_wrapper_subclass(value):
            inner, _ = value.__tensor_flatten__()
            for attribute in inner:
                yield from leaves_of(getattr(value, attribute), f"{name}.{attribute}")
    elif isinstance(value, nn.Module):
        for kind in (value.named_parameters, value.named_buffers):
            for key, tensor in kind():
                yield from leaves_of(tensor, f"{name}.{key}")
    elif isinstance(value, torch.optim.Optimizer):
        for key, state in enumerate(value.state.values()):
            yield from leaves_of(state, f"{name}.state{key}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for key, item in enumerate(value):
            yield from leaves_of(item, f"{name}[{key}]")
    elif value is None or isinstance(value, (int, float, str, torch.Size)):
        yield name, value


def tensors_of(value: Any, name: str) -> dict[str, Tensor]:
    """The tensors among `leaves_of`."""
    return {key: item for key, item in leaves_of(value, name) if isinstance(item, Tensor)}


def versions_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Version counters before a stage; an inference tensor has none."""
    return {name: 0 if t.is_inference() else t._version for name, t in tensors.items()}


def history_of(tensor: Tensor) -> str:
    """Where `tensor` stands in autograd's graph.

    Autograd forbids the question for a view made under no_grad whose base was written to later.
    """
    try:
        if tensor.is_leaf:
            return "leaf"
        return "has grad_fn" if tensor.grad_fn is not None else "no grad_fn"
    except RuntimeError:
        return "forbidden"


def facts_of(tensor: Tensor, version: int | None) -> Facts:
    """Describe `tensor`; `version` is its counter before the stage, None when it was not there."""
    wrapped = is_traceable_wrapper_subclass(tensor)
    tracked = version is not None and not wrapped and not tensor.is_inference()
    # The stride of a dimension that holds at most one element has no meaning.
    stride = tuple(
        s if n > 1 and tensor.numel() else 0
        for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return Facts(
        kind=type(tensor).__name__,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=stride,
        requires_grad=tensor.requires_grad,
        history=history_of(tensor),
        is_inference=tensor.is_inference(),
        bumped=tracked and tensor._version > (version or 0),
        values=None if wrapped else tensor.detach().clone(),
    )


def relation(one: Tensor, two: Tensor) -> str:
    """How two visible tensors are tied: identity, storage with the distance in it, view base."""
    if one is two:
        return "same object"
    ties: list[str] = []
    wrapped = is_traceable_wrapper_subclass(one) or is_traceable_wrapper_subclass(two)
    if not wrapped and one.untyped_storage()._cdata == two.untyped_storage()._cdata:
        starts = [t.storage_offset() * t.element_size() for t in (one, two)]
        ties.append(f"one storage, {starts[1] - starts[0]} bytes apart")
    # A base that nobody can name is not part of the relation: it may as well not exist.
    if one._base is two:
        ties.append("first is a view of second")
    elif two._base is one:
        ties.append("second is a view of first")
    elif one._base is not None and one._base is two._base:
        ties.append("views of one base")
    return ", ".join(ties)


def modes_now() -> Modes:
    """The modes of this thread that a compiled call must carry or restore."""
    return (
        ("grad", torch.is_grad_enabled()),
        ("inference", torch.is_inference_mode_enabled()),
        ("autocast", torch.is_autocast_enabled("cpu")),
        ("autocast dtype", torch.get_autocast_dtype("cpu")),
    )


def stage_of(name: str, visible: Mapping[str, Any], versions: Mapping[str, int]) -> Stage:
    """Describe this moment: `visible` are the values a caller holds, by name."""
    leaves = dict(pair for key, value in visible.items() for pair in leaves_of(value, key))
    tensors = {key: item for key, item in leaves.items() if isinstance(item, Tensor)}
    grads = {
        f"{key}.grad": t.grad
        for key, t in tensors.items()
        if history_of(t) == "leaf" and t.grad is not None
    }
    ties = {f"({a}, {b})": relation(tensors[a], tensors[b]) for a, b in combinations(tensors, 2)}
    described = {key: facts_of(t, versions.get(key)) for key, t in tensors.items()}
    for key, grad in grads.items():
        described |= {inner: facts_of(t, None) for inner, t in tensors_of(grad, key).items()}
    return Stage(
        name=name,
        tensors=described,
        constants={key: item for key, item in leaves.items() if not isinstance(item, Tensor)},
        relations={key: tie for key, tie in ties.items() if tie},
        rng=torch.get_rng_state(),
        modes=modes_now(),
    )


def same_values(one: Tensor, two: Tensor, tolerance: float) -> bool:
    """Whether two tensors hold the same numbers, to the last bit unless a tolerance is given."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    if tolerance:
        return torch.allclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
    return bool(((one == two) | ((one != one) & (two != two))).all())


def tensor_differences(
    name: str, want: Facts, got: Facts, tolerance: float
) -> Iterator[tuple[str, str]]:
    """Each aspect in which `got` differs: its full name, and what was wanted and found."""
    for aspect in Facts.__slots__:
        left, right = getattr(want, aspect), getattr(got, aspect)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            equal = same_values(left, right, tolerance)
        else:
            # What eager forbids to ask, nobody can compare.
            equal = left == right or left == "forbidden"
        if not equal:
            yield f"{name}.{aspect}", f"eager {left}, compiled {right}"


def mapping_differences(
    kind: str, want: Mapping[str, object], got: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Keys of two mappings that only one has, or whose values differ."""
    for key in sorted({*want, *got}):
        left, right = want.get(key, "nothing"), got.get(key, "nothing")
        if left != right:
            yield f"{kind}{key}", f"eager: {left}; compiled: {right}"


def stage_differences(want: Stage, got: Stage, tolerance: float) -> Iterator[tuple[str, str]]:
    """Every difference between the same moment of two runs."""
    if want.error is not None or got.error is not None:
        if got.error is None or want.error is None or not isinstance(got.error, type(want.error)):
            yield "error", f"eager {want.error!r}, compiled {got.error!r}"
        return
    for name in sorted({*want.tensors, *got.tensors}):
        left, right = want.tensors.get(name), got.tensors.get(name)
        if left is None or right is None:
            yield f"{name}.exists", f"eager {left is not None}, compiled {right is not None}"
        else:
            yield from tensor_differences(name, left, right, tolerance)
    yield from mapping_differences("constant ", want.constants, got.constants)
    yield from mapping_differences("relation ", want.relations, got.relations)
    yield from mapping_differences("mode ", dict(want.modes), dict(got.modes))
    if want.rng is not None and got.rng is not None and not torch.equal(want.rng, got.rng):
        yield "rng", "the random state differs"


def refused_early(want: list[Stage], got: list[Stage]) -> bool:
    """Whether a backward that eager must refuse was refused by the forward that traced it."""
    late, early = want[-1], got[-1]
    return (
        late.error is not None
        and isinstance(early.error, type(late.error))
        and late.name.endswith("backward")
        and early.name.endswith("forward")
    )


def differences(
    want: list[Stage], got: list[Stage], *, ignore: tuple[str, ...], tolerance: float
) -> list[str]:
    """Lines that say where two runs differ; `ignore` holds patterns of "stage: what"."""
    lines: list[str] = []
    if refused_early(want, got):
        return lines
    for left, right in zip(want, got, strict=False):
        for what, how in stage_differences(left, right, tolerance):
            name = f"{left.name}: {what}"
            if not any(fnmatch(name.replace("[", "("), p.replace("[", "(")) for p in ignore):
                lines.append(f"{name}: {how}")
    ended = want[-1].error is not None or got[-1].error is not None
    if len(want) != len(got) and not ended:
        lines.append(f"stages: eager {[s.name for s in want]}, compiled {[s.name for s in got]}")
    return lines
