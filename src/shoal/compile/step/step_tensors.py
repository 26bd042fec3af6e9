"""The tensors that a training step works on: where each is, and what stands for it in a trace.

| | plain or replicated | sharded |
|---|---|---|
| parameters | each one | one shard per unit, of which the parameters are views |
| optimizer state | as it is | this rank's part |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import is_
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal._torch import distributed_tensor, storage, traces
from shoal.compile.lowering.graph_unit import GraphUnit, graph_unit_of
from shoal.compile.step.reads import item_at
from shoal.compile.step.refusals import changes_python
from shoal.compile.step.step_data import StepData
from shoal.ddp.replicated import replicas_of
from shoal.errors import UsageError
from shoal.runtime.module_call import kept_full
from shoal.runtime.module_state import units_of
from shoal.tensor.sharded import ShardedTensor

Loose = Sequence[tuple[str, Any, Any, Tensor]]
"""Tensors that are neither parameters nor buffers: path, holder, key in it, the tensor."""


class StepTensors:
    """What a step reads and writes, as a list of tensors that are the inputs of its graph."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loose: Loose, data: StepData
    ) -> None:
        self._model = model
        self.optimizer = optimizer
        self.tensors: list[Tensor] = []
        """The inputs, but for the data of a step."""
        self._originals: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self.units, self.replicas = units_of(model), replicas_of(model)
        self.graph_units = list(map(graph_unit_of, self.units))
        """How the captured step gathers and reduces each unit."""
        self._leaves = [self._add(one.leaf) for one in self.graph_units]
        self._homes: dict[nn.Parameter, tuple[GraphUnit, int, int]] = {
            sharded: (graph_unit, leaf, index)
            for unit, graph_unit, leaf in zip(
                self.units, self.graph_units, self._leaves, strict=True
            )
            for index, sharded in enumerate(unit.shards.sharded)
        }
        self._named = {
            name: self._add(tensor)
            for names in (model.named_parameters, model.named_buffers)
            for name, tensor in names(remove_duplicate=False)
            if tensor not in self._homes
        }
        self._check_known()
        self.trained = tuple(
            number
            for number in dict.fromkeys(self._named.values())
            if self._originals[number].requires_grad
        )
        """The plain parameters that a backward comes to, by their numbers."""
        self._loose = [
            (path, place, key, one, self._add(one))
            for path, place, key, one in loose
            if id(one) in self._numbers or _can_be_input(one, data)
        ]
        self.rates = [_rate_of(group, self.device) for group in optimizer.param_groups]
        self._rates_before: list[float | None] = [None for _ in self.rates]
        self._rate_numbers = [self._add(rate) for rate in self.rates]
        self._state = {
            parameter: {
                key: self._add(_local(one)) if isinstance(one, Tensor) else None
                for key, one in held.items()
            }
            for parameter, held in optimizer.state.items()
        }
        modules = list(model.modules())
        self._holders: list[dict[str, Any]] = [
            *(module._parameters for module in modules),
            *(module._buffers for module in modules),
            *(states := list(optimizer.state.values())),
        ]
        self._states = states
        self._num_held = list(map(len, self._holders))
        self._held = list(self._held_now())
        self._parameters = list(model.parameters())
        self._storages = frozenset(map(storage.storage_key, self.tensors))

    @property
    def device(self) -> torch.device:
        """Where the step computes."""
        return self.tensors[0].device

    def _add(self, tensor: Tensor) -> int:
        """The number of a tensor among the inputs."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor.detach())
            self._originals.append(tensor)  # alive, so that nothing else gets its id
        return number

    def _check_known(self) -> None:
        updated = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        strangers = [p for p in updated if p not in self._homes and id(p) not in self._numbers]
        if strangers:
            raise UsageError(
                f"{len(strangers)} of the optimizer's parameters, the first of shape "
                f"{tuple(strangers[0].shape)}, are not the model's. Make the optimizer after "
                "fully_shard or replicate, from model.parameters()."
            )

    def _held_now(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._holders))

    def are_current(self) -> bool:
        """Whether everything is still where it was: nobody put other tensors or memory there."""
        states = self.optimizer.state
        return (
            len(states) == len(self._states)
            and all(map(is_, states.values(), self._states))
            and list(map(len, self._holders)) == self._num_held
            and all(map(is_, self._held_now(), self._held))
            and all(map(storage.is_set_to, self._originals, self.tensors))
            and not any(unit.shards.have_moved for unit in self.units)
        )

    def lie_apart_from(self, data: StepData) -> bool:
        """Whether no tensor of the data shares memory with one of these."""
        return self._storages.isdisjoint(data.storages)

    def set_rates(self) -> None:
        """Take over what schedulers have made of the learning rates."""
        for number, group in enumerate(self.optimizer.param_groups):
            rate = group["lr"]
            if not isinstance(rate, Tensor) and rate != self._rates_before[number]:
                self.rates[number].fill_(rate)
                self._rates_before[number] = rate

    def drop_gradients(self) -> None:
        """Forget gradients of before, as a step does that begins with `zero_grad()`."""
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def in_place(self, given: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Let the model run on what stands for its tensors; give what to differentiate by."""
        leaves = [given[number].detach().requires_grad_() for number in self._leaves]
        own = {number: given[number].detach().requires_grad_() for number in self.trained}
        stand_ins = {number: own.get(number, given[number]) for number in self._numbers.values()}
        named = {name: stand_ins[number] for name, number in self._named.items()}
        with ExitStack() as stack:
            for _, place, key, one, number in self._loose:
                _put(place, key, stand_ins[number])
                stack.callback(_put, place, key, one)
            stack.enter_context(traces.parameters_replaced(self._model, named))
            stack.enter_context(kept_full())
            for graph_unit, leaf in zip(self.graph_units, leaves, strict=True):
                stack.callback(setattr, graph_unit, "leaf", graph_unit.leaf)
                graph_unit.leaf = leaf
                graph_unit.reached.clear()
            yield [*leaves, *own.values()]
            self._check_loose(stand_ins)
            self._write_back(given, named)

    def _check_loose(self, stand_ins: Mapping[int, Tensor]) -> None:
        """Refuse a step that puts another tensor in the place of one that is no buffer."""
        for path, place, key, _, number in self._loose:
            if _held_at(place, key) is not stand_ins[number]:
                raise changes_python(f"{path} is another tensor")

    def _write_back(self, given: Sequence[Tensor], named: Mapping[str, Tensor]) -> None:
        """Write what a forward put in the place of a buffer into the buffer."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        for name, number in self._named.items():
            new = buffers.get(name, named[name])
            if new is not named[name]:
                with torch.no_grad():
                    given[number].copy_(new)

    def stand_ins(
        self, given: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
        """The optimizer's groups and state, made of what stands for its tensors, with gradients."""
        grad_of = dict(zip((*self._leaves, *self.trained), grads, strict=True))
        groups: list[dict[str, Any]] = []
        state: dict[Tensor, dict[str, Any]] = {}
        for group, rate in zip(self.optimizer.param_groups, self._rate_numbers, strict=True):
            members: list[Tensor] = []
            for parameter in group["params"]:
                stand_in, grad = self._stand_in(parameter, given, grad_of)
                # A rank that has nothing of a parameter counts its steps, as the others do.
                if grad is None:
                    continue
                stand_in.grad = grad
                members.append(stand_in)
                if held := self.optimizer.state.get(parameter):
                    state[stand_in] = {
                        key: held[key] if number is None else given[number]
                        for key, number in self._state[parameter].items()
                    }
            groups.append({**group, "params": members, "lr": given[rate]})
        return groups, state

    def _stand_in(
        self, parameter: nn.Parameter, given: Sequence[Tensor], grad_of: dict[int, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """What stands for a parameter, and its gradient."""
        if parameter not in self._homes:
            number = self._numbers[id(parameter)]
            return given[number], grad_of.get(number)
        graph_unit, leaf, index = self._homes[parameter]
        view, grad = graph_unit.piece_of(given[leaf], index), grad_of[leaf]
        if grad is None or index not in graph_unit.reached:
            return view, None
        return view, graph_unit.piece_of(grad, index)


class Places:
    """Where the tensors of a model and an optimizer lie, to compare with a later step.

    They are held, so that no other tensor comes to lie there: addresses alone would be equal on
    some ranks by chance.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        states = chain.from_iterable(held.values() for held in optimizer.state.values())
        tensors = (one for one in states if isinstance(one, Tensor))
        found = chain(model.parameters(), model.buffers(), tensors)
        self._tensors = [_local(one).detach() for one in found]

    def are_those_of(self, other: Places) -> bool:
        """Whether nothing has moved in between."""
        ours, theirs = self._tensors, other._tensors
        return len(ours) == len(theirs) and all(map(storage.is_set_to, ours, theirs))


def _can_be_input(tensor: Tensor, data: StepData) -> bool:
    """Whether a tensor that is no parameter may be an input of a graph.

    Not if a gradient would have to go on from it, nor if it is data: the next step has others.
    """
    is_data = storage.storage_key(tensor) in data.storages
    return not (tensor.requires_grad or is_data or type(tensor) is not Tensor)


def _put(place: Any, key: Any, one: Tensor) -> None:
    if isinstance(place, CellType):
        place.cell_contents = one
    else:
        place[key] = one


def _held_at(place: Any, key: Any) -> Any:
    """What a place holds; None if it lost that."""
    try:
        return item_at(place, key)
    except (KeyError, IndexError, ValueError):
        return None


def _rate_of(group: dict[str, Any], device: torch.device) -> Tensor:
    """A learning rate in memory, so that another one needs no other graph."""
    rate = group["lr"]
    if isinstance(rate, Tensor):
        return rate
    wide = any(parameter.dtype is torch.float64 for parameter in group["params"])
    dtype = torch.float64 if wide else torch.float32
    return torch.full((), float(rate), dtype=dtype, device=device)


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    if isinstance(tensor, ShardedTensor):
        return tensor.local
    return distributed_tensor.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
