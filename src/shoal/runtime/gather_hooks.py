"""Tensors that say themselves how they are gathered, by torch's two hooks.

    shard.fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        -> (tensors to gather, metadata)
    shard.fsdp_post_all_gather(gathered, metadata, param_dtype, out=None)
        -> (full parameter, tensors whose memory it needs); with `out`, written there

A tensor subclass has them as methods; a plain shard can be given them before the first forward. An
older form of the first hook takes the mesh alone. `Extension` gathers those of one unit.

    shards   → their own hook → some tensors each, of any dtype
    one all-gather of all those tensors' bytes, beside the gather of the unit's other parameters
    gathered → the tensors again, of all ranks → their own hook → full parameters

Every gathered tensor keeps one storage for life, as the tensors do that a hook names as its own:
they have memory between a gather and a reshard. So a full parameter may consist of them, and what
autograd saved of it sees the bytes of the next gather.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal._torch import kernels, storage
from shoal.errors import InvariantError, RankError, UsageError
from shoal.layout.chunk import chunk_with_empty
from shoal.layout.even import EvenPacking, pack_even
from shoal.layout.packing import Packing
from shoal.layout.spec import ParamSpec
from shoal.layout.strides import row_major
from shoal.mesh import DataParallelMeshInfo
from shoal.runtime.arena import Arena, Buffer
from shoal.runtime.gather import Gather, Staged
from shoal.runtime.rank_guard import check_inputs_agree

if TYPE_CHECKING:
    from shoal.runtime.unit import Unit

BEFORE, AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_ARGUMENTS = "mesh, outer_size, outer_stride, module, mp_policy"


def has_hooks(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the hooks; refuses one without the other, and unknown signatures."""
    before, after = hasattr(tensor, BEFORE), hasattr(tensor, AFTER)
    # AssertionErrors, because torch answers these mistakes with one.
    if before != after:
        has, lacks = (BEFORE, AFTER) if before else (AFTER, BEFORE)
        raise AssertionError(
            f"parameter {name!r}: a {type(tensor).__name__} has {has} but no {lacks}; a tensor "
            "that says how it is gathered needs both"
        )
    if before:
        num_arguments(name, tensor)
    return before


def num_arguments(name: str, tensor: torch.Tensor) -> int:
    """How many arguments the hook before the gather takes: 1, or 5."""
    signature = inspect.signature(getattr(tensor, BEFORE))
    num = len(signature.parameters)
    if num not in (1, 5):
        raise AssertionError(
            f"parameter {name!r}: {BEFORE} of a {type(tensor).__name__} must take ({_ARGUMENTS}), "
            f"or the mesh alone, got {signature}"
        )
    return num


def has_hooks_before_sharding(name: str, tensor: torch.Tensor) -> bool:
    """Like `has_hooks`, for a parameter that has still to be cut."""
    found = has_hooks(name, tensor)
    if found and not hasattr(type(tensor), BEFORE):
        raise NotImplementedError(
            f"shoal: parameter {name!r} was given {BEFORE} before fully_shard, whose shards are "
            "other tensors; give the hooks to the local tensor of the shard, after fully_shard"
        )
    return found


