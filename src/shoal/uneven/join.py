"""`with shoal.join(model, optimizer):` around a loop whose ranks have different numbers of inputs.

each rank in its loop     meets the others before a forward, a backward, an optimizer's step
one that has left it      is told the moments of a rank that goes on, and does what its own step
                          machine answers: gathers, reductions of zeros, steps on its shards
all have left             the block ends
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from shoal.doors.fsdp1.root import ready
from shoal.errors import UsageError
from shoal.runtime.context import Context
from shoal.runtime.module_state import context_of, state_of
from shoal.runtime.unit import Unit
from shoal.runtime.updates import optimizers_of
from shoal.sharding_wrapper import ShardingWrapper
from shoal.uneven.calls import methods_of
from shoal.uneven.loop import JoinedLoop

_is_joined = False


@contextmanager
def join(*joined: object, divide_by_initial_world_size: bool = True) -> Iterator[None]:
    """Let ranks run a loop for different numbers of inputs; all ranks enter and leave the block.

    `joined` are the sharded models of the loop, its optimizers, and, if it has some, gradient
    scalers and learning-rate schedulers. Without optimizers it is those that last stepped the
    models. A rank whose loop has ended, also by `break`, takes part in the gathers and reductions
    of the others, with gradients of zero, and makes the same optimizer steps and clipping
    (`torch.nn.utils.clip_grad_norm_`, or the wrapper's) on its shards, until all have ended. If a
    rank raises, all raise.

    Gradients are divided by the number of all ranks; with `divide_by_initial_world_size=False` by
    the number of those that still have inputs. Other collectives in the loop are refused.
    """
    global _is_joined
    if _is_joined:
        raise UsageError("shoal.join: the blocks cannot be nested; give all models to one of them")
    models = [one for one in joined if isinstance(one, nn.Module)]
    for one in joined:
        methods_of(one)
    contexts = [context for model in models for context in _contexts_of(model)]
    if not contexts:
        raise UsageError(
            "shoal.join: none of the models is sharded; pass those that fully_shard, "
            "FullyShardedDataParallel or replicate_with_fsdp.replicate was called on"
        )
    units = [unit for context in contexts for unit in context.units]
    objects = list(joined)
    if not any(isinstance(one, Optimizer) for one in objects):
        objects += optimizers_of(units)
    loop = JoinedLoop(objects, contexts, divides_by_all=divide_by_initial_world_size)
    _is_joined = True
    try:
        with loop.listening():
            try:
                yield
            except BaseException as error:
                loop.fail(error)
                raise
        loop.shadow()
    finally:
        _is_joined = False
        loop.close()


def _contexts_of(model: nn.Module) -> list[Context]:
    """The steps of a model: one, or several if nothing sharded is around its sharded parts."""
    found: dict[Context, None] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        state = state_of(module)
        if state is None or module in inside:
            continue
        inside.update(module.modules())
        if isinstance(module, ShardingWrapper):
            ready(module)  # pyright: ignore[reportArgumentType]
        found[context_of(module, state)] = None
    for context in found:
        for unit in context.units:
            _check_eager(unit)
    return [context for context in found if context.units]


def _check_eager(unit: Unit) -> None:
    if unit.in_graph is not None:
        raise NotImplementedError(
            f"shoal.join: unit {unit.name!r} is gathered and reduced by a compiled graph, whose "
            "moments no other rank hears of; compile blocks with another backend, or not at all"
        )
