"""Running a test's body on ranks."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from harness import modules, verdict
from harness.messages import Call
from harness.pools import borrow_pool
from harness.reset import present_filters
from harness.setup import GLOO, NCCL, Setup

TIMEOUT_S = 60.0
_WORLD_SIZE = "world_size"


def on_ranks(
    world_size: int,
    function: Callable[..., Any],
    /,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    setup: Setup = GLOO,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run a module-level function on every rank of a pool; return the results in rank order.

    `fresh` runs it on new processes that are ended afterwards, for what changes a whole process.
    """
    if world_size < 1:
        raise ValueError(f"expected at least one rank, got world_size={world_size}")
    with borrow_pool(world_size, setup, fresh=fresh) as pool:
        return verdict.values(pool.run(_call(function, args, kwargs), timeout_s))


def ranks(
    *world_sizes: int, timeout_s: float = TIMEOUT_S, setup: Setup = GLOO, fresh: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test's body run on every rank; several world sizes make several tests.

    The body may take `world_size`, besides parameters and fixtures that can be pickled. With
    hypothesis, `@given` stands above `@ranks`, so that all ranks get the same example.
    """
    if not world_sizes or min(world_sizes) < 1:
        raise ValueError(
            f"expected world sizes of one or more, as in @ranks(2, 4), got {world_sizes}"
        )

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        if hasattr(body, "hypothesis"):
            raise TypeError(f"{body.__qualname__}: put @given above @ranks, not below it")
        modules.register(body)
        signature = inspect.signature(body)
        wants_world_size = _WORLD_SIZE in signature.parameters

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            world_size = kwargs.pop(_WORLD_SIZE, world_sizes[0])
            if wants_world_size:
                kwargs[_WORLD_SIZE] = world_size
            with borrow_pool(world_size, setup, fresh=fresh) as pool:
                verdict.values(pool.run(_call(body, args, kwargs), timeout_s))

        return _as_test(test, signature, world_sizes, timeout_s)

    return decorate


def nccl_ranks(
    *world_sizes: int, timeout_s: float = 120.0, fresh: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Do as `ranks` does, on NCCL ranks that share one GPU."""
    return ranks(*world_sizes, timeout_s=timeout_s, setup=NCCL, fresh=fresh)


def _as_test(
    test: Callable[..., None],
    signature: inspect.Signature,
    world_sizes: tuple[int, ...],
    timeout_s: float,
) -> Callable[..., None]:
    """Show pytest the parameters that it should fill in."""
    parameters = [p for name, p in signature.parameters.items() if name != _WORLD_SIZE]
    if len(world_sizes) > 1:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(_WORLD_SIZE, kind))
        test = pytest.mark.parametrize(
            _WORLD_SIZE, world_sizes, ids=[f"{size}ranks" for size in world_sizes]
        )(test)
    test.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    # pytest-timeout stays behind the pool's own timeout, which alone can show the ranks' stacks.
    return pytest.mark.timeout(timeout_s + 60)(test)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    if "<" in function.__qualname__:
        raise TypeError(
            f"expected a module-level function, which ranks can import, got {function.__qualname__}"
        )
    for name, value in [*enumerate(args), *kwargs.items()]:
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"{function.__qualname__}: argument {name!r} is a {type(value).__name__}, which "
                f"cannot be sent to ranks ({error}); make it on the ranks, or pass plain values"
            ) from None
    return Call(
        module=function.__module__,
        file=getattr(sys.modules[function.__module__], "__file__", None) or "",
        qualname=function.__qualname__,
        payload=pickle.dumps((args, dict(kwargs))),
        environment=dict(os.environ),
        folder=os.getcwd(),
        filters=present_filters(),
    )
