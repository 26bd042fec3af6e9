"""The engines that are measured: each is one function that puts itself around the model.

Every sharded engine gets the same units: one per block, and the root with what is left
(embedding, last norm, head). Each says itself where it cannot run, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shoal.bench.cases import Mode, Run
from shoal.bench.model import BenchBlock, BenchTransformer
from shoal.errors import InvariantError
from shoal.layout import Flat, Layout

REDUCE_DTYPE = torch.float32
"""Gradients are summed over ranks in it, by the engines that can choose (DDP cannot)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to train the model on N ranks."""

    name: str
    wrap: Callable[[BenchTransformer, Run], nn.Module]
    """Called in the run's own process, with the model on its device and the group initialised."""
    only_compiled: str | None = None
    """Why it is not measured eagerly, if it is not."""
    whole_graph: bool = False
    """Whether the model is one graph when it is compiled, so that CUDA graphs can replay it."""
    uses_group: bool = True
    """Whether it communicates; if not, no process group is made and one process is enough."""
    casts: bool = True
    """Whether it keeps fp32 parameters and casts them itself; if not, the model is built in the
    compute dtype."""
    gather_apart: Callable[[nn.Module], None] = lambda model: None
    """Lets its gathers share memory with nothing else, after a first step (see `KeptGathers`)."""

    @property
    def shards(self) -> bool:
        """Whether each rank keeps a part: these cast, as nobody else does."""
        return self.casts


def refusal(run: Run) -> str | None:
    """Why this run cannot be made on this machine, or None if it can."""
    case, engine = run.case, ENGINES[run.engine]
    if case.network is not None and run.device_type == "cpu" and not case.quick:
        return "needs CUDA; --quick runs a scaled-down version on CPU"
    if run.mode is Mode.EAGER:
        return engine.only_compiled
    if run.mode is Mode.COMPILED:
        return None
    if not engine.whole_graph:
        return "CUDA graphs are measured for whole graphs only: plain and shoal-graph"
    if run.device_type != "cuda":
        return "CUDA graphs need CUDA"
    if case.name != "B4":
        return "CUDA graphs are measured on B4 only: there the host is the limit"
    return None


def _compile_blocks(model: BenchTransformer, run: Run) -> None:
    """Compile what stands between the engine's hooks, so that no hook is traced."""
    if run.mode is Mode.COMPILED:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)


def _wrap_plain(model: BenchTransformer, run: Run) -> nn.Module:
    if run.mode is not Mode.EAGER:
        model.compile(mode="reduce-overhead" if run.mode is Mode.CUDAGRAPHS else None)
    return model


def _compile_by_shoal(model: nn.Module, run: Run) -> nn.Module:
    import shoal.compile  # noqa: F401 - so that torch knows the backend in a source folder

    cudagraphs = run.mode is Mode.CUDAGRAPHS
    model.compile(backend="shoal", options={"inner": "inductor", "cudagraphs": cudagraphs})
    return model


def _wrap_ddp(model: BenchTransformer, run: Run) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    # Not wrapped.compile(): only this form lets Dynamo cut the graph at the buckets.
    return cast(nn.Module, torch.compile(wrapped)) if run.mode is Mode.COMPILED else wrapped


