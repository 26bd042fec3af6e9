"""What a sharded module can do: the methods of torch's `FSDPModule`, on shoal's engine."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from shoal.comm.group_memory import GroupAllGather, GroupReduceScatter
from shoal.errors import UsageError
from shoal.mesh import DataParallelMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from shoal.runtime.module_call import ModuleCall
from shoal.runtime.module_state import ModuleState, context_of, state_of
from shoal.runtime.policy import AllGather, ReduceScatter
from shoal.runtime.shards import Member
from shoal.runtime.streams import Streams
from shoal.runtime.unit import Unit
from shoal.step.phase import Phase
from shoal.step.unit_step import UnitStep


@dataclass(frozen=True, slots=True)
class ManagedParameter:
    """One parameter of a unit."""

    _unit: Unit
    _member: Member

    @property
    def sharded_param(self) -> nn.Parameter:
        """The parameter while it is sharded."""
        return self._member.sharded

    @property
    def _param_fqn(self) -> str:
        return self._unit.qualified(self._member.spec.name)


@dataclass(frozen=True, slots=True)
class ManagedParameters:
    """The parameters of one unit."""

    _unit: Unit

    @property
    def fsdp_params(self) -> list[ManagedParameter]:
        """Each of them."""
        return [ManagedParameter(self._unit, member) for member in self._unit.shards.members]

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """Over which ranks they are sharded or replicated."""
        return self._unit.mesh_info

    def post_backward(self) -> None:
        """Accepted: the root's final callback, which follows, reduces all units in one order."""

    @property
    def _module_fqn(self) -> str:
        return self._unit.qualified("")


@dataclass(frozen=True, slots=True)
class StateOfModel:
    """What the modules of one model share."""

    all_states: list[TorchState]


@dataclass(frozen=True, slots=True)
class TorchState:
    """What torch would call the FSDP state of a module."""

    _state: ModuleState
    _entered: list[Any] = field(default_factory=list, compare=False, repr=False)

    @property
    def _is_root(self) -> bool:
        return self._state.is_root

    @property
    def _state_ctx(self) -> StateOfModel:
        module = self._state.modules[0]
        below = dict.fromkeys(state for m in module.modules() if (state := state_of(m)) is not None)
        return StateOfModel([TorchState(state) for state in below])

    @property
    def _fsdp_param_groups(self) -> list[ManagedParameters]:
        return [ManagedParameters(unit) for unit in self._state.units]

    @property
    def _fsdp_param_group(self) -> ManagedParameters | None:
        groups = self._fsdp_param_groups
        return groups[0] if groups else None

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients of all micro-batches; free the parameters."""
        context = self._state.context
        if context is not None:
            context.finish()

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Enter a method that torch's own `register_fsdp_forward_method` was given."""
        args, kwargs, runs = self._state.enter(module, args, kwargs)
        self._entered.append(runs)
        return args, kwargs

    def _post_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Leave it; torch keeps this object in between."""
        return self._state.leave(module, self._entered.pop(), self._state.cast_output(output))

    def _lazy_init(self) -> None:
        """Get ready, with this module as the root; the first forward does the same."""
        context_of(self._state.modules[0], self._state)


def torch_state(module: nn.Module) -> TorchState | None:
    """The state of a module, if it was given to `fully_shard`."""
    state = state_of(module)
    return None if state is None else TorchState(state)


class UnshardHandle:
    """A gather that `unshard(async_op=True)` has started."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = tuple(units)

    def wait(self) -> None:
        """Make the full parameters readable, registered on the module."""
        for unit in self._units:
            unit.hold()
        self._units = ()


if TYPE_CHECKING:

    class _TorchFSDPModule(TorchFSDPModule, nn.Module):
        """A module too, which at runtime the class behind `FSDPModule` says."""

else:
    _TorchFSDPModule = TorchFSDPModule


