"""Whether what was computed were numbers.

Matrix units draw less power on zeros and NaNs, and run 8 to 10 % faster. So a measurement counts
only if the values were like those of a real job, and a run that had others fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shoal.bench.model import ModelShape
from shoal.errors import ShoalError

STD_RATIO = 1.25
"""How far the values of gathers may be from the parameters' standard deviation, either way."""


class ValuesError(ShoalError):
    """A run computed on something else than numbers like its parameters."""


def check_losses(losses: Sequence[float], shape: ModelShape) -> None:
    """Refuse steps whose loss is not that of an untrained model."""
    low, high = shape.loss_range
    for index, loss in enumerate(losses):
        if not low < loss < high:  # NaN is not
            raise ValuesError(
                f"the loss was {loss} in step {index} of {len(losses)}, expected between "
                f"{low:.2f} and {high:.2f}: the engine computed on bytes that are not its "
                "parameters, and its times mean nothing"
            )


def check_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse gradients that are not finite, or all zero: backward gathers again."""
    norm = float(torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None))
    if not 0 < norm < math.inf:
        raise ValuesError(
            f"the norm of all gradients was {norm}, expected a positive number: backward computed "
            "on bytes that are not the engine's parameters, and its times mean nothing"
        )


def check_gathers(samples: Sequence[Tensor], shape: ModelShape) -> None:
    """Refuse gathers that delivered something else than values like the parameters'."""
    values = [sample.double() for sample in samples if sample.is_floating_point()]
    if not values:
        return
    for index, sample in enumerate(values):
        # Small shards are padded with zeros.
        if not sample.isfinite().all() or sample.count_nonzero() < 0.5 * sample.numel():
            raise ValuesError(
                f"gather {index} of {len(values)} delivered {sample[:4].tolist()} …, expected "
                "finite numbers, most of them not zero: times on others mean nothing"
            )
    # Of all of them: a single small gather may repeat a few values.
    std = float(torch.cat(values).square().mean().sqrt())
    if not shape.std / STD_RATIO < std < shape.std * STD_RATIO:
        raise ValuesError(
            f"gathers delivered values of standard deviation {std:.3g}, expected {shape.std:.3g}: "
            "they were not parameters, and times mean nothing"
        )
