"""How a unit computes and communicates: frozen choices, validated where they enter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shoal.errors import UsageError
from shoal.low_precision import GatherFormat, Int8
from shoal.mesh import FSDPMeshInfo
from shoal.step.settings import Settings


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit's compute, its gradient reduction and its outputs.

    `param_dtype` is the dtype of gathered parameters, hence of compute; the sharded parameters,
    and so the optimizer, keep the dtype the module had. `reduce_dtype` is the dtype in which
    gradients are summed over ranks; without it they are summed in the compute dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    gather_format: GatherFormat | None = None
    """In which bits matrices travel to be gathered: `Float8()`, `MXFP8()` or `NVFP4()`.

    They arrive in the compute dtype, rounded to what the format can say.
    """
    reduce_format: Int8 | None = None
    """In which bits gradients travel to be reduced: `Int8()`. They are summed in fp32."""

    def __post_init__(self) -> None:
        form = self.gather_format
        if form is not None and not isinstance(form, GatherFormat):
            hint = (
                f"{form.__name__}()" if isinstance(form, type) else "Float8(), MXFP8() or NVFP4()"
            )
            raise UsageError(
                f"MixedPrecisionPolicy.gather_format must be a format, got {form!r}: pass {hint} "
                "of shoal.low_precision"
            )
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, field)
            if dtype is not None and not dtype.is_floating_point:
                raise UsageError(
                    f"MixedPrecisionPolicy.{field} must be a floating-point dtype, got {dtype}"
                )

        if self.reduce_format is not None and not isinstance(self.reduce_format, Int8):
            raise UsageError(
                f"MixedPrecisionPolicy.reduce_format must be Int8() of shoal.low_precision, "
                f"got {self.reduce_format!r}"
            )

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter stored in `dtype` is gathered."""
        if self.param_dtype is None or not dtype.is_floating_point:
            return dtype
        return self.param_dtype

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a dtype are summed over ranks; complex ones stay so."""
        if self.reduce_dtype is None:
            return dtype
        return (
            torch.promote_types(self.reduce_dtype, dtype) if dtype.is_complex else self.reduce_dtype
        )


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards live; this one leaves them on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state live in host memory.

    A gather copies its shard to the device first; reduced gradients are copied back. With
    `pin_memory` both copies overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class ShardPlacementResult:
    """How one parameter is sharded: along which dim, and over which mesh."""

    placement: Any
    mesh_info: FSDPMeshInfo


class Comm(Protocol):
    """A collective of the user's own, with the memory it wants to work in."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Give the tensor to communicate from or into."""
        ...


class AllGather(Comm, Protocol):
    """What `set_custom_all_gather` takes."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather every rank's input into the output."""
        ...


class ReduceScatter(Comm, Protocol):
    """What `set_custom_reduce_scatter` takes."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce all inputs; keep this rank's piece in the output."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOptions(Settings):
    """What may change between steps, with how; `FSDPModule`'s setters replace it as a whole."""

    all_reduces: bool = True
    """Whether they are also summed over the replicas."""
    divide_factor: float | None = None
    """What the sum of gradients is divided by; by default the number of ranks."""
    halves_division: bool = False
    """Whether to divide once before the sum and once after it, in every dtype."""
    only_sums: bool = False
    """Whether collectives may only add, so that division is a step of its own."""
    reduce_group: dist.ProcessGroup | None = None
    """Where gradients are reduced, if not where parameters are gathered."""
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: torch.cuda.Stream | None = None
    keeps_low_precision_shards: bool = False
    """Whether shards are kept in the dtype of compute too, where that takes fewer bytes."""

    @property
    def reduces_by_default(self) -> bool:
        """Whether gradients are reduced as without any setter."""
        return all(
            getattr(self, one.name) == one.default
            for one in fields(self)
            if one.name in _OF_REDUCTIONS
        )


_OF_REDUCTIONS = frozenset(
    {
        *("reduces", "all_reduces", "reduces_unused", "divide_factor", "halves_division"),
        *("only_sums", "reduce_group", "reduce_scatter"),
        *("all_reduce_hook", "all_reduce_hook_stream"),
    }
)
"""The options that say how gradients are reduced; `max_reductions` says only when."""
