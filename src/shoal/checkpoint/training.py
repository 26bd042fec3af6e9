"""A model with its optimizer, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint.agreement import Ranks
from shoal.checkpoint.load import load
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.metadata import JSON, Manifest
from shoal.checkpoint.optimizer import (
    check_groups,
    optimizer_tensors,
    prepare_optimizer,
    restore_hyper_parameters,
)
from shoal.checkpoint.save import save
from shoal.checkpoint.wrapped import empty_states, take_over, wrapped_state, wrapped_weights
from shoal.errors import CheckpointError
from shoal.wrapper.base import wrappers_below


def save_training(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model, its optimizer and a few values; see `save`."""
    tensors, hyper = Ranks(group).together(lambda: _state(model, optimizer))
    save(folder, tensors, {"optimizer": hyper, "training": extra}, group=group)


def load_training(
    folder: Path, model: nn.Module, optimizer: Optimizer, *, group: dist.ProcessGroup | None = None
) -> dict[str, JSON]:
    """Load what `save_training` saved, on any number of ranks; return `extra`. See `load`."""
    folder = Path(folder)
    ranks = Ranks(group)
    manifest = ranks.together(lambda: _checked(folder, model, optimizer))
    if wrappers_below(model):
        return _load_wrapped(folder, model, optimizer, manifest, group)
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    try:
        ranks.together(lambda: prepare_optimizer(model, optimizer, manifest.tensors))
        tensors, _ = ranks.together(lambda: _state(model, optimizer))
        extra: dict[str, Any] = load(folder, tensors, group=group)
    except BaseException:
        # A checkpoint that is refused leaves the optimizer as it was, like everything else.
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
    restore_hyper_parameters(model, optimizer, extra["optimizer"])
    return extra["training"]


def _state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    tensors: dict[str, torch.Tensor] = {}
    is_wrapped = bool(wrappers_below(model))
    weights = wrapped_weights(model) if is_wrapped else model.state_dict()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            raise NotImplementedError(
                f"{name!r} in the model's state_dict is a {type(value).__name__}: checkpoints of "
                "extra state that is not a tensor are not supported"
            )
        tensors[f"model/{name}"] = value
    states = wrapped_state if is_wrapped else optimizer_tensors
    moments, hyper = states(model, optimizer)
    return tensors | moments, hyper


def _load_wrapped(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    manifest: Manifest,
    group: dist.ProcessGroup | None,
) -> dict[str, JSON]:
    """Load into copies, and let the model have them when all are there."""
    weights = Ranks(group).together(lambda: wrapped_weights(model))
    states = Ranks(group).together(lambda: empty_states(model, manifest))
    named = {f"model/{name}": value for name, value in weights.items()}
    extra: dict[str, Any] = load(folder, named | states, group=group)
    take_over(model, optimizer, weights, states, extra["optimizer"])
    restore_hyper_parameters(model, optimizer, extra["optimizer"])
    return extra["training"]


def _checked(folder: Path, model: nn.Module, optimizer: Optimizer) -> Manifest:
    """Read the manifest, and compare what `load` does not know about."""
    manifest = read_manifest(folder)
    extra: Mapping[str, Any] = manifest.extra
    if not extra.keys() >= {"optimizer", "training"}:
        raise CheckpointError(
            f"{folder} was not written by save_training: load it with shoal.checkpoint.load"
        )
    check_groups(model, optimizer, extra["optimizer"])
    return manifest
