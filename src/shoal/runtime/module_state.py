"""Where the engine stands around a module's call, and what it knows of that module.

before the call     → full parameters, cast inputs, a hook on the inputs
after the call      → hooks on the outputs, free
output hook         → full parameters again, when backward reaches the module
input hook          → reduce, free, when backward has left it
state-dict pre-hook → shards
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.rnn import PackedSequence

from shoal._torch import autograd, dynamo
from shoal.errors import InvariantError, UsageError
from shoal.runtime.context import Context
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.runtime.rank_guard import check_ranks_agree
from shoal.runtime.streams import Streams
from shoal.runtime.unit import Borrowed, Unit
from shoal.step.phase import Phase
from shoal.step.unit_step import ModuleRun

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


class Reach:
    """The tensors of a value, as far as it can be looked into. Made twice per unit and step."""

    __slots__ = ("differentiable", "is_opaque", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], is_opaque: bool) -> None:
        self.tensors = tensors
        self.is_opaque = is_opaque
        """Whether something in it may hold tensors that were not found."""
        self.differentiable: list[torch.Tensor] = []
        """Those that a backward comes through: not leaves, and not without gradient mode."""
        if torch.is_grad_enabled():
            self.differentiable = [t for t in tensors if t.requires_grad and not t.is_leaf]

    @classmethod
    def of(cls, value: Any) -> Reach:
        """Look into containers and dataclasses."""
        if isinstance(value, torch.Tensor):
            return cls((value,), False)
        leaves = list(_leaves(value))
        return cls(
            [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
            any(not isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves),
        )

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reach:
        """Look into the arguments of a call, of which most have one tensor."""
        if len(args) == 1 and not kwargs:
            return cls.of(args[0])
        return cls.of((args, kwargs))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replace the tensors of a value, in whatever it can be looked into; the rest stays."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        made: dict[int, Any] = {}
        for field in fields(value):
            old = getattr(value, field.name)
            made[id(old)] = map_tensors(function, old)
            object.__setattr__(result, field.name, made[id(old)])
        if isinstance(value, dict):  # outputs of Transformers are both
            for key, old in value.items():
                new = made[id(old)] if id(old) in made else map_tensors(function, old)
                cast(Any, result)[key] = new
        return result
    if isinstance(value, PackedSequence):
        return value._replace(data=function(value.data))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        # Past its constructor, which may take something else.
        return cast(Any, value)._make(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if type(value) is dict:
            return items
        result = copy.copy(value)
        result.update(items)
        return result
    if isinstance(value, list) and type(value) is not list:
        result = copy.copy(value)  # with its attributes
        result[:] = [map_tensors(function, item) for item in value]
        return result
    if isinstance(value, (list, tuple, set)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple, Set)):
        for item in value:
            yield from _leaves(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


_STATE = "_shoal_state"

Runs = list[tuple[Unit, ModuleRun]]
"""What one call of a module has begun: a run for each of its units."""


LOWERINGS: dict[str, Callable[[ModuleState], None]] = {}
"""Compilers that take units into their graphs: by the name of the backend what prepares a module's
units for it. Compilers put themselves in."""


class ModuleState:
    """What one call of `fully_shard` knows of its modules."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        units: Sequence[Unit],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        device: torch.device,
        borrowed: Sequence[Borrowed] = (),
    ) -> None:
        self.modules = tuple(modules)
        self.units = tuple(units)
        self.borrowed = tuple(borrowed)
        """The parameters of other units that the modules use too (tied weights)."""
        self.used = tuple(dict.fromkeys((*units, *(one.unit for one in borrowed))))
        """The units that are gathered when the modules run: their own, and those borrowed from."""
        self.policy = policy
        self.device = device
        self.streams: Streams | None = None
        """Those of another model, when they are shared."""
        self.context: Context | None = None
        self.is_root = False
        self.casts_as_root = False
        """Whether inputs are cast if this is the root, whatever the policy says."""
        self._to_run: set[nn.Module] = set()
        self._depth = 0
        self.graph_names: dict[nn.Module, list[tuple[tuple[str, int], ...]]] = {}
        """For each module the names of its parameters, unit by unit."""
        self.is_captured = _capture_check(weakref.ref(self))
        """Whether a graph that is being traced takes the units in; asked while it is traced."""
        for module in modules:
            # Past nn.Module's own bookkeeping, and out of its state.
            vars(module)[_STATE] = self
            if policy.output_dtype is not None:
                # A hook, so that the user's own hooks, which come later, see what callers see.
                module.register_forward_hook(lambda _, __, output: self.cast_output(output))
        for unit in self.units:
            unit.options = replace(unit.options, reshards_after_forward=reshard_after_forward)
            self._register_state_dict_hooks(
                unit, (home.module for member in unit.shards.members for home in member.homes)
            )
        for one in self.borrowed:
            one.unit.share(one.member, one.homes)
            self._register_state_dict_hooks(one.unit, (home.module for home in one.homes))

    def _register_state_dict_hooks(self, unit: Unit, modules: Iterable[nn.Module]) -> None:
        """Show state dicts the shards, and gathered parameters in `full_parameters` alone."""

        def reshard(*_: object) -> None:
            if not unit.step.is_lent:
                unit.reshard()

        def follow(*_: object) -> None:
            unit.retrace_if_moved()

        for module in set(modules):
            module.register_state_dict_pre_hook(reshard)
            module.register_load_state_dict_pre_hook(reshard)
            module.register_load_state_dict_post_hook(follow)

    def forget_context(self) -> None:
        """Be part of no model, until one of its modules is called again."""
        if self.context is not None:
            self.context.disown()
        self.context = None
        self.is_root = False
        self._depth = 0
        self._to_run.clear()

    @dynamo.unwrapped_by_dynamo
    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Runs | None]:
        """The module is about to run: give it parameters and inputs to run with.

        Returns no runs where it is a function of tensors for now, which the engine lets alone: in a
        `full_parameters` block, transformed by `torch.func`, or with parameters of the caller's.
        """
        is_transformed = autograd.inside_function_transform()
        if self._is_lent() and (is_transformed or any(u.is_substituted for u in self.used)):
            self._depth += 1
            return (*self._cast_inputs(args, kwargs), None)
        if is_transformed and autograd.inside_gradient_transform():
            raise NotImplementedError(
                "shoal: torch.func transforms that take gradients (grad, vjp, jacrev) see no "
                "backward of a sharded module. Transform it while its parameters are full: with "
                "full_parameters(model): torch.func.grad(...)"
            )
        self._depth += 1  # a module may call itself
        try:
            if is_transformed:
                return self._enter_transformed(module, args, kwargs)
            return self._enter(self.context or context_of(module, self), args, kwargs)
        except BaseException:
            self.abort()
            raise

    def _enter(
        self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Runs]:
        if self.is_root and self._depth == 1:
            context.begin_forward()
            args, kwargs = self._to_device(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        return args, kwargs, self._begin_runs(context, args, kwargs)

    def _enter_transformed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Runs]:
        """Run in `vmap` or `jvp`: they transform what the module does, not what the engine does.

        Inputs of a transform do not say when backward has left the module, so that a run is open
        until the end of backward.
        """
        with autograd.outside_function_transforms():
            context = self.context or context_of(module, self)
            is_outermost = self.is_root and self._depth == 1
            if is_outermost:
                context.begin_forward()
            runs = self._begin_runs(context, (), {})
        if is_outermost:
            args, kwargs = self._to_device(args, kwargs)
        return (*self._cast_inputs(args, kwargs), runs)

    def _begin_runs(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runs:
        if not self.used:
            return []
        if len(self.modules) > 1 and not self._to_run:
            self._to_run.update(self.modules)
        inputs = None
        runs: Runs = []
        for unit in self.used:
            goes_on = unit.phase is Phase.FORWARD
            context.enter_forward(unit, self)
            if unit.phase is Phase.FORWARD:
                inputs = inputs or Reach.of_call(args, kwargs)
                borrows = unit not in self.units
                run = _begin_run(context, unit, inputs, is_borrowed=borrows, goes_on=goes_on)
                runs.append((unit, run))
        return runs

    def enter_graph(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, torch.Tensor]]:
        """Inputs for a module in a graph, and full parameters by their names in it."""
        args, kwargs = self._cast_inputs(args, kwargs)
        tensors: dict[str, torch.Tensor] = {}
        for at, unit in enumerate(self.used):
            in_graph = unit.in_graph
            # Asked so that they become guards: when shards have another dtype, or somebody sets
            # other options, the graph is traced again.
            assert unit.shards.num_recaptures >= 0
            assert in_graph is not None
            options = unit.options
            assert options.all_gather is None
            assert options.reshards_after_forward in (None, True, False)
            assert options.prefetch_depth >= 0
            if unit.reduces_in_graph:
                fulls = in_graph.gather(in_graph.leaf)
            else:
                fulls = in_graph.gather(in_graph.leaf, *in_graph.full_leaves)
            for name, index in self.graph_names[module][at]:
                tensors[name] = fulls[index]
        return args, kwargs, tensors

    @dynamo.unwrapped_by_dynamo
    def leave(self, module: nn.Module, runs: Runs | None, output: Any) -> Any:
        """The module has run: arrange for its backward, and let go of its parameters."""
        if runs is None:
            self._depth -= 1
            return output
        context = self.context
        assert context is not None
        is_complete = self._ran(module)
        self._depth -= 1
        if autograd.inside_function_transform():
            return self._leave_transformed(context, runs, output, is_complete=is_complete)
        reach = Reach.of(output)
        # What cannot be looked into may hold a loss: better to hold the unit in vain.
        is_reached = bool(reach.differentiable)
        is_expected = is_reached or (reach.is_opaque and torch.is_grad_enabled())
        if runs:
            _check_no_parameters(runs, reach.tensors)
            if reach.differentiable:
                boundary = Boundary(context, runs)
                for tensor in reach.differentiable:
                    boundary.stand_at(tensor)
        has_run = bool(runs) and is_complete
        self._end(context, has_run=has_run, is_reached=is_reached, is_expected=is_expected)
        return output

    def _leave_transformed(
        self, context: Context, runs: Runs, output: Any, *, is_complete: bool
    ) -> Any:
        """The end of a run in `vmap` or `jvp`: backward may come by any output, or its tangent."""
        is_expected = torch.is_grad_enabled()
        boundary = Boundary(context, runs)

        def hook(tensor: torch.Tensor) -> torch.Tensor:
            if not autograd.is_transformed(tensor):
                _check_no_parameters(runs, (tensor,))
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            return autograd.call_in_backward(boundary, tensor)

        if runs and is_expected:
            output = map_tensors(hook, output)
        with autograd.outside_function_transforms():
            has_run = bool(runs) and is_complete
            self._end(context, has_run=has_run, is_reached=is_expected, is_expected=is_expected)
        return output

    def _end(self, context: Context, *, has_run: bool, is_reached: bool, is_expected: bool) -> None:
        if self._depth:
            return
        if has_run:
            for unit in self.used:
                context.leave_forward(
                    unit, is_reached=is_reached, is_expected=is_expected, user=self
                )
        if self.is_root:
            context.end_forward(expects_backward=is_expected)

    def _is_lent(self) -> bool:
        """Whether a `full_parameters` block has all that the modules compute with."""
        return bool(self.used) and all(unit.step.is_lent for unit in self.used)

    def abort(self) -> None:
        """The module raised: it runs no more, whatever it had begun."""
        self._depth -= 1
        if self._depth == 0:
            self._to_run.clear()
            if self.context is not None:
                with autograd.outside_function_transforms():
                    self.context.abort_forward(self.used, is_root=self.is_root, user=self)

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.policy.param_dtype
        if dtype is None:
            return args, kwargs
        if not (self.policy.cast_forward_inputs or (self.is_root and self.casts_as_root)):
            return args, kwargs
        # Nearly always there is one argument, which the module before has cast.
        if len(args) != 1 or not isinstance(args[0], torch.Tensor) or args[0].dtype is not dtype:
            args = tuple(_cast(arg, dtype) for arg in args)
        return args, _cast(kwargs, dtype) if kwargs else kwargs

    def cast_output(self, output: Any) -> Any:
        """What the module returns, in the dtype its policy asks for."""
        dtype = self.policy.output_dtype
        return output if dtype is None else _cast(output, dtype)

    def _ran(self, module: nn.Module) -> bool:
        """Whether all modules that share the units have run."""
        if len(self.modules) == 1:
            return True
        self._to_run.discard(module)
        return not self._to_run

    def _to_device(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.device.type == "cpu":
            return args, kwargs

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device == self.device else tensor.to(self.device)

        return map_tensors(move, (args, kwargs))


class Boundary:
    """Where backward goes from one module to the one before: what it leaves, then what it enters.

    The output of a module is often the input of the next: then one hook serves both. If both are
    modules of one unit, and forward kept it in between, backward does too: it is entered before it
    is left, or it would be reduced and freed, to be gathered again at once.
    """

    __slots__ = ("_context", "_entered", "_left", "_stays", "_task")

    def __init__(self, context: Context, entered: Runs) -> None:
        self._context = context
        self._entered = entered
        self._left: Runs = []
        self._stays = False
        self._task = -1

    def stand_at(self, tensor: torch.Tensor) -> None:
        """Be told when the gradient of a tensor is there."""
        autograd.hook_gradient(tensor, self)
        node = autograd.base_node(tensor)
        if node is not None:
            # An in-place operation on a view drops a hook of the view; its base's stays.
            node.register_prehook(self)
            return
        self._context.boundary = (weakref.ref(tensor), self)

    def also_leave(self, unit: Unit, run: ModuleRun, *, goes_on: bool) -> None:
        """When the gradient is there, backward has also left this run."""
        self._left.append((unit, run))
        self._stays |= goes_on and any(entered is unit for entered, _ in self._entered)

    @dynamo.unwrapped_by_dynamo
    def __call__(self, _: object) -> None:
        """The gradient is there; of several hooks in one backward the first counts."""
        task = autograd.backward_task()
        if task == self._task:
            return
        self._task = task
        if self._stays:
            self._enter()
        for unit, run in self._left:
            self._context.leave_backward(unit, run)
        if not self._stays:
            self._enter()

    def _enter(self) -> None:
        for unit, run in self._entered:
            self._context.enter_backward(unit, run)


def _check_no_parameters(runs: Runs, outputs: Sequence[torch.Tensor]) -> None:
    """Raise where a module returns memory that is freed with its units."""
    for unit, _ in runs:
        for tensor in outputs:
            if unit.full.holds(tensor):
                raise InvariantError(
                    f"unit {unit.name!r} returned one of its parameters or a view of one, "
                    "whose memory is freed with the unit. Return a copy (.clone()), or use "
                    "the parameter inside."
                )


def state_of(module: nn.Module) -> ModuleState | None:
    """The state that `fully_shard` gave this very module, if it did."""
    return module.__dict__.get(_STATE)


def units_of(model: nn.Module) -> list[Unit]:
    """The units of all sharded modules in a model."""
    found: dict[Unit, None] = {}
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            found.update(dict.fromkeys(state.used))
    return list(found)


def _capture_check(state_ref: weakref.ref[ModuleState]) -> Callable[[], bool]:
    def is_captured() -> bool:
        state = state_ref()
        lower = LOWERINGS.get(dynamo.tracing_backend() or "")
        if state is None or lower is None:
            return False
        context_of(state.modules[0], state)
        lower(state)
        return True

    return dynamo.constant_in_graph(is_captured)


def context_of(module: nn.Module, state: ModuleState) -> Context:
    """The context of the model that a module belongs to; the first to run becomes its root."""
    if state.context is None:
        if len(state.modules) > 1:
            names = ", ".join(type(module).__name__ for module in state.modules)
            raise RuntimeError(
                f"FSDP requires a single root module but got {names}: the first to run was one of "
                "a list given to fully_shard. Call fully_shard on the module that contains them, "
                "too."
            )
        found: dict[ModuleState, str] = {}
        for name, child in module.named_modules():
            below = state_of(child)
            if below is not None:
                found.setdefault(below, name)
        units: list[Unit] = []
        for below, name in found.items():
            below.is_root = below is state
            for unit in below.units:
                unit.name = name or "root"
                units.append(unit)
        for below, name in found.items():
            _check_lenders(below, name, units)
        check_ranks_agree(units)
        context = Context(units, state.used, state.streams)
        for below in found:
            below.context = context
    assert state.context is not None
    return state.context


def _check_lenders(state: ModuleState, name: str, units: Sequence[Unit]) -> None:
    """Refuse a module whose tied parameters belong to units outside of what runs."""
    for one in state.borrowed:
        if one.unit not in units:
            path = ".".join(part for part in (name, one.name) if part)
            raise UsageError(
                f"parameter {path!r} is tied to {one.unit.qualified(one.member.spec.name)!r}, "
                "which is not below the module that was called first. Call fully_shard on a module "
                "that contains both, and run that one"
            )


def _begin_run(
    context: Context, unit: Unit, inputs: Reach, *, is_borrowed: bool, goes_on: bool
) -> ModuleRun:
    """Arrange to be told when backward has left the module.

    `goes_on` says that another module of the unit has run before, and the unit was full since.
    """
    tensors = inputs.differentiable
    run = ModuleRun(unit.gathered_version, unit.step.position, is_borrowed=is_borrowed)
    if context.machine.is_in_turn and not autograd.inside_backward():
        unit.step.runs.add(run)
    # Without such inputs a run counts as open until the end of backward. So it does with leaves
    # alone: a leaf's own hook would come before nodes that do not depend on it, and pile up on a
    # tensor that outlives the step.
    if not tensors:
        return run
    if len(tensors) == 1:
        known = context.boundary
        if known is not None and known[0]() is tensors[0]:
            known[1].also_leave(unit, run, goes_on=goes_on)
            return run

    def leave(_: object) -> None:
        context.leave_backward(unit, run)

    if len(tensors) == 1:
        autograd.hook_gradient(tensors[0], leave)
    else:
        register_multi_grad_hook(tensors, leave)
    return run


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of nested containers; give the rest through."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return map_tensors(cast, values)
