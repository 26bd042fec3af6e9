"""The full parameters of a unit: the bytes a gather fills, and the parameters that lie in them.

    zero-copy           gathered  [ w w w w w w | b b | . ]      parameters are views of it

    small ones, Even    gathered  [ v v | b | . ][ v v | b | . ][ v v | - | . ]
                                     rank 0          rank 1          rank 2
                        laid out  [ v v v v v v ][ b b - ]       parameters are views of this

For `Even`, large parameters are sections of their own, and zero-copy. Each rank's chunks of the
others are copied beside each other, in one kernel if they are many. Every rank's chunk has the
padded size, so a parameter is followed by the padding of the last ranks.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from shoal._torch import kernels, storage, subclasses
from shoal.errors import InvariantError
from shoal.layout import Packing
from shoal.layout.buffer import gathered_rows
from shoal.layout.even import EvenPacking
from shoal.layout.spec import ALIGN_NUMEL, round_up
from shoal.runtime.arena import Arena, Buffer

if TYPE_CHECKING:
    from shoal.runtime.gather_hooks import Extension
    from shoal.runtime.shards import Member

_version_of = operator.attrgetter("_version")


class ShardOf:
    """Which shard a full parameter is of, and its full name; a copy of the parameter is of none."""

    __slots__ = ("member", "name")

    def __init__(self, member: Member | None = None, name: str = "") -> None:
        self.member = member
        self.name = name

    def __reduce__(self) -> tuple[type[ShardOf], tuple[()]]:
        return ShardOf, ()


_SHARD = "_shoal_shard"
_GRAD: Any = torch.Tensor.grad  # of the tensor itself, past all subclasses
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


def attach(parameter: nn.Parameter, shard: ShardOf) -> None:
    """Let a full parameter know its shard."""
    vars(parameter)[_SHARD] = shard


def full_name(parameter: nn.Parameter) -> str | None:
    """The name of a full parameter that a unit has gathered; None for any other."""
    shard = getattr(parameter, _SHARD, None)  # as Dynamo reads it, in a compiled optimizer's step
    return None if shard is None or shard.member is None else shard.name


own_grad: Callable[[nn.Parameter], torch.Tensor | None] = _GRAD.__get__
"""The gradient that autograd has put on a full parameter, whatever users are shown."""


def drop_own_grad(parameter: nn.Parameter) -> None:
    """Take that gradient off."""
    _GRAD.__set__(parameter, None)


class HeldParameter(nn.Parameter):
    """A full parameter while nothing computes with it: users see the gradient of its shard.

    So whoever zeroes or clips gradients by what is registered on modules reaches those that the
    optimizer sees.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the shard, unless somebody has put one here."""
        own, shard = own_grad(self), vars(self).get(_SHARD)
        if own is not None or shard is None or shard.member is None:
            return own
        return shard.member.sharded.grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _GRAD.__set__(self, grad)
        shard = vars(self).get(_SHARD)
        if grad is None and shard is not None and shard.member is not None:
            shard.member.sharded.grad = None

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return _REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> HeldParameter:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Freeze or unfreeze it, and its shard with it, which says so from the next forward on."""
        _REQUIRES_GRAD.__set__(self, requires_grad)
        shard = vars(self).get(_SHARD)
        if shard is not None and shard.member is not None:
            shard.member.sharded.requires_grad_(requires_grad)
        return self