class FSDPModule(ModuleCall, _TorchFSDPModule):
    """What `fully_shard` makes of a module's class; libraries that look for torch's find it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build an instance of the original class: a copy of the module is not sharded."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        instance = original.__new__(original, *args, **kwargs)
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # pyright: ignore
        """Gather this module's parameters and hold them until `reshard` or the next backward."""
        state = own_state(self)
        for unit in _ready(self, state):
            if unit.step.phase is Phase.GATHERING and unit.is_stale:
                unit.reshard()  # a forward that raised has asked for what is on its way
            unit.prefetch()
            unit.step.is_kept = True
            unit.watch_all_grads()
        handle = UnshardHandle(state.used)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters."""
        for unit in own_state(self).used:
            unit.reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients that optimizers see, also where full parameters are registered now.

        Gradients that wait for a reduction are dropped.
        """
        # Past torch's class: what follows it is the module's own.
        super(TorchFSDPModule, self).zero_grad(set_to_none)  # pyright: ignore
        for state in _states(self, recurse=True):
            for unit in state.used:
                unit.gradients.zero(set_to_none=set_to_none)

    def reset_iter_state(self) -> None:
        """Forget a step that raised, with its gradients; call it on the root module."""
        state = own_state(self)
        if state.context is None:
            return
        if not state.is_root:
            raise RuntimeError(
                "reset_iter_state must be called on the root module, whose forward is called first"
            )
        state.context.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted: here the end of every backward orders compute after its reductions.

        On CUDA that is an event between streams and stops nobody, so there is nothing to save by
        putting it off.
        """

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce gradients, or add them up on each rank."""
        _set(self, recurse, reduces=requires_gradient_sync, all_reduces=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether reduced gradients are also summed over the replicas."""
        _set(self, recurse, all_reduces=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free the parameters between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise UsageError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        _set(self, recurse, reshards_after_forward=reshard_after_forward)
        for state in _states(self, recurse):
            for unit in state.units:
                unit.post = None

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether to free the parameters after backward."""
        _set(self, recurse, reshards_after_backward=reshard_after_backward)

    def set_prefetch_depth(self, depth: int, *, recurse: bool = True) -> None:
        """How many units to gather ahead, where no modules were named: more overlap for memory."""
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise UsageError(f"expected a prefetch depth of 0 units or more, got {depth!r}")
        _set(self, recurse, prefetch_depth=depth)

    def set_keep_low_precision_shards(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether to keep shards in the compute dtype beside those that are stored in a wider one.

        A gather reads and casts the shards otherwise, in forward and again in backward. Kept ones
        are written after a change, by an optimizer's step if it is one, and sent by every gather
        until the next change. They take memory all the time: `plan_of(model).kept_bytes`.

        A change is a step of a `torch.optim.Optimizer`, a state dict that is loaded, an operation
        in place on a parameter. Call `reshard()` on the sharded modules after any other, such as
        `parameter.data.add_()`, `torch._foreach_` operations on parameters, or a collective into
        local tensors.
        """
        _set(self, recurse, keeps_low_precision_shards=keep)

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Which modules' parameters to start gathering when this one's forward begins."""
        _set(self, False, forward_prefetch=_steps_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Which modules' parameters to start gathering when this one's backward begins."""
        _set(self, False, backward_prefetch=_steps_of(modules))

    def set_custom_all_gather(self, comm: AllGather) -> None:  # pyright: ignore
        """Gather with a collective of your own."""
        _refuse_several(self, "set_custom_all_gather")
        _set(self, False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:  # pyright: ignore
        """Reduce with a collective of your own."""
        _refuse_several(self, "set_custom_reduce_scatter")
        _set(self, False, reduce_scatter=comm)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Call a hook with each reduced gradient, after the all-reduce where there is one."""
        _refuse_several(self, "set_all_reduce_hook")
        for unit in own_state(self).units:
            if stream is not None and isinstance(unit.mesh_info, HSDPMeshInfo):
                raise UsageError("stream cannot be set when using native HSDP")
        _set(self, False, all_reduce_hook=hook, all_reduce_hook_stream=stream)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next gathers come after an event, recorded after an optimizer on any stream.

        They come after all that compute was given too, because compute may still use the memory
        they write to.
        """
        context = context_of(self, own_state(self))  # pyright: ignore[reportArgumentType]
        if context.units and context.streams.gathering is not None:
            context.streams.gathering.wait_for(event)
            if any(unit.shards.extended for unit in context.units):
                # Hooks read their shards on the stream of compute.
                compute = torch.cuda.current_stream(context.streams.device)
                compute.wait_event(event)  # pyright: ignore[reportArgumentType]

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        warnings.warn("use set_gradient_divide_factor instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of gradients is divided by, instead of the number of ranks."""
        _set(self, False, divide_factor=factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives only add; division is then a step of its own."""
        _set(self, False, only_sums=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without a gradient counts as having a zero one.

        Ranks may then use different units: backward gathers all units when it begins, and reduces
        them in the order in which they were declared, backwards.
        """
        _set(self, recurse, reduces_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions may be in flight: more overlap for more memory."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise UsageError(f"max_input_buffers must be 1 or more, got {max_input_buffers}")
        _set(self, recurse, max_reductions=max_input_buffers)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce on a process group of its own, so that gathers do not wait for reductions."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for state in _states(self, recurse):
            for unit in state.units:
                unit.options = replace(
                    unit.options, reduce_group=_second_group(unit, made) if enable else None
                )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the parameters; an embedding's does not."""
        _set(self, False, gathers_in_backward=unshard_in_backward)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Communicate from memory that the process group allocates, if its backend can."""
        for unit in own_state(self).units:
            _refuse_custom(unit, "set_allocate_memory_from_process_group_for_comm")
            if unit.transport is None:
                continue
            group, device = unit.transport.group, unit.device
            unit.options = replace(
                unit.options,
                all_gather=GroupAllGather(group, device) if enable else None,
                reduce_scatter=GroupReduceScatter(group, device) if enable else None,
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> NoReturn:
        """Not supported: the engine's gather buffers are its own."""
        raise NotImplementedError(
            f"shoal: set_symm_mem_for_comm({backend!r}) is not supported: this build has no "
            "symmetric memory for gathers. set_allocate_memory_from_process_group_for_comm(True) "
            "communicates from NCCL's own memory"
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: every gather is asynchronous here, and all memory is of compute's stream."""

    def _get_fsdp_state(self) -> TorchState:  # pyright: ignore
        return TorchState(own_state(self))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.reshard()
        # Past torch's class, which would look for its own state.
        result = super(TorchFSDPModule, self)._apply(fn, recurse)  # pyright: ignore
        for unit in own_state(self).used:
            # Of several modules that form a unit this may be the first to move: the last one, or
            # the next gather, follows.
            if unit.shards.is_on_one_device:
                unit.shards.follow()
        return result


def own_state(module: object) -> ModuleState:
    """The state of a module that was given to `fully_shard`."""
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise UsageError(
            f"this {type(module).__name__} was not given to fully_shard; call fully_shard on it"
        )
    return state


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method run as `forward` does: with full parameters. Does nothing if not sharded."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise UsageError(f"{type(module)} does not have a method {method_name}")
    method, state = getattr(module, method_name), own_state(module)

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, runs = state.enter(self, args, kwargs)
        try:
            output = state.cast_output(method(*args, **kwargs))
        except BaseException:
            state.abort()
            raise
        return state.leave(self, runs, output)

    setattr(module, method_name, MethodType(run, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several models, such as the stages of a pipeline, work on the same streams."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise UsageError(f"share_comm_ctx expects sharded modules, got {type(module)}")
    if not modules:
        return
    states = [own_state(module) for module in modules]
    first = states[0]
    shared = first.context.streams if first.context is not None else None
    shared = shared or first.streams or Streams(first.device)
    for state in states:
        state.streams = shared
        if state.context is not None and state.context.units:
            state.context.streams = shared
            for unit in state.context.units:
                unit.use(shared)


def _states(module: object, recurse: bool) -> Iterator[ModuleState]:
    assert isinstance(module, nn.Module)
    seen: set[int] = set()
    for child in module.modules() if recurse else (module,):
        state = state_of(child)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def _set(module: object, recurse: bool, **changes: Any) -> None:
    """Replace the options of a module's units, and of those below it."""
    own_state(module)
    for state in _states(module, recurse):
        for unit in state.units:
            unit.options = replace(unit.options, **changes)


def _ready(module: object, state: ModuleState) -> tuple[Unit, ...]:
    """A module's units, when they can be gathered; before the first forward each stands alone."""
    if state.context is None:
        assert isinstance(module, nn.Module)
        for unit in state.used:
            unit.prepare_alone()
    return state.used


def _steps_of(modules: object) -> tuple[UnitStep, ...]:
    if not isinstance(modules, Sequence):
        raise UsageError(f"expected a list of sharded modules, got {modules!r}")
    steps: list[UnitStep] = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise UsageError(f"expected sharded modules, got {type(module)}: {module}")
        steps.extend(unit.step for unit in own_state(module).units)
    return tuple(steps)


def _refuse_several(module: object, what: str) -> None:
    if len(own_state(module).units) > 1:
        raise UsageError(
            f"{what} is not supported on a module whose parameters are several units, as those of "
            "several meshes are, and DTensors beside a layout other than Even: it would not be "
            "clear for which"
        )


def _refuse_custom(unit: Unit, what: str) -> None:
    for given in (unit.options.all_gather, unit.options.reduce_scatter):
        if given is not None and not isinstance(given, (GroupAllGather, GroupReduceScatter)):
            raise AssertionError(
                f"cannot call {what} when a collective is custom: {type(given).__name__}"
            )


def _second_group(unit: Unit, made: dict[tuple[int, ...], dist.ProcessGroup]) -> dist.ProcessGroup:
    """One more process group of the same ranks; one for all units that share them."""
    if not isinstance(unit.mesh_info, FSDPMeshInfo):
        raise AssertionError("a mesh that only replicates has no reduce-scatter")
    ranks = tuple(dist.get_process_group_ranks(unit.mesh_info.shard_process_group))
    if ranks not in made:
        existing = unit.options.reduce_group
        new = functools.partial(dist.new_group, list(ranks), use_local_synchronization=True)
        made[ranks] = existing or cast(dist.ProcessGroup, new(group_desc="shoal_reduce_scatter"))
    return made[ranks]
