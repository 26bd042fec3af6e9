"""Compares what the ranks are about to communicate, before any of it hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shoal._torch import groups
from shoal.comm.store_comparison import TIMEOUT, StoreComparison
from shoal.errors import RankError
from shoal.layout import Layout
from shoal.layout.packing import Packing
from shoal.layout.spec import ParamSpec
from shoal.low_precision import Wire
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.step.plan import ParameterPlan, UnitPlan

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit

COMPARED = "compared"
"""What units hear when the ranks compare which one is about to run."""


def check_ranks_agree(units: Sequence[Unit]) -> None:
    """Raise on every rank if the ranks of a mesh have sharded different models."""
    by_ranks: dict[tuple[int, ...], list[Unit]] = {}
    for unit in units:
        by_ranks.setdefault(_ranks_of(unit), []).append(unit)
    for ranks, shared in by_ranks.items():
        _compare(
            ranks,
            _group_of(shared[0]),
            [plan_unit(unit).described(frozen=unit.compares_frozen) for unit in shared],
            "{} and {} have sharded different models",
            "Build the same model, with the same units, on every rank.",
        )


def check_inputs_agree(unit: Unit, inputs: Mapping[str, object]) -> None:
    """Raise on every rank if ranks would send different tensors for the same parameters."""
    _compare(
        _ranks_of(unit),
        _group_of(unit),
        [{"unit": unit.name, "layout": repr(unit.layout), "parameters": inputs}],
        "{} and {} send different tensors for one parameter",
        "fsdp_pre_all_gather must return the same dtypes and shapes on every rank: pad them.",
    )


def check_order_agrees(unit: Unit, timeout: timedelta = TIMEOUT) -> None:
    """Raise on every rank if ranks are about to run different units, or to train other parts."""
    if unit.told is not None:
        unit.told(COMPARED, ())
    _compare(
        _ranks_of(unit),
        _group_of(unit),
        [plan_unit(unit).described()],
        "Forward order differs across ranks, or what is trained in it: {} and {} are about to "
        "gather different units",
        "Let every rank run the same modules in the same order, and freeze the same ones.",
        timeout,
    )


def check_tensors_agree(group: dist.ProcessGroup, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise on every rank if the ranks of a group have different tensors to communicate."""
    described = {name: f"{tuple(t.shape)} of {t.dtype}" for name, t in tensors.items()}
    _compare(
        _members_of(group),
        group,
        [{"unit": "", "layout": "", "parameters": described}],
        "{} and {} have different modules",
        "Build the same module on every rank.",
    )


def check_collectives_agree(group: dist.ProcessGroup, sequence: Sequence[str]) -> None:
    """Raise on every rank if the ranks of a group are about to issue different collectives."""
    _compare(
        _members_of(group),
        group,
        [
            {"collective": f"{number}, {text}", "parameters": {}}
            for number, text in enumerate(sequence)
        ],
        "{} and {} have captured graphs with different collectives",
        "Every rank must compile the same model for inputs of the same kind, and as often.",
    )


def tell_failure(group: dist.ProcessGroup, failure: str) -> None:
    """Tell the ranks that compare collectives why this one does not. Waits for nobody."""
    ranks = _members_of(group)
    if _is_comparable(ranks, group):
        StoreComparison(groups.default_store(), ranks, dist.get_rank(), "").fail(failure)


def _ranks_of(unit: Unit) -> tuple[int, ...]:
    return tuple(sorted(unit.mesh_info.mesh.mesh.flatten().tolist()))


def _members_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _group_of(unit: Unit) -> dist.ProcessGroup | None:
    transport = unit.transport or unit.replicas
    return None if transport is None else transport.group


def _is_comparable(ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> bool:
    """Whether others could answer, unlike on a modelled network or torch's fake backend."""
    if len(ranks) == 1 or group is None:
        return False
    return not getattr(group, "others_are_imagined", False) and dist.get_backend(group) != "fake"


def _compare(
    ranks: tuple[int, ...],
    group: dist.ProcessGroup | None,
    mine: list[dict[str, object]],
    accusation: str,
    advice: str,
    timeout: timedelta = TIMEOUT,
) -> None:
    if not _is_comparable(ranks, group):
        return
    comparison = StoreComparison(groups.default_store(), ranks, dist.get_rank(), advice, timeout)
    verdict = comparison.verdict(mine, accusation)
    if verdict:
        raise RankError(verdict if advice in verdict else f"{verdict}. {advice}")


def plan_unit(unit: Unit) -> UnitPlan:
    """Describe a unit, whether it has run or not."""
    shards = unit.shards
    return describe(
        name=unit.name,
        layout=unit.layout,
        ranks=_ranks_of(unit),
        params=[member.spec for member in shards.members],
        trained=[member.sharded.requires_grad for member in shards.members],
        policy=unit.policy,
        packing=shards.packing,
        whole=shards.whole,
        keeps_low_precision_shards=unit.options.keeps_low_precision_shards,
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
    keeps_low_precision_shards: bool,
) -> UnitPlan:
    """A unit by its parameters; `packing` is what is gathered, `whole` what is reduced."""
    compute = [policy.compute_dtype(param.dtype) for param in packing.params]
    gathered = packing.with_dtypes(compute)
    form = policy.gather_format
    sent = gathered if form is None else Wire(gathered, form).packing
    kept_bytes = sent.shard_bytes if keeps_low_precision_shards else 0
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
        encoded_bytes=0 if form is None else sent.gathered_bytes,
        gather_format=None if form is None else repr(form),
        copies_out=any(gathered.gathered_offset(i) is None for i in range(len(params))),
        reduced_bytes=reduced_bytes,
        kept_bytes=kept_bytes if kept_bytes < packing.shard_bytes else 0,
    )
