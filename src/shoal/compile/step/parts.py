"""The tensors that a training step works on: where each is, and what stands for it in a trace.

| | plain or replicated | sharded |
|---|---|---|
| parameters | each one | one shard per unit, of which the parameters are views |
| optimizer state | as it is | this rank's part |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal import _torch
from shoal.errors import UsageError
from shoal.runtime.in_graph import InGraph
from shoal.runtime.module_state import state_of
from shoal.runtime.unit import Unit
from shoal.tensor.sharded import ShardedTensor

ELEMENTWISE = frozenset(
    {
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta"),
        *("RMSprop", "Rprop", "ASGD"),
    }
)
"""Optimizers that treat each element by itself, so that a part of a parameter will do."""


class Parts:
    """What a step reads and writes, as a list of tensors that are the inputs of its graph."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self.optimizer = optimizer
        self.tensors: list[Tensor] = []
        """The inputs, but for the data of a step."""
        self._originals: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self.units = _units_of(model)
        self._leaves = [self._add(_lowered(unit).leaf) for unit in self.units]
        self._homes: dict[nn.Parameter, tuple[int, int]] = {
            sharded: (number, index)
            for number, unit in enumerate(self.units)
            for index, sharded in enumerate(unit.shards.sharded)
        }
        self._named = {
            name: self._add(tensor)
            for names in (model.named_parameters, model.named_buffers)
            for name, tensor in names(remove_duplicate=False)
            if tensor not in self._homes
        }
        self._updated = {p for group in optimizer.param_groups for p in group["params"]}
        self._check()
        self.trained = tuple(
            number
            for number in dict.fromkeys(self._named.values())
            if any(self._numbers.get(id(p)) == number for p in self._updated)
        )
        """The plain parameters that the optimizer updates, by their numbers."""
        self.rates = [_rate_of(group, self.device) for group in optimizer.param_groups]
        self._rate_numbers = [self._add(rate) for rate in self.rates]
        self._state = {
            parameter: {
                key: self._add(_local(one)) if isinstance(one, Tensor) else None
                for key, one in optimizer.state[parameter].items()
            }
            for parameter in self._updated
        }
        self._held = {parameter: optimizer.state[parameter] for parameter in self._updated}
        self._slots: list[tuple[Mapping[str, Any], str, Any]] = [
            (holder, key, one)
            for holder in (
                *(module._parameters for module in model.modules()),
                *(module._buffers for module in model.modules()),
                *self._held.values(),
            )
            for key, one in holder.items()
        ]
        self._at = [one.data_ptr() for one in self._originals]

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

    def _check(self) -> None:
        kind = type(self.optimizer).__name__
        if self.units and kind not in ELEMENTWISE:
            raise NotImplementedError(
                f"shoal: compile_step cannot update sharded parameters with {kind}, which looks at "
                f"whole tensors; there are {', '.join(sorted(ELEMENTWISE))}"
            )
        strangers = [
            p for p in self._updated if p not in self._homes and id(p) not in self._numbers
        ]
        if strangers:
            raise UsageError(
                f"{len(strangers)} of the optimizer's parameters, the first of shape "
                f"{tuple(strangers[0].shape)}, are not the model's. Make the optimizer after "
                "fully_shard or replicate, from model.parameters()."
            )

    def is_current(self) -> bool:
        """Whether everything is still where it was: nobody put other tensors or memory there."""
        states = self.optimizer.state
        return (
            all(holder.get(key) is tensor for holder, key, tensor in self._slots)
            and all(states.get(parameter) is held for parameter, held in self._held.items())
            and all(one.data_ptr() == at for one, at in zip(self._originals, self._at, strict=True))
            and not any(unit.shards.have_moved for unit in self.units)
        )

    def set_rates(self) -> None:
        """Take over what schedulers have made of the learning rates."""
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            if rate is not group["lr"]:
                rate.fill_(float(group["lr"]))

    @contextmanager
    def in_place(self, given: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Let the model run on what stands for its tensors; give what to differentiate by."""
        leaves = [given[number].detach().requires_grad_() for number in self._leaves]
        own = {number: given[number].detach().requires_grad_() for number in self.trained}
        named = {name: own.get(number, given[number]) for name, number in self._named.items()}
        lowered = [_lowered(unit) for unit in self.units]
        before = [one.leaf for one in lowered]
        with ExitStack() as stack:
            stack.enter_context(_torch.parameters_replaced(self._model, named))
            for one, leaf in zip(lowered, leaves, strict=True):
                one.leaf = leaf
                one.reached.clear()
            try:
                yield [*leaves, *own.values()]
            finally:
                for one, leaf in zip(lowered, before, strict=True):
                    one.leaf = leaf

    def stand_ins(
        self, given: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
        """The optimizer's groups and state, made of what stands for its tensors, with gradients."""
        by_number = dict(zip(self.trained, grads[len(self.units) :], strict=True))
        groups: list[dict[str, Any]] = []
        state: dict[Tensor, dict[str, Any]] = {}
        for group, rate in zip(self.optimizer.param_groups, self._rate_numbers, strict=True):
            members: list[Tensor] = []
            for parameter in group["params"]:
                stand_in, grad = self._stand_in(parameter, given, grads, by_number)
                if grad is None or not stand_in.numel():
                    continue
                stand_in.grad = grad
                members.append(stand_in)
                numbers = self._state[parameter]
                held = self.optimizer.state[parameter]
                state[stand_in] = {
                    key: held[key] if number is None else given[number]
                    for key, number in numbers.items()
                }
            groups.append({**group, "params": members, "lr": given[rate]})
        return groups, state

    def _stand_in(
        self,
        parameter: nn.Parameter,
        given: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        by_number: dict[int, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        home = self._homes.get(parameter)
        if home is None:
            number = self._numbers[id(parameter)]
            return given[number], by_number[number]
        unit, index = home
        in_graph, grad = _lowered(self.units[unit]), grads[unit]
        view = in_graph.piece_of(given[self._leaves[unit]], index)
        if grad is None or index not in in_graph.reached:
            return view, None
        return view, in_graph.piece_of(grad, index)


def _units_of(model: nn.Module) -> list[Unit]:
    found: dict[Unit, None] = {}
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            found.update(dict.fromkeys(state.units))
    return list(found)


def _lowered(unit: Unit) -> InGraph:
    in_graph = unit.in_graph
    assert in_graph is not None
    return in_graph


def _rate_of(group: dict[str, Any], device: torch.device) -> Tensor:
    """A learning rate in memory, so that another one needs no other graph."""
    rate = group["lr"]
    return rate if isinstance(rate, Tensor) else torch.tensor(float(rate), device=device)


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    if isinstance(tensor, ShardedTensor):
        return tensor.local
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
