"""Random numbers of compiled programs on CUDA: eager's, also where a checkpoint computes again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.compile.backend import shoal

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    # Inductor advises on TF32 by a warning.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

NUM_STEPS = 3


class Block(nn.Module):
    """Draws before and after what is saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.dropout(self.up(x).relu(), 0.2)), 0.3)


class Blocks(nn.Module):
    """Some of them checkpointed."""

    def __init__(self, checkpointed: Callable[[int], bool]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            is_again = self.checkpointed(index)
            x = checkpoint(block, x, use_reentrant=False) if is_again else block(x)  # pyright: ignore
        return x


CHECKPOINTED: dict[str, Callable[[int], bool]] = {
    "none": lambda _: False,
    "some": lambda index: index != 1,
    "all": lambda _: True,
}


def seen(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Outputs, gradients, and the generator's state after each of some steps."""
    torch.manual_seed(0)
    found: list[Tensor] = []
    for _ in range(NUM_STEPS):
        x = torch.randn(8, 16, device="cuda", requires_grad=True)
        out = run(x)
        found += [out.detach().clone(), torch.cuda.get_rng_state()]
        out.square().sum().backward()
        found += [torch.cuda.get_rng_state(), x.grad.clone()]  # type: ignore[union-attr]
        found += [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
    return found


def built(which: str) -> Blocks:
    torch.manual_seed(1)
    return Blocks(CHECKPOINTED[which]).cuda()


@pytest.mark.parametrize("which", CHECKPOINTED)
def test_direct_calls_draw_what_eager_draws(which: str) -> None:
    torch._dynamo.reset()
    ours, theirs = built(which), built(which)
    run = torch.compile(ours, backend=shoal, fullgraph=True, options={"cache": False})
    for a, b in zip(seen(ours, run), seen(theirs, theirs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("which", CHECKPOINTED)
def test_inductor_draws_what_eager_draws_if_it_is_told_to(which: str) -> None:
    """Its own generator is another; its kernels add in another order than eager's."""
    torch._dynamo.reset()
    ours, theirs = built(which), built(which)
    options = {"cache": False, "inner": "inductor"}
    with torch._inductor.config.patch(fallback_random=True):
        run = torch.compile(ours, backend=shoal, fullgraph=True, options=options)
        found = seen(ours, run)
    for a, b in zip(found, seen(theirs, theirs), strict=True):
        if a.dtype == torch.uint8:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
