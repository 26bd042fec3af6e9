"""Who is measured: each engine is one function that puts itself around the model.

Every sharded engine gets the same units: one per block, and the root with what is left
(embedding, last norm, head). Each says itself where it cannot run, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.bench.model import Block, Transformer
from shoal.bench.run import Mode, Run
from shoal.errors import InvariantError

REDUCE_DTYPE = torch.float32
"""Gradients are summed over ranks in it, by the engines that can choose (DDP cannot)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A way to train the model on N ranks."""

    name: str
    wrap: Callable[[Transformer, Run], nn.Module]
    """Called in the run's own process, with the model on its device and the group initialised."""
    uses_group: bool
    """Whether it communicates; if not, no process group is made and one process is enough."""
    casts: bool
    """Whether it keeps fp32 parameters and casts them itself; if not, the model is built in the
    compute dtype."""
    refuses: Callable[[Run], str | None]
    """Why it cannot do this run, if it cannot."""
    gather_apart: Callable[[nn.Module], None] = lambda model: None
    """Lets its gathers share memory with nothing else, after a first step (see `kept_gathers`)."""


def refusal(run: Run) -> str | None:
    """Why this run cannot be made on this machine, or None if it can."""
    case = run.case
    if case.network is not None and run.device_type == "cpu" and not case.quick:
        return "needs CUDA; --quick runs a scaled-down version on CPU"
    return ENGINES[run.engine].refuses(run)


def _compile_blocks(model: Transformer, run: Run) -> None:
    """Compile what stands between the engine's hooks, so that no hook is traced."""
    if run.mode is Mode.COMPILED:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)


def _plain_refuses(run: Run) -> str | None:
    if run.mode is not Mode.CUDAGRAPHS:
        return None
    if run.device_type != "cuda":
        return "CUDA graphs need CUDA"
    if run.case.name != "B4":
        return "CUDA graphs are measured on B4 only: there the host is the limit"
    return None


def _peer_refuses(run: Run) -> str | None:
    if run.mode is not Mode.CUDAGRAPHS:
        return None
    return "CUDA graphs are measured for whole graphs only: plain and shoal-graph"


def _wrap_plain(model: Transformer, run: Run) -> nn.Module:
    if run.mode is not Mode.EAGER:
        model.compile(mode="reduce-overhead" if run.mode is Mode.CUDAGRAPHS else None)
    return model


def _wrap_plain_shoal(model: Transformer, run: Run) -> nn.Module:
    return _compile_by_shoal(model, run)


def _compile_by_shoal(model: nn.Module, run: Run) -> nn.Module:
    import shoal.compile  # noqa: F401 - so that torch knows the backend in a source folder

    cudagraphs = run.mode is Mode.CUDAGRAPHS
    model.compile(backend="shoal", options={"inner": "inductor", "cudagraphs": cudagraphs})
    return model


def _plain_shoal_refuses(run: Run) -> str | None:
    if run.mode is Mode.EAGER:
        return "the shoal compiler on the unsharded model; eager, that is plain"
    return _plain_refuses(run)


def _wrap_ddp(model: Transformer, run: Run) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    # Not wrapped.compile(): only this form lets Dynamo cut the graph at the buckets.
    return cast(nn.Module, torch.compile(wrapped)) if run.mode is Mode.COMPILED else wrapped


