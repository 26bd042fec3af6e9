"""The key of a compilation: equal only for those whose results are the same."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from shoal._torch import autograd, settings, storage, symbols
from shoal.compile.cache import values
from shoal.compile.cache.errors import NotExactError
from shoal.compile.cache.graph_key import graph_key
from shoal.compile.cache.values import Json
from shoal.compile.options import BackendOptions
from shoal.version import __version__

NEUTRAL = frozenset({"cache", "logs", "passes"})
"""Options that change nothing of what is kept: passes run after it is found."""


def key_of(
    module: fx.GraphModule, args: Sequence[Any], fixed: Collection[int], options: BackendOptions
) -> str:
    """The key of a graph of Dynamo's; refused if something cannot be described exactly."""
    intercepts = settings.what_intercepts()
    if intercepts is not None:
        raise NotExactError(intercepts)
    if settings.joint_pass() is not None:
        raise NotExactError("a pass over joint graphs is set (joint_custom_pass)")
    described = {
        "versions": versions(),
        "options": {
            field.name: getattr(options, field.name)
            for field in fields(options)
            if field.name not in NEUTRAL
        },
        "state": state_key(args, options),
        "fixed": sorted(fixed),
        "inputs": inputs_key(args),
        "graph": graph_key(module),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def state_key(args: Sequence[Any], options: BackendOptions) -> Json:
    """The state of the process that tracing reads."""
    kinds = {"cpu", *(arg.device.type for arg in args if isinstance(arg, Tensor))}
    grouped = dist.is_available() and dist.is_initialized()
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": settings.autocast_state(kinds),
        "backward_autocast": str(settings.backward_autocast()),
        "budget": settings.memory_budget(),
        "flags": settings.backend_flags(),
        "inductor": settings.inductor_settings() if options.inner == "inductor" else None,
        # Whatever a program made of its rank is a constant of the graph; better safe.
        "rank": [dist.get_rank(), dist.get_world_size()] if grouped else None,
    }


@functools.cache
def versions() -> list[str]:
    """What a graph is traced by: torch, Python, and the compiler itself, by its source."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    try:
        folders = (package / "_torch", package / "compile")
        for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    except OSError as error:
        raise NotExactError(f"the compiler's own source cannot be read: {error}") from error
    python = f"{sys.implementation.name} {sys.version}"
    return [__version__, digest.hexdigest(), python, *settings.compiler_versions()]


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
