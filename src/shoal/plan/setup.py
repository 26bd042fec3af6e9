"""How a model is to be sharded and stepped: the choices that a forecast is asked about, as data.

A `Setup` checks itself, says itself in a line, and writes itself as code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from shoal.errors import UsageError
from shoal.layout import Even, Layout
from shoal.runtime.policy import MixedPrecisionPolicy

MOST_RANKS = 1 << 20
"""torch's device mesh numbers all ranks one by one."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train a model on `world` ranks."""

    world: int
    replicas: int = 1
    """How many groups of ranks hold all shards each (hybrid sharding)."""
    layout: Layout = field(default_factory=Even)
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard: bool | int | None = None
    """`reshard_after_forward` of all units but the root."""
    blocks_per_unit: int = 1
    """How many modules of the list of units form one unit."""
    prefetch_depth: int = 1
    micro_batches: int = 1
    reduces_each: bool = False
    """Whether every micro-batch is reduced, not the sum of all at the end."""
    checkpointing: bool | int | Collection[int] = False
    """Whether activations are computed again in backward: of all units, of every n-th, of some."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"expected a number of {least} or more, got {name}={value!r}")
        if self.world > MOST_RANKS:
            raise UsageError(f"expected at most {MOST_RANKS:,} ranks, got world={self.world:,}")
        if self.world % self.replicas:
            raise UsageError(
                "expected a number of ranks that the replicas divide, got "
                f"world={self.world} and replicas={self.replicas}"
            )
        if isinstance(self.reshard, int) and not isinstance(self.reshard, bool):
            self._check_reshard(self.reshard)
        every = self.checkpointing
        if isinstance(every, int) and not isinstance(every, bool) and every < 1:
            raise UsageError(
                f"expected checkpointing of every n-th unit, got checkpointing={every}"
            )

    def _check_reshard(self, size: int) -> None:
        if not 1 <= size <= self.shards or self.shards % size:
            raise UsageError(
                f"expected reshard to be a number that divides the {self.shards} ranks that "
                f"shard, got {size}"
            )

    @property
    def shards(self) -> int:
        """Over how many ranks parameters are sharded."""
        return self.world // self.replicas

    def is_checkpointed(self, unit: int) -> bool:
        """Whether the unit of that number computes its activations again."""
        chosen = self.checkpointing
        if isinstance(chosen, bool):
            return chosen
        return unit % chosen == 0 if isinstance(chosen, int) else unit in chosen

    def __str__(self) -> str:
        """In a line."""
        said = [f"{self.world} ranks"]
        if self.replicas > 1:
            said.append(f"{self.replicas} replicas of {self.shards} shards")
        if self.layout != Even():
            said.append(type(self.layout).__name__)
        if self.reshard is not None:
            said.append(f"reshard {_yes_or_number(self.reshard)}")
        if self.blocks_per_unit > 1:
            said.append(f"{self.blocks_per_unit} blocks in a unit")
        if self.prefetch_depth != 1:
            said.append(f"prefetch {self.prefetch_depth}")
        if self.checkpointing is not False:
            said.append(f"checkpointing{self._which()}")
        if self.micro_batches > 1:
            each = ", each reduced" if self.reduces_each else ""
            said.append(f"{self.micro_batches} micro-batches{each}")
        if self.policy.reduce_dtype is not None:
            said.append(f"gradients in {_dtype(self.policy.reduce_dtype)}")
        if self.policy.gather_format is not None:
            said.append(f"gathered as {self.policy.gather_format}")
        if self.policy.reduce_format is not None:
            said.append(f"reduced as {self.policy.reduce_format}")
        return ", ".join(said)

    def _which(self) -> str:
        chosen = self.checkpointing
        if chosen is True:
            return ""
        if isinstance(chosen, int):
            return f" of every {chosen}. unit" if chosen > 1 else ""
        return f" of units {', '.join(map(str, sorted(chosen)))}"

    def code(self, units: str = "units") -> str:
        """The calls that make it so, to paste; `units` is the name of the list of units."""
        axes = (self.world,) if self.replicas == 1 else (self.replicas, self.shards)
        names = ("shard",) if self.replicas == 1 else ("replicate", "shard")
        policy = ", ".join(
            f"{name}=torch.{_dtype(value)}"
            for name in ("param_dtype", "reduce_dtype", "output_dtype")
            if (value := getattr(self.policy, name)) is not None
        )
        shared = "mesh=mesh, mp_policy=policy"
        if self.layout != Even():
            shared += f", layout={self.layout!r}"
        reshard = "" if self.reshard is None else f", reshard_after_forward={self.reshard}"
        lines = [
            f'mesh = init_device_mesh("cuda", {axes}, mesh_dim_names={names})',
            f"policy = MixedPrecisionPolicy({policy})",
        ]
        if self.checkpointing is not False:
            lines += self._checkpoint_lines(units)
        some = self.blocks_per_unit
        if some == 1:
            lines += [f"for unit in {units}:", f"    fully_shard(unit, {shared}{reshard})"]
        else:
            lines += [
                f"for start in range(0, len({units}), {some}):",
                f"    fully_shard({units}[start : start + {some}], {shared}{reshard})",
            ]
        lines.append(f"fully_shard(model, {shared})")
        if self.prefetch_depth != 1:
            lines.append(f"model.set_prefetch_depth({self.prefetch_depth})")
        if self.micro_batches > 1 and not self.reduces_each:
            lines += [
                f"# of {self.micro_batches} micro-batches, reduce the last:",
                "#   model.set_requires_gradient_sync(is_last)",
            ]
        return "\n".join(lines)

    def _checkpoint_lines(self, units: str) -> list[str]:
        chosen = self.checkpointing
        if chosen is True or chosen == 1:
            return [f"for unit in {units}:", "    checkpoint(unit)"]
        some = f"[::{chosen}]" if isinstance(chosen, int) else ""
        if some:
            return [f"for unit in {units}{some}:", "    checkpoint(unit)"]
        assert not isinstance(chosen, int)
        return [f"for number in {sorted(chosen)}:", f"    checkpoint({units}[number])"]


_LEAST = {
    **dict.fromkeys(("world", "replicas", "micro_batches", "blocks_per_unit"), 1),
    "prefetch_depth": 0,
}


def _yes_or_number(value: bool | int) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
