"""Trainings of many kinds, of which one rank dies: models, optimizers and loops as users have them.

Each variety says how to build a training; `main` runs it under survive, `one_stretch` without.
"""

import json
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import shoal.optim
from shoal import MixedPrecisionPolicy, fully_shard
from shoal.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from shoal.fsdp.sharded_grad_scaler import ShardedGradScaler
from shoal.layout import Block, Even, Flat, Rows, Whole
from shoal.survive import survive
from shoal.survive.corruption import CorruptionChecks
from shoal.survive.run import run_of
from shoal.survive.shares import share_in
from survival.program import Batches, Doom, _whole

WIDTH = 13
STEPS = 8


@dataclass
class Training:
    """What a variety trains, and how."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[torch.Tensor, float, int], float]
    stateful: list[Any] = field(default_factory=list)
    apart: Callable[[], dict[str, Any]] = dict
    """What else must be the same in the end."""


VARIETIES: dict[str, Callable[[], Training]] = {}
REFUSED: dict[str, str] = {}
"""Those that are refused before training starts, with what is said."""


def variety(build, name: str = "", refused: str = ""):
    name = name or build.__name__
    VARIETIES[name] = build
    if refused:
        REFUSED[name] = refused
    return build


def refused(message: str):
    return lambda build: variety(build, refused=message)


def plain(middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(3)
    first, last = nn.Linear(WIDTH, 16), nn.Linear(16, 5)
    return nn.Sequential(first, nn.GELU(), middle or nn.Linear(16, 16), nn.GELU(), last)


def sharded(model: nn.Sequential | None = None, **options: Any) -> nn.Sequential:
    model = plain() if model is None else model
    for index in (0, 2):  # and what is left over, with the root
        fully_shard(model[index], **options)
    fully_shard(model, **options)
    return model


def ordinary(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    stateful: tuple[Any, ...] = (),
    clip: float | None = None,
) -> Training:
    def step(inputs: torch.Tensor, weight: float, _: int) -> float:
        dtype = next(model.parameters()).dtype
        loss = model(inputs.to(dtype)).float().square().mean() * weight
        loss.backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        for one in stateful:
            one.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss.item()

    return Training(model, list(optimizers), step, list(stateful))


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def _of(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Callable[[], Training]:
    def build() -> Training:
        model = sharded(**options)
        return ordinary(model, make(model.parameters()))

    return build


OPTIMIZERS = {
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd_plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "shoal_adamw": lambda p: shoal.optim.AdamW(p, lr=0.01),
}
for _name, _make in OPTIMIZERS.items():
    variety(_of(_make), _name)
    variety(_of(_make, layout=Flat()), f"{_name}_flat")
for _layout in (Even(), Flat(), Rows(), Block(8), Whole()):
    variety(_of(OPTIMIZERS["shoal_adamw"], layout=_layout), f"layout_{type(_layout).__name__}")

ROWS = "must be single elements, or sharded as the parameter is"
variety(_of(shoal.optim.Adafactor), "shoal_adafactor", ROWS)


@variety
def shoal_muon() -> Training:
    model = sharded(layout=Whole())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return ordinary(model, shoal.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01))


def _lbfgs(kind: Any) -> Callable[[], Training]:
    def build() -> Training:
        model = sharded()
        optimizer = kind(model.parameters(), lr=0.1, history_size=3)

        def step(inputs: torch.Tensor, weight: float, _: int) -> float:
            losses = []

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean() * weight
                loss.backward()
                losses.append(loss.item())
                return loss

            optimizer.step(closure)
            return losses[0]

        return Training(model, [optimizer], step)

    return build


variety(_lbfgs(shoal.optim.LBFGS), "shoal_lbfgs", "takes its steps by a closure")
variety(_lbfgs(torch.optim.LBFGS), "torch_lbfgs", "takes its steps by a closure")


class Averaging(torch.optim.SGD):
    """Counts in its groups, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.1 / group["k"])


