"""Rank 0 of 8 on a modelled network, in pytest's own process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from shoal.comm.modelled import FREE, ModelledGroup, Network, init_modelled

Join = Callable[..., ModelledGroup]


@pytest.fixture
def join() -> Iterator[Join]:
    """Join modelled jobs, one after the other; the last one ends with the test."""

    def leave() -> None:
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        torch.cuda.empty_cache()

    def join(network: Network = FREE) -> ModelledGroup:
        leave()
        return init_modelled(8, network, "cuda")

    yield join
    leave()
