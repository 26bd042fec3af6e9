"""The process group of a run: modelled for B1–B5, gloo for B6.

Joining gives a counter of collectives: the modelled group counts by itself, the calls of a real one
are seen as they pass torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal._torch import subclasses, trees
from shoal.bench.cases import Run
from shoal.bench.figures import Collectives
from shoal.comm.modelled import ModelledGroup, init_modelled
from shoal.train import environment

# A rank that waits longer has lost its peer, whose own failure is the one to report.
GLOO_TIMEOUT = timedelta(seconds=120)


def join(run: Run, rank: int, store_path: Path) -> ModelledGroup | None:
    """Make the default group of this process; returned is the modelled one, where it is one."""
    world_size, network = run.case.world_size, run.case.network
    if network is None:
        environment.stay_on_loopback()
        store = dist.FileStore(str(store_path), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=GLOO_TIMEOUT
        )
        return None
    return init_modelled(world_size, network, run.device_type)


def count(group: ModelledGroup | None, step: Callable[[], None]) -> Collectives:
    """The collectives of a step: by the modelled group, or of whatever real groups there are."""
    if group is None:
        with _Counter() as counter:
            step()
        return Collectives(num_calls=counter.num_calls, num_bytes=counter.num_bytes)
    group.reset_traffic()
    step()
    traffic = group.traffic
    return Collectives(num_calls=traffic.num_collectives, num_bytes=traffic.num_bytes)


class _Counter(subclasses.TorchDispatchMode):
    """Counts c10d's calls, and for each the bytes of its larger side: what is gathered, or what is
    reduced before it is scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            self.num_calls += 1
            self.num_bytes += max(_num_bytes(side) for side in args[:2])
        return func(*args, **(kwargs or {}))


def _num_bytes(tensors: object) -> int:
    leaves = trees.tree_leaves(tensors)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
