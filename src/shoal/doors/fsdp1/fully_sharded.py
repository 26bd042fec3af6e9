"""`FullyShardedDataParallel`: a module around a module, whose parameters are one unit."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from shoal._torch import autograd, checkpoints, wrapping
from shoal.doors.fsdp1.comm_hook import CommHooks
from shoal.doors.fsdp1.gradients import Clipping
from shoal.doors.fsdp1.optim_state_dict import OptimStates
from shoal.doors.fsdp1.parameter_names import NamedMember, entries_of, named_members
from shoal.doors.fsdp1.parameters import PlainWrapping, UserParameter, flatten
from shoal.doors.fsdp1.precision import FULL_PRECISION_IN_EVAL, Buffers, keep_low_grads, policy_of
from shoal.doors.fsdp1.preparation import (
    check_unreplicated,
    device_of,
    ignored_of,
    own_modules,
    prepared,
)
from shoal.doors.fsdp1.root import begin, ready
from shoal.doors.fsdp1.state_dict import StateDicts
from shoal.doors.fsdp1.strategy import Groups, Placing, place
from shoal.doors.fsdp1.tensor_parallel import spec_of
from shoal.doors.fsdp1.unit import WrappedUnit
from shoal.doors.fsdp1.wrapper import wrappers_below
from shoal.errors import UsageError
from shoal.layout import Flat, ParamSpec
from shoal.optim.matrix_places import note_range
from shoal.runtime.collect import Found, check_borrowed
from shoal.runtime.module_state import ModuleState, state_of
from shoal.runtime.parameter_wrapping import bytes_of
from shoal.runtime.policy import CPUOffloadPolicy, OffloadPolicy, UnitOptions
from shoal.runtime.shards import ParameterSource
from shoal.runtime.unit import Borrowed
from shoal.sharding_wrapper import WRAPPED
from shoal.tensor.packed import Packed


class FullyShardedDataParallel(Clipping, CommHooks, OptimStates, StateDicts):
    """Shards the parameters of a module that no wrapper inside has sharded.

    The arguments are those of torch's class, and mean the same. `limit_all_gathers` and
    `forward_prefetch` are accepted: the engine gathers one unit ahead and no more.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Groups = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        _check_kind("sharding_strategy", sharding_strategy, ShardingStrategy)
        _check_kind("cpu_offload", cpu_offload, CPUOffload)
        _check_kind("backward_prefetch", backward_prefetch, BackwardPrefetch)
        _check_kind("mixed_precision", mixed_precision, MixedPrecision)
        _check_kind("device_mesh", device_mesh, DeviceMesh)
        checkpoints.serve_wrapper(FullyShardedDataParallel)
        _warn_of_containers(module)
        check_unreplicated(module)
        ignored = ignored_of(module, ignored_modules, ignored_states)
        self._ignored_modules, self._ignored_params = ignored
        device = device_of(module, self._ignored_params, device_id)
        wraps = auto_wrap_policy is not None
        placing = place(sharding_strategy, process_group, device_mesh, device, wraps_itself=wraps)
        if auto_wrap_policy is not None:
            options = {
                "process_group": None if device_mesh is not None else placing.process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": self._ignored_params,
                "device_mesh": device_mesh,
            }
            self._wrap_inside(module, auto_wrap_policy, options)
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._use_orig_params, self._device_mesh = use_orig_params, device_mesh
        self.sharding_strategy = placing.strategy
        self.compute_device = device
        self.process_group = placing.shard_group
        self._inter_node_pg = placing.replicate_group
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self._use_full_prec_in_eval = os.environ.get(FULL_PRECISION_IN_EVAL, "") == "1"
        casts = (child for child in own_modules(module) if child not in self._ignored_modules)
        self._buffers_cast = Buffers(casts, self.mixed_precision.buffer_dtype)
        found, borrowed = prepared(
            module,
            *ignored,
            device,
            moves=device_id is not None,
            param_init_fn=param_init_fn,
            synchronised_over=placing.every_group if sync_module_states else (),
        )
        self._make_unit(module, found, borrowed, placing)
        setattr(self, WRAPPED, module)

    def _wrap_inside(
        self, module: nn.Module, policy: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        for name, child in module.named_modules():
            if state_of(child) is not None:
                raise ValueError(
                    "FSDP auto wrapping requires modules to not already have FSDP applied but "
                    f"found {name} in\n{module}"
                )
        ignored = self._ignored_modules, self._ignored_params
        wrapping.auto_wrap(module, policy, *ignored, options, FullyShardedDataParallel)

    def _make_unit(
        self,
        module: nn.Module,
        found: Sequence[Found],
        borrowed: Sequence[Borrowed],
        placing: Placing,
    ) -> None:
        _check(found, self._device_mesh)
        device, policy = self.compute_device, policy_of(self.mixed_precision)
        check_borrowed(borrowed, placing.mesh_info, policy)
        offload = OffloadPolicy()
        if self.cpu_offload.offload_params:
            offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        self._unit = None
        if found:
            self._unit = WrappedUnit(
                type(module).__name__,
                self._sources(module, found, placing),
                Flat(spreads=True),
                placing.mesh_info,
                device,
                policy,
                offload,
            )
            self._unit.wrapper = weakref.ref(self)
            if self._flat_members is not None:
                self._flat_members.unit = self._unit
            self._unit.options = UnitOptions(
                halves_division=True,
                prefetches_late=self.backward_prefetch is BackwardPrefetch.BACKWARD_POST,
                backward_prefetch=() if self.backward_prefetch is None else None,
            )
            keep_low_grads(self._unit, self.mixed_precision)
            if self._use_orig_params and placing.strategy is not ShardingStrategy.NO_SHARD:
                self._note_ranges(self._unit)
        units = [] if self._unit is None else [self._unit]
        state = ModuleState([self], units, policy, placing.reshard_after_forward, device, borrowed)
        state.casts_as_root = self.mixed_precision.cast_root_forward_inputs

    def _note_ranges(self, unit: WrappedUnit) -> None:
        """Tell optimizers that look across elements what their parameters are ranges of."""
        assert unit.transport is not None
        for index, member in enumerate(unit.shards.members):
            if type(member.sharded) is nn.Parameter:
                place = Packed(
                    packing=unit.shards.packing,
                    index=index,
                    group=unit.transport.group,
                    rank=unit.rank,
                )
                note_range(member.sharded, place)

    def _sources(
        self, module: nn.Module, found: Sequence[Found], placing: Placing
    ) -> list[ParameterSource]:
        is_whole = placing.strategy is ShardingStrategy.NO_SHARD
        if self._use_orig_params:
            self._user_parameters = [UserParameter.of(item) for item in found]
        else:
            flat, self._flat_members = flatten(found, _innermost(module))
            self._user_parameters, found = self._flat_members.members, [flat]
        return [
            ParameterSource(
                spec=ParamSpec.of(item.name, bytes_of(item.parameter)),
                parameter=item.parameter,
                homes=item.homes,
                wrapping=PlainWrapping(
                    shape=bytes_of(item.parameter).shape if is_whole else None,
                    before=spec_of(item.parameter),
                    is_flat=not self._use_orig_params,
                ),
            )
            for item in found
        ]

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without what recomputes or offloads its activations."""
        return _innermost(self._modules[WRAPPED])

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of this wrapper for optimizers: the flat one, or the original ones."""
        return [] if self._unit is None else list(self._unit.sharded_parameters())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self._modules.get(WRAPPED)
            if wrapped is None:  # not yet
                raise
            return getattr(wrapped, name)

    def __getitem__(self, key: int) -> Any:
        return self._modules[WRAPPED][key]  # pyright: ignore

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with full parameters."""
        wrapped = self._modules[WRAPPED]
        assert wrapped is not None
        if self._is_summoned:
            self._give_up_load()
            if self._is_summoned:  # by the user: there is nothing to gather
                return wrapped(*args, **kwargs)
        state = begin(self)
        args, kwargs, runs = state.enter(self, args, kwargs)
        try:
            if not self._have_run:
                self._have_run = True
                if not self._is_in_full_precision:
                    self._buffers_cast.cast()
            units = [unit for unit in state.used if isinstance(unit, WrappedUnit)]
            for unit in units:
                unit.show()
            output = wrapped(*args, **kwargs)
            for unit in units:
                output = unit.apart(output)
        except BaseException:
            state.abort()
            raise
        output = state.leave(self, runs, output)
        if state.is_root and state.context is not None and not autograd.inside_backward():
            for unit in state.context.units:
                if isinstance(unit, WrappedUnit):
                    unit.show_shards()
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients that optimizers see, also where a step that raised left full ones."""
        super().zero_grad(set_to_none)
        for one in wrappers_below(self):
            if one._unit is not None:
                one._unit.gradients.zero(set_to_none=set_to_none)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in a module, itself included; those that no other is around, if asked."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        inside = {below for one in found for below in one.modules() if below is not one}
        return [one for one in found if one not in inside]

    @staticmethod
    def _wrapped_parameters(model: nn.Module) -> Sequence[NamedMember]:
        """See `ShardingWrapper`."""
        return [*named_members(model)]

    @staticmethod
    def _parameter_names(model: nn.Module) -> dict[torch.Tensor, tuple[str, ...]]:
        """See `ShardingWrapper`."""
        return {parameter: entry.names for parameter, entry in entries_of(model).items()}

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one; the first that is asked or runs is it."""
        return ready(self).is_root

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients to themselves until a backward outside of the block."""
        if not ready(self).is_root:
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        units = [one._unit for one in self.fsdp_modules(self) if one._unit is not None]
        before = [unit.options for unit in units]
        for unit in units:
            unit.options = replace(unit.options, reduces=False)
        try:
            yield
        finally:
            for unit, options in zip(units, before, strict=True):
                unit.options = replace(unit.options, reduces=options.reduces)


def _innermost(module: nn.Module | None) -> nn.Module:
    """The module itself, or the one whose activations it recomputes or offloads."""
    if isinstance(module, wrapping.ActivationWrapper):
        module = getattr(module, wrapping.CHECKPOINT_PREFIX.rstrip("."))
    assert isinstance(module, nn.Module)
    return module


def _warn_of_containers(module: nn.Module) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            "FSDP will not all-gather parameters for containers that do not implement forward: "
            f"{module}",
            stacklevel=3,
        )


def _check(found: Sequence[Found], mesh: DeviceMesh | None) -> None:
    for item in found:
        if spec_of(item.parameter) is not None and mesh is None:
            raise UsageError(
                f"parameter {item.name!r} is a DTensor, so the wrapper must know its own axis of "
                "the same mesh: pass device_mesh=mesh[...] instead of a process group"
            )


def _check_kind(name: str, given: object, kind: type) -> None:
    """Refuse what is not of a class, such as `fully_shard`'s policies, before anything changes."""
    if given is not None and not isinstance(given, kind):
        raise TypeError(
            f"{name} of FullyShardedDataParallel must be a {kind.__name__}, got {given!r} of type "
            f"{type(given).__name__}"
        )
