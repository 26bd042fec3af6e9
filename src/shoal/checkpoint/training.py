"""A model with its optimizer, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.checkpoint.apart import ROWS, StateApart, refuse_rows
from shoal.checkpoint.disk import Folder, checkpoint_at
from shoal.checkpoint.load import fill, load
from shoal.checkpoint.load_plan import Selection, check_match
from shoal.checkpoint.manifest import JSON, Manifest, read_manifest
from shoal.checkpoint.optimizer import (
    check_hyper_parameters,
    check_saved_groups,
    check_states,
    optimizer_tensors,
    prepare_optimizer,
    restore_hyper_parameters,
)
from shoal.checkpoint.random_generators import PREFIX as GENERATORS
from shoal.checkpoint.random_generators import (
    generator_shares,
    read_generators,
    restore_generators,
)
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.save import save
from shoal.checkpoint.shares import Share, share_of
from shoal.checkpoint.storage import Checkpoint
from shoal.checkpoint.wrapped import (
    empty_states,
    take_over,
    take_weights,
    wrapped_state,
    wrapped_weights,
)
from shoal.distant import distant_replicas_of
from shoal.errors import CheckpointError
from shoal.sharding_wrapper import wrappers_below

MODEL = "model/"
"""The names of a model's tensors begin with this."""

_MARK = "_shoal_unusable"


