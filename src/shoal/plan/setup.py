"""How a model is to be sharded and stepped: the choices that a forecast is asked about, as data.

A `Setup` checks itself, says itself in a line, and writes itself as code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields

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

    def code(self, units: str = "units(model)", device_type: str = "cuda") -> str:
        """The calls that make it so, to paste where `model` is; `units` is what makes the units."""
        axes = (self.world,) if self.replicas == 1 else (self.replicas, self.shards)
        names = ("shard",) if self.replicas == 1 else ("replicate", "shard")
        shared = "mesh=mesh, mp_policy=policy"
        if self.layout != Even():
            shared += f", layout={self.layout!r}"
        reshard = "" if self.reshard is None else f", reshard_after_forward={self.reshard}"
        lines = [
            f'mesh = init_device_mesh("{device_type}", {axes}, mesh_dim_names={names})',
            f"policy = MixedPrecisionPolicy({self._policy()})",
            f"blocks = list({units})",
        ]
        if self.checkpointing is not False:
            lines += self._checkpoint_lines()
        some = self.blocks_per_unit
        if some == 1:
            lines += ["for block in blocks:", f"    fully_shard(block, {shared}{reshard})"]
        else:
            lines += [
                f"for start in range(0, len(blocks), {some}):",
                f"    fully_shard(blocks[start : start + {some}], {shared}{reshard})",
            ]
        lines.append(f"fully_shard(model, {shared})")
        if self.prefetch_depth != 1:
            lines.append(f"model.set_prefetch_depth({self.prefetch_depth})")
        if self.micro_batches > 1 and not self.reduces_each:
            lines += [
                f"# of {self.micro_batches} micro-batches, reduce the last:",
                "#   model.set_requires_gradient_sync(is_last)",
            ]
        return "\n".join([*self._imports(units), "", *lines])

    def _policy(self) -> str:
        """The arguments of its constructor that are not as usual."""
        usual = MixedPrecisionPolicy()
        named = ((one.name, getattr(self.policy, one.name)) for one in fields(self.policy))
        return ", ".join(
            f"{name}={value!r}" for name, value in named if value != getattr(usual, name)
        )

    def _imports(self, units: str) -> list[str]:
        """Of what the calls name."""
        lines = ["import torch"] if "torch." in self._policy() else []
        if self.checkpointing is not False:
            lines.append("from torch.distributed._composable import checkpoint")
        lines += [
            "from torch.distributed.device_mesh import init_device_mesh",
            "from shoal import MixedPrecisionPolicy, fully_shard",
        ]
        if self.layout != Even():
            lines.append(f"from shoal.layout import {type(self.layout).__name__}")
        formats = (self.policy.gather_format, self.policy.reduce_format)
        lines += [
            f"from {type(one).__module__} import {type(one).__name__}"
            for one in formats
            if one is not None
        ]
        if units.startswith("default_units("):
            lines.append("from shoal.plan import default_units")
        return lines

    def _checkpoint_lines(self) -> list[str]:
        chosen = self.checkpointing
        if isinstance(chosen, int):  # True is 1
            some = f"[::{chosen}]" if chosen > 1 else ""
            return [f"for block in blocks{some}:", "    checkpoint(block)"]
        return [f"for number in {sorted(chosen)}:", "    checkpoint(blocks[number])"]


_LEAST = {
    **dict.fromkeys(("world", "replicas", "micro_batches", "blocks_per_unit"), 1),
    "prefetch_depth": 0,
}


def _yes_or_number(value: bool | int) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
