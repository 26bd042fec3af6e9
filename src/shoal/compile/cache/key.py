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

from shoal._torch import aot_settings, settings
from shoal.compile.cache.errors import NotExactError
from shoal.compile.cache.graph_key import graph_key
from shoal.compile.cache.input_key import inputs_key
from shoal.compile.cache.values import Json
from shoal.compile.options import Options
from shoal.version import __version__

NEUTRAL = frozenset({"cache", "logs", "passes"})
"""Options that change nothing of what is kept: passes run after it is found."""


def key_of(
    module: fx.GraphModule, args: Sequence[Any], fixed: Collection[int], options: Options
) -> str:
    """The key of a graph of Dynamo's; refused if something cannot be described exactly."""
    intercepts = settings.what_intercepts()
    if intercepts is not None:
        raise NotExactError(intercepts)
    if aot_settings.joint_pass() is not None:
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


def state_key(args: Sequence[Any], options: Options) -> Json:
    """The state of the process that tracing reads."""
    kinds = {"cpu", *(arg.device.type for arg in args if isinstance(arg, Tensor))}
    grouped = dist.is_available() and dist.is_initialized()
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": settings.autocast_state(kinds),
        "backward_autocast": str(aot_settings.backward_autocast()),
        "budget": aot_settings.memory_budget(),
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
