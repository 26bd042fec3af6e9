"""Protection: parity of every version of the state, made while the next step computes.

    a step ends ──► image ──► pieces to the others ──► parity ──► all have it? ──► older one goes
                    └─────────── beside the next forward and backward ───────────┘
    the next optimizer step waits until that is done

A thread does it, in a process group of its own, so that its collectives need no order with those of
the model. What has to be kept until when is `versions`' business.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.comm.observer import in_background
from shoal.comm.transport import Transport
from shoal.errors import RankError, UsageError
from shoal.survive.generation import Generation
from shoal.survive.parity import ParityRows, RowPiece
from shoal.survive.roster import Footing
from shoal.survive.state import ImageLayout, Rest, TrainingState
from shoal.survive.versions import Versions

CHUNK_BYTES = 1 << 22
"""How much of each stripe is on its way at a time: a rank receives so much from each other one."""


@dataclass(slots=True, kw_only=True)
class KeptVersion:
    """One version of the state, as this rank has it."""

    layout: ImageLayout
    rows: ParityRows | None
    """None where a single rank has nobody to protect it."""
    image: Tensor
    parity: Tensor
    rest: Rest


class Protection:
    """The parity that the ranks of one generation keep for one another."""

    def __init__(
        self,
        generation: Generation,
        state: TrainingState,
        num_parities: int,
        version: int,
    ) -> None:
        self.generation = generation.number
        self.members = generation.members
        self.num_parities = num_parities
        """How many of the members may die at the same time."""
        self.versions = Versions(version)
        self.kept: dict[int, KeptVersion] = {}
        """The last two versions, each with its parity once that is whole."""
        self.num_sent_bytes = 0
        """What this rank has sent for its last parity."""
        self._check = generation.check
        self._transport = generation.parity
        self._state = state
        # A stream of the thread's own: in the training's it would wait for all that is queued.
        is_cuda = state.device.type == "cuda"
        self._stream = torch.cuda.Stream(state.device) if is_cuda else None
        self._spare: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._notices: Sequence[int] = ()
        self._num_operations = 0

    @property
    def num_kept_bytes(self) -> int:
        """The memory of images and parities, with the one that the next image is written to."""
        kept = sum(one.image.nbytes + one.parity.nbytes for one in self.kept.values())
        return kept + (0 if self._spare is None else self._spare.nbytes)

    def begin(self, rest: Rest, notices: Sequence[int]) -> None:
        """Start to protect the state as it is; nobody may change it until `settle`.

        `notices` are numbers of which `settle` tells the largest of all ranks.
        """
        if self._stream is not None:
            torch.cuda.current_stream(self._state.device).synchronize()
        self._failure = None
        self._notices = notices
        self._num_operations = self._state.num_operations
        self._thread = threading.Thread(
            target=self._run, args=(rest,), name="shoal-parity", daemon=True
        )
        self._thread.start()

    def settle(self) -> Sequence[int]:
        """Wait until all ranks have the parity of the newest version; the largest notices."""
        is_new = self._thread is not None
        self.stop()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if is_new and self._num_operations != self._state.num_operations:
            raise UsageError(
                "parameters were written while they were copied to be protected, in the step after "
                f"version {self.versions.newest} and before optimizer.step(), or outside of `with "
                "step:`. Write them after optimizer.step(), or after run.protect() in the step; "
                "load weights before `with survive(…)`"
            )
        return self._notices

    def stop(self) -> None:
        """Wait until nothing is on its way, whether it came to its end or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def forget_failure(self) -> None:
        """Let go of an error that nobody asks for any more, and of images in its frames."""
        failure, self._failure = self._failure, None
        drop_frames(failure)

    @property
    def footing(self) -> Footing | None:
        """What this rank could go on from; None before its first parity."""
        offer = self.versions.offer
        return None if offer is None else Footing(generation=self.generation, whole=offer.whole)

    def go_back(self, version: int) -> None:
        """Keep nothing but the version that all have agreed on, which they go on from."""
        self.kept = {version: self.kept[version]}
        self._spare = None
        self.versions.go_back(version)

    def _run(self, rest: Rest) -> None:
        try:
            with in_background(), self._in_stream():
                self._protect(rest)
        except RankError as error:
            self._failure = error
        except RuntimeError as error:
            self._failure = RankError(f"parity of version {self.versions.newest}: {error}")
            self._failure.__cause__ = error
        except BaseException as error:  # told by `settle`, in the thread of the training
            self._failure = error

    @contextmanager
    def _in_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._state.device), torch.cuda.stream(self._stream):
            yield

    def _wait_for_stream(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @torch.no_grad()
    def _protect(self, rest: Rest) -> None:
        version, transport = self.versions.newest, self._transport
        layout = self._state.layout()
        self._check_alike(layout)
        rows = self._rows_for(layout)
        image = self._room(layout.max_bytes if rows is None else rows.padded_bytes)
        self._state.write_image(image, layout, transport.rank)
        self._wait_for_stream()
        parity = self._zeros(0 if rows is None else rows.parity_bytes)
        if rows is not None:
            device = self._state.device
            self.num_sent_bytes = exchange(rows, image, parity, transport, device)
        self._wait_for_stream()
        self._check()
        self.kept[version] = KeptVersion(
            layout=layout, rows=rows, image=image, parity=parity, rest=rest
        )
        self.versions.protect()
        self._notices = self._largest(self._notices, "is the parity whole")
        self.versions.confirm()
        self.versions.begin_keep()
        older = self.kept.pop(version - 1, None)
        self._spare = None if older is None else older.image
        self.versions.end_keep()

    def _rows_for(self, layout: ImageLayout) -> ParityRows | None:
        if self.num_parities == 0:
            return None
        return ParityRows(
            num_members=self._transport.size,
            num_parities=self.num_parities,
            num_bytes=layout.max_bytes,
        )

    def _room(self, num_bytes: int) -> Tensor:
        """Memory for an image: that of two versions ago, if it is as large."""
        spare, self._spare = self._spare, None
        if spare is None or spare.numel() != num_bytes:
            return self._zeros(num_bytes)
        return spare

    def _zeros(self, num_bytes: int) -> Tensor:
        """Memory of the host, also for what lies on a GPU: that is for training."""
        pins = self._state.device.type == "cuda"
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pins)

    def _check_alike(self, layout: ImageLayout) -> None:
        digest = layout.digest
        largest, smallest = self._largest([digest, -digest], "do optimizers keep the same")
        if largest != -smallest:
            raise RankError(
                "the optimizers of the ranks keep state for different parameters, so there is no "
                "parity of it: let every rank have a gradient for every trained parameter "
                "(model.set_reduce_scatter_unused_params(True))"
            )

    def _largest(self, numbers: Sequence[int], reason: str) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._state.device)
        if self._transport.size > 1:
            self._transport.all_reduce(tensor, ReduceOp.MAX, reason=f"parity: {reason}").wait()
        found = [int(number) for number in tensor.tolist()]
        self._check()
        return found