def _wrap_modules(model: Transformer, run: Run, wrapper: Callable[..., nn.Module]) -> nn.Module:
    """What `fsdp1` and `shoal-wrapper` have in common: all but the library."""
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    _compile_blocks(model, run)
    return wrapper(
        model,
        process_group=dist.group.WORLD,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(param_dtype=run.compute_dtype, reduce_dtype=REDUCE_DTYPE)
        if run.case.mixed_precision
        else None,
        device_id=run.device,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def _wrap_fsdp1(model: Transformer, run: Run) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return _wrap_modules(model, run, FullyShardedDataParallel)


def _wrap_shoal_wrapper(model: Transformer, run: Run) -> nn.Module:
    from shoal.doors.fsdp1.fully_sharded import FullyShardedDataParallel

    return _wrap_modules(model, run, FullyShardedDataParallel)


def _shard_units(
    model: Transformer,
    run: Run,
    fully_shard: Callable[..., object],
    policy_type: Callable[..., object],
) -> nn.Module:
    """What `fsdp2` and `shoal` have in common: all but the library."""
    _compile_blocks(model, run)
    policy = (
        policy_type(param_dtype=run.compute_dtype, reduce_dtype=REDUCE_DTYPE)
        if run.case.mixed_precision
        else policy_type()
    )
    mesh = init_device_mesh(run.device_type, (run.case.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _wrap_fsdp2(model: Transformer, run: Run) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return _shard_units(model, run, fully_shard, MixedPrecisionPolicy)


def _wrap_simple_fsdp(model: Transformer, run: Run) -> nn.Module:
    from shoal.bench.simple_fsdp import shard_each_parameter

    reduce_dtype = REDUCE_DTYPE if run.case.mixed_precision else run.compute_dtype
    model.compile()
    return shard_each_parameter(model, run, reduce_dtype)


def _simple_fsdp_refuses(run: Run) -> str | None:
    if run.mode is Mode.EAGER:
        return "parameters gathered one by one are for a compiler"
    return _peer_refuses(run)


def _wrap_shoal(model: Transformer, run: Run) -> nn.Module:
    from shoal.runtime.fully_shard import fully_shard
    from shoal.runtime.policy import MixedPrecisionPolicy

    return _shard_units(model, run, fully_shard, MixedPrecisionPolicy)


def _gather_apart(model: nn.Module) -> None:
    from shoal.runtime.module_state import state_of

    state = state_of(model)
    if state is None or state.context is None:
        raise InvariantError(f"{type(model).__name__} has no engine yet: take a step first")
    state.context.arena.gather_apart()


def _wrap_shoal_flat(model: Transformer, run: Run) -> nn.Module:
    from shoal.layout import Flat
    from shoal.runtime.fully_shard import fully_shard
    from shoal.runtime.policy import MixedPrecisionPolicy

    return _shard_units(model, run, partial(fully_shard, layout=Flat()), MixedPrecisionPolicy)


def _wrap_shoal_graph(model: Transformer, run: Run) -> nn.Module:
    return _compile_by_shoal(_wrap_shoal_flat(model, replace(run, mode=Mode.EAGER)), run)


def _shoal_graph_refuses(run: Run) -> str | None:
    if run.mode is Mode.EAGER:
        return "sharding in the graph of a compiler; eager, that is shoal-flat"
    return _plain_refuses(run)


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            name="plain",
            wrap=_wrap_plain,
            uses_group=False,
            casts=False,
            refuses=_plain_refuses,
        ),
        Engine(
            name="plain-shoal",
            wrap=_wrap_plain_shoal,
            uses_group=False,
            casts=False,
            refuses=_plain_shoal_refuses,
        ),
        Engine(
            name="ddp",
            wrap=_wrap_ddp,
            uses_group=True,
            casts=False,
            refuses=_peer_refuses,
        ),
        Engine(
            name="fsdp1",
            wrap=_wrap_fsdp1,
            uses_group=True,
            casts=True,
            refuses=_peer_refuses,
        ),
        Engine(
            name="fsdp2",
            wrap=_wrap_fsdp2,
            uses_group=True,
            casts=True,
            refuses=_peer_refuses,
        ),
        Engine(
            name="simple-fsdp",
            wrap=_wrap_simple_fsdp,
            uses_group=True,
            casts=True,
            refuses=_simple_fsdp_refuses,
        ),
        Engine(
            name="shoal",
            wrap=_wrap_shoal,
            uses_group=True,
            casts=True,
            refuses=_peer_refuses,
            gather_apart=_gather_apart,
        ),
        Engine(
            name="shoal-flat",
            wrap=_wrap_shoal_flat,
            uses_group=True,
            casts=True,
            refuses=_peer_refuses,
            gather_apart=_gather_apart,
        ),
        Engine(
            name="shoal-graph",
            wrap=_wrap_shoal_graph,
            uses_group=True,
            casts=True,
            refuses=_shoal_graph_refuses,
        ),
        Engine(
            name="shoal-wrapper",
            wrap=_wrap_shoal_wrapper,
            uses_group=True,
            casts=True,
            refuses=_peer_refuses,
            gather_apart=_gather_apart,
        ),
    )
}
"""In the order in which they are run and shown."""
