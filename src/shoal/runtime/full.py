"""The full parameters of a unit: the bytes a gather fills, and the parameters that lie in them.

    zero-copy layouts   gathered  [ w w w w w w | b b | . ]      parameters are views of it

    Even                gathered  [ w w | b | . ][ w w | b | . ][ w w | - | . ]
                                     rank 0          rank 1          rank 2
                        laid out  [ w w w w w w ][ b b - ]       parameters are views of this

For `Even`, each rank's chunks are copied beside each other in one kernel. Every rank's chunk has
the padded size, so a parameter is followed by the padding of the last ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from shoal import _torch
from shoal.errors import InvariantError
from shoal.layout import Packing
from shoal.layout.even import EvenPacking
from shoal.layout.spec import ALIGN_NUMEL, round_up
from shoal.runtime.arena import Arena
from shoal.runtime.buffer import Buffer
from shoal.runtime.form import Form

if TYPE_CHECKING:
    from shoal.runtime.extension import Extension


class FreedParameter(nn.Parameter):
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
        with _torch.no_torch_function_subclass():
            return func(*args, **(kwargs or {}))


class FullParameters:
    """The gathered bytes of one unit, as parameters."""

    def __init__(
        self, unit: str, packing: Packing, forms: Sequence[Form], arena: Arena, dtype: torch.dtype
    ) -> None:
        self._gathered = Buffer(packing.gathered_bytes, arena)
        self._laid_out: Buffer | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._columns: tuple[torch.Tensor, list[int], list[torch.Tensor]] | None = None
        self.gathered = self._gathered.typed(dtype)
        """What an all-gather writes, in the one dtype of all parameters, or as bytes."""
        offsets = [packing.gathered_offset(i) for i in range(len(packing.params))]
        if all(offset is not None for offset in offsets):
            datas = [
                _view(self._gathered.bytes, param, offset)
                for param, offset in zip(packing.params, offsets, strict=True)
            ]
        else:
            datas = self._lay_beside(packing, arena)
        # `.data` gives a parameter a version counter of its own, so that writing a gather into
        # the buffer does not look like an in-place change of what autograd saved.
        self._datas = datas
        self.parameters = tuple(
            nn.Parameter(form.full(data.data), requires_grad=False)
            for form, data in zip(forms, datas, strict=True)
        )
        self._freeable = [p for p in self.parameters if type(p) is nn.Parameter]
        self._packing = packing
        self.extension: Extension | None = None
        """What gathers the parameters that are not in the buffer, if there are any."""
        self.rename(unit)

    def settle(self) -> None:
        """All views of the buffers are made: leave them without memory."""
        self._gathered.settle()
        if self._laid_out is not None:
            self._laid_out.settle()
        self._bury()

    def rename(self, unit: str) -> None:
        """Say the unit's name when a freed parameter is read."""
        for param, parameter in zip(self._packing.params, self.parameters, strict=True):
            vars(parameter)["_shoal_name"] = f"parameter {param.name!r} of unit {unit!r}"

    def _lay_beside(self, packing: Packing, arena: Arena) -> list[torch.Tensor]:
        """Views of a second buffer, and the copies that fill it."""
        chunks = _padded_chunks(packing)
        offsets, end = [], 0
        for param, chunk in zip(packing.params, chunks, strict=True):
            offsets.append(end)
            numel = round_up(max(packing.world_size * chunk, param.numel), ALIGN_NUMEL)
            end = round_up(end + numel * param.itemsize, 16 * 16)
        self._laid_out = Buffer(end, arena)
        datas = [
            _view(self._laid_out.bytes, param, offset)
            for param, offset in zip(packing.params, offsets, strict=True)
        ]
        dtypes = {param.dtype for param in packing.params}
        if isinstance(packing, EvenPacking) and not any(packing.dims) and len(dtypes) == 1:
            self._columns = self._as_columns(packing, chunks, offsets, arena)
        else:
            for index, (param, data) in enumerate(zip(packing.params, datas, strict=True)):
                rows = self._gathered.typed(param.dtype).view(packing.world_size, -1)
                for stripe in packing.stripes(index):
                    self._copies.append((stripe.of_full(data.view(-1)), stripe.of_rows(rows)))
        return datas

    def _as_columns(
        self, packing: EvenPacking, chunks: Sequence[int], offsets: Sequence[int], arena: Arena
    ) -> tuple[torch.Tensor, list[int], list[torch.Tensor]]:
        """The chunks of each parameter as columns of the gathered matrix; gaps go nowhere."""
        assert self._laid_out is not None
        dtype, size = packing.params[0].dtype, packing.world_size
        rows = self._gathered.typed(dtype).view(size, -1)
        widths: list[int] = []
        outs: list[torch.Tensor] = []
        end = 0

        def skip(width: int) -> None:
            if width > 0:
                widths.append(width)
                outs.append(torch.empty(size, width, dtype=dtype, device=arena.device))

        for param, chunk, offset, column in zip(
            packing.params, chunks, offsets, packing.offsets_bytes, strict=True
        ):
            if chunk == 0:
                continue
            start = column // param.itemsize
            skip(start - end)
            flat = self._laid_out.typed(dtype)[offset // param.itemsize :][: size * chunk]
            widths.append(chunk)
            outs.append(flat.view(size, chunk))
            end = start + chunk
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
                _torch.copy_columns(*self._columns)
            else:
                _torch.foreach_copy([t for t, _ in self._copies], [s for _, s in self._copies])
            self._gathered.empty()
        for parameter in self._freeable:
            parameter.__class__ = nn.Parameter
        if self.extension is not None:
            self.extension.finish()

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
        """Give the parameters memory without a gather; returns what has to be written."""
        (self._laid_out or self._gathered).fill()
        for parameter in self._freeable:
            parameter.__class__ = nn.Parameter
        return self._datas

    def come_home(self) -> None:
        """Bring parameters back that were given other memory (`parameter.data = ...`)."""
        for parameter, data in zip(self.parameters, self._datas, strict=True):
            is_ours = type(parameter) is nn.Parameter and parameter.shape == data.shape
            if is_ours and parameter.data_ptr() != data.data_ptr():
                parameter.data = data.data

    def free(self) -> None:
        """Take the memory away; from here on reading a parameter is an error."""
        (self._laid_out or self._gathered).empty()
        if self.extension is not None:
            self.extension.free()
        self._bury()

    def _bury(self) -> None:
        for parameter in self._freeable:
            parameter.__class__ = FreedParameter

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of the parameters."""
        buffer = self._laid_out or self._gathered
        if self.extension is not None and self.extension.holds(tensor):
            return True
        if type(tensor) is torch.Tensor:  # nearly always, and cheaper than to ask its storage
            offset = tensor.data_ptr() - buffer.bytes.data_ptr()
            return 0 <= offset < buffer.num_bytes
        pointer = _torch.storage_pointer(tensor)
        return pointer != 0 and pointer == _torch.storage_pointer(buffer.bytes)


def _padded_chunks(packing: Packing) -> list[int]:
    """How many elements of each parameter every rank holds, padding included."""
    if not isinstance(packing, EvenPacking):
        return [0] * len(packing.params)
    return [
        math.prod(packing.piece(index, 0).shape) if param.numel else 0
        for index, param in enumerate(packing.params)
    ]


def _view(data: torch.Tensor, param: Any, offset: int | None) -> torch.Tensor:
    assert offset is not None
    nbytes = param.numel * param.itemsize
    return data[offset : offset + nbytes].view(param.dtype).view(param.shape)