def save_training(
    folder: Folder | Checkpoint,
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
    """Give `save` or `async_save` the tensors and values that `save_training` saves."""
    model = bare(model)
    ranks = Ranks(group)
    apart = _apart(model, ranks)
    tensors, hyper = ranks.together(lambda: _state(model, optimizer, apart))
    generators = generator_shares(ranks.rank, ranks.size)
    values: dict[str, JSON] = {"optimizer": hyper, "training": extra}
    if apart is not None:
        values["distant"] = apart.outer.settings()
    return tensors | generators, values


def load_training(
    folder: Folder | Checkpoint | None,
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
    checkpoint = checkpoint_at(folder)
    model = bare(model)
    ranks = Ranks(group)
    manifest = ranks.together(lambda: _training_manifest(checkpoint))
    weights = ranks.together(lambda: weights_of(model))
    apart = _apart(model, ranks)
    outer = None if apart is None else apart.outer
    if "distant" not in manifest.extra:
        apart = None
    ranks.together(lambda: _check_apart(checkpoint, manifest, apart))
    ranks.together(lambda: _check_fits(checkpoint, manifest, model, optimizer, weights))
    generators = ranks.together(
        lambda: read_generators(checkpoint, manifest, ranks.rank, ranks.size)
    )
    saved = _SavedTraining(
        checkpoint=checkpoint,
        manifest=manifest,
        ranks=ranks,
        verify_first=verify_first,
        apart=apart,
    )
    load_into = _load_wrapped if wrappers_below(model) else _load_bare
    load_into(saved, model, optimizer, weights)
    restore_hyper_parameters(model, optimizer, saved.hyper)
    restore_generators(generators)
    if outer is not None:
        outer.restart() if apart is None else outer.take_up(saved.extra["distant"])
    _clear_mark(model)
    return dict(saved.extra["training"])


def load_model(
    folder: Folder | Checkpoint | None,
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    cast: bool = False,
    verify_first: bool = False,
) -> None:
    """Load weights alone, or those whose names in the model the patterns choose. See `load`."""
    checkpoint = checkpoint_at(folder)
    model = bare(model)
    is_wrapped = bool(wrappers_below(model))
    weights = Ranks(group).together(lambda: weights_of(model))
    load(
        checkpoint,
        _named(weights),
        group=group,
        include=[MODEL + pattern for pattern in include],
        exclude=[MODEL + pattern for pattern in exclude],
        cast=cast,
        verify_first=verify_first,
        before_write=None if is_wrapped else lambda: _mark_unusable(model, checkpoint),
    )
    if is_wrapped:
        _mark_unusable(model, checkpoint)
        take_weights(model, weights)
    outer = distant_replicas_of(model)
    if outer is not None:
        outer.restart()
    _clear_mark(model)


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


def _apart(model: nn.Module, ranks: Ranks) -> StateApart | None:
    """What is saved of replicas that are apart, if the model's are. Collective."""
    outer = distant_replicas_of(model)
    if outer is None:
        return None
    if wrappers_below(model):
        raise NotImplementedError(
            "shoal: checkpoints of DistantReplicas of a model in FullyShardedDataParallel are not "
            "supported, since its parameters do not say which elements they hold; shard the model "
            "with fully_shard"
        )
    outer.settle()
    return StateApart.of(outer, ranks)


def _state(
    model: nn.Module, optimizer: Optimizer, apart: StateApart | None
) -> tuple[dict[str, torch.Tensor | Share], dict[str, JSON]]:
    _check_usable(model)
    weights = weights_of(model)
    states = wrapped_state if wrappers_below(model) else optimizer_tensors
    moments, hyper = states(model, optimizer)
    if apart is not None:
        return apart.tensors(model, weights, moments, MODEL), hyper
    return {**_named(weights), **moments}, hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedTraining:
    """A checkpoint that `save_training` wrote, and how it is to be read."""

    checkpoint: Checkpoint
    manifest: Manifest
    ranks: Ranks
    verify_first: bool
    apart: StateApart | None
    """Where replicas are apart: what of the checkpoint is this replica's."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """The values that were saved beside the tensors."""
        return self.manifest.extra

    @property
    def hyper(self) -> Mapping[str, Any]:
        """The optimizer's groups and plain numbers."""
        return self.extra["optimizer"]

    @property
    def states(self) -> set[str]:
        """The names of all the optimizer's state, tensors or not."""
        names = (name.removeprefix(ROWS) for name in self.manifest.tensors)
        return {*names, *self.hyper["values"]}

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make the state that was saved; raises unless the optimizer can take it over."""
        prepare_optimizer(model, optimizer, self.states)
        check_hyper_parameters(model, optimizer, self.hyper)

    def fill(
        self,
        tensors: Mapping[str, torch.Tensor | Share],
        before_write: Callable[[], None] | None = None,
    ) -> None:
        """Fill the tensors of model and optimizer; those of generators were read before."""
        has_generators = any(name.startswith(GENERATORS) for name in self.manifest.tensors)
        choice = Selection(exclude=[f"{GENERATORS}*"] if has_generators else [])
        fill(
            *(self.ranks, self.checkpoint, self.manifest, tensors, choice),
            cast=False,
            verify_first=self.verify_first,
            before_write=before_write,
        )


def _load_bare(
    saved: _SavedTraining,
    model: nn.Module,
    optimizer: Optimizer,
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Load into the tensors themselves, which make an unusable mixture until all are there."""

    def state() -> Mapping[str, torch.Tensor | Share]:
        saved.prepare(model, optimizer)
        moments = optimizer_tensors(model, optimizer)[0]
        if saved.apart is not None:
            return saved.apart.tensors(model, weights, moments, MODEL)
        return _named(weights) | moments

    # A checkpoint that is refused leaves the optimizer as it was, like everything else.
    with _restored_state(optimizer) as keep:
        tensors = saved.ranks.together(state)
        saved.fill(tensors, lambda: _mark_unusable(model, saved.checkpoint))
        keep()


def _load_wrapped(
    saved: _SavedTraining,
    model: nn.Module,
    optimizer: Optimizer,
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Load into copies, and let the model have them when all are there."""
    ranks = saved.ranks
    ranks.together(lambda: _try_state(saved, model, optimizer))
    states = ranks.together(lambda: empty_states(model, saved.manifest))
    saved.fill({**_named(weights), **states})
    _mark_unusable(model, saved.checkpoint)
    take_over(model, optimizer, weights, states, saved.hyper)


def _try_state(saved: _SavedTraining, model: nn.Module, optimizer: Optimizer) -> None:
    """See that all state is there that the optimizer makes, and leave it as it was."""
    with _restored_state(optimizer):
        saved.prepare(model, optimizer)
        check_states(model, optimizer, saved.states)


@contextmanager
def _restored_state(optimizer: Optimizer) -> Iterator[Callable[[], object]]:
    """Give the optimizer its state back when the block ends, unless it calls what it is given."""
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    with ExitStack() as stack:
        stack.callback(optimizer.state.update, before)
        stack.callback(optimizer.state.clear)
        yield stack.pop_all


def _named(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{MODEL}{name}": value for name, value in weights.items()}


def _training_manifest(checkpoint: Checkpoint) -> Manifest:
    manifest = read_manifest(checkpoint)
    if not isinstance(manifest.extra.get("training"), dict) or "optimizer" not in manifest.extra:
        raise CheckpointError(
            f"{checkpoint} was not written by save_training: load it with shoal.checkpoint.load"
        )
    return manifest


def _check_apart(checkpoint: Checkpoint, manifest: Manifest, apart: StateApart | None) -> None:
    """Raise unless replicas were apart where they are, and can go on."""
    if apart is None:
        refuse_rows(manifest.extra, checkpoint)
    else:
        apart.check(manifest.extra["distant"], checkpoint)


def _check_fits(
    checkpoint: Checkpoint,
    manifest: Manifest,
    model: nn.Module,
    optimizer: Optimizer,
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Raise unless this is a checkpoint of such a model, first of all, and of such an optimizer."""
    shares = {name: share_of(name, v, is_first=True) for name, v in _named(weights).items()}
    stored = [name for name in manifest.tensors if name.startswith(MODEL)]
    check_match(checkpoint, manifest, stored, shares, cast=False, is_partial=False)
    check_saved_groups(model, optimizer, manifest.extra["optimizer"])


def _mark_unusable(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Let every use of the model raise until a load succeeds."""
    _clear_mark(model)
    reason = (
        f"loading {checkpoint} failed when some tensors were written, so the model is a mixture of "
        "two states: load a good checkpoint into it, or build it anew. With verify_first=True a "
        "load that fails writes nothing"
    )

    def refuse(*_: object) -> NoReturn:
        raise CheckpointError(reason)

    handle = model.register_forward_pre_hook(refuse, prepend=True)
    # Beside the module's own attributes: no state dict and no repr shows it.
    model.__dict__[_MARK] = (handle, reason)


def _clear_mark(model: nn.Module) -> None:
    """Let the model be used again."""
    mark: tuple[RemovableHandle, str] | None = model.__dict__.pop(_MARK, None)
    if mark is not None:
        mark[0].remove()


def _check_usable(model: nn.Module) -> None:
    """Raise CheckpointError if the model holds a mixture of two states."""
    mark: tuple[RemovableHandle, str] | None = model.__dict__.get(_MARK)
    if mark is not None:
        raise CheckpointError(mark[1])