class Listing(torch.optim.SGD):
    """Keeps the last gradients, in a list."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    last = self.state[parameter].setdefault("last", [])
                    last.append(parameter.grad.clone())
                    del last[:-2]
                    parameter.data.add_(last[0], alpha=-0.1)


class Counting(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        told = self.state["all"]
        told["count"] = told.get("count", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.1 / told["count"])


variety(_of(Averaging), "counts_in_groups")
variety(
    _of(lambda p: Listing(p, lr=0.1)), "lists_of_gradients", "Listing keeps 'last' of parameter"
)
variety(_of(lambda p: Counting(p, lr=0.1)), "counts_for_all")


@variety
def hooked_step() -> Training:
    """An optimizer's hook counts, and its rate depends on that."""
    model = sharded()
    optimizer = adamw(model)
    count = Counter()

    def after(*_: Any) -> None:
        count.number += 1
        optimizer.param_groups[0]["lr"] = 0.01 / count.number

    optimizer.register_step_post_hook(after)
    training = ordinary(model, optimizer)
    training.stateful = [count]
    training.apart = count.state_dict
    return training


class Counter:
    number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


@variety
def grad_scaler() -> Training:
    """A gradient scaler that skips a step: the one at which a rank dies too."""
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer = adamw(model)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(inputs: torch.Tensor, weight: float, number: int) -> float:
        loss = model(inputs).float().square().mean() * weight
        scaler.scale(loss * (1e30 if number == 2 else 1.0)).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    return Training(model, [optimizer], step, [scaler], lambda: {"scale": scaler.get_scale()})


def _scheduled(make: Callable[[Any], Any]) -> Callable[[], Training]:
    def build() -> Training:
        model = sharded()
        optimizer = adamw(model)
        scheduler = make(optimizer)
        training = ordinary(model, optimizer, stateful=(scheduler,))
        training.apart = lambda: {"lr": optimizer.param_groups[0]["lr"], "at": scheduler.last_epoch}
        return training

    return build


SCHEDULERS = {
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=2 * STEPS),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)],
        [3],
    ),
    "lambda_lr": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}
for _name, _make in SCHEDULERS.items():
    variety(_scheduled(_make), f"schedule_{_name}")


