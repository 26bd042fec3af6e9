"""Compares what the ranks are about to communicate, before any of it hangs.

Each rank puts a digest of what it would do into the store that the job was started with; the first
rank compares, asks for the text of one that differs, and publishes the verdict. No collective is
involved: one that only some ranks enter would hang in just the case that this is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shoal._torch import groups
from shoal.errors import RankError
from shoal.layout import Layout
from shoal.layout.packing import Packing
from shoal.layout.spec import ParamSpec
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.step.plan import ParameterPlan, UnitPlan

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit

_TIMEOUT = timedelta(minutes=5)
_FAILED, _ASKED = "failed: ", "asked: "
"""How a rank begins that raised, and so has nothing to compare; and a verdict that needs a text."""


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
                [plan_unit(unit).described(frozen=unit.compares_frozen) for unit in shared],
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
            [plan_unit(unit).described()],
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
        Meeting(groups.default_store(), ranks, dist.get_rank(), "").fail(failure)


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
    store, rank = groups.default_store(), dist.get_rank()
    meeting = Meeting(store, ranks, rank, advice, timeout)
    verdict = meeting.verdict(mine, accusation)
    if verdict:
        raise RankError(verdict if advice in verdict else f"{verdict}. {advice}")


class Meeting:
    """Ranks that compare descriptions through a store, in a few bytes each if they agree.

    each rank     leaves a digest of its description, and waits for the verdict
    the first     reads all digests; equal: nothing more is said
                  else asks one rank that differs for its text, and publishes the first difference
    """

    def __init__(
        self,
        store: dist.Store,
        ranks: tuple[int, ...],
        rank: int,
        advice: str,
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self._advice, self._timeout = advice, timeout
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
        # The store counts, not the process: ranks may be threads, and a new job has a new store.
        number = store.add(f"shoal/agree/{digest}/count/{rank}", 1)
        self._key = f"shoal/agree/{digest}/{number}"

    def fail(self, failure: str) -> None:
        """Tell the others why this rank has nothing to compare. Waits for nobody."""
        self._store.set(f"{self._key}/{self._rank}", f"{_FAILED}{failure}")
        if self._rank == self._ranks[0]:
            self._store.set(f"{self._key}/verdict", failure)

    def verdict(self, mine: list[dict[str, object]], accusation: str) -> str:
        """In what ranks differ, if they do; the same on all of them."""
        text = json.dumps(mine)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._store.set(f"{self._key}/{self._rank}", digest)
        if self._rank == self._ranks[0]:
            self._judge(mine, digest, accusation)
        verdict = self._read("verdict", mine, self._ranks[0])
        if verdict.startswith(_ASKED):
            if int(verdict.removeprefix(_ASKED)) == self._rank:
                self._store.set(f"{self._key}/text", text)
            verdict = self._read("difference", mine, self._ranks[0])
        return verdict

    def _judge(self, mine: list[dict[str, object]], digest: str, accusation: str) -> None:
        others = self._ranks[1:]
        keys = [f"{self._key}/{other}" for other in others]
        try:
            self._store.wait(keys, self._timeout)
        except dist.DistStoreError as error:
            missing = [other for other, key in zip(others, keys, strict=True) if not self._has(key)]
            raise self._absence(mine, missing or others) from error
        said = [value.decode() for value in self._store.multi_get(keys)]
        failures = [one.removeprefix(_FAILED) for one in said if one.startswith(_FAILED)]
        differing = [other for other, one in zip(others, said, strict=True) if one != digest]
        if failures or not differing:
            self._store.set(f"{self._key}/verdict", failures[0] if failures else "")
            return
        other = differing[0]
        self._store.set(f"{self._key}/verdict", f"{_ASKED}{other}")
        difference = _difference(mine, json.loads(self._read("text", mine, other)))
        accused = accusation.format(f"rank {self._rank}", f"rank {other}")
        self._store.set(f"{self._key}/difference", f"{accused}: {difference}")

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _read(self, what: str, mine: list[dict[str, object]], other: int) -> str:
        """What another rank says, which may have gone elsewhere."""
        key = f"{self._key}/{what}"
        try:
            self._store.wait([key], self._timeout)
        except dist.DistStoreError as error:
            raise self._absence(mine, (other,)) from error
        return self._store.get(key).decode()

    def _absence(self, mine: list[dict[str, object]], others: Sequence[int]) -> RankError:
        return RankError(
            f"rank {self._rank} is at {_place(mine)}, and rank {others[0]} did not come there "
            f"within {self._timeout}. {self._advice}"
        )


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


def plan_unit(unit: Unit) -> UnitPlan:
    """Describe a unit, whether it has run or not."""
    shards = unit.shards
    return describe(
        name=unit.name,
        layout=unit.layout,
        ranks=tuple(sorted(unit.mesh_info.mesh.mesh.flatten().tolist())),
        params=[member.spec for member in shards.members],
        trained=[member.sharded.requires_grad for member in shards.members],
        policy=unit.policy,
        packing=shards.packing,
        whole=shards.whole,
    )


def describe(
    *,
    name: str,
    layout: Layout,
    ranks: tuple[int, ...],
    params: Sequence[ParamSpec],
    trained: Sequence[bool],
    policy: MixedPrecisionPolicy,
    packing: Packing,
    whole: Packing,
) -> UnitPlan:
    """A unit by its parameters; `packing` is what is gathered, `whole` what is reduced."""
    compute = [policy.compute_dtype(param.dtype) for param in packing.params]
    gathered = packing.with_dtypes(compute)
    reduced_bytes = 0
    if any(trained):
        dtype = policy.reduce_dtype or compute[trained.index(True)]
        reduced_bytes = whole.with_dtypes([dtype] * len(params)).gathered_bytes
    return UnitPlan(
        name=name,
        layout=repr(layout),
        ranks=ranks,
        parameters=tuple(
            ParameterPlan(
                name=param.name,
                shape=tuple(param.shape),
                dtype=str(param.dtype),
                is_trained=is_trained,
            )
            for param, is_trained in zip(params, trained, strict=True)
        ),
        shard_bytes=packing.shard_bytes,
        gathered_bytes=gathered.gathered_bytes,
        copies_out=any(gathered.gathered_offset(i) is None for i in range(len(params))),
        reduced_bytes=reduced_bytes,
    )
