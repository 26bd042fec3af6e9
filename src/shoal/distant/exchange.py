"""The outer step of parameters that are exchanged together.

launch    anchor − this replica's weights → a flat tensor, whose mean over the replicas is begun
arrive    the mean is the outer gradient: Nesterov's momentum, then the anchor moves
apply     this replica's weights become the anchor's, or come closer to them

The anchor is the same on all replicas. It moves by what was launched alone, so that it makes no
difference when the mean is waited for between `launch` and `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from shoal.comm.pending import Pending
from shoal.comm.transport import Transport
from shoal.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Parameters that are exchanged together: one unit's, or one bucket of plain replicas."""

    name: str
    """For messages and the log of collectives."""
    parameters: Sequence[nn.Parameter]
    """Those that optimizers hold."""
    locals: Callable[[], Sequence[Tensor]]
    """This rank's parts of them, wherever they lie now."""
    like: Callable[[int, Tensor], Tensor]
    """Makes of memory like a parameter's part the tensor that a checkpoint takes."""
    replicas: Transport
    device: torch.device
    """Where tensors are that the process group can carry."""
    was_written: Callable[[], object]
    """Called when weights were changed in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """The numbers of an outer step."""

    lr: float
    momentum: float


class _Flat:
    """The anchor and the momentum of all parts of one dtype, and what is on its way."""

    def __init__(self, indices: Sequence[int], parts: Sequence[Tensor]) -> None:
        self.indices = tuple(indices)
        self._numels = [part.numel() for part in parts]
        self.anchor = self.joined(parts)
        self.momentum = torch.zeros_like(self.anchor)
        self.pending: Pending | None = None

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """A copy of the parts, one after another."""
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def views(self, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The parts in a flat tensor, in their shapes."""
        pieces = flat.split(self._numels)
        return [piece.view(part.shape) for piece, part in zip(pieces, like, strict=True)]


class Exchange:
    """Anchor and momentum of some parameters, and the outer step that may be on its way."""

    def __init__(self, exchanged: Exchanged) -> None:
        self.exchanged = exchanged
        self._trained = self._requires_grad()
        self._indices = [i for i, is_trained in enumerate(self._trained) if is_trained]
        self._flats: list[_Flat] = []
        self._settings: OuterSettings | None = None
        """Those of the outer step whose mean is on its way."""
        self.is_awaited = False
        """Whether an outer step was launched that has not been applied."""
        with torch.no_grad():
            self.restart()

    def _requires_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.exchanged.parameters]

    def restart(self) -> None:
        """Begin anew from the weights of now: they are the anchor, and nothing is on its way."""
        self._drop()
        parts = self.exchanged.locals()
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index in self._indices:
            by_dtype.setdefault(parts[index].dtype, []).append(index)
        self._flats = [_Flat(found, [parts[i] for i in found]) for found in by_dtype.values()]

    def broadcast(self) -> None:
        """Begin from the first replica's weights. Collective."""
        one = self.exchanged
        parts = one.locals()
        for flat in self._flats:
            if flat.anchor.numel() == 0:
                continue
            sent = flat.anchor.to(one.device)
            reason = f"the first replica's weights of {one.name}"
            flat.anchor.copy_(one.replicas.broadcast(sent, 0, reason=reason).wait())
            self._write(flat, parts, share=0.0)
        one.was_written()

    def launch(self, settings: OuterSettings) -> None:
        """Begin the mean of what the replicas have learned since the anchor. Collective."""
        one = self.exchanged
        if self._requires_grad() != self._trained:
            raise UsageError(
                f"parameters of {one.name} were frozen or unfrozen since DistantReplicas was "
                "built, which would move anchors without weights; build it anew after that"
            )
        parts = one.locals()
        for flat in self._flats:
            own = flat.joined([parts[index] for index in flat.indices])
            learned = torch.sub(flat.anchor, own, out=own).to(one.device)
            if learned.numel() == 0:
                continue
            carried = torch.view_as_real(learned).view(-1) if learned.is_complex() else learned
            flat.pending = one.replicas.all_reduce(
                carried, ReduceOp.AVG, reason=f"the outer step of {one.name}"
            )
        self._settings, self.is_awaited = settings, True

    def arrive(self) -> None:
        """Wait for the mean, and move the anchor by it; nothing, where that has been done."""
        settings, self._settings = self._settings, None
        if settings is None:
            return
        for flat in self._flats:
            if flat.pending is None:
                continue
            mean, flat.pending = flat.pending.wait(), None
            if flat.anchor.is_complex():
                mean = torch.view_as_complex(mean.view(-1, 2))
            mean = mean.to(flat.anchor.device)
            # As `torch.optim.SGD(nesterov=True)` does it, operation by operation.
            flat.momentum.mul_(settings.momentum).add_(mean)
            mean.add_(flat.momentum, alpha=settings.momentum)
            flat.anchor.add_(mean, alpha=-settings.lr)

    def apply(self, share: float) -> None:
        """Let this replica's weights be the anchor's, but for a share of its own."""
        self.arrive()
        self.is_awaited = False
        parts = self.exchanged.locals()
        for flat in self._flats:
            self._write(flat, parts, share)
        self.exchanged.was_written()

    def _write(self, flat: _Flat, parts: Sequence[Tensor], share: float) -> None:
        own = [parts[index].detach() for index in flat.indices]
        # One by one and not at once: kernels of lists do not count as changes.
        for part, anchor in zip(own, flat.views(flat.anchor, own), strict=True):
            if share == 0:
                part.copy_(anchor)
            else:
                part.lerp_(anchor, 1 - share)

    def _drop(self) -> None:
        """Forget an outer step that is on its way."""
        for flat in self._flats:
            if flat.pending is not None:
                flat.pending.wait()  # the other replicas take part in it all the same
                flat.pending = None
        self._settings, self.is_awaited = None, False

    # For checkpoints.

    def anchors(self) -> dict[nn.Parameter, Tensor]:
        """By parameter the anchor, as a tensor that lies as the parameter does."""
        return self._shown(lambda flat: flat.anchor)

    def momenta(self) -> dict[nn.Parameter, Tensor]:
        """By parameter the momentum of the outer step."""
        return self._shown(lambda flat: flat.momentum)

    def _shown(self, of: Callable[[_Flat], Tensor]) -> dict[nn.Parameter, Tensor]:
        parts, one = self.exchanged.locals(), self.exchanged
        shown: dict[nn.Parameter, Tensor] = {}
        for flat in self._flats:
            own = [parts[index] for index in flat.indices]
            for index, view in zip(flat.indices, flat.views(of(flat), own), strict=True):
                shown[one.parameters[index]] = one.like(index, view)
        return shown

    def take_up(self, *, is_awaited: bool) -> None:
        """Go on from anchors and momenta that were loaded."""
        self._settings, self.is_awaited = None, is_awaited
