"""How a call of a sharded module comes to the engine, or to a graph that has the engine in it.

model(x)                        → gather, the module, free
model(x), compiled by shoal     → one graph of all three
model(x), compiled by others    → gather, a graph of the module, free
block(x) in a model's forward   → gather, a graph of the block, free: gathers of other units
                                  stay beside it, as they could not with each in its own graph
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from shoal._torch import dynamo, traces
from shoal.runtime.module_state import ModuleState

_COMPILED = "_shoal_compiled"
"""Where a module has what its calls were compiled to, gathers among them."""


class ModuleCall:
    """Stands before a module's own class: its calls."""

    _has_own_call = False
    """Whether the module's own class calls modules in another way than `nn.Module`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Look at the module's own class, once it is known."""
        super().__init_subclass__(**kwargs)
        behind = cls.__mro__[cls.__mro__.index(ModuleCall) + 1 :]
        calls = [vars(one)["__call__"] for one in behind if "__call__" in vars(one)]
        cls._has_own_call = calls[:1] != [nn.Module.__call__]

    @dynamo.stepped_over_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, its hooks and whatever it was compiled to, with full parameters."""
        if torch.compiler.is_compiling():
            return self._run(*args, **kwargs)
        state: ModuleState = self.__dict__["_shoal_state"]
        if state.is_root or state.context is None:
            compiled = self.__dict__.get(_COMPILED)
            if compiled is not None:
                return compiled(*args, **kwargs)
            if dynamo.compiling_backend() == "shoal":
                return self._run_in_graph(*args, **kwargs)
        return self._run(*args, **kwargs)

    @dynamo.stepped_over_by_dynamo
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Whoever has kept `nn.Module`'s own call of the module comes here, past `__call__`.

        As `torch.compile(model)` does, if `fully_shard(model)` comes after it.
        """
        if self._has_own_call:
            return super()._call_impl(*args, **kwargs)  # pyright: ignore
        return ModuleCall.__call__(self, *args, **kwargs)

    def _run_in_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Compiled: what it calls is traced into one graph."""
        return self._run(*args, **kwargs)

    @dynamo.stepped_over_by_dynamo
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        state: ModuleState = self.__dict__["_shoal_state"]
        if torch.compiler.is_compiling() and _is_captured(state):
            args, kwargs, tensors = state.enter_graph(self, args, kwargs)  # pyright: ignore[reportArgumentType]
            if _is_kept_full():
                _kept_full[-1].enter_context(traces.parameters_replaced(self, tensors))  # pyright: ignore[reportArgumentType]
                return self._call_module(*args, **kwargs)
            with traces.parameters_replaced(self, tensors):  # pyright: ignore[reportArgumentType]
                return self._call_module(*args, **kwargs)
        args, kwargs, runs = state.enter(self, args, kwargs)  # pyright: ignore[reportArgumentType]
        try:
            output = self._call_module(*args, **kwargs)
        except BaseException:
            state.abort()
            raise
        return state.leave(self, runs, output)  # pyright: ignore[reportArgumentType]

    @dynamo.stepped_over_by_dynamo
    def _call_module(self, *args: Any, **kwargs: Any) -> Any:
        """What `nn.Module`'s own call does."""
        if self._has_own_call:
            return super().__call__(*args, **kwargs)  # pyright: ignore
        compiled = self._compiled_call_impl  # pyright: ignore
        if compiled is not None and not torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        return super()._call_impl(*args, **kwargs)  # pyright: ignore

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile calls of this module; by shoal's backend together with its gathers.

        A block is compiled without its own: the engine overlaps them with other blocks.
        """
        backend = kwargs.get("backend")
        self.__dict__.pop(_COMPILED, None)
        if getattr(backend, "__name__", backend) == "shoal":
            self.__dict__[_COMPILED] = torch.compile(self._run_in_graph, *args, **kwargs)
        # nn.Module compiles what it finds under this name: not the way to the engine.
        self.__dict__["_call_impl"] = super()._call_impl  # pyright: ignore
        try:
            super().compile(*args, **kwargs)  # pyright: ignore
        finally:
            del self.__dict__["_call_impl"]


_kept_full: list[ExitStack] = []


@contextmanager
def kept_full() -> Iterator[None]:
    """Leave captured modules their full parameters until the end of the block.

    A backward that is captured without Dynamo runs checkpointed parts of modules again by calling
    them, past the modules' own calls.
    """
    with ExitStack() as stack:
        _kept_full.append(stack)
        try:
            yield
        finally:
            _kept_full.pop()


@dynamo.constant_in_graph
def _is_kept_full() -> bool:
    return bool(_kept_full)


def _is_captured(state: ModuleState) -> bool:
    # Who keeps parameters full has lowered all units before. To look for their shards now finds
    # full parameters in their places: of a module that has run before, or of one with tied weights.
    if _is_kept_full() and all(unit.in_graph is not None for unit in state.used):
        return True
    return state.is_captured()


def swap_class(module: nn.Module, manager: type, prefix: str, refusal: str) -> None:
    """Make a module an instance of `manager` and of its own class.

    Copies are refused with the given words, in the class itself, so that it wins over a module's
    own: a copy would share the state.
    """
    module.__class__ = _class_of(type(module), manager, prefix, refusal)


@functools.cache
def _class_of(cls: type[nn.Module], manager: type, prefix: str, refusal: str) -> type[nn.Module]:
    def refuse_copy(self: nn.Module, memo: dict[int, Any]) -> NoReturn:
        raise AssertionError(refusal)  # because torch's classes answer with one

    return type(f"{prefix}{cls.__name__}", (manager, cls), {"__deepcopy__": refuse_copy})
