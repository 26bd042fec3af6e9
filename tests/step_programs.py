"""Random programs around a training step: what users change between steps, in words of a list.

Each change is made to a model that trains by `compile_step` and to one whose step is written out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal import compile_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5),
}

NORM = 1.0
scale = 1.0
"""A global that the loss reads."""


class Refusal(Exception):
    """Raised by a loss, on purpose."""


class Block(nn.Module):
    """Most of what a module can read: rates, numbers in lists, modes, buffers, hooks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(0.0)
        self.gains = [1.0, 0.5]
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        hidden = self.drop(functional.gelu(self.up(self.norm(x)) * self.gains[0]))
        return x + self.down(hidden) * self.gains[1]


class Model(nn.Module):
    """Blocks, and a part that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.extra = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.uses_extra = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.extra(x) if self.uses_extra else x)


class Loss:
    """A loss with a number and a mood."""

    def __init__(self) -> None:
        self.weight, self.raises = 1.0, False

    def __call__(self, output: Tensor, wanted: Tensor) -> Tensor:
        if self.raises:
            raise Refusal
        return functional.mse_loss(output.float(), wanted) * self.weight * scale


class Side:
    """A model in training."""

    def __init__(self, model: Any, kind: str) -> None:
        self.model, self.loss = model, Loss()
        left_out = {id(p) for p in model.head.parameters()}
        first = [p for p in model.parameters() if id(p) not in left_out]
        self.optimizer = OPTIMIZERS[kind](first)
        self.handles: list[Any] = []

    def written_out(self, x: Tensor, y: Tensor) -> Tensor:
        """The step that `compile_step` stands for."""
        self.optimizer.zero_grad()
        self.model.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()
        return loss.detach()


Change = Callable[[Side, random.Random], None]


def _freeze(side: Side, lot: random.Random) -> None:
    lot.choice(list(side.model.parameters())).requires_grad_(False)


def _freeze_a_block(side: Side, lot: random.Random) -> None:
    lot.choice(list(side.model.blocks)).requires_grad_(False)


def _unfreeze(side: Side, lot: random.Random) -> None:
    side.model.requires_grad_(True)


def _dropout(side: Side, lot: random.Random) -> None:
    lot.choice(list(side.model.blocks)).drop.p = lot.choice([0.0, 0.5])


def _gain(side: Side, lot: random.Random) -> None:
    lot.choice(list(side.model.blocks)).gains[lot.randrange(2)] = lot.choice([0.5, 1.0, 1.5])


def _eps(side: Side, lot: random.Random) -> None:
    side.model.blocks[0].norm.eps = lot.choice([1e-5, 1e-1])


def _extra(side: Side, lot: random.Random) -> None:
    side.model.uses_extra = not side.model.uses_extra


def _hook(side: Side, lot: random.Random) -> None:
    factor = lot.choice([0.5, 2.0])
    block = lot.choice(list(side.model.blocks))
    side.handles.append(block.up.register_forward_hook(lambda _, __, output: output * factor))


def _unhook(side: Side, lot: random.Random) -> None:
    if side.handles:
        side.handles.pop(lot.randrange(len(side.handles))).remove()


def _rate(side: Side, lot: random.Random) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.9


def _numbers(side: Side, lot: random.Random) -> None:
    first = lot.choice([0.5, 0.8])
    for group in side.optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (first, group["betas"][1])
        elif "momentum" in group:
            group["momentum"] = first
        group["weight_decay"] = lot.choice([0.0, 0.1])


def _add_group(side: Side, lot: random.Random) -> None:
    if len(side.optimizer.param_groups) == 1:
        side.optimizer.add_param_group({"params": list(side.model.head.parameters()), "lr": 0.02})


def _mode(side: Side, lot: random.Random) -> None:
    side.model.train(lot.random() < 0.5)


def _block_mode(side: Side, lot: random.Random) -> None:
    side.model.blocks[0].train(lot.random() < 0.5)


def _weight(side: Side, lot: random.Random) -> None:
    side.loss.weight = lot.choice([0.5, 1.0])


def _zero_grad(side: Side, lot: random.Random) -> None:
    for parameter in side.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    side.optimizer.zero_grad(set_to_none=lot.random() < 0.5)


def _load_optimizer(side: Side, lot: random.Random) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


CHANGES: list[Change] = [
    *(_freeze, _freeze_a_block, _unfreeze, _dropout, _gain, _eps, _extra, _hook, _unhook, _rate),
    *(_numbers, _add_group, _mode, _block_mode, _weight, _zero_grad, _load_optimizer),
]
"""Those that a sharded model knows as well."""


def _load(side: Side, lot: random.Random) -> None:
    state = {name: one * 0.9 for name, one in side.model.state_dict().items()}
    side.model.load_state_dict(state)


def _swap(side: Side, lot: random.Random) -> None:
    parameter = lot.choice(list(side.model.parameters()))
    parameter.data = parameter.data.clone() * 0.9


def _replace(side: Side, lot: random.Random) -> None:
    torch.manual_seed(lot.randrange(1000))
    side.model.blocks[0].drop = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Dropout(0.0))


UNSHARDED: list[Change] = [_load, _swap, _replace]
"""Those that put other tensors in the place of parameters."""


def run_program(seed: int, kind: str, build: Callable[[], Any], changes: list[Change]) -> int:
    """Run one program on both sides; how many graphs it took."""
    lot = random.Random(seed)
    sides = [Side(build(), kind) for _ in range(2)]
    ours, theirs = sides
    step = compile_step(ours.model, ours.loss, ours.optimizer, max_norm=NORM)
    cast: Callable[[], AbstractContextManager[Any]] = nullcontext
    done: list[str] = []
    for number in range(12):
        for change in lot.sample(changes, lot.choice([0, 0, 1, 1, 2])):
            drawn = lot.randrange(1 << 30)
            done.append(f"{number}: {change.__name__}")
            for side in sides:
                change(side, random.Random(drawn))
        if lot.random() < 0.15:
            dtype = lot.choice([None, torch.bfloat16, torch.float16])
            done.append(f"{number}: autocast {dtype}")
            cast = nullcontext if dtype is None else _autocast(dtype)
        raises = lot.random() < 0.1
        torch.manual_seed(number)
        x, y = torch.randn(lot.choice([4, 4, 4, 5]), 6), torch.randn(1, 3)
        losses = [_ran(call, side, x, y, cast, raises) for call, side in _calls(step, theirs, ours)]
        assert (losses[0] is None) == (losses[1] is None), done
        if losses[0] is not None and losses[1] is not None:
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
        else:  # a step that raises while it is captured has not even written to buffers
            for one, other in zip(ours.model.buffers(), theirs.model.buffers(), strict=True):
                one.copy_(other)
        _assert_same(ours, theirs, done)
        if lot.random() < 0.3:
            outputs = [_output(side, x) for side in sides]  # no weights from before the step
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    return step.num_graphs


def _autocast(dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast("cpu", dtype)


def _calls(step: Any, theirs: Side, ours: Side) -> list[tuple[Callable[..., Tensor], Side]]:
    return [(step, ours), (theirs.written_out, theirs)]


def _ran(
    call: Callable[..., Tensor], side: Side, x: Tensor, y: Tensor, cast: Any, raises: bool
) -> Tensor | None:
    side.loss.raises = raises
    torch.manual_seed(7)
    try:
        with cast():
            return call(x, y.expand(len(x), 3))
    except Refusal:
        if hasattr(side.model, "reshard"):
            side.model.reshard()  # the root stays full after a forward, for its backward
        return None


@torch.no_grad()
def _output(side: Side, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return side.model(x)


def whole(tensor: Any) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _assert_same(ours: Side, theirs: Side, done: list[str]) -> None:
    """Compare all that a step writes; then take their values over, so that nothing adds up."""
    held = zip(_held(ours), _held(theirs), strict=True)
    for (name, one), (other_name, other) in held:
        assert name == other_name, (name, other_name, done)
        where = f"{name} after {done}"
        torch.testing.assert_close(whole(one), whole(other), rtol=1e-3, atol=2e-5, msg=where)
        with torch.no_grad():
            one.copy_(other)


def _held(side: Side) -> list[tuple[str, Any]]:
    named = [*side.model.named_parameters(), *side.model.named_buffers()]
    state = [
        (f"{name}.{key}", one)
        for name, parameter in side.model.named_parameters()
        if parameter in side.optimizer.state
        for key, one in side.optimizer.state[parameter].items()
        if isinstance(one, Tensor)
    ]
    return named + state
