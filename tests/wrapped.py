"""A tensor around another one, from which tests make tensors with gather hooks."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
KEPT = {
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
    _aten.detach.default,
}
"""What quantisation libraries keep their own class for; everything else gives plain tensors."""


class Wrapped(torch.Tensor):
    """Has its own class for all that trains and shards it."""

    whole: torch.Tensor
    kept = KEPT
    shown_as: torch.dtype | None = None

    @staticmethod
    def __new__(cls, whole: torch.Tensor, *args: Any) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            whole.size(),
            strides=whole.stride(),
            storage_offset=whole.storage_offset(),
            dtype=cls.shown_as or whole.dtype,
            device=whole.device,
            requires_grad=whole.requires_grad,
        )

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.whole})"

    def like(self, whole: torch.Tensor) -> Self:
        """Wrap another tensor in the same way."""
        return type(self)(whole)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found: list[Wrapped] = []

        def unwrap(tensor: Wrapped) -> torch.Tensor:
            found.append(tensor)
            return tensor.whole

        args, kwargs = tree_map_only(Wrapped, unwrap, (args, kwargs or {}))
        output = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, found[0].like, output) if func in cls.kept else output


class Plainly(Wrapped):
    """Travels as it is; the full parameter is the very tensor that was gathered."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.whole,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (output,) = outputs
        return None if out is not None else (output, (output,))
