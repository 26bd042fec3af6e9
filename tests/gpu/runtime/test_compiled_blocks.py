"""Blocks compiled by Inductor, one by one, inside a model that is sharded eagerly on NCCL ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from differential import PLAIN, SHOAL
from gpu.runtime.steps import DEVICE, model_for
from harness import nccl_ranks
from oracle import batches, full, loss_of
from shoal.layout import Even, Flat

# Inductor advises on TF32 by a warning, and dynamo looks at the gradient of whatever it traces.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def compiled(**options: Any) -> Any:
    model = model_for(SHOAL, **options)
    for block in model.blocks:
        block.compile()
    return model


@nccl_ranks(2, timeout_s=240)
def test_compiled_blocks_train_like_eager_ones_and_are_compiled_once() -> None:
    """One test for both layouts, since the second finds the kernels of the first."""
    from torch._inductor import config  # only here: it takes long to import

    config.compile_threads = 1  # ranks are ended with no regard for workers
    for layout in (Even(), Flat()):
        plain, sharded = model_for(PLAIN), compiled(layout=layout)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
        for index, (whole, part) in enumerate(batches(5, dist.get_rank(), 2, DEVICE)):
            expected = loss_of(plain, whole)
            expected.backward()
            stance = "fail_on_recompile" if index > 1 else "default"
            with torch.compiler.set_stance(stance):
                loss = loss_of(sharded, part)
                loss.backward()
            torch.testing.assert_close(SHOAL.mean(loss), expected.detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert counters["stats"]["unique_graphs"] > 0
        for (name, p), (_, q) in zip(
            plain.named_parameters(), sharded.named_parameters(), strict=True
        ):
            torch.testing.assert_close(
                full(q), p, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