class FreedParameter(HeldParameter):
    """A full parameter while its unit is freed: it says so when it is read."""

    _ALLOWED: ClassVar[frozenset[str]] = frozenset(
        {
            *("__get__", "__set__", "__delete__"),  # shape, grad, requires_grad and their like
            *("size", "dim", "numel", "element_size", "stride", "is_floating_point", "is_complex"),
            *("register_post_accumulate_grad_hook", "requires_grad_", "__hash__"),
        }
    )
    _READS: ClassVar[frozenset[object]] = frozenset(
        getattr(torch.Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag")
    )

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse whatever would read the bytes."""
        reads = getattr(func, "__self__", None) in cls._READS
        if reads or getattr(func, "__name__", "") not in cls._ALLOWED:
            freed = next((a for a in args if isinstance(a, FreedParameter)), None)
            where = "a parameter" if freed is None else vars(freed).get("_shoal_name", "?")
            raise InvariantError(
                f"{where} was read ({getattr(func, '__name__', func)}) while its unit is freed: a "
                "full parameter has memory only during its module's forward and backward. Read "
                "module.weight anew (outside of forward it is the shard), or use "
                "full_parameters(module)."
            )
        with subclasses.no_torch_function_subclass():
            return func(*args, **(kwargs or {}))


class FullParameters:
    """The gathered bytes of one unit, as parameters."""

    def __init__(
        self,
        unit: str,
        packing: Packing,
        members: Sequence[Member],
        arena: Arena,
        dtype: torch.dtype,
    ) -> None:
        self._gathered = Buffer(packing.gathered_bytes, arena)
        self._laid_out: Buffer | None = None
        self._restrided: Buffer | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._columns: tuple[torch.Tensor, list[int], list[torch.Tensor]] | None = None
        self.gathered = self._gathered.typed(dtype)
        """What an all-gather writes, in the one dtype of all parameters, or as bytes."""
        copied = _copied(packing)
        rows = self._lay_beside(packing, copied, arena) if copied else {}
        for index, param in enumerate(packing.params):
            if index not in rows:
                rows[index] = _view(self._gathered.bytes, param, packing.gathered_offset(index))
        self._row_major = [rows[index] for index in range(len(packing.params))]
        """The parameters in row-major order; some have other strides, and are copied once more."""
        datas, restrided = [*self._row_major], self._restride(members, arena)
        for index, data in restrided.items():
            datas[index] = data
        stay = {index in copied for index in range(len(packing.params)) if index not in restrided}
        last = self._restrided
        self._buffers = tuple(
            buffer
            for buffer, stays in (
                (self._gathered, False in stay),
                (self._laid_out, True in stay),
                (last, True),
            )
            if buffer is not None and stays
        )
        """Where the parameters lie, so that it is needed as long as they."""
        # `.data` gives a parameter a version counter of its own, so that writing a gather into
        # the buffer does not look like an in-place change of what autograd saved.
        self._datas = datas = [
            member.wrapping.shaped(data) for member, data in zip(members, datas, strict=True)
        ]
        self.parameters = tuple(
            nn.Parameter(member.wrapping.full(data.data), requires_grad=False)
            for member, data in zip(members, datas, strict=True)
        )
        self._is_imagined = arena.device.type == "meta"
        self._freeable = [p for p in self.parameters if type(p) is nn.Parameter]
        self._kind: type[nn.Parameter] = nn.Parameter
        """What the freeable parameters are now: to be computed with, held, or freed."""
        self._versions: list[int] = []
        self._packing = packing
        self.extension: Extension | None = None
        """What gathers the parameters that are not in the buffer, if there are any."""
        self.rename(unit)

    def settle(self) -> None:
        """All views of the buffers are made: leave them without memory."""
        for buffer in (self._gathered, self._laid_out, self._restrided):
            if buffer is not None:
                buffer.settle()
        self._become(FreedParameter)

    def rename(self, unit: str) -> None:
        """Say the unit's name when a freed parameter is read."""
        for param, parameter in zip(self._packing.params, self.parameters, strict=True):
            vars(parameter)["_shoal_name"] = f"parameter {param.name!r} of unit {unit!r}"

    def _lay_beside(
        self, packing: Packing, copied: Sequence[int], arena: Arena
    ) -> dict[int, torch.Tensor]:
        """Views of a second buffer, and the copies that fill it."""
        offsets: dict[int, int] = {}
        end = 0
        for index in copied:
            param, chunk = packing.params[index], _padded_chunk(packing, index)
            offsets[index] = end
            numel = round_up(max(packing.world_size * chunk, param.numel), ALIGN_NUMEL)
            end = round_up(end + numel * param.itemsize, 16 * 16)
        self._laid_out = Buffer(end, arena)
        datas = {
            index: _view(self._laid_out.bytes, packing.params[index], offset)
            for index, offset in offsets.items()
        }
        dtypes = {packing.params[index].dtype for index in copied}
        is_even = isinstance(packing, EvenPacking) and not any(packing.dims[i] for i in copied)
        if is_even and len(dtypes) == 1 and len(copied) > kernels.FEW:
            self._columns = self._as_columns(packing, offsets, arena)
        else:
            for index, data in datas.items():
                rows = gathered_rows(packing, self._gathered.bytes, index)
                for stripe in packing.stripes(index):
                    self._copies.append((stripe.of_full(data.view(-1)), stripe.of_rows(rows)))
        return datas

    def _restride(self, members: Sequence[Member], arena: Arena) -> dict[int, torch.Tensor]:
        """Views of one more buffer for the parameters that are not row-major."""
        self._turns: list[tuple[torch.Tensor, torch.Tensor]] = []
        strides = {i: m.strides for i, m in enumerate(members) if m.strides is not None}
        if not strides:
            return {}
        offsets: dict[int, int] = {}
        end = 0
        for index in strides:
            offsets[index] = end
            end = round_up(end + self._row_major[index].nbytes, 16 * 16)
        self._restrided = Buffer(end, arena)
        datas: dict[int, torch.Tensor] = {}
        for index, stride in strides.items():
            rows = self._row_major[index]
            flat = self._restrided.bytes[offsets[index] : offsets[index] + rows.nbytes]
            datas[index] = flat.view(rows.dtype).as_strided(
                rows.shape, stride, offsets[index] // rows.itemsize
            )
            self._turns.append((datas[index], rows))
        return datas

    def _as_columns(
        self, packing: Packing, offsets: dict[int, int], arena: Arena
    ) -> tuple[torch.Tensor, list[int], list[torch.Tensor]]:
        """The chunks of each parameter as columns of their section; gaps go nowhere."""
        assert self._laid_out is not None
        size = packing.world_size
        first = next(iter(offsets))
        rows = gathered_rows(packing, self._gathered.bytes, first)
        dtype, start = rows.dtype, packing.section_of(first).start
        widths: list[int] = []
        outs: list[torch.Tensor] = []
        end = 0

        def skip(width: int) -> None:
            if width > 0:
                widths.append(width)
                outs.append(torch.empty(size, width, dtype=dtype, device=arena.device))

        for index, offset in offsets.items():
            chunk = _padded_chunk(packing, index)
            if chunk == 0:
                continue
            column = (packing.piece(index, 0).offset_bytes - start) // dtype.itemsize
            skip(column - end)
            flat = self._laid_out.typed(dtype)[offset // dtype.itemsize :][: size * chunk]
            widths.append(chunk)
            outs.append(flat.view(size, chunk))
            end = column + chunk
        skip(rows.shape[1] - end)
        return rows, widths, outs

    def begin(self) -> torch.Tensor:
        """Give the gather memory to write to."""
        self._gathered.fill()
        return self.gathered

    def finish(self) -> None:
        """The gather has written: make the parameters readable."""
        if self._laid_out is not None:
            self._laid_out.fill()
            if self._columns is not None:
                kernels.copy_columns(*self._columns)
            else:
                kernels.foreach_copy([t for t, _ in self._copies], [s for _, s in self._copies])
            if self._gathered not in self._buffers and not self._turns:
                self._gathered.empty()
        self.turn()
        self.wake()
        if self.extension is not None:
            self.extension.finish()
        self.note_writes()

    def turn(self) -> None:
        """The parameters are there in row-major order: copy those that have other strides."""
        if self._restrided is None:
            return
        self._restrided.fill()
        kernels.foreach_copy([t for t, _ in self._turns], [s for _, s in self._turns])
        for buffer in (self._gathered, self._laid_out):
            if buffer is not None and buffer not in self._buffers:
                buffer.empty()

    def rest(self) -> None:
        """Nothing computes with the parameters."""
        self._become(HeldParameter)

    def wake(self) -> None:
        """Something computes with them: they have the gradients that autograd gives them."""
        self._become(nn.Parameter)

    def note_writes(self) -> None:
        """What was written to the parameters so far is known."""
        self._versions = list(map(_version_of, self._freeable))

    def written(self) -> nn.Parameter | None:
        """A parameter that was changed in place since it was gathered."""
        versions = list(map(_version_of, self._freeable))
        if versions == self._versions:
            return None
        changed = map(operator.ne, versions, self._versions)
        return next(itertools.compress(self._freeable, changed), None)

    def put(self, index: int, parameter: nn.Parameter) -> None:
        """Take a parameter that was made of its first gather, and not in the buffer."""
        blank = self.parameters[index]
        vars(parameter).update(vars(blank))
        self.parameters = (*self.parameters[:index], parameter, *self.parameters[index + 1 :])
        self._freeable = [p for p in self._freeable if p is not blank]
        if type(parameter) is nn.Parameter:
            self._freeable.append(parameter)

    def cancel(self) -> None:
        """Take back what `begin` gave; nobody has read it."""
        self._gathered.empty()
        if self.extension is not None:
            self.extension.cancel()

    def revive(self) -> list[torch.Tensor]:
        """Give the parameters memory without a gather; returns what has to be written.

        It is in row-major order: `turn` does the rest.
        """
        filled = self._buffers
        if self._restrided is not None:
            filled = [one for one in (self._gathered, self._laid_out) if one is not None]
        for buffer in filled:
            buffer.fill()
        self.wake()
        self.note_writes()
        return self._row_major

    def come_home(self) -> None:
        """Bring parameters back that were given other memory (`parameter.data = ...`)."""
        for parameter, data in zip(self.parameters, self._datas, strict=True):
            is_ours = type(parameter) is nn.Parameter and parameter.shape == data.shape
            if is_ours and parameter.data_ptr() != data.data_ptr():
                parameter.data = data.data

    def free(self) -> None:
        """Take the memory away; from here on reading a parameter is an error."""
        for buffer in self._buffers:
            buffer.empty()
        if self.extension is not None:
            self.extension.free()
        self._become(FreedParameter)

    def _become(self, kind: type[nn.Parameter]) -> None:
        if kind is not self._kind:
            self._kind = kind
            for parameter in self._freeable:
                parameter.__class__ = kind

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of the parameters."""
        if self.extension is not None and self.extension.holds(tensor):
            return True
        if self._is_imagined:  # everything is at address 0
            key = storage.storage_key(tensor)
            return any(key == storage.storage_key(buffer.bytes) for buffer in self._buffers)
        if type(tensor) is torch.Tensor:  # nearly always, and cheaper than to ask its storage
            pointer = tensor.data_ptr()
            return any(
                0 <= pointer - buffer.bytes.data_ptr() < buffer.num_bytes
                for buffer in self._buffers
            )
        pointer = storage.storage_pointer(tensor)
        return pointer != 0 and any(
            pointer == storage.storage_pointer(buffer.bytes) for buffer in self._buffers
        )


def _copied(packing: Packing) -> list[int]:
    """The parameters of all sections that are not just full parameters."""
    by_section: dict[range, list[int]] = {}
    for index in range(len(packing.params)):
        by_section.setdefault(packing.section_of(index), []).append(index)
    return [
        index
        for indices in by_section.values()
        if not all(map(packing.is_zero_copy, indices))
        for index in indices
    ]


def _padded_chunk(packing: Packing, index: int) -> int:
    """How many elements of a parameter every rank holds, padding included."""
    if not isinstance(packing, EvenPacking) or not packing.params[index].numel:
        return 0
    return math.prod(packing.piece(index, 0).shape)


def _view(data: torch.Tensor, param: Any, offset: int | None) -> torch.Tensor:
    assert offset is not None
    nbytes = param.numel * param.itemsize
    return data[offset : offset + nbytes].view(param.dtype).view(param.shape)
