"""Choose the units that stay gathered between forward and backward, within a memory budget."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shoal.comm.buckets import MIB
from shoal.errors import UsageError
from shoal.runtime.fsdp_module import FSDPModule
from shoal.runtime.module_state import state_of


def choose_kept(num_bytes: Sequence[int], budget_bytes: int) -> list[int]:
    """The units to keep, by their places in forward, of those with these sizes.

    The last ones first: backward needs them first, so that they are kept for the shortest time.
    """
    if budget_bytes < 0:
        raise UsageError(f"expected a budget of 0 bytes or more, got {budget_bytes}")
    kept: list[int] = []
    for place in reversed(range(len(num_bytes))):
        if num_bytes[place] <= budget_bytes:
            kept.append(place)
            budget_bytes -= num_bytes[place]
    return kept[::-1]


def keep_gathered(model: nn.Module, budget_mb: float) -> list[str]:
    """Decide for each unit of a sharded model whether forward frees it; give the names kept.

    To be called before the model is compiled or trained. Units are taken to run in module order;
    the outermost one, which backward comes to first, counts as the last.
    """
    found: dict[str, tuple[FSDPModule, int]] = {}
    for name, module in model.named_modules():
        state = state_of(module)
        if state is not None and state.modules[0] is module and state.units:
            assert isinstance(module, FSDPModule)
            sizes = [
                sum(
                    param.numel * unit.policy.compute_dtype(param.dtype).itemsize
                    for param in unit.shards.packing.params
                )
                for unit in state.units
            ]
            found[name] = (module, sum(sizes))
    if not found:
        raise UsageError("keep_gathered needs a model with fully_shard on it; this one has none")
    if "" in found:
        found[""] = found.pop("")
    kept = choose_kept([size for _, size in found.values()], int(budget_mb * MIB))
    for place, (module, _) in enumerate(found.values()):
        module.set_reshard_after_forward(place not in kept, recurse=False)
    return [name for place, name in enumerate(found) if place in kept]
