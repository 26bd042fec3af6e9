"""A unit inside a captured graph: one gather and one reduction, as ordinary nodes.

    shard ──(cast)── all-gather ── wait ── views ── full parameters      forward
    shard's gradient ── wait ── reduce-scatter ── one matrix ── gradients   backward

A graph sees one plain tensor per unit: the shard, as a leaf that shares its memory with the sharded
parameters. When the leaf gets its gradient, the sharded parameters get theirs, which are views of
it. What the eager engine does by hooks (when to gather, when to free) is the graph's business.

Where somebody has set how gradients are reduced, or earlier ones still wait to be, a graph reduces
nothing: full gradients leave it, and the engine does with them what it does without a graph. So it
is for gradients that are sent in a format of their own, and for parameters that make no matrix of
one dtype of floating-point numbers: their leaf is bytes, which have no gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from shoal._torch import collectives, dynamo, kernels, storage, traces
from shoal.compile.lowering.encoded_rows import EncodedRows
from shoal.compile.lowering.gathered_rows import (
    full_in,
    lies_in_runs,
    matrix_of,
    parts_of,
    place_of,
)
from shoal.errors import InvariantError
from shoal.layout.packing import Packing
from shoal.layout.strides import with_strides
from shoal.runtime.gradient_matrix import MatrixParts, cut, examples_of
from shoal.runtime.module_state import LOWERINGS, ModuleState
from shoal.runtime.parameter_wrapping import NumberWrapping
from shoal.runtime.reduction import Division
from shoal.runtime.unit import Unit
from shoal.step.phase import Phase
from shoal.step.settings import Settings

_REDUCTIONS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "avg"}
"""As the operators of graphs name them."""


_GRAPH_UNIT = "_shoal_graph_unit"

MOST_ROWS = 64
"""Of a matrix that graphs cut in parts: each row's piece of a part is a node or more."""