@torch.no_grad()
def cut(
    name: str,
    tensor: torch.Tensor,
    *,
    dim: int,
    num_chunks: int,
    rank: int,
    place: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A rank's chunk, made by the tensor's own operations; in memory for a whole chunk."""
    chunks = chunk_with_empty(tensor, num_chunks, dim)
    chunk, padded = chunks[rank], tensor.new_zeros(chunks[0].size())
    length = chunk.size(dim) if chunk.numel() else 0
    if length:
        padded.narrow(dim, 0, length).copy_(chunk)
    shard = place(padded).narrow(dim, 0, length)
    if not has_hooks(name, shard):
        raise UsageError(
            f"parameter {name!r}: a shard of a {type(tensor).__name__} came out as a "
            f"{type(shard).__name__}, which has no {BEFORE}; let its __torch_dispatch__ keep the "
            "class for split, new_zeros, slice, and moves between devices"
        )
    return shard


def without(packing: Packing, indices: Collection[int]) -> Packing:
    """The same packing, in which some parameters have no elements: they are not in its bytes."""
    if not indices:
        return packing
    if not isinstance(packing, EvenPacking):
        raise refusal(packing.params[min(indices)].name, f"a {type(packing).__name__}")
    return packing.standing_for(
        [
            replace(param, shape=(*param.shape[:dim], 0, *param.shape[dim + 1 :]))
            if index in indices
            else param
            for index, (param, dim) in enumerate(zip(packing.params, packing.dims, strict=True))
        ]
    )


def refusal(name: str, combination: Any) -> NotImplementedError:
    """What to raise where the hooks cannot be honoured."""
    return NotImplementedError(
        f"shoal: parameter {name!r} says itself how it is gathered ({BEFORE}), which is not "
        f"supported with {combination}"
    )


class Extension:
    """The parameters of one unit that have hooks, gathered together."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._members = [Extended(unit, index) for index in sorted(unit.shards.extended)]
        self._gather: Gather | None = None
        self._wait: Callable[[], object] | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def launch(self) -> None:
        """Ask the shards what to send, and start the gather of it."""
        inputs = [member.inputs() for member in self._members]
        if self._gather is None:
            self._gather = self._settle(inputs)
        for buffer in (self._staged, self._gathered):
            buffer.fill()
        torch.cat([_bytes(tensor) for tensors in inputs for tensor in tensors], out=self._row)
        self._wait = self._gather.launch(self._unit.options.all_gather)

    def _settle(self, inputs: Sequence[Sequence[torch.Tensor]]) -> Gather:
        """Make what receives as much as the shards send now; it stays as it is."""
        unit = self._unit
        self._check_ranks_agree(inputs)
        for member, tensors in zip(self._members, inputs, strict=True):
            member.settle(tensors, unit.arena)
        self._targets = [target for member in self._members for target in member.targets]
        self._widths = [target.shape[1] for target in self._targets]
        num_bytes = sum(self._widths)
        spec = ParamSpec(name="inputs", shape=(unit.size * num_bytes,), dtype=torch.uint8)
        packing = pack_even([spec], (0,), unit.size)
        self._staged = Buffer(packing.shard_bytes, unit.arena)
        self._row = self._staged.bytes[:num_bytes]
        self._gathered = Buffer(packing.gathered_bytes, unit.arena)
        self._rows = self._gathered.bytes.view(unit.size, packing.shard_bytes)[:, :num_bytes]
        gather = Gather(
            f"{unit.name} (own hooks)",
            Staged(buffer=self._staged.bytes, packing=packing),
            packing,
            self._gathered.bytes,
            unit.transport,
            unit.streams,
        )
        self._staged.settle()
        self._gathered.settle()
        return gather

    def _check_ranks_agree(self, inputs: Sequence[Sequence[torch.Tensor]]) -> None:
        described: dict[str, object] = {}
        for member, tensors in zip(self._members, inputs, strict=True):
            described[member.name] = [[str(t.dtype), list(t.shape)] for t in tensors]
        try:
            check_inputs_agree(self._unit, described)
        except RankError as error:
            uneven = [member for member in self._members if member.is_uneven]
            if not uneven:
                raise
            # An AssertionError, because torch answers this mistake with one, if on some ranks only.
            raise AssertionError(
                f"{error} ({uneven[0].name!r} is cut unevenly: its hook must return tensors of the "
                f"padded size {uneven[0].padded_shape} on every rank)"
            ) from error

    def wait(self) -> None:
        """Wait for the bytes alone; `finish` does the rest."""
        if self._wait is not None:
            self._wait()
            self._wait = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """The gather has written: have the full parameters made, or written anew."""
        self.wait()
        self._staged.empty()
        for member in self._members:
            member.fill()
        if self._rows.numel():
            kernels.copy_columns(self._rows, self._widths, self._targets)
        self._gathered.empty()
        for member in self._members:
            member.finish()

    def cancel(self) -> None:
        """Take back the memory of a gather that nobody has read."""
        self.wait()
        for buffer in (self._staged, self._gathered):
            buffer.empty()

    def free(self) -> None:
        """Take the memory of the full parameters away."""
        for member in self._members:
            member.empty()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of the full parameters."""
        pointer = storage.storage_pointer(tensor)
        return pointer != 0 and any(pointer in member.pointers for member in self._members)


class Extended:
    """One parameter that has hooks."""

    def __init__(self, unit: Unit, index: int) -> None:
        self._unit = unit
        self._index = index
        self._member = unit.shards.members[index]
        self.name = self._member.spec.name
        self._mesh = _shard_mesh(unit.mesh_info)
        self._metadata: Any = None
        self._shapes: list[tuple[torch.dtype, torch.Size]] = []
        self._received: list[Buffer] = []
        self._outputs: tuple[torch.Tensor, ...] = ()
        self.targets: list[torch.Tensor] = []
        """Where the gathered bytes go: a matrix with a row per rank for each tensor."""
        self._inner: list[Buffer] = []
        self._parameter: nn.Parameter | None = None

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The largest shard of the parameter that some rank holds."""
        return self._unit.shards.whole.piece(self._index, 0).shape

    @property
    def is_uneven(self) -> bool:
        """Whether ranks hold shards of different sizes."""
        whole = self._unit.shards.whole
        return whole.piece(self._index, whole.world_size - 1).shape != self.padded_shape

    def inputs(self) -> list[torch.Tensor]:
        """Ask the shard what this rank sends."""
        unit, name, local = self._unit, self.name, self._member.local
        if local.device.type != unit.device.type:
            local = local.to(unit.device, non_blocking=True)
            if not has_hooks(name, local):
                raise refusal(name, f"hooks of a {type(local).__name__} that lives on the CPU")
        hook: Any = getattr(local, BEFORE)
        if num_arguments(name, local) == 1:
            inputs, self._metadata = hook(self._mesh)
        else:
            size = torch.Size(self._member.spec.shape)
            module = self._member.homes[0].module
            inputs, self._metadata = hook(self._mesh, size, row_major(size), module, unit.policy)
        shapes = [(tensor.dtype, tensor.shape) for tensor in inputs]
        if self._received and shapes != self._shapes:
            raise InvariantError(
                f"parameter {name!r} of unit {unit.name!r}: {BEFORE} returned {shapes}, but "
                f"{self._shapes} at the first gather; a parameter must send the same each time"
            )
        self._shapes = shapes
        return list(inputs)

    def settle(self, inputs: Sequence[torch.Tensor], arena: Arena) -> None:
        """Make the tensors that all ranks' inputs are gathered into."""
        size, outputs = self._unit.size, []
        for tensor in inputs:
            shape = (size * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (size,)
            buffer = Buffer(size * tensor.numel() * tensor.element_size(), arena)
            self.targets.append(buffer.bytes.view(size, -1 if buffer.num_bytes else 0))
            # `.data` has a version counter of its own: writing a gather is not a change to it.
            outputs.append(buffer.typed(tensor.dtype).view(shape).data)
            buffer.settle()
            self._received.append(buffer)
        self._outputs = tuple(outputs)

    def fill(self) -> None:
        """Give memory to what a gather writes, and to what the hook will write."""
        for buffer in (*self._received, *self._inner):
            buffer.fill()

    def empty(self) -> None:
        """Take that memory away."""
        for buffer in (*self._received, *self._inner):
            buffer.empty()

    @property
    def pointers(self) -> set[int]:
        """Where the memory of the full parameter is."""
        buffers = (*self._received, *self._inner)
        return {storage.storage_pointer(buffer.bytes) for buffer in buffers}

    def finish(self) -> None:
        """Let the hook make the full parameter of what was gathered."""
        unit, spec = self._unit, self._member.spec
        hook: Any = getattr(self._member.local, AFTER)
        dtype = unit.policy.compute_dtype(spec.dtype)
        metadata, self._metadata = self._metadata, None
        if self._parameter is not None:
            hook(self._outputs, metadata, dtype, out=self._parameter)
            return
        tensor, inner = hook(self._outputs, metadata, dtype)
        self._own(inner)
        data = torch.as_strided(tensor, spec.shape, row_major(spec.shape), 0)
        wrapping, is_trained = self._member.wrapping, self._member.sharded.requires_grad
        self._parameter = nn.Parameter(wrapping.full(data), requires_grad=is_trained)
        unit.put_full(self._index, self._parameter)

    def _own(self, inner: Sequence[torch.Tensor]) -> None:
        """Free the hook's own tensors with the rest from now on."""
        for tensor in inner:
            pointer = storage.storage_pointer(tensor)
            if pointer == 0 and tensor.numel():
                raise UsageError(
                    f"parameter {self.name!r} of unit {self._unit.name!r}: {AFTER} must name plain "
                    f"tensors as its own, got a {type(tensor).__name__}"
                )
            if pointer not in self.pointers and tensor.numel():
                self._inner.append(Buffer.around(tensor, self._unit.arena))


def _shard_mesh(info: DataParallelMeshInfo) -> DeviceMesh:
    """The axis that shards, as a mesh."""
    if info.mesh.ndim == 1:
        return info.mesh
    assert info.mesh.mesh_dim_names is not None  # a mesh of two axes has names
    return info.mesh[info.mesh.mesh_dim_names[-1]]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
