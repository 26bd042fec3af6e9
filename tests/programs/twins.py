"""A sharded model and its unsharded twin, in the middle of a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from programs.net import DIM, Cell, Net, Oddity, Way, loss_of
from shoal import MixedPrecisionPolicy, compile_step, fully_shard
from shoal.fsdp import FullyShardedDataParallel, full_parameters
from shoal.fsdp.wrap import ModuleWrapPolicy
from shoal.layout import Layout
from shoal.sharded_tensor import load_with_process_group
from shoal.tensor.sharded import ShardedTensor

ShardingApi = Literal["fully_shard", "wrapper"]
Precision = Literal["", "low", "kept"]


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and how it is sharded."""

    kinds: tuple[str, ...]
    layouts: tuple[Layout, ...]
    """Of the cells, and of the root."""
    reshards: tuple[bool | int, ...]
    """Which of them are freed after forward; a number: but for a piece of so many ranks."""
    optimizer: str = "AdamW"
    is_parallel: bool = False
    api: ShardingApi = "fully_shard"
    compiled: Literal["", "model", "cells"] = ""
    """What is compiled, gathers among it if it is the model."""
    is_hybrid: bool = False
    """Whether every two ranks have a replica."""
    is_tied: bool = False
    """Whether two cells share a weight."""
    oddities: tuple[Oddity, ...] = ()
    """What all cells but the last have."""
    precision: Precision = ""
    """Whether it computes in float32, and keeps the shards in it."""
    reduces_unused: bool = False
    has_sections: bool = False
    """Whether `Even` takes a weight for large, so that it is gathered and reduced by itself."""

    def build(self) -> Net:
        """The same weights on every call."""
        torch.manual_seed(0)
        return Net(self.kinds, self.oddities, is_tied=self.is_tied).double()

    @property
    def gives_zeros(self) -> bool:
        """Whether parameters without a gradient get zeros."""
        return self.is_parallel or self.reduces_unused

    @property
    def dtype(self) -> torch.dtype:
        """What forwards compute in."""
        return torch.float32 if self.precision else torch.float64

    @property
    def tolerances(self) -> tuple[float, float]:
        """How far a number may be from the twin's, in relation to it and besides."""
        return (1e-3, 1e-5) if self.precision else (1e-9, 1e-11)

    def shard(self) -> Any:
        """The model, sharded."""
        model: Any = self.build()
        if self.api == "wrapper":
            policy = ModuleWrapPolicy({Cell})
            return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)
        mesh = _hybrid_mesh(dist.group.WORLD) if self.is_hybrid else None
        policy = MixedPrecisionPolicy(self.dtype, torch.float64)
        with patch("shoal.layout.even.ALONE_NUMEL", 12 if self.has_sections else 1 << 20):
            units = zip([*model.cells, model], self.layouts, self.reshards, strict=True)
            for module, layout, reshard in units:
                fully_shard(
                    module,
                    mesh=mesh,
                    layout=layout,
                    reshard_after_forward=reshard,
                    mp_policy=policy if self.precision else MixedPrecisionPolicy(),
                )
        if self.compiled:
            for module in [model] if self.compiled == "model" else model.cells:
                module.compile(backend="shoal")
        if self.gives_zeros:
            model.set_reduce_scatter_unused_params(True)
        if self.precision == "kept":
            model.set_keep_low_precision_shards(True)
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer whose state would show a gradient that came or stayed away wrongly."""
        if self.optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        # A gradient that is rounding alone is no step.
        eps = 1e-3 if self.precision else 1e-8
        return torch.optim.AdamW(
            model.parameters(), lr=0.02, eps=eps, weight_decay=0.1, foreach=True
        )


class Twins:
    """Both models, their optimizers, and what the twin knows of the sharded one."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.model: Any = setup.shard()
        self.twin = setup.build()
        self.models: tuple[Any, Any] = (self.model, self.twin)
        self.make_optimizers()
        self.unreduced: dict[str, Tensor] = {}
        """The twin's gradients of backwards without a reduction, or that raised."""
        self.is_broken = False
        """Whether a backward raised, and none has come to its end since."""
        self.is_partly_reduced = False
        """Whether a backward that reduces raised, and none has reduced the rest since: which of
        the gradients are on the shards depends on how far reductions had come."""
        self.has_run = False
        self.factor = float(self.world_size)
        """What gradients are divided by, once they are added."""
        self._generator = torch.Generator().manual_seed(1)

    @property
    def is_wrapped(self) -> bool:
        """Whether the model was sharded by the wrapper."""
        return self.setup.api == "wrapper"

    def reading_shards(self) -> AbstractContextManager[Any]:
        """In it pickled shards belong to the ranks that they were shared out to."""
        if not self.setup.is_hybrid:
            return nullcontext()
        mesh = _hybrid_mesh(dist.group.WORLD)
        return load_with_process_group(mesh.get_group("shard"))

    @property
    def is_unclear(self) -> bool:
        """Whether shards show other gradients than the twin's until more backwards are done."""
        return self.is_broken or self.is_partly_reduced

    def reshard(self) -> None:
        """Free all full parameters."""
        for module in (*self.model.cells, self.model):
            module.reshard()

    def make_optimizers(self) -> None:
        """New ones, without state, over the parameters that the models have now."""
        self.optimizers = tuple(map(self.setup.make_optimizer, self.models))
        self._compiled: Any = None

    def batch(self) -> Tensor:
        """The next batch: a row of samples for each rank."""
        shape = self.world_size, 2, DIM
        return torch.randn(shape, generator=self._generator, dtype=self.setup.dtype)

    def losses(self, way: Way, batch: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's loss, and the twin's over all ranks' data."""
        if way.is_alone and not self.has_run:
            self.model(batch[self.rank])  # the first module to run is the root
        self.has_run = True
        mine = loss_of(way.run(self.model, batch[self.rank], self.rank))
        all_ = [loss_of(way.run(self.twin, x, rank)) for rank, x in enumerate(batch)]
        return mine, torch.stack(all_).mean()

    def reducing(self, reduces: bool) -> AbstractContextManager[Any]:
        """Forwards and backwards in it reduce gradients, or leave them for a later one."""
        if not self.is_wrapped:
            self.model.set_requires_gradient_sync(reduces)
            return nullcontext()
        return nullcontext() if reduces else self.model.no_sync()

    def backward(
        self, losses: tuple[Tensor, Tensor], *, reduces: bool = True, retains: bool = False
    ) -> None:
        """Backward of both."""
        mean = losses[0].detach().clone()
        dist.all_reduce(mean)
        self.compare(mean / self.world_size, losses[1].detach(), "loss")
        assert losses[0].requires_grad == losses[1].requires_grad, "whether the loss has a graph"
        if not losses[0].requires_grad:  # all that was used is frozen
            return
        losses[0].backward(retain_graph=retains)
        self.add_grads(losses[1], reduces=reduces, retains=retains)

    def add_grads(self, loss: Tensor, *, reduces: bool = True, retains: bool = False) -> None:
        """Backward of the twin."""
        named = {name: p for name, p in self.twin.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(
            loss, list(named.values()), allow_unused=True, retain_graph=retains
        )
        for name, grad in zip(named, grads, strict=True):
            if grad is not None:
                self.unreduced[name] = self.unreduced.get(name, 0) + _dense(grad)
            elif self.setup.gives_zeros:
                self.unreduced.setdefault(name, torch.zeros_like(named[name]))
        if reduces:
            for name, unreduced in self.unreduced.items():
                grad = unreduced * (self.world_size / self.factor)
                parameter = self.twin.get_parameter(name)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            self.unreduced, self.is_partly_reduced = {}, False
        self.is_broken = False  # a backward takes away the marks that one which raised has left

    @contextmanager
    def collecting_grads(self, *, reduces: bool) -> Iterator[None]:
        """Backwards of the twin that raise: what they accumulate waits for a reduction."""
        parameters = dict(self.twin.named_parameters())
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        yield
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self.unreduced[name] = self.unreduced.get(name, 0) + _dense(parameter.grad)
            elif self.setup.gives_zeros and parameter.requires_grad:
                self.unreduced.setdefault(name, torch.zeros_like(parameter))
            parameter.grad = before[name]
        self.is_broken = True
        self.is_partly_reduced |= reduces

    def forget_broken(self) -> None:
        """Parameters were replaced: new ones know nothing of a backward that raised."""
        if self.is_broken:
            self.forget_unreduced()

    def forget_unreduced(self) -> None:
        """No gradient waits any more, after a backward that raised or another."""
        self.unreduced, self.is_broken, self.is_partly_reduced = {}, False, False

    def drop_grads(self) -> None:
        """Zero all gradients, also those that wait for a reduction."""
        for model in self.models:
            model.zero_grad()
        self.forget_unreduced()

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of both, if there are any: the wrapper warns where there are none."""
        if all(parameter.grad is None for parameter in self.twin.parameters()):
            return
        if self.is_wrapped:
            with warnings.catch_warnings():  # other ranks may hold all that has gradients
                warnings.filterwarnings("ignore", "Called FSDP.clip_grad_norm_.* no gradients")
                self.model.clip_grad_norm_(max_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        nn.utils.clip_grad_norm_(self.twin.parameters(), max_norm)

    def full(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        """All parameters of the sharded model are full in it."""
        if self.is_wrapped:
            return FullyShardedDataParallel.summon_full_params(self.model, writeback=writeback)
        return full_parameters(self.model, writeback=writeback)

    def compiled_step(self, inputs: Tensor) -> None:
        """A step of the sharded model by its compiled function."""
        if self._compiled is None:
            self._compiled = compile_step(self.model, loss_of, self.optimizers[0])
        self._compiled(inputs, None)

    def check(self) -> None:
        """Parameters, gradients and optimizer state are the twin's."""
        with self._sharded() as named:
            for name, whole in self.twin.named_parameters():
                mine = named[name]
                assert mine.requires_grad == whole.requires_grad, name
                self._check_piece(name, mine, whole)
                # The wrapper shows full gradients that wait; after an exception marks do.
                if not (self.is_unclear or (self.is_wrapped and self.unreduced)):
                    self._check_grad(name, mine.grad, whole.grad)
                if not self.is_wrapped:
                    self._check_state(name, mine, whole)

    @contextmanager
    def _sharded(self) -> Iterator[dict[str, Any]]:
        """The parameters as they are between steps."""
        if self.is_wrapped:
            with FullyShardedDataParallel.summon_full_params(
                self.model, writeback=False, with_grads=not (self.unreduced or self.is_unclear)
            ):
                yield dict(self.model.named_parameters())
            return
        self.reshard()
        named = dict(self.model.named_parameters())
        assert all(isinstance(p, DTensor | ShardedTensor) for p in named.values()), "full"
        yield named

    def _check_state(self, name: str, mine: nn.Parameter, whole: nn.Parameter) -> None:
        states = [
            optimizer.state.get(parameter, {})
            for optimizer, parameter in zip(self.optimizers, (mine, whole), strict=True)
        ]
        assert states[0].keys() == states[1].keys(), f"optimizer state of {name}"
        for key, value in states[0].items():
            self._check_piece(f"{key} of {name}", value, states[1][key])

    def _check_grad(self, name: str, mine: Tensor | None, whole: Tensor | None) -> None:
        assert (mine is None) == (whole is None), f"gradient of {name}: {mine} instead of {whole}"
        if mine is not None and whole is not None:
            self._check_piece(f"gradient of {name}", mine, whole)

    def _check_piece(self, name: str, mine: Any, whole: Tensor) -> None:
        if isinstance(mine, ShardedTensor):
            parts = [(part, whole[region.slices]) for region, part in mine.parts()]
        elif isinstance(mine, DTensor) and mine.ndim == 0:
            parts = [(mine.to_local(), whole)]
        elif isinstance(mine, DTensor):
            num, own = mine.device_mesh.size(-1), mine.device_mesh.get_local_rank(-1)
            pieces = whole.chunk(num)
            wanted = pieces[own] if own < len(pieces) else whole[:0]
            parts = [(mine.to_local(), wanted)]
        else:
            parts = [(mine, whole)]
        for part, wanted in parts:
            self.compare(part, wanted, name)

    def compare(self, mine: Tensor, whole: Tensor, name: str = "output") -> None:
        """Raise if two numbers differ by more than rounding."""
        rtol, atol = self.setup.tolerances
        torch.testing.assert_close(
            mine.detach(), whole.detach(), rtol=rtol, atol=atol, msg=_saying(name)
        )


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


@cache
def _hybrid_mesh(world: Any) -> DeviceMesh:
    """Two ranks have a replica; one mesh for all programs, as each makes groups."""
    return init_device_mesh("cpu", (world.size() // 2, 2), mesh_dim_names=("replicate", "shard"))


def _saying(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"
