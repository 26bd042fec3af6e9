"""The columns of `docs/compose.md`: ways to shard and run a model, on live ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shoal
from compositions.feature import NUM_STEPS, Feature
from compositions.net import Net
from oracle import full
from shoal.checkpoint import load_training, save_training
from shoal.experts import clip_grad_norm_, shard_experts
from shoal.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, full_parameters, fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.fully_shard import replicate as replicate_units


@dataclass
class Way:
    """A model that is trained in some way. This one is the truth: one process, all rows."""

    is_sharded: ClassVar[bool] = False

    column: str = "plain"
    num_data: int = 1
    """How many ranks have rows of their own."""
    has_experts: bool = False
    steps: Sequence[int] = range(NUM_STEPS)
    resumes_at: int = 0
    """The first step of twice as many ranks."""
    folder: Path = Path()

    is_distributed = False
    """Whether layers and experts were cut over their own axes, where that is asked for."""

    def train(self, feature: Feature) -> dict[str, Tensor]:
        """Whole parameters by name after all steps."""
        self.build(feature)
        assert self.is_distributed == self.is_sharded
        self.optimizer = feature.optimizer(self, self.parameters())
        self.begin()
        for number in self.steps:
            feature.step(self, number)
        self.end()
        return self.whole()

    def build(self, feature: Feature) -> None:
        """Make the model and shard it."""
        self.feature = feature
        net = feature.net(has_experts=self.has_experts)
        if self.is_sharded:
            feature.change_sharded(net)
            net = net.to("meta") if feature.starts_on_meta else net
        self.net: Any = self.shard(net)
        self.model: Any = self.net
        feature.set_up(self)

    def shard(self, net: Net) -> Any:
        """Shard a net, and return what runs it."""
        return net

    def begin(self) -> None:
        """Before the first step."""

    def end(self) -> None:
        """After the last one."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer gets."""
        return self.net.parameters()

    def whole(self) -> dict[str, Tensor]:
        """Copies of whole parameters, by the names of the plain model. Collective."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.net.named_parameters():
            found[name] = full(parameter.detach()).clone()
        return found

    def data_ranks(self) -> Sequence[int]:
        """Whose rows are computed here."""
        return range(self.num_data)

    def num_data_in(self, number: int) -> int:
        """How many ranks have rows of their own in a step; fewer before a model was resumed."""
        return self.num_data // 2 if number < self.resumes_at else self.num_data

    def rows(self, number: int) -> list[list[Tensor]]:
        """The micro-batches of each of these data ranks."""
        parts = self.feature.batch(number).chunk(self.num_data)
        return [
            list(parts[rank].chunk(self.feature.num_micro_batches)) for rank in self.data_ranks()
        ]

    def backward(self, number: int) -> Tensor:
        """Forwards and backwards of a step; returns the loss of the rows that are here."""
        total = torch.zeros(())
        for micro_batches in self.rows(number):
            for index, x in enumerate(micro_batches):
                with self.syncing(index == len(micro_batches) - 1):
                    with self.feature.around(self):
                        loss = self.feature.loss(self, self.model, x)
                    loss = loss / (len(micro_batches) * len(self.data_ranks()))
                    self.scaled(loss).backward()
                    total += loss.detach()
        return total

    scaler: Any = None

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, by the scaler if the feature has one."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @contextmanager
    def syncing(self, syncs: bool) -> Iterator[None]:
        """Forwards and backwards in it reduce gradients, or leave that to later ones."""
        if self.is_sharded and self.feature.num_micro_batches > 1:
            self.net.set_requires_gradient_sync(syncs)
        yield

    def clip(self, max_norm: float) -> Tensor:
        """Clip gradients by the norm of all of them."""
        return full(nn.utils.clip_grad_norm_(self.net.parameters(), max_norm))

    def full(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        """All parameters are whole in it, under their own names."""
        return nullcontext()

    def fill(self, values: dict[str, Tensor]) -> None:
        """Give a model from the meta device memory, and these values."""
        raise NotImplementedError


class FullyShard(Way):
    """Blocks and root by `fully_shard`."""

    is_sharded = True
    outer: ClassVar[tuple[str, ...]] = ()
    """An axis of two that comes before the one that shards."""
    inner: ClassVar[tuple[str, ...]] = ()
    """An axis of two that comes after it."""

    def __init__(self, column: str = "fully_shard", **options: Any) -> None:
        super().__init__(column)
        self.given = options

    def build(self, feature: Feature) -> None:
        if feature.cuts_layers:
            self.inner = ("tensor",)
        self.has_experts |= feature.has_experts
        others = (*self.outer, *self.inner)
        self.mesh = self.mesh_with({"shard": dist.get_world_size() // 2 ** len(others)})
        self.axes = tuple(name for name in (*self.outer, "shard") if name != "pipe")
        self.given["mesh"] = self.mesh[self.axes if len(self.axes) > 1 else self.axes[0]]
        self.num_data = self.given["mesh"].size()
        if self.has_experts:  # all ranks make its groups, also those of a stage without experts
            names = {"dp": self.mesh["shard"].size() // 2, "ep": 2}
            axes = (*(one for one in self.axes if one != "shard"), *names)
            self.expert_mesh = self.mesh_with(names)[axes]
        super().build(feature)

    def mesh_with(self, shards: dict[str, int]) -> DeviceMesh:
        """All ranks, with some axes in the middle for those that share a unit."""
        shape = (*(2 for _ in self.outer), *shards.values(), *(2 for _ in self.inner))
        return mesh(shape, (*self.outer, *shards, *self.inner))

    def data_ranks(self) -> Sequence[int]:
        place = 0
        for name in self.axes:
            place = place * self.mesh[name].size() + self.mesh[name].get_local_rank()
        return (place,)

    @property
    def has_parallel_layers(self) -> bool:
        """Whether some full parameters are DTensors, on axes that are not data-parallel."""
        return self.has_experts or "tensor" in self.inner

    def door_options(self) -> dict[str, Any]:
        """Of the column, then of the feature."""
        return {**self.given, **self.feature.options(self)}

    def shard(self, net: Net) -> Any:
        options = self.door_options()
        self.distribute(net, options)
        for block in net.blocks.values():
            self.shard_one(block, **options)
        return self.shard_one(net, **options)

    def distribute(self, net: Net, options: dict[str, Any]) -> None:
        """Cut layers over the axis for that, deal experts to ranks."""
        self.is_distributed = True
        for name, block in net.blocks.items():
            if name == "mixture":
                kept = {k: v for k, v in options.items() if k in _FOR_EXPERTS}
                shard_experts(block.experts, self.expert_mesh, **kept)
            elif "tensor" in self.inner:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, self.mesh["tensor"], plan)

    def shard_one(self, module: nn.Module, **options: Any) -> Any:
        """Make one unit."""
        return fully_shard(module, **options)

    def clip(self, max_norm: float) -> Tensor:
        if self.has_parallel_layers:
            return clip_grad_norm_(self.net.parameters(), max_norm)
        return super().clip(max_norm)

    def full(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        return full_parameters(self.net, writeback=writeback)

    def fill(self, values: dict[str, Tensor]) -> None:
        self.net.to_empty(device="cpu")
        own = dict(self.net.named_parameters()).keys()
        mine = {name: value for name, value in values.items() if name in own}
        set_model_state_dict(self.net, mine, options=StateDictOptions(full_state_dict=True))


_FOR_EXPERTS = ("mp_policy", "offload_policy", "reshard_after_forward")


class Offload(FullyShard):
    """Shards on the host, also where compute is there."""

    def __init__(self, column: str) -> None:
        super().__init__(column, offload_policy=CPUOffloadPolicy(pin_memory=False))


class Hybrid(FullyShard):
    """Two replicas of shards."""

    outer = ("replicate",)


class Compiled(FullyShard):
    """The whole model as a graph that has gathers in it."""

    def build(self, feature: Feature) -> None:
        super().build(feature)
        self.model = torch.compile(self.net, backend="shoal")


class Replicated(FullyShard):
    """Whole parameters on each rank, gradients in buckets."""

    def shard(self, net: Net) -> Any:
        if self.feature.needs_units:
            return super().shard(net)
        options = self.door_options()
        self.distribute(net, options)
        return shoal.replicate(net, options.pop("mesh"), **options)

    def shard_one(self, module: nn.Module, **options: Any) -> Any:
        return replicate_units(module, **options)

    def full(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        return nullcontext()


class Wrapper(FullyShard):
    """`FullyShardedDataParallel` around blocks and root."""

    def shard(self, net: Net) -> Any:
        options = {"use_orig_params": True, **self.door_options()}
        self.distribute(net, options)
        options["device_mesh"] = options.pop("mesh")
        for name, block in net.blocks.items():
            net.blocks[name] = FullyShardedDataParallel(block, **options)
        return FullyShardedDataParallel(net, **options)

    @contextmanager
    def syncing(self, syncs: bool) -> Iterator[None]:
        with nullcontext() if syncs else self.net.no_sync():
            yield

    def whole(self) -> dict[str, Tensor]:
        state = self.net.state_dict()
        plain = self.feature.net(has_experts=self.has_experts)
        return {name: full(state[name]).clone() for name, _ in plain.named_parameters()}

    def clip(self, max_norm: float) -> Tensor:
        return self.net.clip_grad_norm_(max_norm)

    def full(self, *, writeback: bool = False) -> AbstractContextManager[Any]:
        return FullyShardedDataParallel.summon_full_params(self.net, writeback=writeback)

    def fill(self, values: dict[str, Tensor]) -> None:
        self.net.load_state_dict(values)


class TensorParallel(FullyShard):
    """Layers of blocks cut over one axis, everything sharded over the other."""

    inner = ("tensor",)


class ExpertParallel(FullyShard):
    """Experts dealt to the ranks of one axis and sharded over the other."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.has_experts = True