@variety
def plateau() -> Training:
    model = sharded()
    optimizer = adamw(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    def step(inputs: torch.Tensor, weight: float, _: int) -> float:
        loss = model(inputs).square().mean() * weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        scheduler.step(total.item())
        return loss.item()

    rate = lambda: {"lr": optimizer.param_groups[0]["lr"]}  # noqa: E731
    return Training(model, [optimizer], step, [scheduler], rate)


@refused("nothing is stateful")
def forgotten_scheduler() -> Training:
    """A scheduler of which survive knows nothing would run ahead of what is undone."""
    model = sharded()
    optimizer = adamw(model)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    training = ordinary(model, optimizer, stateful=(scheduler,))
    training.stateful = []
    return training


@variety
def batch_norm() -> Training:
    return ordinary(model := sharded(plain(nn.BatchNorm1d(16))), adamw(model))


@variety
def dropout() -> Training:
    model = plain()
    model[1] = nn.Sequential(nn.GELU(), nn.Dropout(0.3))
    return ordinary(sharded(model), adamw(model))


@variety
def growing_buffer() -> Training:
    """A queue of what was seen: its buffer is another tensor after each step, of another shape."""

    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", None)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            mean = inputs.detach().mean(0, keepdim=True)
            dist.all_reduce(mean)
            if self.training:
                self.seen = mean if self.seen is None else torch.cat([self.seen, mean])
            return inputs + self.seen.mean(0)

    model = plain()
    model[1] = Queue()
    return ordinary(sharded(model), adamw(model))


@variety
def extra_state() -> Training:
    """A module's own state, which its `state_dict` holds, and which is no buffer."""

    class Amax(nn.Module):
        history: list[float]

        def __init__(self) -> None:
            super().__init__()
            self.history = []

        def get_extra_state(self) -> Any:
            return torch.tensor(self.history)

        def set_extra_state(self, state: Any) -> None:
            self.history = state.tolist()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.history.append(float(len(self.history) % 3))
            return inputs * (1 + 0.1 * sum(self.history[-3:]))

    model = plain()
    model[1] = amax = Amax()
    training = ordinary(sharded(model), adamw(model))
    training.apart = lambda: {"history": list(amax.history)}
    return training


@variety
def accumulates_in_steps() -> Training:
    model = sharded()
    optimizer = adamw(model)

    def step(inputs: torch.Tensor, weight: float, _: int) -> float:
        total = 0.0
        for number, part in enumerate(inputs.tensor_split(2)):
            model.set_requires_gradient_sync(number == 1)
            loss = model(part).square().sum() / len(inputs) * weight
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Training(model, [optimizer], step)


@variety
def accumulates_over_steps() -> Training:
    """The optimizer steps every second time: gradients are state in between."""
    return every_second_time(reduces_each=True)


def every_second_time(*, reduces_each: bool) -> Training:
    model = sharded()
    optimizer = adamw(model)

    def step(inputs: torch.Tensor, weight: float, number: int) -> float:
        model.set_requires_gradient_sync(reduces_each or number % 2 == 1)
        loss = model(inputs).square().mean() * weight
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Training(model, [optimizer], step)


@variety
def frozen_then_trained() -> Training:
    """Half is frozen at first; its optimizer state begins later."""
    model = sharded()
    optimizer = adamw(model)
    model[0].requires_grad_(False)
    inner = ordinary(model, optimizer)

    def step(inputs: torch.Tensor, weight: float, number: int) -> float:
        model[0].requires_grad_(number >= 4)
        return inner.step(inputs, weight, number)

    return Training(model, [optimizer], step)


@variety
def lora() -> Training:
    """An optimizer of few of the parameters; the others are protected too."""
    model = plain()
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    model = sharded(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return ordinary(model, torch.optim.AdamW(trained, lr=0.01))


@variety
def bf16() -> Training:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return ordinary(model := sharded(mp_policy=policy), adamw(model), clip=0.1)


@variety
def bf16_weights() -> Training:
    return ordinary(model := sharded(plain().bfloat16(), layout=Flat()), adamw(model), clip=0.1)


@variety
def offloaded() -> Training:
    policy = CPUOffloadPolicy(pin_memory=False)
    return ordinary(model := sharded(offload_policy=policy), adamw(model), clip=0.1)


@variety
def kept_after_forward() -> Training:
    return ordinary(model := sharded(reshard_after_forward=False), adamw(model), clip=0.1)


@variety
def tied() -> Training:
    model = plain()
    model[4] = nn.Linear(16, 16)
    model[4].weight = model[2].weight
    fully_shard(model)
    return ordinary(model, adamw(model))


@variety
def tiny_parameters() -> Training:
    """Fewer rows than ranks, scalars: some ranks hold nothing of them."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.shift = nn.Parameter(torch.zeros(2, 16))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * self.scale + self.shift.sum(0)

    return ordinary(model := sharded(plain(Scaled())), adamw(model))


@variety
def checkpointed() -> Training:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.inner = nn.Linear(16, 16)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, inputs, use_reentrant=False)

    return ordinary(model := sharded(plain(Again())), adamw(model))


@variety
def two_optimizers() -> Training:
    model = sharded()
    first, *others = model.parameters()
    sgd = torch.optim.SGD([first], lr=0.1, momentum=0.9)
    return ordinary(model, sgd, torch.optim.AdamW(others, lr=0.01), clip=1.0)


def _compiled(**options: Any) -> Callable[[], Training]:
    def build() -> Training:
        model = sharded()
        inner = ordinary(model, adamw(model))
        compiled = torch.compile(model, **options)

        def step(inputs: torch.Tensor, weight: float, _: int) -> float:
            loss = compiled(inputs).square().mean() * weight
            loss.backward()
            inner.optimizers[0].step()
            inner.optimizers[0].zero_grad()
            return loss.item()

        return Training(model, inner.optimizers, step)

    return build


variety(_compiled(backend="eager"), "compiled_eager")
variety(_compiled(backend="aot_eager"), "compiled_aot")
variety(_compiled(backend="shoal"), "compiled_shoal")


@refused("FullyShardedDataParallel")
def older_door() -> Training:
    model = FullyShardedDataParallel(plain(), use_orig_params=True)
    return ordinary(model, adamw(model))


class Average:
    """An average of the weights, made by hand: shards of this rank, or whole tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}

    def step(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.values[name].lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


@refused("of shards, which went with a rank")
def average_as_stateful() -> Training:
    """Shards are no small state that is the same on all ranks."""
    model = sharded()
    return ordinary(model, adamw(model), stateful=(Average(model),))


@refused("of shards, which went with a rank")
def average_of_flat_as_stateful() -> Training:
    model = sharded(layout=Flat())
    return ordinary(model, adamw(model), stateful=(Average(model),))


def _average(**options: Any) -> Callable[[], Training]:
    def build() -> Training:
        """Shards of weights that only the user's code knows: those of another rank one day.

        All are of one size, also when other ranks hold them.
        """
        torch.manual_seed(3)
        model = sharded(nn.Sequential(nn.Linear(WIDTH, 18), nn.GELU(), nn.Linear(18, 6)), **options)
        training = ordinary(model, adamw(model))
        average: list[Average] = []

        def step(inputs: torch.Tensor, weight: float, number: int) -> float:
            loss = training.step(inputs, weight, number)
            if not average:
                average.append(Average(model))
            average[0].step()
            return loss

        return Training(model, training.optimizers, step)

    return build


STALE: dict[str, tuple[str, ...]] = {}
"""Those that hold what is of ranks that are gone, with what is said then."""


def stale(build: Callable[[], Training], name: str, *messages: str) -> None:
    STALE[name] = messages
    variety(build, name)


stale(_average(), "held_average", "different meshes")
stale(_average(layout=Flat()), "held_average_flat", "cut alike")


def _held(get: Callable[[], Any]) -> Callable[[], Training]:
    def build() -> Training:
        """A group that is of the ranks that there were."""
        model = sharded()
        training = ordinary(model, adamw(model))
        group: list[Any] = []

        def step(inputs: torch.Tensor, weight: float, number: int) -> float:
            loss = training.step(inputs, weight, number)
            if not group:
                group.append(get())
            total = torch.tensor(loss)
            dist.all_reduce(total, group=group[0])
            return loss

        return Training(model, training.optimizers, step)

    return build


GONE = "is not initialized in the world group map"
stale(_held(lambda: dist.group.WORLD), "held_world", GONE)
stale(_held(dist.new_group), "held_group", GONE)


@refused("written while they were copied")
def writes_too_early() -> Training:
    """Weights are clamped before the forward, while they are copied to be protected."""
    model = sharded()
    training = ordinary(model, adamw(model))

    def step(inputs: torch.Tensor, weight: float, number: int) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
        return training.step(inputs, weight, number)

    return Training(model, training.optimizers, step)


@variety
def writes_after_the_step() -> Training:
    model = sharded()
    training = ordinary(model, adamw(model))

    def step(inputs: torch.Tensor, weight: float, number: int) -> float:
        loss = training.step(inputs, weight, number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
        return loss

    return Training(model, training.optimizers, step)


@variety
def muon_even() -> Training:
    model = sharded()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return ordinary(model, shoal.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01))


@variety
def alternating() -> Training:
    """Two optimizers, of which one steps every second time."""
    model = sharded()
    first, *others = model.parameters()
    often = torch.optim.SGD([first], lr=0.1, momentum=0.9)
    rarely = torch.optim.AdamW(others, lr=0.01)

    def step(inputs: torch.Tensor, weight: float, number: int) -> float:
        loss = model(inputs).square().mean() * weight
        loss.backward()
        often.step()
        often.zero_grad()
        if number % 2:
            rarely.step()
            rarely.zero_grad()
        return loss.item()

    return Training(model, [often, rarely], step)


@refused("are not reduced at the end of a step")
def unreduced_over_steps() -> Training:
    """Gradients wait in whole on each rank for the next step's reduction."""
    return every_second_time(reduces_each=False)


@variety
def flipped_bits() -> Training:
    """Bits flip in shards, in the optimizer's state, in gradients: each step is taken again."""
    model = sharded()
    optimizer = adamw(model)
    if "SHOAL_SURVIVE_MEMBER" in os.environ:
        CorruptionChecks(model, optimizer)
    left = {2, 4, 5} if "SHOAL_SURVIVE_MEMBER" in os.environ else set()

    def flip(number: int, tensor: Any) -> None:
        if number not in left:
            return
        run_of(model).protect()  # what has flipped before it is kept cannot be undone
        if dist.get_rank() == 1:
            tensor.to_local().detach().view(torch.int32).view(-1)[3] ^= 1 << 5

    def step(inputs: torch.Tensor, weight: float, number: int) -> float:
        parameter = next(model.parameters())
        if number == 2:
            flip(number, parameter.data)
        if number == 4:
            flip(number, optimizer.state[parameter]["exp_avg"])
        loss = model(inputs).square().mean() * weight
        loss.backward()
        if number == 5:
            flip(number, parameter.grad)
        left.discard(number)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Training(model, [optimizer], step)


@variety
def zeroes_at_the_start() -> Training:
    model = sharded()
    optimizer = adamw(model)

    def step(inputs: torch.Tensor, weight: float, number: int) -> float:
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss = model(inputs).square().mean() * weight
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training(model, [optimizer], step)


def whole_state(training: Training) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in training.model.named_parameters():
        found[name] = _whole(parameter.detach())
        for number, optimizer in enumerate(training.optimizers):
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"{name}/{number}/{key}"] = _whole(value)
    return found


def local_state(training: Training) -> dict[str, Any]:
    """What is this rank's own, or the same on all."""
    return {
        "buffers": dict(training.model.named_buffers()),
        "apart": training.apart(),
        "generator": torch.get_rng_state(),
    }


class Killer(Doom):
    """Dies where any training has phases."""

    def hook(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from shoal.runtime import reduction
        from shoal.survive import protection, versions

        self._around(reduction.UnitReducer, "launch", "reduction", after=True)
        self._around(ShardedGradScaler, "unscale_", "unscaled", after=True)
        self._around(protection, "exchange", "parity", after=False)
        self._around(versions.Versions, "end_keep", "parity done", after=True)
        optimizer.register_step_post_hook(lambda *_: self.at("optimizer"))


def main(folder: Path, plan: dict[str, Any]) -> None:
    member = int(os.environ["SHOAL_SURVIVE_MEMBER"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = VARIETIES[plan["variety"]]()
    doom = Killer(folder, member, plan)
    batches = Batches(plan["steps"], plan.get("samples", 12))
    losses: dict[int, Any] = {}
    torch.manual_seed(100 + member)
    random.seed(100 + member)
    with survive(training.model, training.optimizers, batches, stateful=training.stateful) as run:
        doom.hook(training.model, training.optimizers[-1])
        for step in run:
            doom.step = step.number
            with step:
                loss = training.step(step.batch, step.weight, step.number)
                losses[step.number] = [run.rank, float(loss).hex()]
            (folder / f"{member}.done").touch()
        state, own = whole_state(training), local_state(training)
        if run.rank == 0:
            torch.save(state, folder / "state.pt")
        torch.save(own, folder / f"own-{member}.pt")
        story = {
            "has_left": run.has_left,
            "losses": losses,
            "recoveries": [{"members": r.members, "version": r.version} for r in run.recoveries],
        }
        (folder / f"{member}.json").write_text(json.dumps(story))


def one_stretch(name: str, folder: Path, first: int, last: int, members: list[int], plan: Any):
    """Steps on the ranks of the pool, from files and to files; no survive in it."""
    from shoal.checkpoint import load_training, save_training

    member = members[dist.get_rank()]
    training = VARIETIES[name]()
    torch.manual_seed(100 + member)
    random.seed(100 + member)
    batches = Batches(plan["steps"], plan.get("samples", 12))
    if first:
        kept = torch.load(folder / f"own-{first}-{member}.pt", weights_only=False)
        for one, state in zip(training.stateful, kept["stateful"], strict=True):
            one.load_state_dict(state)
        for module, (buffers, extra) in zip(training.model.modules(), kept["modules"], strict=True):
            for key, value in buffers.items():
                module._buffers[key] = value
            if extra is not None:
                module.set_extra_state(extra)
        for number, optimizer in enumerate(training.optimizers):
            load_training(folder / f"step-{first}-{number}", training.model, optimizer)
        for optimizer, groups in zip(training.optimizers, kept["groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        for optimizer, numbers in zip(training.optimizers, kept["numbers"], strict=True):
            optimizer.state.update(numbers)
        for name, parameter in training.model.named_parameters():
            if name in kept["gradients"]:
                gradient = kept["gradients"][name]
                parameter.grad = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements
                )
        torch.set_rng_state(kept["generator"])
        random.setstate(kept["python"])
    losses = {}
    for step in range(first, last):
        share, weight = share_in(batches[step], dist.get_rank(), dist.get_world_size())
        losses[step] = float(training.step(share, weight, step)).hex()
    if last < plan["steps"]:
        for number, optimizer in enumerate(training.optimizers):
            save_training(folder / f"step-{last}-{number}", training.model, optimizer, {})
        kept = {
            "stateful": [one.state_dict() for one in training.stateful],
            "modules": [
                (dict(m._buffers), m.get_extra_state() if _has_extra(m) else None)
                for m in training.model.modules()
            ],
            "groups": [
                [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
                for o in training.optimizers
            ],
            "numbers": [
                {k: v for k, v in o.state.items() if not isinstance(k, torch.Tensor)}
                for o in training.optimizers
            ],
            "gradients": {
                name: _whole(parameter.grad)
                for name, parameter in training.model.named_parameters()
                if parameter.grad is not None
            },
            "generator": torch.get_rng_state(),
            "python": random.getstate(),
        }
        torch.save(kept, folder / f"own-{last}-{member}.pt")
        dist.barrier()
        return losses, {}, {}
    return losses, whole_state(training), local_state(training)


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
