"""Compares what the ranks are about to communicate, before any of it hangs.

Each rank puts a description of its units into the store that the job was started with; the first
rank compares and publishes the verdict. No collective is involved: one that only some ranks enter
would hang in just the case that this is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shoal import _torch
from shoal.errors import RankError
from shoal.runtime.plan import UnitPlan

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit

_TIMEOUT = timedelta(minutes=5)
_FAILURE = "failure"
"""What a rank says that has nothing to compare, because it raised."""


def check_ranks_agree(units: Sequence[Unit]) -> None:
    """Raise on every rank if the ranks of a mesh have sharded different models."""
    by_ranks: dict[tuple[int, ...], list[Unit]] = {}
    for unit in units:
        ranks = tuple(sorted(unit.mesh_info.mesh.mesh.flatten().tolist()))
        by_ranks.setdefault(ranks, []).append(unit)
    for ranks, shared in by_ranks.items():
        if len(ranks) > 1 and not _is_imagined(shared[0]):
            _compare(
                ranks,
                [UnitPlan.of(unit).described(frozen=unit.compares_frozen) for unit in shared],
                "{} and {} have sharded different models",
                "Build the same model, with the same units, on every rank.",
            )


def check_inputs_agree(unit: Unit, inputs: Mapping[str, object]) -> None:
    """Raise on every rank if ranks would send different tensors for the same parameters."""
    ranks = tuple(sorted(unit.mesh_info.mesh.mesh.flatten().tolist()))
    if len(ranks) > 1 and not _is_imagined(unit):
        sent = {"unit": unit.name, "layout": repr(unit.layout), "parameters": inputs}
        _compare(
            ranks,
            [sent],
            "{} and {} send different tensors for one parameter",
            "fsdp_pre_all_gather must return the same dtypes and shapes on every rank: pad them.",
        )


def check_order_agrees(unit: Unit, timeout: timedelta = _TIMEOUT) -> None:
    """Raise on every rank if ranks are about to run different units, or to train other parts."""
    ranks = tuple(sorted(unit.mesh_info.mesh.mesh.flatten().tolist()))
    if len(ranks) > 1 and not _is_imagined(unit):
        _compare(
            ranks,
            [UnitPlan.of(unit).described()],
            "Forward order differs across ranks, or what is trained in it: {} and {} are about to "
            "gather different units",
            "Let every rank run the same modules in the same order, and freeze the same ones.",
            timeout,
        )


def check_tensors_agree(group: dist.ProcessGroup, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise on every rank if the ranks of a group have different tensors to communicate."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if len(ranks) > 1 and not _are_others_imagined(group):
        described = {name: f"{tuple(t.shape)} of {t.dtype}" for name, t in tensors.items()}
        _compare(
            ranks,
            [{"unit": "", "layout": "", "parameters": described}],
            "{} and {} have different modules",
            "Build the same module on every rank.",
        )


def check_collectives_agree(group: dist.ProcessGroup, sequence: Sequence[str]) -> None:
    """Raise on every rank if the ranks of a group are about to issue different collectives."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if len(ranks) > 1 and not _are_others_imagined(group):
        _compare(
            ranks,
            [
                {"collective": f"{number}, {text}", "parameters": {}}
                for number, text in enumerate(sequence)
            ],
            "{} and {} have captured graphs with different collectives",
            "Every rank must compile the same model for inputs of the same kind, and as often.",
        )


def tell_failure(group: dist.ProcessGroup, failure: str) -> None:
    """Tell the ranks that compare collectives why this one does not. Waits for nobody."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if len(ranks) > 1 and not _are_others_imagined(group):
        store, rank = _torch.default_store(), dist.get_rank()
        key = _next_key(store, ranks, rank)
        store.set(f"{key}/{rank}", json.dumps([{_FAILURE: failure}]))
        if rank == ranks[0]:
            store.set(f"{key}/verdict", failure)


def _is_imagined(unit: Unit) -> bool:
    """Whether the other ranks exist only in a model of the network."""
    transport = unit.transport or unit.replicas
    return transport is None or _are_others_imagined(transport.group)


def _are_others_imagined(group: dist.ProcessGroup) -> bool:
    """Whether nobody else could answer, as in a modelled network or with torch's fake backend."""
    return getattr(group, "others_are_imagined", False) or dist.get_backend(group) == "fake"


def _compare(
    ranks: tuple[int, ...],
    mine: list[dict[str, object]],
    accusation: str,
    advice: str,
    timeout: timedelta = _TIMEOUT,
) -> None:
    store, rank = _torch.default_store(), dist.get_rank()
    key = _next_key(store, ranks, rank)
    store.set(f"{key}/{rank}", json.dumps(mine))
    if rank == ranks[0]:
        verdict = ""
        for other in ranks[1:]:
            theirs = json.loads(_awaited(store, f"{key}/{other}", mine, other, advice, timeout))
            if verdict:
                continue
            if theirs and _FAILURE in theirs[0]:
                verdict = theirs[0][_FAILURE]
            elif difference := _difference(mine, theirs):
                verdict = f"{accusation.format(f'rank {rank}', f'rank {other}')}: {difference}"
        store.set(f"{key}/verdict", verdict)
    verdict = _awaited(store, f"{key}/verdict", mine, ranks[0], advice, timeout).decode()
    if verdict:
        raise RankError(verdict if advice in verdict else f"{verdict}. {advice}")


def _next_key(store: dist.Store, ranks: tuple[int, ...], rank: int) -> str:
    """Where ranks meet that compare something for the same time."""
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    # The store counts, not the process: ranks may be threads, and a new job has a new store.
    number = store.add(f"shoal/agree/{digest}/count/{rank}", 1)
    return f"shoal/agree/{digest}/{number}"


def _awaited(
    store: dist.Store,
    key: str,
    mine: list[dict[str, object]],
    other: int,
    advice: str,
    timeout: timedelta,
) -> bytes:
    """What another rank says, which may have gone elsewhere."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError as error:
        raise RankError(
            f"rank {dist.get_rank()} is at {_place(mine)}, and rank {other} did not come there "
            f"within {timeout}. {advice}"
        ) from error
    return store.get(key)


def _difference(mine: list[dict[str, object]], theirs: list[dict[str, object]]) -> str | None:
    """The first thing in which two ranks differ."""
    for a, b in zip(mine, theirs, strict=False):
        for what in a:
            if what != "parameters" and a[what] != b.get(what):
                return f"{what} {a[what]} and {b.get(what)}"
        ours, others = a["parameters"], b["parameters"]
        assert isinstance(ours, dict)
        assert isinstance(others, dict)
        for name in dict.fromkeys((*ours, *others)):
            if ours.get(name) != others.get(name):
                return (
                    f"parameter {name!r} of unit {a['unit']!r} is {ours.get(name, 'missing')} and "
                    f"{others.get(name, 'missing')}"
                )
    if len(mine) != len(theirs):
        extra = (mine if len(mine) > len(theirs) else theirs)[min(len(mine), len(theirs))]
        return f"there are {len(mine)} and {len(theirs)}, the first too many is {_place([extra])}"
    return None


def _place(described: list[dict[str, object]]) -> str:
    """Where a rank is, by the first thing that it names."""
    what, name = next(iter(described[0].items())) if described else ("nothing", "")
    return f"{what} {name!r}"