class GraphUnit:
    """How one unit is gathered and reduced by a graph."""

    gathers_again: bool
    """Whether backward gathers again, so that full parameters need not be kept for it."""
    prefetch_depth: int
    allocates = False
    """Whether it counts also on CPU that memory of a size that nobody else has is kept for it."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)
        self.name = unit.name
        self.stored: Packing = unit.shards.packing.in_one_section()
        self._pieces = tuple(
            place_of(self.stored, i, unit.rank) for i in range(len(self.stored.params))
        )
        self._strides = [member.strides for member in unit.shards.members]
        self._wrappings = [member.wrapping for member in unit.shards.members]
        self._numbers = tuple(
            i for i, one in enumerate(self._wrappings) if isinstance(one, NumberWrapping)
        )
        starts = {i: (start, shape) for i, (start, _, shape) in enumerate(self._pieces)}
        shapes, wanted = cut(starts)
        self._examples, self._wanted = examples_of(shapes), sorted(wanted)
        self._is_bytes = not unit.is_uniform
        self.reached: set[int] = set()
        """The parameters that a backward comes to, while one runs or is traced."""
        self._marks = False
        self._buffer = unit.shards.buffer
        self.leaf = self._new_leaf()
        """This rank's shard: the input of graphs."""
        self._device = unit.device
        """Where the graph computes; the shard is elsewhere if it is offloaded."""
        self._policy, self._num_recaptures = unit.policy, unit.shards.num_recaptures
        self._compute_dtypes = [unit.policy.compute_dtype(p.dtype) for p in self.stored.params]
        self.reduce_dtype = unit.policy.reduce_dtype or self._compute_dtypes[0]
        form = unit.policy.gather_format
        self._encoded = None
        if form is not None:
            in_compute = self.stored.with_dtypes(self._compute_dtypes)
            self._encoded = EncodedRows(self.stored, in_compute, form, unit.rank)
        self.trained = tuple(bool(p.requires_grad) for p in unit.shards.sharded)
        transport = unit.transport if unit.size > 1 else None
        self._gather_group = None if transport is None else transport.group
        self._replicas = None if unit.replicas is None else unit.replicas.group
        self.size = unit.size
        num_replicas = 1 if unit.replicas is None else unit.replicas.size
        # As without a graph; but not every gloo averages, and there the graph divides.
        self._division = Division.of(
            self.reduce_dtype, unit.size, num_replicas, None, only_sums=unit.device.type == "cpu"
        )
        in_parts = not self._is_bytes and (self.allocates or unit.device.type == "cuda")
        parts = _parts_of(unit, self.stored, self.reduce_dtype) if in_parts else None
        self._bounds = [] if parts is None else parts.bounds
        """The columns of each part of a matrix that is too large to be reduced at once."""
        self.full_leaves = tuple(self._new_full_leaf(index) for index in range(len(self.trained)))
        """For each parameter one of its full shape, without memory: what full gradients are for."""
        self.gather: Callable[..., tuple[Tensor, ...]] = dynamo.allowed_in_graph(self._gather)
        """Full parameters of the leaf, which gets reduced gradients; a graph traces through it.

        Given `full_leaves` too, these get the gradients as they are.
        """

    def _new_leaf(self) -> Tensor:
        leaf = self._buffer.detach()
        dynamo.mark_unmoving(leaf)
        if not self._is_bytes:
            leaf = leaf.view(self.stored.params[0].dtype).requires_grad_()
            leaf.register_post_accumulate_grad_hook(
                _weakly(GraphUnit._deliver, self, self._buffer, self._marks)
            )
        setattr(leaf, _GRAPH_UNIT, weakref.ref(self))
        return leaf

    def _new_full_leaf(self, index: int) -> Tensor:
        blank = torch.zeros((), dtype=self._compute_dtypes[index], device=self._device)
        full = blank.expand(self.stored.params[index].shape)
        leaf = self._wrappings[index].shaped(full)
        if not self.trained[index]:
            return leaf
        leaf.requires_grad_().register_post_accumulate_grad_hook(
            _weakly(GraphUnit._hand_over, self, index)
        )
        return leaf

    @property
    def sharded(self) -> Sequence[nn.Parameter]:
        """The parameters whose pieces lie in the leaf."""
        unit = self._unit()
        return () if unit is None else unit.shards.sharded

    def holds_for(self, unit: Unit) -> bool:
        """Whether graphs hold for a unit as it is now, wherever its shards lie."""
        return (
            unit.shards.num_recaptures == self._num_recaptures
            and unit.policy is self._policy
            and tuple(bool(p.requires_grad) for p in unit.shards.sharded) == self.trained
        )

    def follow(self) -> Tensor:
        """The leaf to read now: parameters may have been moved or replaced since the last time."""
        unit = self._unit()
        if unit is None:
            return self.leaf
        if unit.phase is Phase.SHARDED:  # in the others the engine has followed
            unit.shards.follow()
        if unit.shards.buffer is self._buffer:  # then what Dynamo guards is all there is
            return self.leaf
        if not self.holds_for(unit):
            raise InvariantError(
                f"parameters of unit {self.name!r} were frozen, unfrozen, or given another dtype "
                "or device since the graph was captured that is about to read them. Call "
                "torch._dynamo.reset() after such a change, so that the model is captured again."
            )
        self._buffer = unit.shards.buffer
        self.leaf = self._new_leaf()
        return self.leaf

    def take_reached(self) -> frozenset[int]:
        """The parameters that the backward comes to that was traced last; all if none was.

        Where a graph does not come to all of them, graphs have to say so from here on.
        """
        trained = frozenset(index for index, trains in enumerate(self.trained) if trains)
        reached = (trained & self.reached) or trained
        self.reached.clear()
        if reached != trained and not self._marks:
            self._marks = True
            self.leaf = self._new_leaf()
        return reached

    def marked(self, leaf: Tensor, reached: frozenset[int]) -> Tensor:
        """The leaf for a graph whose backward comes to these parameters only."""
        return _MarkReached.apply(leaf, self, reached) if self._marks else leaf

    def _gather(self, leaf: Tensor, *full_leaves: Tensor) -> tuple[Tensor, ...]:
        again = traces.computed_again_in_backward() if self.gathers_again else nullcontext()
        with again:
            fulls = _GatherShard.apply(self, leaf, *full_leaves)
        return tuple(
            full if trains else full.detach()
            for full, trains in zip(fulls, self.trained, strict=True)
        )

    def fulls_of(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Gather, and find the parameters in what was gathered."""
        packing, rows = self._gathered(shard)
        fulls: list[Tensor] = []
        for index, param in enumerate(packing.params):
            row = rows if rows.is_floating_point() else rows.view(param.dtype)
            full = self._wrappings[index].shaped(full_in(packing, index, row))
            fulls.append(with_strides(full.to(self._compute_dtypes[index]), self._strides[index]))
        return tuple(fulls)

    def _gathered(self, shard: Tensor) -> tuple[Packing, Tensor]:
        """All ranks' rows: in the dtype of compute, or bytes; and where parameters lie in them."""
        encoded = self._encoded
        casts = encoded is None and not self._is_bytes
        dtype = self._compute_dtypes[0] if casts else shard.dtype
        sent = shard.to(self._device, dtype, non_blocking=True)
        if encoded is not None:
            sent = encoded.encode(sent.view(torch.uint8))
        if self._gather_group is not None:
            sent = collectives.gather_in_graph(sent, self.size, self._gather_group)
        if encoded is None:
            return self.stored, sent.view(self.size, -1)
        return encoded.packing, encoded.decode(sent).view(self.size, -1)

    def shard_of(self, grads: tuple[Tensor | None, ...]) -> Tensor:
        """Reduce gradients to this rank's shard of them."""
        grads = tuple(
            grad if grad is None else wrapping.packed(_dense(grad))
            for wrapping, grad in zip(self._wrappings, grads, strict=True)
        )
        zeros = partial(torch.zeros, dtype=self.reduce_dtype, device=self._device)
        if self._bounds:
            parts = parts_of(self.stored, grads, self.reduce_dtype, self._bounds)
            shard = torch.cat([self._reduced(part) for part in parts])
        else:
            matrix = matrix_of(self.stored, grads, self.reduce_dtype, zeros)
            shard = self._reduced(matrix.view(-1))
        return shard.to(self.leaf.device, self.leaf.dtype)

    def _reduced(self, shard: Tensor) -> Tensor:
        """This rank's part of a matrix, or of some of its columns, over all ranks."""
        before, after = self._division.before, self._division.after
        if before not in (None, 1):
            shard = shard / before
        if self._gather_group is not None:
            how = _REDUCTIONS[self._division.reduce_op]
            shard = collectives.reduce_scatter_in_graph(shard, self.size, self._gather_group, how)
        if self._replicas is not None:
            how = _REDUCTIONS[self._division.all_reduce_op]
            shard = collectives.all_reduce_in_graph(shard, self._replicas, how)
        return shard if after in (None, 1) else shard / after

    def piece_of(self, shard: Tensor, index: int) -> Tensor:
        """One parameter's part of this rank's shard, or of its gradient; a graph may look at it."""
        start, end, shape = self._pieces[index]
        if index in self._numbers:  # each rank has a copy of a number by itself
            shape = ()
        return shard.view(-1)[start:end].view(shape)

    def total_of_squares(self, grad: Tensor) -> Tensor:
        """The squared norm of the unit's gradient on all ranks, from this rank's shard of it."""
        wide = storage.wide_dtype(grad)
        total = torch.linalg.vector_norm(grad, dtype=wide).square()
        for index in self._numbers:  # of its copies one counts
            copy = self.piece_of(grad, index).to(wide).abs().square()
            total = total - copy * (1 - 1 / self.size)
        if self._gather_group is not None:
            total = collectives.all_reduce_in_graph(total, self._gather_group)
        return total

    def _deliver(self, buffer: Tensor, marks: bool, leaf: Tensor) -> None:
        """Give the sharded parameters their gradients, of a leaf that lies in a buffer.

        Those that backward did not come to get none, as without a graph.
        """
        unit, grad = self._unit(), leaf.grad
        leaf.grad = None
        if unit is None or grad is None:
            return
        reached = set(self.reached) if marks else range(len(self.trained))
        self.reached.clear()
        self._check_unchanged(unit, buffer)
        views = kernels.unflatten(grad.view(-1), self._examples)
        for index, at in self._wanted:
            if self.trained[index] and index in reached:
                unit.gradients.put(index, views[at])
        # For the end of a backward, also of one that does not come to them.
        if unit.gradients.waiting:
            unit.gradients.take_late()

    def _hand_over(self, index: int, leaf: Tensor) -> None:
        """Give the engine a full gradient, to reduce or to keep when this backward ends."""
        unit, grad = self._unit(), leaf.grad
        leaf.grad = None
        if unit is not None and grad is not None:
            self._check_unchanged(unit, self._buffer)
            unit.gradients.take_late({index: grad})

    def _check_unchanged(self, unit: Unit, buffer: Tensor) -> None:
        moved = unit.phase is Phase.SHARDED and unit.shards.have_moved
        if moved or unit.shards.buffer is not buffer or not self.holds_for(unit):
            raise InvariantError(
                f"parameters of unit {self.name!r} were moved, replaced, frozen or unfrozen "
                "between the forward and the backward of a captured graph, so these gradients are "
                "not theirs. Make such changes before forward, or after backward."
            )


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()


def _parts_of(unit: Unit, packing: Packing, dtype: torch.dtype) -> MatrixParts | None:
    """In which parts a graph reduces a unit: as the engine does, for the allocator's sake."""
    part_bytes = unit.matrix.part_bytes
    if part_bytes is None or not 1 < unit.size <= MOST_ROWS or not lies_in_runs(packing):
        return None
    whole = packing.with_dtypes([dtype] * len(packing.params))
    return MatrixParts.of(whole, dtype, part_bytes)


def _weakly(method: Callable[..., None], unit: GraphUnit, *args: Any) -> Callable[[Tensor], None]:
    """A hook that keeps nothing alive: the garbage collector does not look into hooks."""
    alive = weakref.ref(unit)

    def hook(leaf: Tensor) -> None:
        found = alive()
        if found is not None:
            method(found, *args, leaf)

    return hook


def graph_unit_of(unit: Unit) -> GraphUnit:
    """How graphs gather and reduce a unit of which one was captured."""
    assert isinstance(unit.in_graph, GraphUnit)
    return unit.in_graph


def graph_unit_at(leaf: object) -> GraphUnit | None:
    """Whose shard a tensor is, if it is the leaf of a unit."""
    found = getattr(leaf, _GRAPH_UNIT, None) if isinstance(leaf, Tensor) else None
    return None if found is None else found()


def prefetch_depth_of(units: Iterable[GraphUnit]) -> int:
    """How many units a graph of these gathers ahead, as the machine's settings say."""
    return max((unit.prefetch_depth for unit in units), default=Settings().prefetch_depth)


class _GatherShard(torch.autograd.Function):
    """A gather whose derivative is a reduction; without one, if there are leaves for the rest."""

    @staticmethod
    def forward(
        ctx: Any, unit: GraphUnit, leaf: Tensor, *full_leaves: Tensor
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.unit, ctx.reduces = unit, not full_leaves
        ctx.set_materialize_grads(False)
        fulls = unit.fulls_of(leaf)
        whole_numbers = [f for f in fulls if not (f.is_floating_point() or f.is_complex())]
        ctx.mark_non_differentiable(*whole_numbers)
        return fulls

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.reduces:
            return None, None, *grads
        ctx.unit.reached.update(i for i, grad in enumerate(grads) if grad is not None)
        return None, ctx.unit.shard_of(grads)


class _MarkReached(torch.autograd.Function):
    """A leaf as it is, whose derivative comes with the parameters that it is for."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, unit: GraphUnit, reached: frozenset[int]) -> Tensor:  # type: ignore[override]
        ctx.unit, ctx.reached = unit, reached
        ctx.set_materialize_grads(False)
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        if grad is not None:  # else the graph gives full gradients to the engine
            ctx.unit.reached.update(ctx.reached)
        return grad, None, None


def _check_can_lower(unit: Unit) -> None:
    """Refuse what a graph cannot do, by name."""
    dtypes = {param.dtype for param in unit.shards.packing.params}
    by_default = unit.options.reduces_by_default
    # In a whole step, no engine comes after the graph.
    is_step = dynamo.captures_without_dynamo()
    waits = is_step and unit.graphs_may_reduce and not unit.reduces_in_graph
    named = ", ".join(sorted(map(str, dtypes)))
    refused = {
        f"parameters of {named} in compile_step": is_step and not unit.is_uniform,
        "DTensor parameters (tensor parallelism, experts)": any(
            member.wrapping.is_distributed for member in unit.shards.members
        ),
        "parameters with all-gather hooks of their own": unit.shards.extended,
        f"reduce_format={unit.policy.reduce_format!r} in compile_step": is_step
        and unit.policy.reduce_format is not None,
        "CPU offload in compile_step": unit.offloads and is_step,
        "set_custom_all_gather": unit.options.all_gather is not None,
        "gradients of earlier backwards that wait to be reduced": waits and by_default,
        f"reductions that setters have changed ({unit.options})": waits and not by_default,
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    if reasons:
        raise NotImplementedError(
            f"unit {unit.name!r} cannot be captured in a graph with {'; '.join(reasons)}. Compile "
            "its blocks instead of the whole model (block.forward = torch.compile(block.forward))."
        )


def lower_units(state: ModuleState) -> None:
    """Let graphs gather a module's units; again in backward if the machine frees them before."""
    assert state.context is not None
    for unit in state.used:
        _lower(unit, gathers_again=state.context.machine.frees_after_forward(unit.step))
    for module in state.modules:
        state.graph_names[module] = [_names_in(module, unit) for unit in state.used]


def _lower(unit: Unit, *, gathers_again: bool) -> None:
    """Anew when its shards have changed."""
    unit.gradients.note_waiting()
    _check_can_lower(unit)
    if unit.phase is not Phase.SHARDED:
        unit.reshard()
    unit.shards.follow()
    known = unit.in_graph
    if not isinstance(known, GraphUnit) or not known.holds_for(unit):
        known = unit.in_graph = GraphUnit(unit)
    known.follow()
    known.gathers_again = gathers_again
    known.prefetch_depth = unit.options.prefetch_depth


def _names_in(module: nn.Module, unit: Unit) -> tuple[tuple[str, int], ...]:
    """The names under which a module, or one inside it, has parameters of a unit."""
    prefixes = {id(inner): f"{name}." if name else "" for name, inner in module.named_modules()}
    return tuple(
        (f"{prefixes[id(home.module)]}{home.name}", index)
        for index, member in enumerate(unit.shards.members)
        for home in member.homes
        if id(home.module) in prefixes
    )


LOWERINGS["shoal"] = lower_units
