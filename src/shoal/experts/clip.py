"""Clipping where parameters are sharded over different meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from shoal.errors import UsageError


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale all gradients down if their norm together exceeds `max_norm`; returns the norm.

    As `torch.nn.utils.clip_grad_norm_`, which takes parameters of one mesh. Every rank calls it,
    with parameters in the same order.
    """
    if norm_type <= 0:
        raise UsageError(f"norm_type must be positive, got {norm_type}")
    with_grads = [parameter for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in with_grads:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms: list[torch.Tensor] = []
    for some in by_mesh.values():
        norm = nn.utils.get_total_norm(
            [one.grad for one in some if one.grad is not None], norm_type
        )
        norms.append(getattr(norm, "full_tensor", lambda norm=norm: norm)())
    if not norms:
        return torch.tensor(0.0)
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    order = math.inf if math.isinf(norm_type) else norm_type
    total = torch.linalg.vector_norm(together, order)
    for some in by_mesh.values():
        nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return total
