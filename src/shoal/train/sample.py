"""Generating text from a trained model."""

from __future__ import annotations

import torch
from torch import nn

_TEMPERATURE = 0.7
_LARGEST = 1e30


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
        # A model that has diverged scores with NaN or infinity; it may still babble.
        logits = torch.nan_to_num(logits, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
        probabilities = torch.softmax(logits.clamp(-_LARGEST, _LARGEST) / _TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=draws)))
    return bytes(tokens[len(prompt) :])