def _wrap_modules(
    model: BenchTransformer, run: Run, wrapper: Callable[..., nn.Module]
) -> nn.Module:
    """Wrap for `fsdp1` and `shoal-wrapper`, which differ in the library alone."""
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    _compile_blocks(model, run)
    return wrapper(
        model,
        process_group=dist.group.WORLD,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({BenchBlock}),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(param_dtype=run.compute_dtype, reduce_dtype=REDUCE_DTYPE)
        if run.case.mixed_precision
        else None,
        device_id=run.device,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def _wrap_fsdp1(model: BenchTransformer, run: Run) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return _wrap_modules(model, run, FullyShardedDataParallel)


def _wrap_shoal_wrapper(model: BenchTransformer, run: Run) -> nn.Module:
    from shoal.doors.fsdp1.fully_sharded import FullyShardedDataParallel

    return _wrap_modules(model, run, FullyShardedDataParallel)


def _shard_units(
    model: BenchTransformer,
    run: Run,
    fully_shard: Callable[..., object],
    policy_type: Callable[..., object],
) -> nn.Module:
    """Shard for `fsdp2` and `shoal`, which differ in the library alone."""
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


def _wrap_fsdp2(model: BenchTransformer, run: Run) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return _shard_units(model, run, fully_shard, MixedPrecisionPolicy)


class _Gathered(nn.Module):
    """A parameter on one rank, gathered from its shards where it is used, and again in backward.

    What SimpleFSDP does: parametrizations of DTensors, traced and left to Inductor. Collectives
    stay as they are traced, one for each parameter, neither merged nor moved.
    """

    def __init__(self, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        super().__init__()
        self.dtypes: dict[str, Any] = {
            "forward_dtype": compute_dtype,
            "backward_dtype": reduce_dtype,
        }

    def forward(self, shards: DTensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _recompute)
        return checkpoint(self._gather, shards, use_reentrant=False, context_fn=contexts)

    def _gather(self, shards: DTensor) -> Tensor:
        whole: Any = shards.redistribute(placements=[Replicate()], **self.dtypes)
        return whole.to_local(grad_placements=[Partial("avg")])


def _recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep nothing of a gather for backward."""
    return CheckpointPolicy.MUST_RECOMPUTE


def _wrap_simple_fsdp(model: BenchTransformer, run: Run) -> nn.Module:
    """Replace parameters by their shards, from which they are gathered when they are read."""
    reduce_dtype = REDUCE_DTYPE if run.case.mixed_precision else run.compute_dtype
    model.compile()
    mesh = init_device_mesh(run.device_type, (run.case.world_size,))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(shards))
            gathered = _Gathered(run.compute_dtype, reduce_dtype)
            register_parametrization(module, name, gathered, unsafe=True)
    return model


def _wrap_shoal(model: BenchTransformer, run: Run, layout: Layout | None = None) -> nn.Module:
    from shoal.runtime.fully_shard import fully_shard
    from shoal.runtime.policy import MixedPrecisionPolicy

    return _shard_units(model, run, partial(fully_shard, layout=layout), MixedPrecisionPolicy)


def _gather_apart(model: nn.Module) -> None:
    from shoal.runtime.module_state import state_of

    state = state_of(model)
    if state is None or state.context is None:
        raise InvariantError(f"{type(model).__name__} has no engine yet: take a step first")
    state.context.arena.gather_apart()


def _wrap_shoal_flat(model: BenchTransformer, run: Run) -> nn.Module:
    return _wrap_shoal(model, run, Flat())


def _wrap_shoal_graph(model: BenchTransformer, run: Run) -> nn.Module:
    return _compile_by_shoal(_wrap_shoal_flat(model, replace(run, mode=Mode.EAGER)), run)


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("plain", _wrap_plain, whole_graph=True, uses_group=False, casts=False),
        Engine(
            "plain-shoal",
            _compile_by_shoal,
            only_compiled="the shoal compiler on the unsharded model; eager, that is plain",
            whole_graph=True,
            uses_group=False,
            casts=False,
        ),
        Engine("ddp", _wrap_ddp, casts=False),
        Engine("fsdp1", _wrap_fsdp1),
        Engine("fsdp2", _wrap_fsdp2),
        Engine(
            "simple-fsdp",
            _wrap_simple_fsdp,
            only_compiled="parameters gathered one by one are for a compiler",
        ),
        Engine("shoal", _wrap_shoal, gather_apart=_gather_apart),
        Engine("shoal-flat", _wrap_shoal_flat, gather_apart=_gather_apart),
        Engine(
            "shoal-graph",
            _wrap_shoal_graph,
            only_compiled="sharding in the graph of a compiler; eager, that is shoal-flat",
            whole_graph=True,
        ),
        Engine("shoal-wrapper", _wrap_shoal_wrapper, gather_apart=_gather_apart),
    )
}
"""In the order in which they are run and shown."""