class Pipeline(FullyShard):
    """Two stages, each sharded over two ranks."""

    outer = ("pipe",)

    def shard(self, net: Net) -> Any:
        return super().shard(net.stage(self.mesh["pipe"].get_local_rank()))

    def begin(self) -> None:
        place, group = self.mesh["pipe"].get_local_rank(), self.mesh["pipe"].get_group()
        stage = PipelineStage(self.net, place, 2, torch.device("cpu"), group=group)
        self.schedule = ScheduleGPipe(
            stage,
            self.feature.num_micro_batches,
            loss_fn=lambda output, _: self.scaled(self.feature.loss_of(self, output)),
        )

    def backward(self, number: int) -> Tensor:
        self.run_schedule(torch.cat(self.rows(number)[0]))
        return torch.full((), torch.nan)  # the last stage alone knows it

    def run_schedule(self, x: Tensor) -> None:
        """Forwards and backwards of all micro-batches of a batch."""
        with self.feature.around(self):
            if self.mesh["pipe"].get_local_rank() == 0:
                self.schedule.step(x)
            else:
                self.schedule.step(target=x)

    def clip(self, max_norm: float) -> Tensor:
        parameters = list(self.net.parameters())
        norm = full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        squares = norm.square()
        dist.all_reduce(squares, group=self.mesh["pipe"].get_group())
        nn.utils.clip_grads_with_norm_(parameters, max_norm, squares.sqrt())
        return squares.sqrt()


