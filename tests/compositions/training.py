"""Rows of the table: what a step does besides a forward and a backward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as ddp_hooks
from torch.distributed.fsdp import MixedPrecision
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import shoal
from collectives import OwnGather, OwnReduce, reduce_scatter
from compositions.feature import Feature
from compositions.net import DIM, Block, Net
from compositions.ways import Way
from shoal.fsdp import MixedPrecisionPolicy
from shoal.fsdp.sharded_grad_scaler import ShardedGradScaler

HALF = torch.bfloat16


class Mixed(Feature):
    """Computes in bfloat16, sums gradients in float32."""

    tolerance = {"rtol": 1e-2, "atol": 1e-3}

    class block(Block):
        def before(self, x: Tensor) -> Tensor:
            assert self.up.weight.dtype is x.dtype is HALF
            return x

    def options(self, way: Way) -> dict[str, Any]:
        if way.column == "wrapper":
            return {"mixed_precision": MixedPrecision(param_dtype=HALF, reduce_dtype=torch.float32)}
        policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
        return {"mp_policy": policy}

    needs_units = True

    def loss(self, way: Way, model: Any, x: Tensor) -> Tensor:
        if way.is_sharded:
            return super().loss(way, model, x)
        halves = {name: p.to(HALF) for name, p in model.named_parameters()}
        return self.loss_of(way, functional_call(model, halves, x.to(HALF)))


class Accumulated(Feature):
    """Gradients of several backwards; the last one reduces them."""

    num_micro_batches = 2


class Recomputed(Feature):
    """Blocks are computed again in backward."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.compute, x, use_reentrant=False)


class Autocast(Feature):
    """Computes in the dtypes that autocast chooses."""

    tolerance = {"rtol": 1e-2, "atol": 1e-3}

    class block(Block):
        def before(self, x: Tensor) -> Tensor:
            assert torch.mm(x, x.t()).dtype is HALF
            return x

    def around(self, way: Way) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", HALF)


class Frozen(Feature):
    """A frozen weight in one block, and a block with nothing else."""

    def change(self, net: Net) -> None:
        net.blocks["0"].up.weight.requires_grad_(False)
        net.blocks["1"].requires_grad_(False)

    def moves(self, name: str) -> bool:
        return not name.startswith(("blocks.0.up.weight", "blocks.1."))

    def optimizer(self, way: Way, parameters: Iterable[nn.Parameter]) -> Any:
        return super().optimizer(way, [p for p in parameters if p.requires_grad])


class Unused(Feature):
    """A layer that no step uses, and one that only the second step uses."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(DIM, DIM)
            self.sometimes = nn.Linear(DIM, DIM)
            self.is_time = False

        def before(self, x: Tensor) -> Tensor:
            return self.sometimes(x) if self.is_time else x

    def options(self, way: Way) -> dict[str, Any]:
        return {"find_unused_parameters": True} if way.column == "replicate" else {}

    def step(self, way: Way, number: int) -> None:
        for module in way.net.modules():
            if hasattr(module, "is_time"):
                module.is_time = number == 1
        super().step(way, number)

    def moves(self, name: str) -> bool:
        return ".spare." not in name


class Meta(Feature):
    """Made without memory, sharded, and filled."""

    starts_on_meta = True
    needs_units = True

    def options(self, way: Way) -> dict[str, Any]:
        if way.column != "wrapper":
            return {}
        return {"param_init_fn": lambda module: module.to_empty(device="cpu", recurse=False)}

    def set_up(self, way: Way) -> None:
        if way.is_sharded:
            assert way.column == "wrapper" or all(p.is_meta for p in way.net.parameters())
            way.fill(self.net(has_experts=way.has_experts).state_dict())


class WholeForAWhile(Feature):
    """Parameters are read, and changed, while they are whole."""

    def step(self, way: Way, number: int) -> None:
        super().step(way, number)
        with way.full(writeback=True), torch.no_grad():
            for parameter in way.net.parameters():
                assert (
                    not way.is_sharded
                    or way.has_parallel_layers
                    or type(parameter.data) is torch.Tensor
                )
                parameter.sub_(parameter.mean() / 4)


class Clipped(Feature):
    """Gradients are scaled down by the norm of all of them."""

    def optimizer(self, way: Way, parameters: Iterable[nn.Parameter]) -> Any:
        return torch.optim.SGD(parameters, lr=1.0)

    def step(self, way: Way, number: int) -> None:
        way.backward(number)
        assert way.clip(0.3) > 0.3
        way.optimizer.step()
        way.optimizer.zero_grad()


class Scaled(Feature):
    """Losses are scaled, and the second step overflows in the rows of the first rank."""

    def set_up(self, way: Way) -> None:
        make = ShardedGradScaler if way.column == "wrapper" else torch.amp.GradScaler
        way.scaler = make("cpu", init_scale=8.0, growth_interval=1)
        way.scaler.scale(torch.zeros(()))  # a pipeline's first stage scales no loss

    def loss_of(self, way: Way, output: Tensor) -> Tensor:
        loss = super().loss_of(way, output)
        return loss * torch.inf if self.overflows and 0 in way.data_ranks() else loss

    overflows = False

    def step(self, way: Way, number: int) -> None:
        self.overflows = number == 1
        way.backward(number)
        way.scaler.step(way.optimizer)
        way.scaler.update()
        way.optimizer.zero_grad()


class Hooked(Feature):
    """Collectives of the user's own."""

    def set_up(self, way: Way) -> None:
        self.calls: list[str] = []
        if way.column == "replicate":
            way.net.register_comm_hook(None, self._average)
        elif way.column == "wrapper":
            way.net.register_comm_hook(None, self._reduce)
        elif way.is_sharded:
            for module in way.net.modules():
                if hasattr(module, "set_custom_reduce_scatter"):
                    if way.column != "compiled":  # a graph gathers by nodes of its own
                        module.set_custom_all_gather(OwnGather())
                    module.set_custom_reduce_scatter(_Counted(self.calls))
                    if way.column == "HSDP":
                        module.set_all_reduce_hook(self._look)

    def _average(self, state: None, bucket: Any) -> Any:
        self.calls.append("all-reduce")
        return ddp_hooks.allreduce_hook(dist.group.WORLD, bucket)

    def _reduce(self, state: None, grad: Tensor, output: Tensor) -> None:
        self.calls.append("reduce-scatter")
        reduce_scatter(output, grad)
        output.div_(dist.get_world_size())

    def _look(self, grad: Tensor) -> None:
        self.calls.append("all-reduce")

    def step(self, way: Way, number: int) -> None:
        super().step(way, number)
        assert bool(self.calls) == way.is_sharded


