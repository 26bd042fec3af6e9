"""One flat parameter in place of many: what optimizers see with `use_orig_params=False`.

The modules' own names then hold views of the full flat parameter, made anew in every forward, so
that autograd carries their gradients to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shoal.runtime.collect import Found
from shoal.runtime.shards import Home
from shoal.runtime.unit import Unit

NAME = "_flat_param"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatMember:
    """A parameter that is a range of a flat one."""

    name: str
    """Below the wrapped module."""
    shape: torch.Size
    homes: tuple[Home, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.shape.numel()


def flatten(found: Sequence[Found]) -> tuple[nn.Parameter, FlatMembers]:
    """Put parameters after one another in one, and take them off their modules."""
    dtypes = {item.parameter.dtype for item in found}
    if len(dtypes) > 1:
        raise ValueError(
            f"Must flatten tensors with uniform dtype but got {sorted(map(str, dtypes))}: wrap "
            "modules of one dtype each, or pass use_orig_params=True"
        )
    trained = {item.parameter.requires_grad for item in found}
    if len(trained) > 1:
        raise ValueError(
            "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
            f"{[i.name for i in found if not i.parameter.requires_grad]} are frozen; wrap them "
            "apart, or pass use_orig_params=True"
        )
    with torch.no_grad():
        data = torch.cat([item.parameter.detach().reshape(-1) for item in found])
    flat = nn.Parameter(data, requires_grad=trained.pop())
    # torch's `FlatParameter` asks for this attribute when `isinstance` is asked.
    flat._is_flat_param = True  # pyright: ignore[reportAttributeAccessIssue]
    members = tuple(
        FlatMember(name=item.name, shape=item.parameter.shape, homes=item.homes) for item in found
    )
    for member in members:
        for home in member.homes:
            del home.module._parameters[home.name]
    return flat, FlatMembers(members)


class FlatMembers:
    """The parameters of one flat parameter, as views of it."""

    def __init__(self, members: Sequence[FlatMember]) -> None:
        self.members = tuple(members)
        self._sizes = [member.numel for member in self.members]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The elements of each, in its shape."""
        pieces = flat.split(self._sizes)
        return [p.view(m.shape) for p, m in zip(pieces, self.members, strict=True)]

    def show(self, flat: torch.Tensor) -> None:
        """Let the modules compute with views of a full flat parameter."""
        for member, view in zip(self.members, self.views(flat), strict=True):
            for home in member.homes:
                # Past `nn.Module.__setattr__`, which costs more than all the rest.
                vars(home.module)[home.name] = view

    def hide(self) -> None:
        """Take the views off the modules."""
        for member in self.members:
            for home in member.homes:
                vars(home.module).pop(home.name, None)

    @contextmanager
    def as_parameters(self, unit: Unit) -> Iterator[None]:
        """Let the modules have parameters again, views of the full one, for as long as it is full.

        What is written to them reaches the flat parameter.
        """
        self.hide()
        (flat,) = unit.full.parameters
        taken = [(p, n) for p, n in unit.shards.members[0].places if n in p]
        kept = [parameters.pop(name) for parameters, name in taken]
        with torch.no_grad():
            views = self.views(flat.detach())
        for member, view in zip(self.members, views, strict=True):
            parameter = nn.Parameter(view, requires_grad=flat.requires_grad)
            for home in member.homes:
                home.module._parameters[home.name] = parameter
        try:
            yield
        finally:
            for member in self.members:
                for home in member.homes:
                    home.module._parameters.pop(home.name, None)
            for (parameters, name), parameter in zip(taken, kept, strict=True):
                parameters[name] = parameter