def drop_frames(error: BaseException | None) -> None:
    """Let go of what an exception holds: tensors, and through them groups that are gone."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def exchange(
    rows: ParityRows, image: Tensor, parity: Tensor, transport: Transport, device: torch.device
) -> int:
    """Make this rank's parities of all ranks' images; returns how many bytes it sent.

    Image and parity lie on the host; pieces travel, and are added up, on the device.
    """
    rank, peers = transport.rank, range(rows.num_members)
    sent = [rows.sent(rank, peer) for peer in peers]
    received = [rows.sent(peer, rank) for peer in peers]
    num_sent = 0
    for start in range(0, rows.stripe_bytes, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, rows.stripe_bytes)
        width = stop - start
        pieces = [image[rows.span(piece)][start:stop] for to in sent for piece in to]
        leaving = (torch.cat(pieces) if pieces else image[:0]).to(device)
        num_sent += leaving.numel()
        arriving = torch.empty(width * sum(map(len, received)), dtype=torch.uint8, device=device)
        transport.all_to_all(
            arriving,
            leaving,
            [width * len(pieces) for pieces in received],
            [width * len(pieces) for pieces in sent],
            reason="parity: pieces of the state",
        ).wait()
        order = [piece for pieces in received for piece in pieces]
        found = dict(zip(order, arriving.split(width), strict=True))
        for own in rows.kept_by(rank):
            row = [(m, found[RowPiece(own.row, m)]) for m in rows.members_in(own.row)]
            assert own.parity is not None
            parity[rows.span(own)][start:stop] = rows.encode(own.parity, row)
    return num_sent