class _Counted(OwnReduce):
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("reduce-scatter")
        return super().__call__(*args, **kwargs)


class Penalty(Feature):
    """The loss has the gradient towards the inputs in it."""

    def loss(self, way: Way, model: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        loss = super().loss(way, model, x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class Functional(Feature):
    """Gradients by function transforms, of parameters that are full."""

    def step(self, way: Way, number: int) -> None:
        x = self.batch(number)
        with way.full(writeback=True), torch.no_grad():
            model = getattr(way.net, "module", way.net)
            weights = {name: p.detach() for name, p in model.named_parameters()}

            def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
                return self.loss_of(way, functional_call(model, weights, row[None]))

            grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
            for name, parameter in model.named_parameters():
                parameter.sub_(0.3 * grads[name].mean(0))


class KeptWithin(Feature):
    """Between forward and backward parameters are cut over fewer ranks."""

    num_shards = 4

    def options(self, way: Way) -> dict[str, Any]:
        return {"reshard_after_forward": 2}


class Uneven(Feature):
    """The second half of the ranks has one batch more in each epoch."""

    needs_units = True

    def inputs(self, epoch: int, rank: int, num_ranks: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(10 * epoch + rank)
        num = 1 + (2 * rank >= num_ranks)
        return [torch.randn(2, DIM, generator=generator) for _ in range(num)]

    def step(self, way: Way, number: int) -> None:
        num = way.num_data_in(number)
        batches = [self.inputs(number, rank, num) for rank in range(num)]
        if way.is_sharded:
            (rank,) = way.data_ranks()
            with shoal.join(way.net, way.optimizer):
                for x in batches[rank]:
                    self._backward(way, x)
                    self._update(way)
            return
        for index in range(max(map(len, batches))):
            for batch in batches:
                if index < len(batch):
                    (self.loss(way, way.model, batch[index]) / num).backward()
            self._update(way)

    def _backward(self, way: Way, x: Tensor) -> None:
        if way.column == "PP":
            way.run_schedule(x)
        else:
            self.loss(way, way.model, x).backward()

    def _update(self, way: Way) -> None:
        way.optimizer.step()
        way.optimizer.zero_grad()


ROWS: dict[str, list[Feature]] = {
    "mixed precision": [Mixed()],
    "gradient accumulation": [Accumulated()],
    "activation checkpointing": [Recomputed()],
    "autocast": [Autocast()],
    "frozen parameters": [Frozen()],
    "unused parameters": [Unused()],
    "meta-device initialisation": [Meta()],
    "full parameters": [WholeForAWhile()],
    "clipping by norm": [Clipped()],
    "gradient scaling": [Scaled()],
    "communication hooks": [Hooked()],
    "gradient penalties": [Penalty()],
    "torch.func": [Functional()],
    "reshard_after_forward as a number": [KeptWithin()],
    "uneven inputs": [Uneven()],
}
