"""A unit's gradients: taken off full parameters, kept, handed to a reduction, put on the shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal._torch import autograd
from shoal.errors import InvariantError
from shoal.runtime.full import drop_own_grad, own_grad
from shoal.runtime.gradient_matrix import Cuts
from shoal.runtime.reduction import PackedGradients
from shoal.runtime.shards import Member

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit


@dataclass(frozen=True, slots=True)
class GradMark:
    """A gradient as it is on a parameter, by which it is seen whether somebody zeroes it."""

    grad: torch.Tensor
    num_operations: int
    stands_for_none: bool


class Gradients:
    """The gradients of one unit, from the moment that autograd has put them on full parameters."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._kept: dict[int, torch.Tensor] = {}
        """Those of earlier backwards, which wait for a reduction."""
        self._unused: set[int] = set()
        """The parameters that are reduced with the next backward whether or not this rank keeps a
        gradient of them, because another rank may."""
        self._partial: tuple[tuple[int, ...], torch.Tensor, tuple[int, ...]] | None = None
        """Whose were reduced without the replicas, the sums, and what was trained then."""
        self._marks: dict[int, GradMark] = {}
        self._absent: tuple[int, ...] | None = None
        """The parameters of which other ranks have gradients, where this one had no inputs."""
        self.waiting: set[Unit] = set()
        """The units of the model that have gradients of earlier backwards to reduce."""

    def note(self) -> None:
        """Tell the machine whether there are gradients to take."""
        parameters = self.unit.full.parameters
        self.unit.step.has_grads = any(
            own_grad(parameters[i]) is not None for i in self.unit.trained
        )

    def present(self) -> set[int]:
        """The parameters whose gradients a reduction would have now."""
        parameters, members = self.unit.full.parameters, self.unit.shards.members
        arrived = (i for i in self.unit.trained if own_grad(parameters[i]) is not None)
        trained = {index for index in arrived if members[index].sharded.requires_grad}
        return trained | self._unused | self._waiting_indices()

    def _waiting_indices(self) -> set[int]:
        """The parameters of which gradients of earlier backwards are kept."""
        return set(self._kept)

    def stand_in(self, present: tuple[int, ...]) -> None:
        """Let the next reduction be of these parameters, for ranks that have gradients of them.

        This rank has no inputs: it contributes what it keeps of earlier ones, and zeros.
        """
        self._absent = present

    def take(self) -> dict[int, torch.Tensor]:
        """Take the gradients that arrived off the full parameters."""
        grads: dict[int, torch.Tensor] = {}
        parameters, members = self.unit.full.parameters, self.unit.shards.members
        strided = torch.strided
        for index in self.unit.trained:
            parameter = parameters[index]
            grad = own_grad(parameter)
            if grad is None:
                continue
            drop_own_grad(parameter)
            if grad.layout is not strided:  # ranks have used other rows: the sum is dense
                grad = grad.to_dense()
            if members[index].sharded.requires_grad:  # frozen since forward, autograd gives none
                # Whatever graph it has: the reduction is no part of that.
                data = grad.detach() if grad.requires_grad else grad
                grads[index] = members[index].wrapping.grad_data(data)
        if self._absent is not None:
            self._unused, self._absent = set(self._absent), None
            self._kept = {i: kept for i, kept in self._kept.items() if i in self._unused}
        return grads

    def keep(self, taken: Mapping[int, torch.Tensor] | None = None) -> None:
        """Add the gradients, and maybe some taken before, to those that wait for a reduction."""
        for index, grad in (*self.take().items(), *(taken or {}).items()):
            kept = self._kept.get(index)
            if kept is not None:
                kept += grad
            else:
                self._kept[index] = grad.to(self.unit.policy.sum_dtype(grad.dtype))
        if self.unit.options.reduces_unused:
            self._unused.update(self.unit.trained)
        self.note_waiting()

    def note_waiting(self) -> None:
        """Tell the machine, the model and graphs whether gradients wait for a reduction."""
        self.unit.step.has_sums = bool(self._kept or self._unused)
        waits = self.unit.step.has_sums or self._partial is not None
        if waits:
            self.waiting.add(self.unit)
        else:
            self.waiting.discard(self.unit)
        by_default = not waits and self.unit.reduces_by_default
        self.unit.reduces_in_graph = by_default and self.unit.graphs_may_reduce

    def take_late(self, grads: Mapping[int, torch.Tensor] | None = None) -> None:
        """Take full gradients of a backward that ran without the engine, for when it ends."""
        self.unit.prepare_moved()
        self.unit.follow_requires_grad()
        for index, grad in (grads or {}).items():
            parameter = self.unit.full.parameters[index]
            own = own_grad(parameter)
            parameter.grad = grad if own is None else own.add_(grad)
        assert self.unit.notices is not None
        self.unit.notices(self.unit, is_handed_over=True)

    def pack(self, grads: dict[int, torch.Tensor]) -> PackedGradients | None:
        """Lay gradients out for their reduction, with those kept from earlier, if there are any."""
        kept_unused: set[int] = set()
        if self._kept or self._unused or self.unit.step.has_sums:  # which users may have dropped
            for index, kept in self._kept.items():
                grads[index] = kept.add_(grads[index]) if index in grads else kept
            kept_unused, self._kept, self._unused = self._unused, {}, set()
            self.note_waiting()
        if not grads and not kept_unused and not self.unit.options.reduces_unused:
            return None
        return self.unit.reducer.pack(grads, kept_unused)

    @property
    def has_partial(self) -> bool:
        """Whether gradients were reduced to which the replicas have still to add theirs."""
        return self._partial is not None

    def add_partial(
        self, indices: tuple[int, ...], output: torch.Tensor
    ) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """Add what was reduced without the replicas, if any; keep it until that is done.

        Returns whose gradients are there now, since other parameters may have been used before.
        """
        if self._partial is None:
            return indices, None
        before, partial, trained = self._partial
        self._partial = None
        self.note_waiting()
        if trained != self.unit.matrix.trained:
            raise InvariantError(
                f"parameters of unit {self.unit.name!r} were frozen or unfrozen while partial sums "
                "of their gradients wait for the all-reduce. Change requires_grad after a backward "
                "with set_requires_all_reduce(True)."
            )
        output.add_(partial)
        return tuple(sorted({*before, *indices})), partial

    def keep_partial(self, indices: tuple[int, ...], output: torch.Tensor) -> None:
        """Keep a gradient that the replicas have still to add theirs to."""
        self._partial = (indices, output, self.unit.matrix.trained)
        self.note_waiting()

    def are_read_at_once(self, indices: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether these gradients are read as soon as they are there, if only to cast them."""
        members = [self.unit.shards.members[index] for index in indices]
        return any(
            member.dtype is not dtype
            or member.sharded.grad is not None
            or autograd.grad_hooks(member.sharded)
            for member in members
        )

    def may_be_put_later(self, dtype: torch.dtype) -> bool:
        """Whether nobody waits for gradients of this dtype, and no memory is gained by them."""
        members = self.unit.shards.members
        return members[0].dtype is dtype and not (
            any(map(autograd.grad_hooks, self.unit.shards.sharded))
            or members[0].sharded.grad is not None
        )

    def put_reduced(self, indices: Sequence[int], output: torch.Tensor, cuts: Cuts) -> None:
        """Put reduced gradients on the sharded parameters."""
        members, dtype = self.unit.shards.members, output.dtype
        wanted = None if indices is self.unit.trained else set(indices)
        failure: BaseException | None = None
        for index, grad in self.unit.matrix.views(output, cuts):
            if wanted is not None and index not in wanted:
                continue
            stored = members[index].dtype
            if dtype.is_complex and not stored.is_complex:
                grad = grad.real  # of a real parameter beside complex ones
            try:
                self.put(index, grad if stored is dtype else grad.to(stored).contiguous())
            except BaseException as error:  # a user's hook: the other gradients are there too
                failure = failure or error
        if failure is not None:
            raise failure

    def put(self, index: int, grad: torch.Tensor) -> None:
        """Put a gradient of this rank's piece on its parameter, or add it to what is there."""
        member = self.unit.shards.members[index]
        sharded = member.sharded
        held = sharded.grad
        if held is None:
            sharded.grad = member.wrapping.grad(sharded, grad)
        else:
            self._accumulate(member, held, grad)
        if autograd.grad_hooks(sharded):
            autograd.run_grad_hooks(sharded)

    def _accumulate(self, member: Member, held: torch.Tensor, grad: torch.Tensor) -> None:
        local = member.wrapping.local_of(held)
        if local is None:
            raise InvariantError(
                f"the gradient of {member.spec.name!r} of unit {self.unit.name!r} was replaced by "
                f"a {type(held).__name__}; set it to None instead"
            )
        local.add_(grad)

    def zero(self, *, set_to_none: bool) -> None:
        """Zero the gradients of the shards, and drop those that have not reached them."""
        self._drop_waiting(range(len(self.unit.shards.members)))
        for parameter in self.unit.shards.sharded:
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    # A backward that raised: gradients that have not reached the shards stay, unless the user
    # zeroes gradients before the next backward.

    def keep_broken(self, taken: Mapping[int, torch.Tensor] | None = None) -> None:
        """Keep what a backward has accumulated, and maybe taken, that raised."""
        self.keep(taken)
        self.mark_waiting()
        self.unit.show_after_break()

    def mark_waiting(self) -> None:
        """Mark the parameters whose gradients wait for a reduction."""
        partial = () if self._partial is None else self._partial[0]
        self.mark({*self._kept, *self._unused, *partial})

    def mark(self, indices: Iterable[int]) -> None:
        """Leave a gradient of zeros where there is none: whoever zeroes gradients finds it."""
        for index in indices:
            member = self.unit.shards.members[index]
            sharded, stands_for_none = member.sharded, member.sharded.grad is None
            if stands_for_none:
                sharded.grad = member.wrapping.grad(sharded, torch.zeros_like(member.local))
            if sharded.grad is not None:  # a rank that holds nothing of it may have none
                count = self._num_operations(member, sharded.grad)
                self._marks[index] = GradMark(sharded.grad, count, stands_for_none)

    def settle_marks(self) -> frozenset[int]:
        """Take the marks away; drop, and return, those whose gradients were zeroed since."""
        if not self._marks:
            return frozenset()
        marks, self._marks = self._marks, {}
        zeroed: set[int] = set()
        for index, mark in marks.items():
            member = self.unit.shards.members[index]
            count = self._num_operations(member, mark.grad)
            if member.sharded.grad is not mark.grad or count != mark.num_operations:
                zeroed.add(index)
            elif mark.stands_for_none:
                member.sharded.grad = None
        self._drop_waiting(zeroed)
        return frozenset(zeroed)

    def _num_operations(self, member: Member, grad: torch.Tensor) -> int:
        local = member.wrapping.local_of(grad)
        return grad._version + (0 if local is None else local._version)

    def _drop_waiting(self, indices: Collection[int]) -> None:
        """Drop gradients that wait for a reduction."""
        for index in indices:
            self._kept.pop(index, None)
        self._unused.difference_update(indices)
        if self._partial is not None:
            before, partial, trained = self._partial
            left = tuple(index for index in before if index not in indices)
            for index, view in self.unit.matrix.views(partial, self.unit.matrix.cuts):
                if index in indices:
                    view.zero_()
            self._partial = (left, partial, trained) if left else None
        self.note_waiting()

    def forget(self) -> None:
        """Drop every gradient that has not reached the shards."""
        self.settle_marks()
        self._kept, self._unused, self._partial = {}, set(), None
        self.note_waiting()
        self._drop_own()

    def _drop_own(self) -> None:
        for parameter in self.unit.full.parameters:
            drop_own_grad(parameter)
