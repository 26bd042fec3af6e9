"""Gradients reduced in eight bits: blocks of int8 with a scale each, summed in fp32.

rank 0   [ for rank 0 | for rank 1 ]  + what was rounded away last time  ->  codes, scales
all-to-all: each rank gets what all ranks have for it, adds it up in fp32, and keeps the rest:
what its own codes do not say is added to the next gradients (error feedback)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn import functional

from shoal._torch import collectives
from shoal.errors import UsageError

_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Int8:
    """Gradients travel as int8 with an fp32 scale for each `block` elements: 0.26 of fp32.

    With `error_feedback` each rank adds what was rounded away to its next gradients, for a byte
    per element of the unsharded gradients. Without it, small gradients beside large ones are lost.
    """

    block: int = 128
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise UsageError(f"Int8 takes the number of elements of a block, got {self.block!r}")


class Int8ReduceScatter:
    """The reduce-scatter of one unit; it has the form of `set_custom_reduce_scatter`'s.

    What was rounded away belongs to the gradients of one matrix on these ranks: it is dropped when
    other parameters are trained, and when ranks change. No checkpoint has it.
    """

    def __init__(self, form: Int8) -> None:
        self._form = form
        self._error: tuple[torch.Tensor, torch.Tensor] | None = None

    def forget(self) -> None:
        """Drop what was rounded away: the next gradients are others."""
        self._error = None

    @property
    def error_bytes(self) -> int:
        """The memory of what was rounded away."""
        return 0 if self._error is None else sum(tensor.nbytes for tensor in self._error)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce, in order with the current stream."""
        size, block = group.size(), self._form.block
        rows = input_tensor.view(size, -1).float()
        blocks = functional.pad(rows, (0, -rows.shape[1] % block)).view(size, -1, block)
        codes, scales = self._encode(blocks)
        sent = torch.cat([part.view(size, -1).view(torch.uint8) for part in (codes, scales)], dim=1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
        split = codes[0].numel()
        theirs = received[:, :split].view(torch.int8).view(size, -1, block)
        total = (theirs * received[:, split:].view(torch.float32).unsqueeze(-1)).sum(0)
        total = total.view(-1)[: output_tensor.numel()]
        if op == ReduceOp.AVG:
            total /= size
        elif op != ReduceOp.SUM:
            total *= collectives.premultiplier(op)
        output_tensor.copy_(total)

    def _encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of blocks, with what was rounded away before added."""
        feeds_back = self._form.error_feedback
        if feeds_back and self._error is not None and self._error[0].shape == blocks.shape:
            codes, scales = self._error
            blocks = torch.addcmul(blocks, codes, scales)
        scales = (blocks.abs().amax(-1, keepdim=True) / _LARGEST).clamp_(min=_TINY)
        scaled = blocks / scales
        codes = scaled.round()
        if feeds_back:
            # At most half a step is left: in eight bits again, of steps that are 254 times finer.
            rest = (scaled - codes).mul_(2 * _LARGEST).round_()
            # A gradient that is not finite has to be seen now, and not in every step from now on.
            is_finite = scales.isfinite()
            rest = torch.where(is_finite, rest, 0).to(torch.int8)
            self._error = rest, torch.where(is_finite, scales, 0) / (2 * _LARGEST)
        return codes.nan_to_num_().to(torch.int8), scales
