"""Values for a skeleton: loaded or drawn, one unit after the other.

    meta ── materialise(unit) ──► whole unit on CPU ── fully_shard(unit) ──► this rank's shards

A rank never holds more than its shards and one whole unit. Values do not depend on the number of
ranks: each unit is drawn from a seed of its own, or read from the files by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from shoal.train.hugging_face.adapters import Adapter, draw_adapters
from shoal.train.hugging_face.stored_weights import StoredWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def materialise(
    model: PreTrainedModel,
    units: Sequence[nn.Module],
    unit: nn.Module,
    *,
    weights: StoredWeights | None,
    seed: int | None,
) -> None:
    """Give a unit, one of `units` or the model without them, memory on CPU and values.

    They are loaded from `weights`, or drawn by the model's own rules from `seed`. With neither,
    parameters are left for a checkpoint to fill.
    """
    others = {module for other in units if other is not unit for module in other.modules()}
    modules = [module for module in unit.modules() if module not in others]
    for module in modules:
        module.to_empty(device="cpu", recurse=False)
    modules = [module for module in modules if not isinstance(module, Adapter)]
    if unit is model:
        model.tie_weights()
    if weights is not None:
        _load(model, modules, weights)
    elif seed is None:
        for module in modules:
            for parameter in module.parameters(recurse=False):
                _mark_filled(parameter)
    number = units.index(unit) + 1 if unit is not model else 0
    state = torch.get_rng_state()
    sequence = np.random.SeedSequence([seed or 0, number])
    torch.manual_seed(int(sequence.generate_state(1, dtype=np.uint64)[0]))
    _draw(model, modules)
    draw_adapters(modules)
    torch.set_rng_state(state)


def _mark_filled(tensor: Tensor) -> None:
    """Keep the model's initialisation away from a tensor that has its values."""
    tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def _load(model: PreTrainedModel, modules: list[nn.Module], weights: StoredWeights) -> None:
    """Fill what has a name in a state dict; tied parameters from any of their names."""
    paths = {module: name for name, module in model.named_modules()}
    lacking: dict[str, Tensor] = {}
    for module in modules:
        own = {**module._parameters, **module._buffers}
        for leaf, tensor in own.items():
            if tensor is not None and leaf not in module._non_persistent_buffers_set:
                lacking[f"{paths[module]}.{leaf}".removeprefix(".")] = tensor
    filled: set[int] = set()
    for name, value in weights.values(lacking.keys()):
        tensor = lacking.pop(name)
        weights.check_shape(name, tuple(tensor.shape), tuple(value.shape))
        tensor.copy_(value)
        _mark_filled(tensor)
        filled.add(id(tensor))
    missing = [name for name, tensor in lacking.items() if id(tensor) not in filled]
    if missing:
        raise weights.missing_error(missing)


@torch.no_grad()
def _draw(model: PreTrainedModel, modules: list[nn.Module]) -> None:
    """Draw what was not loaded, and compute buffers, as `transformers` does after its own load."""
    from transformers import PreTrainedModel, initialization

    # Inside of a composite model each part draws for itself.
    owners: dict[nn.Module, PreTrainedModel] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            owners.update(dict.fromkeys(part.modules(), part))
    with initialization.guard_torch_init_functions():
        for module in reversed(modules):  # a module may change what its children drew
            owners[module]._init_weights(module)
