"""What a run must know of its model before it is made; nothing here takes memory for weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from shoal.train.config import ModelConfig
from shoal.train.data import VOCABULARY
from shoal.train.hugging_face.models import build_skeleton, read_model_config, units_of
from shoal.train.model import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The size of a model, of its vocabulary, and of what a rank holds at once."""

    num_parameters: int
    largest_unit: int
    """How many parameters a rank makes before it shards them."""
    vocabulary: int
    width: int
    """Of the residual stream."""
    layers: int
    most_positions: int | None = None
    """The longest sequence that the model was made for, if it says so."""

    def operations_per_token(self, context: int, *, is_frozen: bool) -> float:
        """Floating-point operations that a trained token costs.

        2 per parameter forward, 2 for the gradients of inputs, 2 for those of weights, which frozen
        ones do not have; and for its attention 12 · layers · width · context. Recomputing is no
        progress, and does not count.
        """
        per_parameter = 4 if is_frozen else 6
        return per_parameter * self.num_parameters + 12 * self.layers * self.width * context


@lru_cache(maxsize=4)
def demo_facts(config: ModelConfig) -> ModelFacts:
    """Look at the transformer over bytes, of which every rank makes the whole."""
    with torch.device("meta"):
        # All blocks are alike; thousands of them take long to make, even without memory.
        one, two = (Transformer(dataclasses.replace(config, layers=layers)) for layers in (1, 2))
    num_in_one, num_in_two = map(_num_parameters, (one, two))
    num = num_in_one + (config.layers - 1) * (num_in_two - num_in_one)
    return ModelFacts(
        num_parameters=num,
        largest_unit=num,
        vocabulary=VOCABULARY,
        width=config.dim,
        layers=config.layers,
    )


@lru_cache(maxsize=4)
def facts_of_config(path: Path) -> ModelFacts:
    """Look at a model of `transformers`, which is made one unit at a time."""
    model = build_skeleton(read_model_config(path))
    text = model.config.get_text_config()
    in_units = [_num_parameters(unit) for unit in units_of(model)]
    num = _num_parameters(model)
    return ModelFacts(
        num_parameters=num,
        largest_unit=max(num - sum(in_units), *in_units, 0),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        width=text.hidden_size,
        layers=text.num_hidden_layers,
        most_positions=getattr(text, "max_position_embeddings", None),
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
