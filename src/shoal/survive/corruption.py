"""Silent corruption: a bit that flips in memory or on the way, found and named.

    with corruption_checks(model, optimizer):
        for batch in data:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

| what | summed when it was written | and looked at again |
|---|---|---|
| shards of parameters, and the optimizer's state | after each step | before the next |
| gathered parameters | what each rank sends | what each rank received |
| gradients on their way | what each rank sends, by receiver | what each rank received |
| reduced gradients | when they are put on the parameters | before the optimizer's step |

These are sums of bits, which see any one bit; but what ranks add up is rounded, so gradients on
their way are summed as numbers: a flip is seen if it changes the sum by more than rounding can.
Reduced gradients that have changed on all ranks were clipped, or unscaled: they are taken as
written.

Before the optimizer's step ranks exchange what they found in one all-gather, so that all raise
the same error, before anything is applied. On CUDA nobody waits for that: what a step finds is
raised
before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from shoal.comm.transport import Transport
from shoal.errors import RankError, UsageError
from shoal.mesh import FSDPMeshInfo
from shoal.optim.local_tensors import TENSOR_TYPES
from shoal.runtime.fsdp_module import own_state
from shoal.runtime.gradient_matrix import real_of
from shoal.runtime.module_state import context_of
from shoal.runtime.unit import Unit
from shoal.survive.bits import sum_of_bits, sum_of_parts

_NUM_INTEGERS = 10
"""In a row of the table of sums; what follows are floating point numbers."""
_MIXER = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd factor: sums of several gathers of a step go into one number, and none cancels another."""


