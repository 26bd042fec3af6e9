"""Names of parameters as the user's model has them, without what wrappers add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shoal._torch import wrapping
from shoal.runtime.shards import Home
from shoal.wrapper.base import WRAPPED, Wrapper
from shoal.wrapper.distributed import Spec
from shoal.wrapper.plain_form import before_of

PREFIX = f"{WRAPPED}."


def clean(name: str) -> str:
    """A name without the levels that sharding, checkpointing and offloading wrappers add."""
    return name.replace(PREFIX, "").replace(wrapping.CHECKPOINT_PREFIX, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMember:
    """One of the user's parameters that a wrapper shards."""

    names: tuple[str, ...]
    """Its clean names from the module that was asked, the first one first; a shared parameter has
    several."""
    wrapper: Wrapper
    index: int
    """In `wrapper._flat_members.members` if there is one flat parameter, else in
    `wrapper._unit.shards.members`."""
    shape: torch.Size
    """Of what the ranks of its wrapper have together."""
    before: Spec
    """How the parameter is distributed over other ranks."""

    @property
    def name(self) -> str:
        """The name that stands for it."""
        return self.names[0]


def named_members(module: nn.Module) -> Iterator[NamedMember]:
    """The parameters that wrappers below a module shard, the module itself included."""
    prefixes: dict[nn.Module, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        prefixes.setdefault(child, []).append(f"{name}." if name else "")
    for wrapper in prefixes:
        if isinstance(wrapper, Wrapper):
            for index, (homes, shape, before) in enumerate(_members_of(wrapper)):
                names = [clean(p + home.name) for home in homes for p in prefixes[home.module]]
                yield NamedMember(
                    names=tuple(dict.fromkeys(names)),
                    wrapper=wrapper,
                    index=index,
                    shape=shape,
                    before=before,
                )


def _members_of(wrapper: Wrapper) -> list[tuple[tuple[Home, ...], torch.Size, Spec]]:
    """Where each of a wrapper's parameters belongs, and how it looks there."""
    if wrapper._unit is None:
        return []
    if wrapper._flat_members is not None:
        return [(m.homes, m.shape, m.before) for m in wrapper._flat_members.members]
    members = wrapper._unit.shards.members
    return [(m.homes, torch.Size(m.spec.shape), before_of(m.form)) for m in members]
