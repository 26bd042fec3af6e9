"""The optimizer: AdamW or Muon, its rate over a run, gradient clipping, and fp16's loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shoal.doors.fsdp1.gradients import Clipping
from shoal.doors.fsdp1.parameter_names import entries_of
from shoal.optim import AdamW
from shoal.optim.muon_with_adamw import MuonWithAdamW
from shoal.train.config import OptimConfig

_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_GOOD_STEPS_TO_GROW = 1000


def make_optimizer(
    model: nn.Module,
    config: OptimConfig,
    *,
    blocks: Iterable[nn.Module] = (),
    mesh: DeviceMesh | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of the (sharded) parameters that train: matrices, then vectors.

    With Muon the matrices inside of `blocks` come first, as a group of their own.
    """
    num_dims = {entry.parameter: entry.num_dims for entry in entries_of(model).values()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inside = {parameter for block in blocks for parameter in block.parameters()}
    for_muon = [
        parameter
        for parameter in trained
        if config.optimizer == "muon" and parameter in inside and num_dims[parameter] == 2
    ]
    rest = set(trained) - set(for_muon)
    groups = [
        {"params": [p for p in trained if p in rest and num_dims[p] >= 2]},
        {"params": [p for p in trained if p in rest and num_dims[p] < 2]},
    ]
    # One call for all parameters: the loop over them costs more than the arithmetic.
    if for_muon:
        optimizer = MuonWithAdamW(for_muon, groups, mesh=mesh, foreach=True)
    else:
        optimizer = AdamW(groups, foreach=True)
    configure_optimizer(optimizer, config)
    return optimizer


def configure_optimizer(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Set what the config says, also after a checkpoint brought back what it used to say."""
    *decaying, vectors = optimizer.param_groups
    for group in decaying:
        group["weight_decay"] = config.weight_decay
    vectors["weight_decay"] = 0.0  # norms scale; they have nothing to decay to
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = config.momentum
        else:
            group["betas"] = (config.beta1, config.beta2)


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Return the rate of step 1…num_steps: linear warm-up, then a cosine down to the final one."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    progress = (step - config.warmup) / max(1, num_steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def unscale_gradients(model: nn.Module, factor: float) -> None:
    """Divide all gradients by what the loss was multiplied by."""
    for parameter in model.parameters() if factor != 1 else ():
        if parameter.grad is not None:
            parameter.grad.div_(factor)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm."""
    if isinstance(model, Clipping):  # its gradients are pieces that do not know of each other
        return model.clip_grad_norm_(max_norm or math.inf)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in parameters])  # pyright: ignore[reportArgumentType]
    if isinstance(norm, DTensor):
        # Whatever placement torch gave it: a plain number from here on, the same on every rank.
        norm = norm.full_tensor()
    if max_norm:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor by which a loss in fp16 is multiplied, so that small gradients do not vanish.

    It is halved whenever gradients overflow, in which case the step is skipped, and doubled after
    many steps in which none did. A power of two throughout, so that taking it out again is exact.
    Other precisions have the constant 1.
    """

    factor: float = 1.0
    good_steps: int = 0
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        # A checkpoint brings it back, and may hold anything.
        if not isinstance(self.factor, int | float) or not 1 <= self.factor <= _LARGEST_SCALE:
            raise ValueError(f"expected a factor from 1 to {_LARGEST_SCALE:g}")
        if not isinstance(self.good_steps, int) or self.good_steps < 0:
            raise ValueError("expected a number of good steps")

    @classmethod
    def for_precision(cls, precision: Literal["auto", "bf16", "fp16", "fp32"]) -> LossScale:
        """The scale that a run begins with."""
        return cls(factor=_FIRST_SCALE, is_dynamic=True) if precision == "fp16" else cls()

    @property
    def can_shrink(self) -> bool:
        """Whether gradients that are not finite may be the factor's fault."""
        return self.is_dynamic and self.factor > 1

    def shrunk(self) -> LossScale:
        """The scale after gradients that were not finite."""
        return LossScale(factor=self.factor / 2, is_dynamic=True)

    def grown(self) -> LossScale:
        """The scale after a good step."""
        if not self.is_dynamic:
            return self
        if self.good_steps + 1 < _GOOD_STEPS_TO_GROW or self.factor >= _LARGEST_SCALE:
            return LossScale(factor=self.factor, good_steps=self.good_steps + 1, is_dynamic=True)
        return LossScale(factor=2 * self.factor, is_dynamic=True)