class Saved(FullyShard):
    """Trains some steps on two ranks, and saves."""

    def __init__(self, column: str, folder: Path) -> None:
        super().__init__(column)
        self.folder, self.steps = folder, range(2)

    def end(self) -> None:
        save_training(self.folder, self.net, self.optimizer, {})


class Resumed(FullyShard):
    """Goes on from there on four ranks, with another layout."""

    def __init__(self, column: str, folder: Path) -> None:
        super().__init__(column, layout=Flat())
        self.folder, self.steps, self.resumes_at = folder, range(2, NUM_STEPS), 2

    def begin(self) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.zero_()
        load_training(self.folder, self.net, self.optimizer)


_LAYOUTS: dict[str, Layout] = {
    "Even": Even(),
    "Flat": Flat(),
    "Rows": Rows(),
    "Block": Block(5),
    "Whole": Whole(),
}
_WAYS: dict[str, type[FullyShard]] = {
    "fully_shard": FullyShard,
    "wrapper": Wrapper,
    "replicate": Replicated,
    "compiled": Compiled,
    "HSDP": Hybrid,
    "TP": TensorParallel,
    "EP": ExpertParallel,
    "PP": Pipeline,
    "offload": Offload,
}


_meshes: dict[Any, DeviceMesh] = {}


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh for all features of a column: each makes process groups."""
    if any(group is not dist.group.WORLD for group, *_ in _meshes):
        _meshes.clear()
    key = (dist.group.WORLD, shape, names)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]


def ways_of(column: str, folder: Path) -> list[FullyShard]:
    """What a column needs to be tried: one training, or two on different numbers of ranks."""
    if column in _LAYOUTS:
        return [FullyShard(column, layout=_LAYOUTS[column])]
    if column == "checkpoint":
        return [Saved(column, folder / "saved"), Resumed(column, folder / "saved")]
    return [_WAYS[column](column)]
