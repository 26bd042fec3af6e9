"""The state of a training: what is sharded, as bytes in a fixed order; the rest, as a copy.

Sharded are parameters and what an optimizer keeps of their shape. Each rank's part of all of them,
one after another, is its *image*: parity is made of images, and a lost rank's image is rebuilt.
Everything else (hyper-parameters, step counts, buffers, generators, schedulers) is small, and every
survivor has its own.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal._torch.optimizers import (
    bare_step,
    forget_unscaled,
    has_scheduler,
    without_step_hooks,
)
from shoal.errors import UsageError
from shoal.layout import Packing
from shoal.layout.piece import Piece
from shoal.mesh import FSDPMeshInfo
from shoal.runtime.module_state import map_tensors
from shoal.runtime.parameter_wrapping import bytes_of
from shoal.runtime.shards import Member
from shoal.survive.parity import WORD_BYTES
from shoal.survive.take_over import check_can_move, take_over
from shoal.tensor.sharded import ShardedTensor


class Stateful(Protocol):
    """Something small that changes with the steps, such as a scheduler; the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Go back to what was kept."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """One sharded tensor: a parameter of a unit, or what an optimizer keeps of it."""

    unit: int
    member: int
    state: str | None
    """The optimizer's name for it, or that of a gradient; None: the parameter itself."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Which sharded tensors there are, and how they are cut over the ranks."""

    parts: tuple[ImagePart, ...]
    packings: tuple[Packing, ...]
    """One for each unit."""

    @property
    def world_size(self) -> int:
        """Over how many ranks they are cut."""
        return self.packings[0].world_size

    def piece(self, part: ImagePart, rank: int) -> Piece:
        """What a rank holds of a tensor."""
        return self.packings[part.unit].piece(part.member, rank)

    def num_bytes(self, rank: int) -> int:
        """The size of a rank's image."""
        return sum(_in_words(self.piece(part, rank), part) for part in self.parts)

    @property
    def max_bytes(self) -> int:
        """The size of the largest image."""
        return max(self.num_bytes(rank) for rank in range(self.world_size))

    def locals_in(self, image: Tensor, rank: int) -> list[Tensor]:
        """A rank's local tensors, as views of its image."""
        found, start = [], 0
        for part in self.parts:
            piece = self.piece(part, rank)
            stop = start + piece.numel * part.dtype.itemsize
            found.append(image[start:stop].view(part.dtype).view(piece.shape))
            start += _in_words(piece, part)
        return found

    @property
    def digest(self) -> int:
        """A number that tells layouts apart, the same on all ranks that have the same."""
        text = repr([(p.unit, p.member, p.state, str(p.dtype)) for p in self.parts])
        number = 0
        for byte in text.encode():
            number = (number * 257 + byte) % (1 << 61)
        return number


