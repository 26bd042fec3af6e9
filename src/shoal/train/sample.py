"""Generating text from a trained model."""

from __future__ import annotations

import torch
from torch import nn

_TEMPERATURE = 0.7


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    *,
    num_bytes: int,
    context: int,
    seed: int,
    device: torch.device,
) -> bytes:
    """Continue `prompt`; a sharded model needs all its ranks to call this alike.

    Always the same bytes for the same model: the draws come from `seed` alone.
    """
    draws = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_bytes):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = model(window)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / _TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=draws)))
    return bytes(tokens[len(prompt) :])
