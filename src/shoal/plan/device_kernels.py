"""What operators do on a device where meta tensors take another way.

On meta, torch takes normalisation, attention and dropout apart, and saves what the parts save.
While a device is imagined they are the kernels that CUDA has; on a CPU attention is one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


@contextmanager
def kernels_of(device_type: Literal["cpu", "cuda"], timeless: set[str]) -> Iterator[None]:
    """Let operators on meta tensors be those of a device, inside of the `with` block.

    `timeless` gets the names of those that ran without anybody noting what they cost.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in _KERNELS[device_type].items():
            if name in _TIMELESS:
                function = partial(_naming, timeless, name, function)
            library.impl(name, function, "AutogradMeta")
        yield
    finally:
        library._destroy()


def _naming(seen: set[str], name: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
    seen.add(name)
    return function(*args)


_TIMELESS = frozenset({"rms_norm"})
"""Those that take and return memory here, and do nothing else."""


class _RMSNorm(torch.autograd.Function):
    """One kernel, which keeps the reciprocal norm of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        rows = x.shape[: x.dim() - len(shape)]
        dtype = torch.promote_types(x.dtype, torch.float32)
        rstd = x.new_empty((*rows, *[1] * len(shape)), dtype=dtype)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        wants_x, _, wants_weight, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.empty_like(weight) if wants_weight and weight is not None else None
        return grad_x, None, grad_weight, None


def _rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _RMSNorm.apply(x, normalized_shape, weight, eps)  # pyright: ignore[reportReturnType]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if query.dim() == 4 and is_half and attn_mask is None and query.shape[-1] <= 256:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(times, -3) for one in (key, value))
    if query.dim() != 4:
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
    wants_grad = query.requires_grad or key.requires_grad or value.requires_grad
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, wants_grad, dropout_p, is_causal, scale=scale
    )[0]


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    return _aten.native_dropout(x, p, train)[0]


def _attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dim() == 4 and dropout_p == 0 and (attn_mask is None or not attn_mask.requires_grad):
        if enable_gqa and query.shape[-3] != key.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = (one.repeat_interleave(times, -3) for one in (key, value))
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


_KERNELS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "cpu": {"scaled_dot_product_attention": _attention_on_cpu},
    "cuda": {
        "rms_norm": _rms_norm,
        "scaled_dot_product_attention": _attention,
        "dropout": _dropout,
    },
}


def temporaries_of(func: Any, args: Sequence[Any]) -> list[int]:
    """The bytes that CUDA's kernel of an operator takes while it runs, in order."""
    packet = func.overloadpacket
    if packet is _aten._scaled_dot_product_flash_attention_backward:
        query, key = args[1], args[2]
        batch, heads, length, dim = query.shape
        rows = batch * heads * _round_up(length, 128)
        taken = [rows * 4, rows * _round_up(dim, 32 if dim <= 128 else 64) * 4]
        if key.shape[1] != heads:  # gradients of keys and values for every head, then summed
            taken += [batch * heads * key.shape[2] * dim * key.itemsize] * 2
        return taken
    return []


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
