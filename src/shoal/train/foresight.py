"""What `shoal train` will do, as `shoal plan` asks it: a recipe's workload and setup; and its own
forecast, which the report sets beside what was measured."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.optim import AdamW
from shoal.plan import Setup, Workload, forecast_setup
from shoal.plan.accelerators import device_here
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.train.config import TrainConfig
from shoal.train.model import Transformer, next_token_loss
from shoal.train.optimizer import clip_gradients

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def is_recipe(reference: str) -> bool:
    """Whether a file has a recipe of `shoal train`, and not what `shoal plan` looks for itself."""
    path = Path(reference)
    if not path.exists() and ":" in reference:
        return True  # FILE:NAME
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return False
    names = {one.name for one in body if isinstance(one, ast.FunctionDef)}
    return "recipe" in names and "model" not in names


def setup_of(config: TrainConfig, *, world: int, device: str) -> Setup:
    """How a run of this config is sharded on so many ranks of a device."""
    config.check_ranks(world)
    if config.parallel.compile != "off":
        raise NotImplementedError(
            f"shoal plan: --compile {config.parallel.compile} is not modelled; plan the run with "
            "--compile off, which computes the same"
        )
    if config.model.source is not None:
        raise NotImplementedError(
            "shoal plan: recipes with --model are not modelled; plan the model with --model hf:PATH"
        )
    if config.parallel.engine != "fully_shard":
        raise NotImplementedError(
            f"shoal plan: --engine {config.parallel.engine} is not modelled; plan the run with "
            "--engine fully_shard"
        )
    precision = config.parallel.precision
    if precision == "auto":
        precision = "fp32" if device == "cpu" else "bf16"
    half = _HALF.get(precision)
    return Setup(
        world=world,
        replicas=config.parallel.replicas,
        policy=MixedPrecisionPolicy(half, None if half is None else torch.float32),
        micro_batches=config.run.accumulate,
        reduces_each=True,
    )


def foresee(config: TrainConfig, *, world: int) -> dict[str, Any]:
    """The forecast of a run on the devices here, as plain values; or why there is none.

    The default process group must not be there yet.
    """
    kind = "cuda" if config.parallel.device != "cpu" and torch.cuda.is_available() else "cpu"
    device = device_here(kind)
    try:
        found = forecast_setup(
            workload_of(config, world=world),
            setup_of(config, world=world, device=device),
            device=device,
            network="free" if kind == "cpu" else "nvlink+ib",
        )
    except (NotImplementedError, UsageError) as error:
        return {"why_not": str(error)}
    return found.to_json()


def workload_of(config: TrainConfig, *, world: int) -> Workload:
    """The model, data and optimizer of a run of this config, as one of so many ranks has them."""
    config.check_ranks(world)
    parallel, run, context = config.parallel, config.run, config.model.context
    batch = run.batch_size // world // run.accumulate

    def model() -> nn.Module:
        return Transformer(config.model, activation_checkpointing=parallel.activation_checkpointing)

    def inputs() -> Tensor:
        return torch.zeros(batch, context, dtype=torch.long)

    targets = torch.zeros(batch, context, dtype=torch.long, device="meta")

    def loss(logits: Tensor) -> Tensor:
        return next_token_loss(logits, targets) / run.accumulate

    def units(built: Any) -> list[nn.Module]:
        return list(built.blocks)

    return Workload(
        model=model,
        inputs=inputs,
        units=units,
        loss=loss,
        optimizer=_optimizer,
        clip=_clipping(config.optim.clip),
    )


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [[one for one in every if (one.ndim > 1) is is_matrix] for is_matrix in (True, False)]
    return AdamW([{"params": group} for group in groups], foreach=True)


def _clipping(clip: float) -> Callable[[nn.Module], object]:
    return lambda model: clip_gradients(model, clip)
