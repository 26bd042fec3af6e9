"""A model with its optimizer, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.checkpoint.agreement import Ranks
from shoal.checkpoint.generators import PREFIX as GENERATORS
from shoal.checkpoint.generators import generator_shares, restore_generators
from shoal.checkpoint.load import load
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.metadata import JSON, Manifest
from shoal.checkpoint.optimizer import (
    check_groups,
    optimizer_tensors,
    prepare_optimizer,
    restore_hyper_parameters,
)
from shoal.checkpoint.placement import Share
from shoal.checkpoint.save import save
from shoal.checkpoint.unusable import check_usable, clear_mark, mark_unusable
from shoal.checkpoint.wrapped import (
    empty_states,
    take_over,
    take_weights,
    wrapped_state,
    wrapped_weights,
)
from shoal.errors import CheckpointError
from shoal.wrapper.base import wrappers_below

MODEL = "model/"
"""What the names of a model's tensors begin with."""


def save_training(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model, its optimizer, the random generators of all ranks and a few values.

    See `save`.
    """
    tensors, values = training_state(model, optimizer, extra, group=group)
    save(folder, tensors, values, group=group)


def training_state(
    model: nn.Module,
    optimizer: Optimizer,
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, torch.Tensor | Share], dict[str, JSON]]:
    """What `save_training` saves, for `save` or `async_save`: tensors, and values beside them."""
    model = bare(model)
    ranks = Ranks(group)
    tensors, hyper = ranks.together(lambda: _state(model, optimizer))
    generators = generator_shares(ranks.rank, ranks.size)
    return tensors | generators, {"optimizer": hyper, "training": extra}


def load_training(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    verify_first: bool = False,
) -> dict[str, JSON]:
    """Load what `save_training` saved, on any number of ranks; return `extra`. See `load`.

    Random generators are restored on the number of ranks that saved them. An error before the
    first write leaves everything as it was; after it, the model raises when it is used.
    """
    folder = Path(folder)
    model = bare(model)
    ranks = Ranks(group)
    manifest = ranks.together(lambda: _checked(folder, model, optimizer))
    generators = _generators(ranks, manifest)
    source = _Source(
        folder=folder,
        manifest=manifest,
        generators=generators,
        group=group,
        verify_first=verify_first,
    )
    load_into = _load_wrapped if wrappers_below(model) else _load_bare
    extra = load_into(source, model, optimizer)
    restore_hyper_parameters(model, optimizer, extra["optimizer"])
    restore_generators(generators)
    return extra["training"]


def load_model(
    folder: Path,
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    cast: bool = False,
    verify_first: bool = False,
) -> None:
    """Load weights alone, or those whose names in the model the patterns choose. See `load`."""
    model = bare(model)
    is_wrapped = bool(wrappers_below(model))
    weights = Ranks(group).together(lambda: weights_of(model))
    load(
        folder,
        {f"{MODEL}{name}": value for name, value in weights.items()},
        group=group,
        include=[MODEL + pattern for pattern in include],
        exclude=[MODEL + pattern for pattern in exclude],
        cast=cast,
        verify_first=verify_first,
        before_write=None if is_wrapped else lambda: mark_unusable(model, _mixture(folder)),
    )
    if is_wrapped:
        take_weights(model, weights)
    clear_mark(model)


def bare(model: nn.Module) -> nn.Module:
    """The model inside of DDP and of `torch.compile`, whose names are those of a plain one."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by clean names: copies, of models in `FullyShardedDataParallel`."""
    weights = wrapped_weights(model) if wrappers_below(model) else model.state_dict()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            raise NotImplementedError(
                f"{name!r} in the model's state_dict is a {type(value).__name__}: checkpoints of "
                "extra state that is not a tensor are not supported"
            )
    return weights


def _state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    check_usable(model)
    return _tensors(model, optimizer)


def _tensors(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    tensors = {f"{MODEL}{name}": value for name, value in weights_of(model).items()}
    states = wrapped_state if wrappers_below(model) else optimizer_tensors
    moments, hyper = states(model, optimizer)
    return tensors | moments, hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A checkpoint, and how it is to be read."""

    folder: Path
    manifest: Manifest
    generators: Mapping[str, Share]
    """What the saved states of generators are loaded into."""
    group: dist.ProcessGroup | None
    verify_first: bool

    def load(
        self,
        tensors: Mapping[str, torch.Tensor],
        before_write: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Fill tensors, and generators' states with them; return what was saved beside."""
        stored = self.manifest.tensors
        unused = [n for n in stored if n.startswith(GENERATORS) and n not in self.generators]
        return load(
            self.folder,
            {**tensors, **self.generators},
            group=self.group,
            exclude=unused,
            verify_first=self.verify_first,
            before_write=before_write,
        )


def _load_bare(source: _Source, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Load into the tensors themselves, which make an unusable mixture until all are there."""
    ranks = Ranks(source.group)
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    try:
        ranks.together(lambda: prepare_optimizer(model, optimizer, source.manifest.tensors))
        tensors, _ = ranks.together(lambda: _tensors(model, optimizer))
        extra = source.load(tensors, lambda: mark_unusable(model, _mixture(source.folder)))
    except BaseException:
        # A checkpoint that is refused leaves the optimizer as it was, like everything else.
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
    clear_mark(model)
    return extra


def _load_wrapped(source: _Source, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Load into copies, and let the model have them when all are there."""
    ranks = Ranks(source.group)
    weights = ranks.together(lambda: wrapped_weights(model))
    states = ranks.together(lambda: empty_states(model, source.manifest))
    named = {f"{MODEL}{name}": value for name, value in weights.items()}
    extra = source.load({**named, **states})
    take_over(model, optimizer, weights, states, extra["optimizer"])
    return extra


def _generators(ranks: Ranks, manifest: Manifest) -> dict[str, Share]:
    """What the saved states of generators are loaded into; nothing on another number of ranks."""
    own = generator_shares(ranks.rank, ranks.size)
    stored = manifest.tensors
    return {
        name: share
        for name, share in own.items()
        if name in stored and stored[name].shape == share.shape
    }


def _mixture(folder: Path) -> str:
    return (
        f"loading {folder} failed when some tensors were written, so the model is a mixture of "
        "two states: load a good checkpoint into it, or build it anew. With verify_first=True a "
        "load that fails writes nothing"
    )


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
