"""How a wrapper holds parameters: the user's own objects, or one flat parameter in place of many.

With `use_orig_params=True` each parameter stays the user's plain tensor, whose bytes come and go.
With `use_orig_params=False` optimizers see one flat parameter. The modules' own names then hold
views of the full flat parameter, through which autograd carries their gradients to it. All forwards
before a backward have the same views: what several uses of a parameter contribute is then added in
the order of the unsharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import eq
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import nn

from shoal._torch import wrapping
from shoal.doors.fsdp1.tensor_parallel import Spec, spec_of, view, whole
from shoal.layout.strides import Strides, strides_of, with_strides
from shoal.runtime.collect import Found
from shoal.runtime.full import FreedParameter
from shoal.runtime.parameter_wrapping import ParameterWrapping, bytes_of, local_grad
from shoal.runtime.shards import Home

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit

FLAT_PARAM = "_flat_param"


def _identity(tensor: torch.Tensor) -> object:
    """Where a tensor lies; without elements that is nowhere, but it can be moved and cast."""
    return tensor.data_ptr() or (tensor.device, tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWrapping(ParameterWrapping):
    """A parameter that is one rank's elements in one dim, or all of them in its own shape."""

    identity: ClassVar[Callable[[torch.Tensor], object]] = _identity
    is_same: ClassVar[Callable[[object, object], bool]] = eq

    shape: torch.Size | None
    """The shape of the parameter where every rank has all of it."""
    before: Spec = None
    """How the full parameter is distributed over other axes."""
    is_flat: bool = False
    """Whether it is the flat parameter of a unit, of which every rank has a gradient and optimizer
    state, even if without elements."""

    def adopt(self, original: nn.Parameter, local: torch.Tensor) -> nn.Parameter:
        """See `ParameterWrapping.adopt`: optimizers that hold the object hold the shard."""
        if self.before is not None:  # a DTensor stays one
            return nn.Parameter(self.shard(local), requires_grad=original.requires_grad)
        original.data = self.shard(local)
        return original

    def full(self, data: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.full`."""
        return whole(data, self.before)

    def grad_data(self, grad: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.grad_data`."""
        return grad if self.before is None else local_grad(grad, self.before)

    def shard(self, local: torch.Tensor) -> torch.Tensor:
        """See `ParameterWrapping.shard`."""
        return local if self.shape is None else local.view(self.shape)

    def grad(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor | None:
        """See `ParameterWrapping.grad`; without elements there is none, unless it is flat."""
        return self.shard(local) if self.is_flat or local.numel() > 0 else None

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `ParameterWrapping.local_of`."""
        return tensor

    def rehome(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """See `ParameterWrapping.rehome`."""
        tensor.data = self.shard(local)

    def follow(self, tensor: torch.Tensor) -> ParameterWrapping:
        """See `ParameterWrapping.follow`."""
        return self


@dataclass(slots=True, kw_only=True)
class UserParameter:
    """One of the user's parameters that a wrapper shards, by itself or as a range of a flat one."""

    name: str
    """Below the wrapped module."""
    shape: torch.Size
    """The shape of this rank's local tensor, where the parameter is distributed."""
    homes: tuple[Home, ...]
    """Where it is registered; modules of other wrappers may use it too (tied weights)."""
    before: Spec
    """How the parameter is distributed over other axes."""
    strides: Strides | None
    """Those of the local tensor, unless it is row-major."""

    @classmethod
    def of(cls, found: Found) -> Self:
        """Describe a parameter before it is sharded."""
        local = bytes_of(found.parameter)
        return cls(
            name=found.name,
            shape=local.shape,
            homes=found.homes,
            before=spec_of(found.parameter),
            strides=strides_of(local),
        )


def flatten(found: Sequence[Found], module: nn.Module) -> tuple[Found, FlatMembers]:
    """Put parameters after one another in one, which is the module's; theirs are taken off."""
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
    # In the order of `module.parameters()`, in which torch's lie too.
    order = {parameter: index for index, parameter in enumerate(module.parameters())}
    found = sorted(found, key=lambda item: order[item.parameter])
    with torch.no_grad():
        data = torch.cat([bytes_of(item.parameter.detach()).reshape(-1) for item in found])
    flat = nn.Parameter(data, requires_grad=trained.pop())
    # torch's `FlatParameter` asks for this attribute when `isinstance` is asked.
    flat._is_flat_param = True  # pyright: ignore[reportAttributeAccessIssue]
    members = tuple(map(UserParameter.of, found))
    # torch's checkpoints ask this of it.
    flat._fqns = [m.name.replace(wrapping.CHECKPOINT_PREFIX, "") for m in members]  # pyright: ignore
    home = Home(module=module, name=FLAT_PARAM)
    flat_members = FlatMembers(members, home)
    for index, item in enumerate(found):
        _take_off(item)
        setattr(item.parameter, _FLATTENED, (flat_members, index))
    module.register_parameter(FLAT_PARAM, flat)
    return Found(name=FLAT_PARAM, parameter=flat, homes=(home,)), flat_members


_FLATTENED = "_shoal_flattened"
"""Where an original parameter says which flat one has taken its place."""


def flattened(item: Found) -> tuple[FlatMembers, int] | None:
    """Which flat parameter has a parameter in it already, and as which of its members."""
    return getattr(item.parameter, _FLATTENED, None)


def _take_off(item: Found) -> None:
    """Let modules have views of a flat parameter from here on, and no parameter."""
    blank = _blank(item)
    for home in item.homes:
        del home.module._parameters[home.name]
        vars(home.module)[home.name] = blank


def _blank(item: Found) -> torch.Tensor:
    """A parameter without memory, until a forward shows the real one; reading it is an error."""
    data = torch.empty_like(bytes_of(item.parameter), requires_grad=False)
    data.untyped_storage().resize_(0)
    blank = nn.Parameter(data, requires_grad=item.parameter.requires_grad)
    vars(blank)["_shoal_name"] = f"parameter {item.name!r}"
    blank.__class__ = FreedParameter
    return blank


class _WithDenseGradient(torch.autograd.Function):
    """A view as it is: gradients of views of a flat parameter cannot be sparse."""

    @staticmethod
    def forward(ctx: object, view: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return view.view_as(view)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.to_dense() if grad.is_sparse else grad


class FlatMembers:
    """The parameters of one flat parameter, as views of it."""

    def __init__(self, members: tuple[UserParameter, ...], home: Home) -> None:
        self.members = members
        self.unit: Unit | None = None
        """The unit of the flat parameter, once it is made."""
        self._home = home
        self._sizes = [member.shape.numel() for member in self.members]
        self._shown: torch.Tensor | None = None
        """The full flat parameter that the modules have views of."""
        self._modes: tuple[int | bool, ...] = ()
        """When the views were made: the step, and the modes of autograd."""

    def share(self, index: int, item: Found) -> None:
        """Let modules of another wrapper use one of them too."""
        self.members[index].homes += item.homes
        self._shown = None
        _take_off(item)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The elements of each, in its shape; a copy of those that are not row-major."""
        pieces = flat.split(self._sizes)
        return [
            with_strides(p.view(m.shape), m.strides)
            for p, m in zip(pieces, self.members, strict=True)
        ]

    def ranges(self, piece: slice) -> Iterator[tuple[UserParameter, slice]]:
        """Each member with its elements of a piece of the flat parameter."""
        end = 0
        for member, size in zip(self.members, self._sizes, strict=True):
            begin, end = end, end + size
            first, last = max(begin, piece.start), min(end, piece.stop)
            yield member, slice(first - piece.start, max(first, last) - piece.start)

    def show(self, flat: torch.Tensor, step: int) -> None:
        """Let the modules compute with views of a full flat parameter; new ones in a new step."""
        modes = (
            step,
            flat.requires_grad,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        if self._shown is flat and self._modes == modes:
            return
        self._shown, self._modes = flat, modes
        for member, local in zip(self.members, self.views(flat), strict=True):
            if any(getattr(home.module, "sparse", False) for home in member.homes):
                local = _WithDenseGradient.apply(local)
            shown = view(local, member.before)
            for home in member.homes:
                # Past `nn.Module.__setattr__`, which costs more than all the rest.
                vars(home.module)[home.name] = shown

    @contextmanager
    def as_parameters(self, flat: nn.Parameter) -> Iterator[None]:
        """Let the modules have parameters again, views of the flat one, which is whole and hidden.

        What is written to them, or put in their places, reaches the flat parameter.
        """
        parameters = self._home.module._parameters
        del parameters[self._home.name]
        views = self.views(flat.data)
        homes = [home for member in self.members for home in member.homes]
        # A backward that is still to come may recompute with the views that forward was shown.
        shown = [vars(home.module).pop(home.name, None) for home in homes]
        for member, local in zip(self.members, views, strict=True):
            data = whole(local, member.before)
            parameter = nn.Parameter(data, requires_grad=flat.requires_grad)
            for home in member.homes:
                home.module._parameters[home.name] = parameter
        try:
            yield
        finally:
            rows = flat.data.split(self._sizes)
            for member, local in zip(self.members, rows, strict=True):
                found = [home.module._parameters.pop(home.name, None) for home in member.homes]
                data = None if found[0] is None else bytes_of(found[0].data)
                if data is not None and data.data_ptr() != local.data_ptr():
                    local.copy_(data.reshape(-1))
            for home, before in zip(homes, shown, strict=True):
                if before is not None:
                    vars(home.module)[home.name] = before
            parameters[self._home.name] = flat