def _in_words(piece: Piece, part: ImagePart) -> int:
    return -(-piece.numel * part.dtype.itemsize // WORD_BYTES) * WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is not sharded, as it was at one version."""

    optimizer_states: list[dict[tuple[int, int], dict[str, Any]]]
    """For each optimizer, and each parameter by unit and member, its state in order; sharded
    tensors are in the image, and `SHARDED` stands for them."""
    optimizer_numbers: list[dict[Any, Any]]
    """What an optimizer keeps under other keys than parameters."""
    optimizer_groups: list[list[dict[str, Any]]]
    modules: list[ModuleRest]
    """Of the model's modules, in their order."""
    stateful: list[dict[str, Any]]
    generators: dict[str, Any]
    """Of this rank: torch's, Python's and numpy's."""


SHARDED = "sharded"
_GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRest:
    """What a module keeps beside its parameters, at one version."""

    buffers: dict[str, Tensor | None]
    extra: Any
    """What its `get_extra_state` gives, if it has one."""

    @classmethod
    def of(cls, module: nn.Module) -> ModuleRest:
        """Copy what a module has now."""
        return cls(
            buffers={
                name: None if buffer is None else buffer.detach().clone()
                for name, buffer in module._buffers.items()
            },
            extra=copy.deepcopy(module.get_extra_state()) if _has_extra(module) else None,
        )

    def put_on(self, module: nn.Module) -> None:
        """Let a module have it again: in the tensors that are there, where they fit."""
        for name, kept in self.buffers.items():
            there = module._buffers.get(name)
            if kept is None or there is None or kept.shape != there.shape:
                module._buffers[name] = None if kept is None else kept.clone()
            else:
                there.copy_(kept)
        if _has_extra(module):
            module.set_extra_state(copy.deepcopy(self.extra))


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


class TrainingState:
    """A model, its optimizers, and what else changes with the steps."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], stateful: Sequence[Stateful]
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.stateful = tuple(stateful)
        self.units = check_can_move(model)
        self._owners = {id(member.sharded): (u, m) for u, m, member in self._members()}
        self._carried: frozenset[tuple[int, int]] = frozenset()
        """Parameters whose gradients the next step adds to."""
        self._check_optimizers()
        self._check_stateful()

    @property
    def device(self) -> torch.device:
        """Where the shards lie."""
        return self.units[0].shards.buffer.device

    @property
    def first_info(self) -> FSDPMeshInfo:
        """The mesh that the model lies on now."""
        info = self.units[0].mesh_info
        assert isinstance(info, FSDPMeshInfo)
        return info

    def _members(self) -> Iterator[tuple[int, int, Member]]:
        for u, unit in enumerate(self.units):
            for m, member in enumerate(unit.shards.members):
                yield u, m, member

    def _check_optimizers(self) -> None:
        if not self.optimizers:
            raise UsageError("expected an optimizer, or several, got none")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                strangers = [p for p in group["params"] if id(p) not in self._owners]
                if strangers:
                    raise UsageError(
                        f"the {type(optimizer).__name__} holds {len(strangers)} parameters that "
                        f"are not sharded by the model, the first of shape "
                        f"{tuple(strangers[0].shape)}: build it from model.parameters(), after "
                        "fully_shard"
                    )

    def _check_stateful(self) -> None:
        for one in self.stateful:
            spread = _spread_tensor_in(one.state_dict())
            if spread is not None:
                raise UsageError(
                    f"stateful: the state of this {type(one).__name__} holds a {spread} of shards, "
                    "which went with a rank that dies. What is stateful must be the same on all "
                    "ranks: keep averages of weights in buffers of a module that is sharded whole, "
                    "or make them of checkpoints"
                )
        scheduled = [one for one in self.optimizers if has_scheduler(one)]
        if scheduled and not self.stateful:
            raise UsageError(
                f"a scheduler sets the rate of the {type(scheduled[0]).__name__}, and nothing is "
                "stateful: a step that is undone would not be undone for it. Pass "
                "survive(…, stateful=[scheduler])"
            )

    def check_probe(self) -> None:
        """Refuse optimizers whose state could not be moved, before the first step is made.

        An optimizer makes its state in its first step. One that has none makes it here, for
        gradients of zero at rate zero, and forgets it.
        """
        for optimizer in self.optimizers:
            _check_step(optimizer)
            if any(optimizer.state.values()):
                continue
            _step_on_nothing(optimizer)
            try:
                self._check_states()
            finally:
                optimizer.state.clear()
        self._check_states()

    def _check_states(self) -> None:
        """Raise where an optimizer keeps state that neither an image nor a copy could have."""
        self.layout()
        for optimizer in self.optimizers:
            self._numbers_of(optimizer)

    def layout(self) -> ImageLayout:
        """What is sharded now."""
        return ImageLayout(
            parts=tuple(part for part, _ in self._parts()),
            packings=tuple(unit.shards.whole for unit in self.units),
        )

    def locals(self) -> list[Tensor]:
        """This rank's local tensors, in the order of the layout."""
        return [local for _, local in self._parts()]

    @property
    def num_operations(self) -> int:
        """Grows when parameters are written in place."""
        return sum(unit.shards.num_operations for unit in self.units)

    def carry_gradients(self, stepped: Collection[Optimizer]) -> bool:
        """From now on protect the gradients of optimizers that have not stepped; are there any?

        They are added to in the next step, as where the optimizer steps every second time.
        """
        held = {
            self._owners[id(parameter)]
            for optimizer in self.optimizers
            if optimizer not in stepped
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        present = {
            (u, m)
            for u, m, member in self._members()
            if (u, m) in held and member.sharded.grad is not None
        }
        waiting = {self.units[u].name for u, _ in held if self.units[u].gradients.waiting}
        if waiting:
            raise NotImplementedError(
                f"gradients of unit {min(waiting)!r} are not reduced at the end of a step, so they "
                "would go with a rank that dies: reduce them in the last backward of each step "
                "(model.set_requires_gradient_sync(True))"
            )
        # A rank that holds nothing of a parameter may have no gradient of it.
        empty = {
            (u, m)
            for u, m, member in self._members()
            if (u, m) in held and not member.local.numel()
        }
        self._carried = frozenset(present | empty) if present else frozenset()
        return bool(present)

    def _parts(self) -> Iterator[tuple[ImagePart, Tensor]]:
        for u, m, member in self._members():
            yield ImagePart(unit=u, member=m, state=None, dtype=member.dtype), member.local
        for u, m in sorted(self._carried):
            member = self.units[u].shards.members[m]
            held = member.sharded.grad
            found = None if held is None else member.wrapping.local_of(held)
            local = torch.zeros_like(member.local) if found is None else found
            yield ImagePart(unit=u, member=m, state=_GRADIENT, dtype=local.dtype), local
        for number, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                place = self._owners.get(id(parameter))
                if place is None:
                    continue
                for key, value in state.items():
                    if self._is_sharded(optimizer, place, parameter, key, value):
                        local = bytes_of(value) if isinstance(value, DTensor) else value.local
                        name = f"{number}/{key}"
                        yield (
                            ImagePart(
                                unit=place[0], member=place[1], state=name, dtype=local.dtype
                            ),
                            local,
                        )

    def _is_sharded(
        self, optimizer: Optimizer, place: tuple[int, int], parameter: Tensor, key: str, value: Any
    ) -> bool:
        """Whether a value of an optimizer's state lies as its parameter does; else it is small."""
        if _is_small(value):
            return False
        member = self.units[place[0]].shards.members[place[1]]
        local = bytes_of(value) if isinstance(value, DTensor) else getattr(value, "local", None)
        if (
            not isinstance(value, Tensor)
            or isinstance(value, DTensor) != isinstance(parameter, DTensor)
            or value.shape != parameter.shape
            or local is None
            or local.shape != member.local.shape
        ):
            raise NotImplementedError(
                f"{type(optimizer).__name__} keeps {key!r} of parameter "
                f"{self._name_of(parameter)!r} as {_described(value)}: state of a sharded "
                "parameter must be single elements, or sharded as the parameter is "
                f"({tuple(parameter.shape)}), to be rebuilt when a rank dies"
            )
        return True

    def _name_of(self, parameter: Tensor) -> str:
        names = (name for name, found in self.model.named_parameters() if found is parameter)
        return next(names, "?")

    @torch.no_grad()
    def write_image(self, image: Tensor, layout: ImageLayout, rank: int) -> None:
        """Copy all that this rank holds into an image."""
        views = layout.locals_in(image, rank)
        for view, local in zip(views, self.locals(), strict=True):
            view.copy_(local)

    @torch.no_grad()
    def rest(self) -> Rest:
        """Copy what is not sharded."""
        states = []
        for optimizer in self.optimizers:
            by_place: dict[tuple[int, int], dict[str, Any]] = {}
            for parameter, state in optimizer.state.items():
                place = self._owners.get(id(parameter))
                if place is None:
                    continue
                by_place[place] = {
                    key: SHARDED
                    if self._is_sharded(optimizer, place, parameter, key, value)
                    else copy.deepcopy(value)
                    for key, value in state.items()
                }
            states.append(by_place)
        return Rest(
            optimizer_states=states,
            optimizer_numbers=[self._numbers_of(optimizer) for optimizer in self.optimizers],
            optimizer_groups=[
                [
                    {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
                    for group in optimizer.param_groups
                ]
                for optimizer in self.optimizers
            ],
            modules=[ModuleRest.of(module) for module in self.model.modules()],
            stateful=[copy.deepcopy(one.state_dict()) for one in self.stateful],
            generators=_generators(self.device),
        )

    def _numbers_of(self, optimizer: Optimizer) -> dict[Any, Any]:
        """A copy of what an optimizer keeps that belongs to no parameter."""
        found = {key: v for key, v in optimizer.state.items() if not isinstance(key, Tensor)}
        for key, value in found.items():
            if not _is_small(value):
                raise NotImplementedError(
                    f"{type(optimizer).__name__} keeps {_described(value)} under {key!r}, which "
                    "belongs to no parameter: such state must be numbers and single elements, "
                    "the same on all ranks"
                )
        return copy.deepcopy(found)

    @torch.no_grad()
    def take_over(self, info: FSDPMeshInfo, layout: ImageLayout, rest: Rest) -> list[Tensor]:
        """Lie over the ranks of a mesh; returns the new local tensors, which the caller fills.

        They are in the order of the layout's parts. Whatever is not sharded is set.
        """
        for optimizer in self.optimizers:  # what is there goes before there is more
            optimizer.state.clear()
        take_over(self.model, info)
        members = [unit.shards.members for unit in self.units]
        self._owners = {id(member.sharded): (u, m) for u, m, member in self._members()}
        new: dict[tuple[int, int, str], Tensor] = {}
        found: list[Tensor] = []
        for part in layout.parts:
            member = members[part.unit][part.member]
            if part.state is None:
                found.append(member.local)
                continue
            shape = member.local.shape
            local = torch.zeros(shape, dtype=part.dtype, device=member.local.device)
            found.append(local)
            if part.state == _GRADIENT:
                member.sharded.grad = cast(Any, member.wrapping.grad(member.sharded, local))
            else:
                new[part.unit, part.member, part.state] = local
        self._carried = frozenset(
            (part.unit, part.member) for part in layout.parts if part.state == _GRADIENT
        )
        self._set_states(rest, members, new)
        self.set_rest(rest)
        return found

    def _set_states(
        self,
        rest: Rest,
        members: Sequence[Sequence[Member]],
        new: Mapping[tuple[int, int, str], Tensor],
    ) -> None:
        for number, (optimizer, states) in enumerate(
            zip(self.optimizers, rest.optimizer_states, strict=True)
        ):
            optimizer.state.update(copy.deepcopy(rest.optimizer_numbers[number]))
            for (u, m), state in states.items():
                member = members[u][m]
                optimizer.state[member.sharded] = {
                    key: member.wrapping.shard(new[u, m, f"{number}/{key}"])
                    if isinstance(value, str) and value == SHARDED
                    else copy.deepcopy(value)
                    for key, value in state.items()
                }

    @torch.no_grad()
    def set_rest(self, rest: Rest) -> None:
        """Set hyper-parameters, buffers, generators and what else was kept; not the states."""
        for optimizer, groups in zip(self.optimizers, rest.optimizer_groups, strict=True):
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(kept))
        for module, kept in zip(self.model.modules(), rest.modules, strict=True):
            kept.put_on(module)
        for one, kept in zip(self.stateful, rest.stateful, strict=True):
            one.load_state_dict(copy.deepcopy(kept))
            if isinstance(one, torch.amp.GradScaler):
                forget_unscaled(one)
        _set_generators(rest.generators, self.device)


def _is_small(value: Any) -> bool:
    """Whether a value is made of numbers, words and single elements alone."""
    if isinstance(value, Tensor):
        return not isinstance(value, (DTensor, ShardedTensor)) and value.numel() <= 1
    if isinstance(value, Mapping):
        return all(map(_is_small, value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(map(_is_small, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    inside = "" if not isinstance(value, (Mapping, Iterable)) else ", which holds more than numbers"
    return f"a {type(value).__name__}{inside}"


def _spread_tensor_in(value: Any) -> str | None:
    """The kind of a tensor in a value of which each rank holds a part."""
    found: list[str] = []

    def look(tensor: Tensor) -> Tensor:
        if isinstance(tensor, (DTensor, ShardedTensor)):
            found.append(type(tensor).__name__)
        return tensor

    map_tensors(look, value)
    return next(iter(found), None)


def _check_step(optimizer: Optimizer) -> None:
    """Refuse optimizers that step by asking a closure again and again."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise NotImplementedError(
            f"{type(optimizer).__name__} takes its steps by a closure, and keeps state that does "
            "not lie as parameters do: it could not be rebuilt when a rank dies. Take an optimizer "
            "whose step() needs no closure"
        )


def _step_on_nothing(optimizer: Optimizer) -> None:
    """Make a step of zero gradients at rate zero, and undo all that it changed but the state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    values = [bytes_of(p.detach()) if isinstance(p, DTensor) else p.local for p in parameters]
    before = [value.clone() for value in values]
    rates = [group.get("lr") for group in optimizer.param_groups]
    groups = [
        {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        with without_step_hooks(optimizer):  # such as one that counts
            bare_step(optimizer)(optimizer)  # and schedulers hear of none
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate, before_it in zip(optimizer.param_groups, rates, groups, strict=True):
            group.update(before_it)  # some count in there
            if rate is not None:
                group["lr"] = rate
        with torch.no_grad():
            for value, was in zip(values, before, strict=True):
                value.copy_(was)


def _generators(device: torch.device) -> dict[str, Any]:
    states = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
