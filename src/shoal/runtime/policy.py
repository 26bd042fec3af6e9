"""How a unit computes: frozen choices that enter once and are validated there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.errors import UsageError


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

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, field)
            if dtype is not None and not dtype.is_floating_point:
                raise UsageError(
                    f"MixedPrecisionPolicy.{field} must be a floating-point dtype, got {dtype}"
                )
