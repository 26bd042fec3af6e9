"""`embedding` and `embedding_bag` with a sharded weight: torch's own, on the rows that are needed.

Every rank has indices of its own and gets its own output. The rows come from the ranks that hold
them, and torch's operation runs on those as on a small weight. So results have the bits of the
unsharded operation in every mode.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from shoal.tensor.sharded import ShardedTensor
from shoal.tensor.table import Renorm, look_up


def embedding(
    input: Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Do as `torch.nn.functional.embedding` does with the whole weight: collective.

    `max_norm` applies to the rows that any rank looks up, before any of them looks.
    """
    _check(input, weight, scale_grad_by_freq, sparse)
    found = look_up(
        weight,
        input,
        renorm=_renorm(max_norm, norm_type),
        reason="embedding with a sharded weight",
    )
    return functional.embedding(
        found.positions, found.rows, found.position_of(_row(padding_idx, weight))
    )


def embedding_bag(
    input: Tensor,
    weight: ShardedTensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Do as `torch.nn.functional.embedding_bag` does with the whole weight: collective."""
    _check(input, weight, scale_grad_by_freq, sparse)
    _check_bags(input, offsets, mode, per_sample_weights, include_last_offset)
    found = look_up(
        weight,
        input,
        renorm=_renorm(max_norm, norm_type),
        reason="embedding_bag with a sharded weight",
    )
    return functional.embedding_bag(
        # Offsets and indices have one dtype.
        found.positions.to(input.dtype),
        found.rows,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=found.position_of(_row(padding_idx, weight)),
    )


def _check(input: object, weight: object, scale_grad_by_freq: bool, sparse: bool) -> None:
    if not isinstance(input, Tensor) or isinstance(input, ShardedTensor):
        raise TypeError(f"input need to be torch.Tensor, this rank's own; got {type(input)}")
    if not isinstance(weight, ShardedTensor):
        raise TypeError(f"weight needs to be ShardedTensor, got {type(weight)}")
    if weight.dim() != 2:
        raise ValueError(f"Weight needs to have exactly 2 dims, got {weight.dim()}")
    if scale_grad_by_freq or sparse:
        flag = "scale_grad_by_freq" if scale_grad_by_freq else "sparse"
        raise RuntimeError(f'nn.Embedding weight sharded with flag on "{flag}" not supported!')


def _check_bags(
    input: Tensor,
    offsets: object,
    mode: str,
    per_sample_weights: object,
    include_last_offset: bool,
) -> None:
    for name, given in (("offsets", offsets), ("per_sample_weights", per_sample_weights)):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"{name} need to be torch.Tensor, got {type(given)}")
    if input.dim() > 2:
        raise ValueError(f"Input more than 2 dims not supported, got {input.dim()}")
    if offsets is not None and input.dim() != 1:
        raise ValueError(
            f"Input dimension needs to be exactly 1 dim with offsets, got {input.dim()}"
        )
    if offsets is None and include_last_offset:
        raise ValueError('offsets is required for flag "include_last_offset"!')
    if offsets is None and input.dim() == 1:
        raise ValueError("offsets is required for 1D input")
    if isinstance(offsets, Tensor) and include_last_offset and offsets[-1] != input.shape[0]:
        raise ValueError(
            "offsets need to have the input size in the end when the flag "
            f'"include_last_offset" is on! Expected {input.shape[0]}, got {int(offsets[-1])}'
        )
    if isinstance(per_sample_weights, Tensor) and per_sample_weights.shape != input.shape:
        raise ValueError(
            f"per_sample_weights size {per_sample_weights.size()} not equal to input size "
            f"{input.size()}"
        )
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode '{mode}' is not supported: expected sum, mean or max")


def _renorm(max_norm: float | None, order: float | None) -> Renorm | None:
    return (
        None
        if max_norm is None
        else Renorm(max_norm=max_norm, order=2.0 if order is None else order)
    )


def _row(padding_idx: int | None, weight: ShardedTensor) -> int | None:
    if padding_idx is None:
        return None
    if not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise AssertionError(
            f"padding_idx must be within the {weight.shape[0]} rows of the weight, "
            f"got {padding_idx}"
        )
    return padding_idx % weight.shape[0]
