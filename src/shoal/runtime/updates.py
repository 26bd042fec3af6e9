"""Notices optimizer steps, so that parameters gathered before one are never taken for current,
nor an optimizer for one that trains the model when it holds the parameters from before sharding.

Version counters do not tell: the multi-tensor and fused optimizers change the local tensors of
DTensors below autograd, where nothing is counted. So every optimizer's step is seen through
torch's global hook, registered when the first unit is made.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shoal.errors import InvariantError
from shoal.runtime.full import full_name


class Updatable(Protocol):
    """Something that wants to know of updates of its parameters."""

    def note_update(self) -> None:
        """An optimizer's step is done."""
        ...

    def sharded_parameters(self) -> list[nn.Parameter]:
        """The parameters an optimizer would hold."""
        ...


_REPLACED = "_shoal_replaced"
_KEPT = "_shoal_kept"


def mark_replaced(parameter: nn.Parameter, name: str, home: object) -> None:
    """Note on an original parameter that shards have taken its place, and where that is."""
    setattr(parameter, _REPLACED, (name, home))


def mark_kept(parameter: nn.Parameter) -> None:
    """Note on an original parameter that it is the shard itself now."""
    setattr(parameter, _KEPT, True)


def is_kept(parameter: nn.Parameter) -> bool:
    """Whether an original parameter has become the shard itself."""
    return getattr(parameter, _KEPT, False)


def replaced_name(parameter: nn.Parameter) -> str | None:
    """The name under which a parameter was sharded, if it was."""
    return getattr(parameter, _REPLACED, (None, None))[0]


def replaced_home(parameter: nn.Parameter) -> Any:
    """Where the shards of a parameter are registered, if it was sharded."""
    return getattr(parameter, _REPLACED, (None, None))[1]


_changes = itertools.count(1)
_num_changes = 0


def note_change() -> None:
    """Parameters of an owner were replaced: whose an optimizer's are has to be asked anew."""
    global _num_changes
    _num_changes = next(_changes)


_uncounted: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def leave_uncounted(optimizer: Optimizer) -> None:
    """Tell nobody of this optimizer's steps: they are parts of another one's, which is counted."""
    _uncounted.add(optimizer)


_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_owners_in: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()


class _Known:
    """Whose parameters an optimizer holds, as long as both sides stay as they are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.held = _held(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        replaced = [name for p in parameters if (name := replaced_name(p)) is not None]
        if replaced:
            raise InvariantError(
                f"the optimizer holds {len(replaced)} parameters from before fully_shard (the "
                f"first is {replaced[0]!r}), so its steps do not reach the model. Build the "
                "optimizer after fully_shard, from model.parameters()."
            )
        full = [name for p in parameters if (name := full_name(p)) is not None]
        if full:
            raise InvariantError(
                f"the optimizer holds {len(full)} full parameters (the first is {full[0]!r}), "
                "which were registered when it was built: between a forward and its backward, "
                "after a forward that raised, or inside of unshard(). They are freed, so its "
                "steps do not reach the model. Build the optimizer before the first forward or "
                "after backward(), or call model.reshard() first."
            )
        held = set(self.held[2:])
        # Weak references to parameters themselves would forbid torch to swap them.
        self.owners: weakref.WeakSet[Updatable] = weakref.WeakSet(
            owner for owner in _owners if any(id(p) in held for p in owner.sharded_parameters())
        )


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def count_updates(owner: Updatable) -> None:
    """From now on, tell the owner of each optimizer step on its parameters."""
    _watch_optimizers()
    _owners.add(owner)


def owners_known() -> list[Any]:
    """All units that are alive, of whatever model."""
    return [*_owners]


def optimizers_of(owners: Iterable[Updatable]) -> list[Optimizer]:
    """The optimizers that have stepped parameters of these owners, in the order of their first."""
    wanted = {*owners}
    return [one for one, known in _owners_in.items() if not wanted.isdisjoint(known.owners)]


def _held(optimizer: Optimizer) -> list[int]:
    """Which parameters an optimizer holds, and how many could own them."""
    held = [len(_owners), _num_changes]
    for group in optimizer.param_groups:
        held.extend(map(id, group["params"]))
    return held


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _uncounted:
        return
    known = _owners_in.get(optimizer)
    if known is None or known.held != _held(optimizer):
        _owners_in[optimizer] = _Known(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    known = _owners_in.get(optimizer)
    if known is None:  # units were made in its step
        return
    for owner in known.owners:
        owner.note_update()
