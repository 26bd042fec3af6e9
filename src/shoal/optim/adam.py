"""Adam and AdamW on the local tensors of sharded parameters.

torch asks every parameter in turn for its gradient and its state, carries hundreds of tensors of a
subclass through its operators, and sorts them by device and dtype. Adam's step never looks across
elements, so that it may as well get the local tensors, all lists at once; and what was found to be
alike in one step needs no second look in the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal._torch import kernels
from shoal.optim.local_tensors import TENSOR_TYPES, TensorType

_GRAD = attrgetter("grad")
_KEYS = ("exp_avg", "exp_avg_sq", "step")
_GETTERS = tuple(map(itemgetter, _KEYS))


class _OnLocalTensors(Optimizer):
    """Fills the lists of a step, or does the step; whatever is unusual, torch does."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Fill the lists, or leave them empty if the step is done; returns if any is complex."""
        is_usual = _is_usual(group)
        known = self._find(group) if is_usual else None
        if known is None:
            # A first step: torch makes the states. On hundreds of DTensors its operators take
            # seconds to find out how they lie, so what follows is done as in all other steps.
            is_first = is_usual and id(group) not in self._groups_known()
            has_complex = super()._init_group(group, *lists)  # pyright: ignore
            known = self._find(group) if is_first else None
            if known is None:
                return has_complex
            for filled in lists:
                filled.clear()
        is_scaled = getattr(self, "found_inf", None) is not None
        if group["fused"] and known.is_uniform and not is_scaled:
            known.step(group)
            return False
        for target, values in zip(lists, known.lists(), strict=True):
            target.extend(values)
        return any(param.is_complex() for param in lists[0])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch; lets go of the moments that are replaced."""
        self._groups_known().clear()
        super().load_state_dict(state_dict)

    def _groups_known(self) -> dict[int, _AdamLists | None]:
        """What each group was seen to be; an optimizer that was pickled or copied has none."""
        return vars(self).setdefault("_shoal_known", {})

    def _find(self, group: dict[str, Any]) -> _AdamLists | None:
        """What the step works on, unless it is nothing, or its first step makes some of it."""
        params: list[Any] = group["params"]
        grads = [*map(_GRAD, params)]
        has_grad = [*map(is_not, grads, repeat(None))]
        if not all(has_grad):
            params, grads = [*compress(params, has_grad)], [*compress(grads, has_grad)]
        # Not by index: that would make states for those that have none.
        states: list[Any] = [*map(self.state.get, params)]
        if not params or not all(states):
            return None
        groups = self._groups_known()
        known = groups.get(id(group))
        if known is None or not known.still_holds(params, states):
            known = groups[id(group)] = _AdamLists.of(params, states)
        return known if known is not None and known.take(grads) else None


class Adam(_OnLocalTensors, torch.optim.Adam):  # pyright: ignore
    """torch's Adam, to the bit, and faster on sharded parameters if fused, or with foreach."""


class AdamW(_OnLocalTensors, torch.optim.AdamW):  # pyright: ignore
    """torch's AdamW, to the bit, and faster on sharded parameters if fused, or with foreach.

    optimizer = shoal.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    """


def _is_usual(group: Mapping[str, Any]) -> bool:
    """Whether a group's options ask for nothing but Adam's step on lists of tensors."""
    if torch.compiler.is_compiling() or not (group["fused"] or group["foreach"]):
        return False
    if group["amsgrad"] or group["differentiable"]:
        return False
    return not any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))


class _AdamLists:
    """The lists of a group's step: parameters and moments that lie alike, and their gradients."""

    def __init__(self, kind: TensorType, params: list[Any], held: list[list[Any]]) -> None:
        self._kind = kind
        self._params = params
        self._held = held
        """First moments, second moments, steps."""
        self._grads: list[Any] = []
        self._specs: list[Any] = []
        """Those of the last gradients that were seen to lie as the parameters do."""
        tensors = [local for some in (params, *held[:2]) for local in kind.locals_of(some)]
        places = {(t.device, t.dtype, t.layout) for t in tensors}
        devices = {step.device for step in held[2]}
        self.is_uniform = len(places) == 1 and devices == {tensors[0].device}
        """Whether one call of one operator can take all of them."""
        # The optimizer has steps to count for a rank's empty parts, and nothing else.
        self._is_there = [tensor.numel() > 0 for tensor in tensors[: len(params)]]
        self._are_all_there = all(self._is_there)

    @classmethod
    def of(cls, params: list[Any], states: list[Any]) -> _AdamLists | None:
        """Look at all of them; None if they are not all of one kind and alike."""
        types = {*map(type, params)}
        kind = TENSOR_TYPES.get(next(iter(types))) if len(types) == 1 else None
        if kind is None or not all(key in state for state in states for key in _KEYS):
            return None
        held = _held(states)
        for moments in held[:2]:
            if {*map(type, moments)} != {kind.holds} or not kind.are_alike(params, moments):
                return None
        return cls(kind, params, held)

    def still_holds(self, params: list[Any], states: list[Any]) -> bool:
        """Whether the optimizer holds the very same tensors."""
        return all(map(_are_same, (params, *_held(states)), (self._params, *self._held)))

    def take(self, grads: list[Any]) -> bool:
        """Take this step's gradients, unless they are of another kind."""
        kind = self._kind
        if {*map(type, grads)} != {kind.holds}:
            return False
        specs = [*map(kind.spec, grads)]
        if not _are_same(specs, self._specs) and not kind.are_alike(self._params, grads):
            return False
        self._specs, self._grads = specs, grads
        return True

    def lists(self) -> tuple[list[Any], ...]:
        """Parameters, gradients, moments, nothing, steps: in the order of `_init_group`."""
        local = self._kind.locals_of
        first, second, steps = self._held
        grads, self._grads = self._grads, []  # they are the model's to keep or to drop
        return local(self._params), local(grads), local(first), local(second), [], steps

    def step(self, group: Mapping[str, Any]) -> None:
        """Adam's fused step, as torch makes it for tensors of one device and dtype."""
        lists = self.lists()
        kernels.foreach_add(lists[-1], 1)
        if not self._are_all_there:
            lists = tuple([*compress(one, self._is_there)] for one in lists)
            if not lists[0]:
                return
        beta1, beta2 = group["betas"]
        kernels.fused_adam(decoupled=group["decoupled_weight_decay"])(
            *lists,
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=None,
        )


def _held(states: list[Any]) -> list[list[Any]]:
    return [[*map(get, states)] for get in _GETTERS]


def _are_same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same objects; comparing tensors would compare numbers."""
    return len(some) == len(others) and all(map(is_, some, others))
