"""What one gather of a unit carries in a format of few bits.

    shards      | w w w w w w w w | b b |                    this rank's, as they are stored
    its row     | codes of w | b b | scales of w |           one packing for each kind of part
    gathered    | row of rank 0 | row of rank 1 | ... |
    decoded     | w w w w … w w w w | b b b b |              where parameters of compute lie

Each part is packed as its parameters are, with an element for every k of theirs. So where a part
lies is arithmetic on a packing, with nothing sent beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from shoal._torch import kernels
from shoal.errors import UsageError
from shoal.layout.buffer import gathered_rows, shard_views
from shoal.layout.even import pack_even
from shoal.layout.packing import Packing
from shoal.layout.spec import ParamSpec
from shoal.low_precision.formats import GatherFormat


class Wire:
    """The bytes of a unit's gather in a format; `packing` is of its parameters in compute."""

    def __init__(self, packing: Packing, form: GatherFormat) -> None:
        check_cuts(packing, form)
        self.form = form
        self._packing = packing
        self.encoded = encoded_in(packing, form)
        """The parameters that are encoded; the others travel in the dtype of compute."""
        self._parts = [form.parts(_row(packing.params[index])) for index in self.encoded]
        self._columns: list[tuple[int, Packing]] = []
        end = 0
        for part in [packing.in_one_section().standing_for(p) for p in self._params_of_parts()]:
            self._columns.append((end, part))
            end += part.shard_bytes
        spec = ParamSpec(name="row", shape=(end * packing.world_size,), dtype=torch.uint8)
        self.packing = pack_even([spec], (0,), packing.world_size)
        """Of the rows, as bytes."""

    @property
    def row_bytes(self) -> int:
        """What each rank sends."""
        return self.packing.shard_bytes

    def _params_of_parts(self) -> list[list[ParamSpec]]:
        """For each kind of part, what stands for each parameter; at last those as they are."""
        params = self._packing.params
        encoded = dict(zip(self.encoded, self._parts, strict=True))
        kinds = max((len(parts) for parts in self._parts), default=0)
        found = [
            [
                replace(p, shape=(*p.shape[:-1], p.shape[-1] // of.each), dtype=of.dtype)
                if (of := encoded[i][kind] if i in encoded else None)
                else without_elements(p)
                for i, p in enumerate(params)
            ]
            for kind in range(kinds)
        ]
        plain = [without_elements(p) if i in encoded else p for i, p in enumerate(params)]
        return [*found, plain]

    def encode(self, shards: Sequence[torch.Tensor], rank: int, row: torch.Tensor) -> None:
        """Write a rank's local tensors, one of each parameter, to the row that it sends."""
        *parts, plain = [
            shard_views(packing, rank, row[start : start + packing.shard_bytes])
            for start, packing in self._columns
        ]
        targets, sources = [], []
        for indices, width in self._alike():
            flats = [shards[index].reshape(-1) for index in indices]
            flat = flats[0] if len(flats) == 1 else torch.cat(flats)
            if not flat.numel():
                continue
            for into, codes in zip(parts, self.form.encode(flat, width), strict=True):
                # As bytes: not every kernel knows every dtype of few bits.
                views = [into[index].reshape(-1).view(torch.uint8) for index in indices]
                targets += views
                sources += codes.view(torch.uint8).split([view.numel() for view in views])
        for index, view in enumerate(plain):
            if view.numel():
                targets.append(view)
                sources.append(shards[index])
        _copy(targets, sources)

    def _alike(self) -> list[tuple[list[int], int]]:
        """The encoded parameters by the length of their rows: one kernel each for all of a kind."""
        by_row: dict[int, list[int]] = {}
        for index in self.encoded:
            by_row.setdefault(_row(self._packing.params[index]), []).append(index)
        return [(indices, row) for row, indices in by_row.items()]

    def decoder(self, rows: torch.Tensor, gathered: torch.Tensor) -> Callable[[], None]:
        """What writes all ranks' rows, as they are by then, to a buffer of full parameters.

        Both are bytes; views of them are made now.
        """
        *parts, plain = [
            rows.view(packing.world_size, self.row_bytes)[:, start : start + packing.shard_bytes]
            for start, packing in self._columns
        ]
        packings = [packing for _, packing in self._columns]
        matrices: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        targets, sources = [], []
        for index in range(len(self._packing.params)):
            full = gathered_rows(self._packing, gathered, index)
            into = [stripe.of_rows(full) for stripe in self._packing.stripes(index)]
            if index not in self.encoded:
                targets += into
                sources += _stripes(packings[-1], plain, index)
                continue
            found = [_stripes(*one, index) for one in zip(packings, parts, strict=False)]
            matrices += [(list(one), to) for to, *one in zip(into, *found, strict=True)]
        return partial(self._decode, matrices, targets, sources)

    def _decode(
        self,
        matrices: Sequence[tuple[list[torch.Tensor], torch.Tensor]],
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
    ) -> None:
        for parts, into in matrices:
            self.form.decode(parts, into)
        _copy(targets, sources)


def encoded_in(packing: Packing, form: GatherFormat) -> tuple[int, ...]:
    """The parameters of a packing that a format encodes."""
    params = enumerate(packing.params)
    return tuple(index for index, param in params if form.encodes(param.shape, param.dtype))


def check_cuts(packing: Packing, form: GatherFormat) -> None:
    """Refuse a packing that cuts what shares a scale: both halves would be scaled otherwise."""
    for index in encoded_in(packing, form):
        param = packing.params[index]
        unit = form.cannot_be_cut(_row(param))
        for stripe in packing.stripes(index):
            if stripe.full_offset % unit or stripe.numel % unit:
                raise UsageError(
                    f"{form!r} keeps {unit} consecutive elements of parameter {param.name!r} of "
                    f"shape {param.shape} on one rank, since they share a scale, and the layout "
                    f"cuts between {stripe.numel} elements: use Even() (along dim 0), Rows(), "
                    f"Block({unit}) or Whole() of shoal.layout"
                )


def without_elements(param: ParamSpec) -> ParamSpec:
    """A parameter of which nobody holds anything."""
    return replace(param, shape=(0, *param.shape[1:]))


def _row(param: ParamSpec) -> int:
    return param.shape[-1]


def _stripes(packing: Packing, columns: torch.Tensor, index: int) -> list[torch.Tensor]:
    """A part's stripes, in columns of the gathered rows."""
    stripes = packing.stripes(index)
    if not stripes:  # there may be no columns at all
        return []
    typed = columns.view(packing.params[index].dtype)
    return [stripe.of_rows(typed) for stripe in stripes]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        kernels.foreach_copy(targets, sources)
