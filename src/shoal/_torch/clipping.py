"""The two halves of `torch.nn.utils.clip_grad_norm_`, for whoever wants to hear of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch.nn.utils import clip_grad

_clip_grad: Any = cast(Any, clip_grad)

total_norm: Callable[..., Any] = _clip_grad._get_total_norm
"""The norm of some gradients together."""
clip_with_norm: Callable[..., Any] = _clip_grad._clip_grads_with_norm_
"""Scales the gradients of parameters by a norm."""


@contextmanager
def clipping_through(norm: Callable[..., Any], clip: Callable[..., Any]) -> Iterator[None]:
    """Let `clip_grad_norm_` call these in the place of its halves, however it was imported."""
    _clip_grad._get_total_norm, _clip_grad._clip_grads_with_norm_ = norm, clip
    try:
        yield
    finally:
        _clip_grad._get_total_norm = total_norm
        _clip_grad._clip_grads_with_norm_ = clip_with_norm
