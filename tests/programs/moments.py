"""The moments of a program. Each is a value, so that a program can be printed and shrunk."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from programs.net import PlannedError, Way, loss_of
from programs.twins import Twins


class Moment(Protocol):
    """Something that a user's script does."""

    def run(self, twins: Twins) -> None:
        """Do it to both models."""
        ...


@dataclass(frozen=True, slots=True)
class Train:
    """Forward and backward."""

    way: Way
    reduces: bool = True

    def run(self, twins: Twins) -> None:
        with twins.reducing(self.reduces):
            twins.backward(twins.losses(self.way, twins.batch()), reduces=self.reduces)


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's step, after a reduction of what is not reduced yet."""

    way: Way
    clips: bool
    sets_to_none: bool

    def run(self, twins: Twins) -> None:
        _reduce_all(twins, self.way)
        if self.clips:
            twins.clip(0.1)
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.sets_to_none)


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A forward without a backward."""

    way: Way
    mode: Literal["recorded", "no_grad", "inference"]
    """What autograd does of it; records for nothing, for instance."""

    def run(self, twins: Twins) -> None:
        batch = twins.batch()
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        with modes.get(self.mode, nullcontext)():
            mine, whole = (
                model.eval()(batch[twins.rank], self.way, twins.rank) for model in twins.models
            )
        twins.compare(mine, whole)
        for model in twins.models:
            model.train()


@dataclass(frozen=True, slots=True)
class EvaluateBetween:
    """An evaluation between a forward and its backward."""

    way: Way
    evaluation: Evaluate
    reduces: bool

    def run(self, twins: Twins) -> None:
        with twins.reducing(self.reduces):
            losses = twins.losses(self.way, twins.batch())
            self.evaluation.run(twins)
            twins.backward(losses, reduces=self.reduces)


@dataclass(frozen=True, slots=True)
class TwoForwards:
    """Two forwards before their backwards, in either order."""

    ways: tuple[Way, Way]
    is_reversed: bool
    reduces: bool

    def run(self, twins: Twins) -> None:
        with twins.reducing(self.reduces):
            losses = [twins.losses(way, twins.batch()) for way in self.ways]
            for each in reversed(losses) if self.is_reversed else losses:
                twins.backward(each, reduces=self.reduces)


@dataclass(frozen=True, slots=True)
class TwoBackwards:
    """Two backwards through one graph."""

    way: Way

    def run(self, twins: Twins) -> None:
        with twins.reducing(True):
            losses = twins.losses(self.way, twins.batch())
            twins.backward(losses, retains=True)
            twins.backward(losses)


@dataclass(frozen=True, slots=True)
class FailInForward:
    """A forward that raises."""

    at: int

    def run(self, twins: Twins) -> None:
        batch, way = twins.batch(), Way(fails_at=self.at)
        for model in twins.models:
            _expect_failure(lambda model=model: model(batch[twins.rank], way))


@dataclass(frozen=True, slots=True)
class FailInBackward:
    """A backward that raises: gradients until then stay, unless the user drops all."""

    at: int
    reduces: bool
    drops: bool

    def run(self, twins: Twins) -> None:
        way = Way(fails_at=self.at, fails_in_backward=True)
        batch = twins.batch()
        with twins.reducing(self.reduces):
            loss = loss_of(twins.model(batch[twins.rank], way))
            _expect_failure(loss.backward)
        with twins.collecting_grads(reduces=self.reduces):
            for x in batch:
                loss = loss_of(twins.twin(x, way)) / twins.world_size
                _expect_failure(loss.backward)
        if self.drops:
            twins.drop_grads()


@dataclass(frozen=True, slots=True)
class ZeroBetween:
    """Gradients zeroed between a forward and its backward."""

    way: Way
    by_optimizer: bool

    def run(self, twins: Twins) -> None:
        _reduce_all(twins, self.way)
        with twins.reducing(True):
            losses = twins.losses(self.way, twins.batch())
            for holder in twins.optimizers if self.by_optimizer else twins.models:
                holder.zero_grad()
            twins.backward(losses)


@dataclass(frozen=True, slots=True)
class Zero:
    """Gradients zeroed, whatever waits for a reduction."""

    by_optimizer: bool
    sets_to_none: bool

    def run(self, twins: Twins) -> None:
        # Gradients that wait are on no parameter: those of zeros would have none.
        sets_to_none = self.sets_to_none or bool(twins.unreduced)
        by_optimizer = self.by_optimizer and not twins.is_partly_reduced
        for holder in twins.optimizers if by_optimizer else twins.models:
            holder.zero_grad(set_to_none=sets_to_none)
        # The optimizer of `fully_shard` does not see them either, until a backward raises.
        if twins.is_broken or twins.is_wrapped or not by_optimizer:
            twins.forget_unreduced()


@dataclass(frozen=True, slots=True)
class FreezePart:
    """All cells, or the layer before them, are frozen, or trained, from here on."""

    part: Literal["first", "cells"]
    trains: bool

    def run(self, twins: Twins) -> None:
        for model in twins.models:
            getattr(model, self.part).requires_grad_(self.trains)


@dataclass(frozen=True, slots=True)
class Freeze:
    """Some parameters of a cell are frozen, or trained, from here on."""

    cell: int
    names: tuple[str, ...]
    trains: bool

    def run(self, twins: Twins) -> None:
        for model in twins.models:
            for name in self.names:
                model.cells[self.cell].get_parameter(name).requires_grad_(self.trains)


@dataclass(frozen=True, slots=True)
class Scale:
    """Weights changed in place."""

    factor: float

    def run(self, twins: Twins) -> None:
        with torch.no_grad():
            for model in twins.models:
                for parameter in model.parameters():
                    parameter.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class ScaleData:
    """Weights changed past autograd, which the engine is told of by `reshard()`."""

    factor: float

    def run(self, twins: Twins) -> None:
        twins.reshard()
        for model in twins.models:
            for parameter in model.parameters():
                parameter.data.mul_(self.factor)
        twins.reshard()


@dataclass(frozen=True, slots=True)
class SaveAndLoad:
    """State dicts taken, weights spoiled, state dicts loaded."""

    assigns: bool
    pickles: bool = False

    def run(self, twins: Twins) -> None:
        if self.assigns and twins.is_partly_reduced and not twins.is_broken:
            twins.drop_grads()  # what is on the shards goes with them, and the rest does not
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
        for model in twins.models:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            if self.pickles:
                file = io.BytesIO()
                torch.save(saved, file)
                with twins.reading_shards():
                    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
            model.load_state_dict(saved, assign=self.assigns)
            if self.assigns:  # each name has a parameter of its own
                model.tie()
        if self.assigns:
            twins.forget_broken()
            twins.make_optimizers()
        for optimizer, state in zip(twins.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class Full:
    """Full parameters in a block, looked at or changed."""

    writes: bool

    def run(self, twins: Twins) -> None:
        with twins.full(writeback=self.writes), torch.no_grad():
            pairs = zip(twins.model.parameters(), twins.twin.parameters(), strict=True)
            for mine, whole in pairs:
                twins.compare(mine, whole.to(mine.dtype))
                if self.writes:
                    mine.mul_(0.9)
                    whole.copy_(whole.to(mine.dtype).mul_(0.9))


@dataclass(frozen=True, slots=True)
class Transform:
    """`torch.func` in a block with full parameters: gradients of each sample."""

    way: Way

    def run(self, twins: Twins) -> None:
        x = twins.batch()[twins.rank]
        with twins.full():
            mine, whole = (self._per_sample(model, x, twins) for model in twins.models)
            for name, wanted in whole.items():
                twins.compare(mine[name].to(wanted.dtype), wanted, f"per-sample gradient of {name}")

    def _per_sample(self, model: Any, x: Tensor, twins: Twins) -> dict[str, Tensor]:
        module: nn.Module = model.module if hasattr(model, "module") else model
        weights = {name: parameter.detach() for name, parameter in module.named_parameters()}

        def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
            inputs = (sample[None], self.way, twins.rank)
            return loss_of(torch.func.functional_call(module, weights, inputs))

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)


@dataclass(frozen=True, slots=True)
class Hold:
    """Units gathered, and maybe freed, by hand."""

    cell: int | None
    frees: bool
    waits: bool

    def run(self, twins: Twins) -> None:
        module = twins.model if self.cell is None else twins.model.cells[self.cell]
        handle = module.unshard(async_op=not self.waits)
        if self.frees:
            module.reshard()
        elif handle is not None:
            handle.wait()


@dataclass(frozen=True, slots=True)
class Reshard:
    """Another choice of what is freed after forwards, or after backwards."""

    after_forward: bool
    frees: bool

    def run(self, twins: Twins) -> None:
        if self.after_forward:
            twins.model.set_reshard_after_forward(self.frees)
        else:
            twins.model.set_reshard_after_backward(self.frees)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Another choice of what is gathered ahead, useful or not."""

    cell: int
    ahead: tuple[int, ...]
    in_backward: bool

    def run(self, twins: Twins) -> None:
        cells = twins.model.cells
        ahead = [cells[index] for index in self.ahead]
        if self.in_backward:
            cells[self.cell].set_modules_to_backward_prefetch(ahead)
        else:
            cells[self.cell].set_modules_to_forward_prefetch(ahead)


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Another number of units that are gathered ahead, and of reductions in flight."""

    depth: int
    num_reductions: int

    def run(self, twins: Twins) -> None:
        twins.model.set_prefetch_depth(self.depth)
        for module in (*twins.model.cells, twins.model):
            module.set_reduce_scatter_max_input_buffers(self.num_reductions)


@dataclass(frozen=True, slots=True)
class Keep:
    """Whether shards are kept in the dtype of compute from here on."""

    keeps: bool

    def run(self, twins: Twins) -> None:
        twins.model.set_keep_low_precision_shards(self.keeps)


@dataclass(frozen=True, slots=True)
class Divide:
    """Another number that gradients are divided by."""

    factor: float

    def run(self, twins: Twins) -> None:
        _reduce_all(twins, Way())
        twins.factor = self.factor
        for module in (*twins.model.cells, twins.model):
            module.set_gradient_divide_factor(self.factor)


@dataclass(frozen=True, slots=True)
class GradOfInputs:
    """A gradient for the inputs alone: parameters keep theirs."""

    num_cells: int

    def run(self, twins: Twins) -> None:
        way = Way(num_cells=self.num_cells)
        _reduce_all(twins, way)
        twins.model.set_requires_gradient_sync(True)
        own = twins.batch()[twins.rank]
        grads = []
        for model in twins.models:
            x = own.clone().requires_grad_()
            grads += torch.autograd.grad(loss_of(model(x, way)), x)
        twins.compare(*grads, name="gradient of the input")


@dataclass(frozen=True, slots=True)
class Penalise:
    """A gradient for the inputs that is part of the loss, maybe with a forward in between."""

    way: Way
    evaluates: bool
    reduces: bool

    def run(self, twins: Twins) -> None:
        _reduce_all(twins, self.way)
        batch = twins.batch()
        twins.has_run = True
        with twins.reducing(self.reduces):
            mine = self._loss(twins.model, batch[twins.rank], twins.rank)
            all_ = [self._loss(twins.twin, x, rank) for rank, x in enumerate(batch)]
            twins.backward((mine, torch.stack(all_).mean()), reduces=self.reduces)

    def _loss(self, model: Any, x: Tensor, rank: int) -> Tensor:
        x, way = x.clone().requires_grad_(), replace(self.way, detaches_at=None)
        output = model(x, way, rank)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        if self.evaluates:
            with torch.no_grad():
                model(x, way, rank)
        return slope.square().mean() + output.mean()


@dataclass(frozen=True, slots=True)
class Cast:
    """All weights rounded to float32, and back."""

    def run(self, twins: Twins) -> None:
        _reduce_all(twins, Way())
        for optimizer in twins.optimizers:
            optimizer.zero_grad()
        for model in twins.models:
            model.float().double()


@dataclass(frozen=True, slots=True)
class FullState:
    """A full state dict taken, changed, and loaded, by the functions of torch's checkpoints."""

    def run(self, twins: Twins) -> None:
        options = StateDictOptions(full_state_dict=True)
        full: dict[str, Any] = get_model_state_dict(twins.model, options=options)
        for name, whole in twins.twin.state_dict().items():
            twins.compare(full[name], whole, name)
        full = {name: value * 1.1 for name, value in full.items()}
        set_model_state_dict(twins.model, full, options=options)
        twins.twin.load_state_dict({k: v * 1.1 for k, v in twins.twin.state_dict().items()})


@dataclass(frozen=True, slots=True)
class NewOptimizers:
    """Optimizers built anew, between steps."""

    def run(self, twins: Twins) -> None:
        twins.reshard()
        twins.make_optimizers()


@dataclass(frozen=True, slots=True)
class Compiled:
    """Some steps of `compile_step`, beside ordinary ones of the twin."""

    num_steps: int

    def run(self, twins: Twins) -> None:
        _reduce_all(twins, Way())
        twins.model.set_requires_gradient_sync(True)
        for optimizer in twins.optimizers:
            optimizer.zero_grad()
        for _ in range(self.num_steps):
            batch = twins.batch()
            twins.compiled_step(batch[twins.rank])
            twins.add_grads(torch.stack([loss_of(twins.twin(x)) for x in batch]).mean())
            twins.optimizers[1].step()
            twins.optimizers[1].zero_grad()


def _reduce_all(twins: Twins, way: Way) -> None:
    """Have nothing wait for a reduction."""
    if twins.unreduced:
        Train(way).run(twins)


def _expect_failure(call: Callable[[], Any]) -> None:
    try:
        call()
    except PlannedError:
        return
    raise AssertionError("the planned exception did not come")
