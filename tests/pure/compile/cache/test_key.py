"""Keys differ when results may, are equal otherwise, and are refused where nothing can tell."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shoal  # noqa: F401  (gives the backend its name where no entry point did)
from shoal.compile.cache.errors import NotExactError
from shoal.compile.cache.key import key_of
from shoal.compile.options import BackendOptions


def keys(fn: Callable[..., Any], *args: Any, options: BackendOptions | None = None) -> list[str]:
    """The keys of the graphs that Dynamo makes of a function."""
    found: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        try:
            found.append(key_of(module, inputs, [], options or BackendOptions()))
        except NotExactError as error:
            found.append(error)
        return module

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*args)
    return found


def key(fn: Callable[..., Any], *args: Any, options: BackendOptions | None = None) -> str:
    (found,) = keys(fn, *args, options=options)
    if isinstance(found, NotExactError):
        raise found
    return found


def ones() -> Tensor:
    return torch.ones(4, 6, requires_grad=True)


def program(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


def test_names_and_values_make_no_difference() -> None:
    def renamed(anything: Tensor) -> Tensor:
        another = torch.sin(anything)
        return another * 2

    assert key(program, ones()) == key(renamed, torch.zeros(4, 6, requires_grad=True))
    assert key(program, ones()) == key(
        program, ones(), options=BackendOptions(logs="all", cache=False)
    )
    assert key(program, ones()) == key(
        program, ones(), options=BackendOptions(passes=lambda one: one)
    )


def chained(x: Tensor) -> Tensor:
    return torch.sin(x) * 3


def as_float(x: Tensor) -> Tensor:
    return torch.sin(x) * 2.0


def other_order(x: Tensor) -> Tensor:
    return 2 * torch.sin(x)


@pytest.mark.parametrize(
    "different",
    [
        lambda: key(chained, ones()),
        lambda: key(as_float, ones()),
        lambda: key(other_order, ones()),
        lambda: key(lambda x: torch.sin(x).mul(2), ones()),
        lambda: key(lambda x: torch.cos(x) * 2, ones()),
        lambda: key(program, torch.ones(4, 6)),
        lambda: key(program, ones() * 1),
        lambda: key(program, torch.ones(4, 6, dtype=torch.float64, requires_grad=True)),
        lambda: key(program, torch.ones(6, 4, requires_grad=True)),
        lambda: key(program, torch.ones(6, 4).t().requires_grad_()),
        lambda: key(program, torch.ones(5, 6)[1:].requires_grad_()),
        lambda: key(program, torch.nn.Parameter(torch.ones(4, 6))),
        lambda: key(program, ones(), options=BackendOptions(partition="default")),
        lambda: key(program, ones(), options=BackendOptions(memory_budget=0.5)),
        lambda: key(program, ones(), options=BackendOptions(inner="inductor")),
    ],
)
def test_what_a_result_depends_on_makes_a_difference(different: Callable[[], str]) -> None:
    assert key(program, ones()) != different()


def test_views_of_one_tensor_differ_from_tensors() -> None:
    def pair(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(1) + y

    whole = torch.ones(8)
    apart = key(pair, torch.ones(8)[:4], torch.ones(8)[4:])
    together = key(pair, whole[:4], whole[4:])
    detached = key(pair, whole[:4], whole.detach()[4:])
    assert len({apart, together, detached}) == 3


@pytest.mark.parametrize(
    "state",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
        lambda: _Set("deterministic"),
        lambda: _Set("dtype"),
        lambda: _Set("precision"),
    ],
)
def test_the_state_of_the_process_makes_a_difference(state: Callable[[], Any]) -> None:
    def plain(x: Tensor) -> Tensor:
        return x.sin() * 2

    x = torch.ones(4, 6)
    before = key(plain, x)
    with state():
        assert key(plain, x) != before
    assert key(plain, x) == before


class _Set:
    """Changes a global setting for a while."""

    setters: dict[str, tuple[Callable[[Any], None], Any, Any]] = {
        "deterministic": (torch.use_deterministic_algorithms, True, False),
        "dtype": (torch.set_default_dtype, torch.float64, torch.float32),
        "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    }

    def __init__(self, name: str) -> None:
        self.setter, self.value, self.before = self.setters[name]

    def __enter__(self) -> None:
        self.setter(self.value)

    def __exit__(self, *_: object) -> None:
        self.setter(self.before)


class Anything(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@torch._dynamo.allow_in_graph
def own_function(x: Tensor) -> Tensor:
    return x.sin()


@torch.library.custom_op("shoal_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("fn", "args", "why"),
    [
        (lambda x: own_function(x), [torch.ones(2)], "no function of torch's or Python's own"),
        (lambda x: doubled(x), [torch.ones(2)], "code that no key can hold"),
        (lambda x: x * 2, [torch.ones(2).as_subclass(Subclass)], "class Subclass"),
        (
            lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
            [torch.ones(2)],
            "higher-order operator cond",
        ),
    ],
)
def test_what_cannot_be_described_has_no_key(
    fn: Callable[..., Any], args: list[Any], why: str
) -> None:
    with pytest.raises(NotExactError, match=why):
        key(fn, *args)


def test_sparse_tensors_have_no_key() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.sin(x))
    with pytest.raises(NotExactError, match="layout"):
        key_of(graph, [torch.ones(2).to_sparse()], [], BackendOptions())


def test_sizes_that_are_not_known_have_no_key() -> None:
    x = torch.ones(4, 6)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(NotExactError, match="guards would be lost"):
        key(program, x)


def test_what_intercepts_operators_has_no_key() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.sin(x))
    for around, why in (
        (nullcontext(), None),
        (Anything(), "mode Anything"),
        (torch.device("meta"), "mode DeviceContext"),
        (torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), "hooks on saved"),
    ):
        x = torch.ones(2)
        with around:
            if why is None:
                key_of(graph, [x], [], BackendOptions())
            else:
                with pytest.raises(NotExactError, match=why):
                    key_of(graph, [x], [], BackendOptions())
