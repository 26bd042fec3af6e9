"""Generating text."""

import torch
from torch import nn

from shoal.train.sample import generate


class Successor(nn.Module):
    """Knows for sure that the next byte is the last one plus one."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= 4, "the window is longer than the context"
        return nn.functional.one_hot((tokens + 1) % 256, 256).float() * 1000


class Unsure(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 256)


def run(model: nn.Module, seed: int = 0) -> bytes:
    return generate(model, b"abc", num_bytes=6, context=4, seed=seed, device=torch.device("cpu"))


class Lost(nn.Module):
    """Has diverged."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = torch.full((*tokens.shape, 256), torch.nan)
        scores[..., ::2] = torch.inf
        scores[..., 1::4] = -torch.inf
        return scores


def test_a_model_that_has_diverged_still_says_something():
    assert len(run(Lost())) == 6


def test_text_continues_its_prompt():
    assert run(Successor()) == b"defghi"


def test_draws_come_from_the_seed_alone():
    torch.manual_seed(1)
    first = run(Unsure())
    torch.manual_seed(2)
    assert run(Unsure()) == first
    assert run(Unsure(), seed=1) != first