class CorruptionError(RankError):
    """Bits changed that nobody wrote. `findings` says where, alike on all ranks."""

    def __init__(self, message: str, findings: Sequence[Finding]) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Something that is not as it was written."""

    rank: int
    """Where it changed; for what was sent and received, who received it."""
    unit: str
    what: str

    def __str__(self) -> str:
        return f"{self.what} of unit {self.unit!r} on rank {self.rank}"


PARAMETERS = "the shards of parameters"
STATE = "the optimizer's state"
GATHERED = "gathered parameters"
GRADIENTS = "gradients on their way"
REDUCED = "reduced gradients"


@contextmanager
def corruption_checks(model: nn.Module, optimizer: Optimizer) -> Iterator[CorruptionChecks]:
    """Check sharded training for flipped bits inside of the `with` block; see the module.

    Whoever writes parameters, gradients or state in another way than by `optimizer.step()` and
    `load_state_dict` (clamping weights, say) calls `checks.written()` after it.
    """
    checks = CorruptionChecks(model, optimizer)
    try:
        yield checks
        checks.finish()
    finally:
        checks.close()


@dataclass(slots=True)
class _Seals:
    """What was summed of one unit."""

    parameters: Tensor
    state: Tensor
    sent: Tensor
    received: Tensor
    sums: Tensor
    """Of gradients that go to each rank of the group that shards."""
    sizes: Tensor
    """The same of their absolute values: what rounding errors are measured by."""
    reduced: Tensor
    """Of the gradients that have arrived here."""
    num_reductions: int = 0
    grads: tuple[Tensor, Tensor] | None = None
    """Reduced gradients that lie on the parameters, and their bits."""


class CorruptionChecks:
    """The sums of one model's units, and what became of them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        context = context_of(model, own_state(model))
        if not context.units:
            raise UsageError(f"this {type(model).__name__} has no parameters to check")
        self._units = context.units
        self._optimizer = optimizer
        self._group = _group_of(self._units)
        self._device = self._units[0].device
        self._width = _NUM_INTEGERS + 1 + 2 * max(unit.size for unit in self._units)
        self._seals = {unit: self._blank(unit) for unit in self._units}
        self._open: list[tuple[Tensor, torch.cuda.Event | None]] = []
        """Tables of which nobody has looked at the contents yet."""
        for unit in self._units:
            if unit.inspector is not None:
                raise UsageError("this model is checked for corruption already")
        for unit in self._units:
            unit.inspector = self
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self.look()),
            optimizer.register_step_post_hook(lambda *_: self.written()),
            optimizer.register_load_state_dict_post_hook(lambda _: self.written()),
            model.register_load_state_dict_post_hook(lambda *_: self.written()),
        ]
        self.written()

    def close(self) -> None:
        """Stop checking."""
        for unit in self._units:
            unit.inspector = None
        for handle in self._handles:
            handle.remove()

    def finish(self) -> None:
        """Raise what the last step has found, where nobody has waited for it yet."""
        while self._open:
            self._look_at(*self._open.pop(0))

    def moved(self, *, is_undone: bool) -> None:
        """The units lie over other groups now; those of a step that was broken off are forgotten.

        `is_undone` tells that the ranks are the same, and shards are what they were after the last
        step: they must have the sums that they had then.
        """
        before = self._seals
        self._group = _group_of(self._units)
        self._width = _NUM_INTEGERS + 1 + 2 * max(unit.size for unit in self._units)
        self._seals = {unit: self._blank(unit) for unit in self._units}
        self._open.clear()
        if not is_undone:
            self.written()
            return
        for unit, seals in self._seals.items():
            seals.parameters, seals.state = before[unit].parameters, before[unit].state

    @torch.no_grad()
    def written(self) -> None:
        """Whatever parameters and state are now, that is what was written."""
        for unit in self._units:
            seals = self._seals[unit]
            seals.parameters = self._parameters(unit)
            seals.state = self._state(unit)

    # What the engine tells, of one unit.

    def on_gathered(self, unit: Unit, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """The bytes of a gather are there, as this rank has sent and received them."""
        seals = self._seals[unit]
        ours = sum_of_bits(sent, self._device)
        theirs = torch.stack([sum_of_parts(whole, unit.size) for whole in received]).sum()
        seals.sent = seals.sent * _MIXER + ours
        seals.received = seals.received * _MIXER + theirs

    @torch.no_grad()
    def on_reducing(self, unit: Unit, matrices: Sequence[Tensor]) -> None:
        """Gradients are about to be reduced: of each matrix, a row goes to each rank."""
        seals = self._seals[unit]
        for matrix in matrices:
            rows = real_of(matrix).reshape(unit.size, -1)
            seals.sums += rows.sum(dim=1, dtype=torch.float64)
            seals.sizes += torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float64)

    @torch.no_grad()
    def on_reduced(self, unit: Unit, output: Tensor) -> None:
        """They were, and lie on the parameters now."""
        seals = self._seals[unit]
        flat = real_of(output).to(self._device)
        seals.reduced = seals.reduced + flat.sum(dtype=torch.float64)
        seals.num_reductions += 1
        seals.grads = None
        if _lie_in(unit, output):
            bits = sum_of_bits([output], output.device).to(self._device)
            seals.grads = (output, bits)

    # Once per step.

    @torch.no_grad()
    def look(self) -> None:
        """Compare all sums now, as is done before each step of the optimizer; collective.

        Before gradients are clipped, it finds what clipping would hide.
        """
        mine = torch.zeros(len(self._units), self._width, dtype=torch.int64, device=self._device)
        for number, unit in enumerate(self._units):
            self._fill(mine[number], unit)
        self.finish()
        size = 1 if self._group is None else self._group.size()
        table = mine.new_empty(size, *mine.shape)
        if self._group is None:
            table[0] = mine
        else:
            reason = "the sums of bits before an optimizer's step"
            Transport(self._group).all_gather(table.view(-1), mine.view(-1), reason=reason).wait()
        if self._device.type != "cuda":
            self._look_at(table, None)
            return
        host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
        host.copy_(table, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._open.append((host, event))

    def _fill(self, row: Tensor, unit: Unit) -> None:
        """Write what one unit's sums are on this rank, and begin new ones."""
        seals = self._seals[unit]
        waits = unit.gradients.has_partial  # for the replicas' part
        row[0] = self._parameters(unit) - seals.parameters
        row[1] = self._state(unit) - seals.state
        row[2], row[3] = seals.sent, seals.received
        if seals.grads is not None:
            output, row[4] = seals.grads
            row[5] = sum_of_bits([output], output.device).to(self._device)
        row[6], row[7] = int(waits), seals.num_reductions
        row[8], row[9] = _place_of(unit)
        values = row[_NUM_INTEGERS:].view(torch.float64)
        values[0] = seals.reduced
        values[1 : 1 + unit.size] = seals.sums
        values[1 + unit.size : 1 + 2 * unit.size] = seals.sizes
        fresh = self._blank(unit)
        fresh.parameters, fresh.state = seals.parameters, seals.state
        if waits:
            fresh.reduced, fresh.sums, fresh.sizes = seals.reduced, seals.sums, seals.sizes
            fresh.num_reductions = seals.num_reductions
        self._seals[unit] = fresh

    def _look_at(self, table: Tensor, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()
        ranks = [0] if self._group is None else dist.get_process_group_ranks(self._group)
        findings = [
            found
            for number, unit in enumerate(self._units)
            for found in _findings(unit, ranks, table[:, number])
        ]
        if not findings:
            return
        more = "".join(f"\n  {found}" for found in findings)
        raise CorruptionError(
            "bits have changed that nobody wrote, so the optimizer's step was not taken:"
            + more
            + "\nIf your code writes parameters or state itself, call checks.written() after it. "
            "Otherwise look at that rank's memory or network, and go on from a checkpoint "
            "(under survive a step is undone for it, once).",
            findings,
        )

    def _blank(self, unit: Unit) -> _Seals:
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        rows = torch.zeros(unit.size, dtype=torch.float64, device=self._device)
        number = rows.new_zeros(())
        return _Seals(none, none, none, none, rows, rows.clone(), number)

    def _parameters(self, unit: Unit) -> Tensor:
        shards = unit.shards
        apart = [shards.members[index].local for index in shards.extended]
        return sum_of_bits([shards.buffer, *map(_plain, apart)], shards.buffer.device).to(
            self._device
        )

    def _state(self, unit: Unit) -> Tensor:
        held = self._optimizer.state
        tensors = [
            _plain(value)
            for member in unit.shards.members
            for value in held.get(member.sharded, {}).values()
            if isinstance(value, Tensor)
        ]
        on_host = [one for one in tensors if one.device != self._device]
        there = [one for one in tensors if one.device == self._device]
        total = sum_of_bits(there, self._device)
        return total + sum_of_bits(on_host, torch.device("cpu")).to(self._device)


def _findings(unit: Unit, ranks: Sequence[int], table: Tensor) -> Iterator[Finding]:
    """What a table of all ranks' sums says of one unit."""
    whole = table[:, :_NUM_INTEGERS].tolist()
    values = table[:, _NUM_INTEGERS:].contiguous().view(torch.float64)
    # Clipping and unscaling write gradients on all ranks; where they are zero, nothing changes.
    all_wrote = all(row[4] != row[5] for row in whole if row[4])
    for number, rank in enumerate(ranks):
        parameters, state, _, received, put, now, waits, count, replica, shard = whole[number]
        if parameters:
            yield Finding(rank, unit.name, PARAMETERS)
        if state:
            yield Finding(rank, unit.name, STATE)
        if put != now and not all_wrote:
            yield Finding(rank, unit.name, REDUCED)
        sent = sum(row[2] for row in whole if row[8] == replica)
        if (sent - received) % (1 << 64):
            yield Finding(rank, unit.name, GATHERED)
        if not waits and not _has_own_sums(unit):
            total, size = (values[:, 1 + shift + shard].sum() for shift in (0, unit.size))
            if not _is_near(unit, values[number, 0], total, size, count):
                yield Finding(rank, unit.name, GRADIENTS)


def _has_own_sums(unit: Unit) -> bool:
    """Whether a user's own function makes something else of sums of gradients."""
    return unit.options.all_reduce_hook is not None or unit.reduce_scatter is not None


def _is_near(unit: Unit, reduced: Tensor, total: Tensor, size: Tensor, num_reductions: int) -> bool:
    """Whether reduced gradients add up to what was sent, but for rounding."""
    dtype = unit.matrix.dtype
    if dtype is None or not total.isfinite():
        return True
    num_ranks = unit.size * (1 if unit.replicas is None else unit.replicas.size)
    scale = 1 / (unit.options.divide_factor or num_ranks)
    dtypes = {dtype, *(member.dtype for member in unit.shards.members)}
    eps = max(torch.finfo(one).eps for one in dtypes)
    least = max(torch.finfo(one).tiny for one in dtypes) * unit.matrix.shard_numel
    bound = eps * (num_ranks + num_reductions + 2) * size * scale + least * num_ranks
    return bool((reduced - total * scale).abs() <= bound)


def _place_of(unit: Unit) -> tuple[int, int]:
    """This rank's number among the replicas, and among the ranks that shard."""
    return (0 if unit.replicas is None else unit.replicas.rank), unit.rank


def _plain(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks."""
    kind = TENSOR_TYPES.get(type(tensor))
    return tensor if kind is None or kind.local is None else kind.local(tensor)


def _lie_in(unit: Unit, output: Tensor) -> bool:
    """Whether the gradients of a unit's parameters are views of what was reduced."""
    memory = output.untyped_storage().data_ptr()
    grads = [_plain(p.grad) for p in unit.shards.sharded if p.grad is not None]
    return bool(grads) and all(
        grad.untyped_storage().data_ptr() == memory for grad in grads if grad.numel()
    )


def _group_of(units: Sequence[Unit]) -> ProcessGroup | None:
    """The group of all ranks that train the units; None for one rank."""
    found = {_ranks_of(unit): unit for unit in units}
    if len(found) > 1:
        one, other, *_ = found.items()
        raise NotImplementedError(
            f"corruption_checks: unit {one[1].name!r} is trained by the ranks {list(one[0])} and "
            f"unit {other[1].name!r} by {list(other[0])}; all units must be on the same ranks"
        )
    ((ranks, unit),) = found.items()
    for transport in (unit.transport, unit.replicas):
        if transport is not None and transport.size == len(ranks):
            return transport.group
    if len(ranks) == 1:
        return None
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    return made


def _ranks_of(unit: Unit) -> tuple[int, ...]:
    """The ranks that train a unit together."""
    info = unit.mesh_info
    ranks = info.mesh.mesh
    roles = [
        # Replicas that are apart train by themselves, and are checked so.
        *([info.replicate_mesh_dim] if unit.replicas is not None else []),
        *([info.shard_mesh_dim] if isinstance(info, FSDPMeshInfo) else []),
    ]
    coordinate = info.mesh.get_coordinate()
    assert coordinate is not None
    for dim in reversed(range(ranks.dim())):
        if dim not in roles:
            ranks = ranks.select(dim, coordinate[dim])
    return tuple(sorted(ranks.reshape(-1).tolist()))
