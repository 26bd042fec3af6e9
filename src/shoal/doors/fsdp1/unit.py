"""A unit of a wrapper: between forward and backward, users see what optimizers hold."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shoal.layout import Packing
from shoal.layout.buffer import full_tensors
from shoal.layout.region import flat_span
from shoal.runtime.gradients import Gradients
from shoal.runtime.module_state import Reach, map_tensors
from shoal.runtime.reduction import PackedGradients
from shoal.runtime.shards import Home, Member
from shoal.runtime.unit import Unit
from shoal.step.phase import COMPUTING, Phase

if TYPE_CHECKING:
    from shoal.doors.fsdp1.wrapper import Wrapper


class WrappedGradients(Gradients):
    """Gradients that wait are on the parameters of optimizers, where `zero_grad` finds them."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        self._shown: dict[int, torch.Tensor] = {}
        """Gradients that wait, as they are on the parameters."""
        self._covered: dict[int, torch.Tensor | None] = {}
        """The gradients in whose place they are."""
        self.num_backwards = 0
        """How often gradients were taken, or given up."""

    def _waiting_indices(self) -> set[int]:
        members = self.unit.shards.members
        return {i for i, shown in self._shown.items() if members[i].sharded.grad is shown}

    def take(self) -> dict[int, torch.Tensor]:
        """See `Gradients.take`."""
        self.num_backwards += 1
        return super().take()

    def keep(self, taken: Mapping[int, torch.Tensor] | None = None) -> None:
        """See `Gradients.keep`; in the dtype of compute, and where `zero_grad` finds them."""
        kept = self._taken_back()
        for index, grad in (*self.take().items(), *(taken or {}).items()):
            kept[index] = kept[index].add_(grad) if index in kept else grad
        self._kept = kept
        for index, grad in kept.items():
            parameter = self.unit.shards.members[index].sharded
            self._covered[index] = parameter.grad
            parameter.grad = torch.empty_like(parameter)
            # Past the check that a gradient has its parameter's shape and dtype.
            parameter.grad.data = grad
            self._shown[index] = parameter.grad

    def pack(self, grads: dict[int, torch.Tensor]) -> PackedGradients | None:
        """See `Gradients.pack`."""
        self._kept = self._taken_back()
        return super().pack(grads)

    def mark_waiting(self) -> None:
        """See `Gradients.mark_waiting`; what waits for a whole reduction is on the parameters."""
        self.mark(() if self._partial is None else self._partial[0])

    def forget(self) -> None:
        """See `Gradients.forget`."""
        self.num_backwards += 1
        self._taken_back()
        super().forget()

    def _taken_back(self) -> dict[int, torch.Tensor]:
        """The gradients that wait, but for those that somebody has taken off the parameters."""
        kept: dict[int, torch.Tensor] = {}
        for index, shown in self._shown.items():
            parameter = self.unit.shards.members[index].sharded
            if parameter.grad is shown:
                kept[index] = shown.data
                parameter.grad = self._covered[index]
        self._shown.clear()
        self._covered.clear()
        return kept


class WrappedUnit(Unit):
    """A unit whose parameters and gradients can be looked at, and zeroed, at any moment.

    | | on the modules | `.grad` of what optimizers hold |
    |---|---|---|
    | in forward and backward | full parameters | from before |
    | between them, if still full | what optimizers hold | the same |
    | after a backward in `no_sync` | the same | the full gradient, which waits |
    """

    gradients_type: ClassVar[type[Gradients]] = WrappedGradients
    gradients: WrappedGradients
    compares_frozen: ClassVar[bool] = False
    wrapper: weakref.ref[Wrapper]
    """Whose parameters these are."""
    _shows_shards = False

    def share(self, member: Member, homes: Sequence[Home]) -> None:
        """See `Unit.share`."""
        super().share(member, homes)
        wrapper = self.wrapper()
        if homes and wrapper is not None:
            wrapper._user_parameters[self.shards.members.index(member)].homes += tuple(homes)

    def show(self) -> None:
        """Let modules compute with views of the full flat parameter, if there is one."""
        wrapper = self.wrapper()
        if wrapper is not None and wrapper._flat_members is not None:
            wrapper._flat_members.show(self.full.parameters[0], self.gradients.num_backwards)

    def rest(self) -> None:
        """See `Unit.rest`; here users see what optimizers hold by `show_shards`."""

    def wake(self) -> None:
        """See `Unit.wake`."""
        if self._shows_shards:
            self._shows_shards = False
            self.register_full()
        super().wake()

    def _let_go(self, *, keeps: bool) -> None:
        self._shows_shards = False
        super()._let_go(keeps=keeps)

    def show_after_break(self) -> None:
        """See `Unit.show_after_break`."""
        self._show_shards_in(*COMPUTING, Phase.HELD)

    def show_shards(self) -> None:
        """Put what optimizers hold on the modules until the unit computes again."""
        self._show_shards_in(Phase.HELD)

    def _show_shards_in(self, *phases: Phase) -> None:
        if self.phase in phases and not self.step.is_kept:
            self.shards.register()
            self._shows_shards = True

    def apart(self, output: Any) -> Any:
        """The output of a forward, in which parameters of the unit are replaced by copies."""
        if any(self.full.holds(tensor) for tensor in Reach.of(output).tensors):
            return map_tensors(lambda t: t.clone() if self.full.holds(t) else t, output)
        return output

    def own_range(self, index: int) -> slice:
        """The elements of a parameter that this rank holds: with the layout `Flat` one run."""
        packing = self.shards.packing
        piece = packing.piece(index, self.rank)
        shape = packing.params[index].shape
        start = flat_span(shape, piece.regions[0])[0] if piece.regions else 0
        return slice(start, start + piece.numel)

    def gathered(self, packing: Packing, shard: torch.Tensor, reason: str) -> list[torch.Tensor]:
        """Full tensors of all ranks' shard buffers, on the device of compute. Collective."""
        shard = shard.to(self.device)
        if self.transport is not None and self.size > 1:
            whole = shard.new_empty(packing.gathered_bytes)
            shard = self.transport.all_gather(whole, shard, reason=reason).wait()
        return full_tensors(packing, shard)
