"""The inputs of a graph as canonical data: all that tracing can see of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal._torch import autograd, settings, storage, symbols
from shoal.compile.cache import values
from shoal.compile.cache.errors import NotExactError
from shoal.compile.cache.values import Json


def inputs_key(args: Sequence[Any]) -> Json:
    """Arguments of a graph; which of them are one tensor, and which share memory, included."""
    first: dict[int, int] = {}
    memory: dict[int | None, int] = {}
    bases: dict[int, int] = {}
    keys: list[Json] = []
    for i, one in enumerate(args):
        if not isinstance(one, Tensor):
            if isinstance(one, symbols.SYMBOLIC):
                raise NotExactError("it has a size that is not known, whose guards would be lost")
            keys.append(["value", values.encode(one)])
            continue
        _check_plain(one)
        at = first.setdefault(id(one), i)
        shared = memory.setdefault(storage.storage_key(one), i)
        base = bases.setdefault(id(one if one._base is None else one._base), i)
        keys.append([at, shared, base, *_tensor_key(one)])
    return keys


def _check_plain(tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise NotExactError(f"an input is a tensor of class {type(tensor).__name__}")
    if tensor.layout is not torch.strided or not storage.has_storage(tensor):
        raise NotExactError(f"an input has the layout {tensor.layout}")
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if any(isinstance(one, symbols.SYMBOLIC) for one in sizes):
        raise NotExactError("it has a size that is not known, whose guards would be lost")


def _tensor_key(tensor: Tensor) -> list[Json]:
    key: list[Json] = [
        str(tensor.dtype),
        list(tensor.shape),
        list(tensor.stride()),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        settings.device_text(tensor.device),
        tensor.requires_grad,
        tensor.is_leaf,
        type(tensor) is torch.nn.Parameter,
        settings.dispatch_text(tensor),
    ]
    base = tensor._base
    if base is not None:
        # Memory that several inputs share is entered by the tensor that they are views of.
        key += [autograd.view_text(tensor), _tensor_key(base)]
    return key
