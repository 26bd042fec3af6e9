"""Operations on sharded tensors give what they give on the whole ones, or say that they cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cuts import LAYOUTS, SHAPES, parameters, random_tensors, sharded
from pure.layout.strategies import profile
from shoal.comm.local import run_local
from shoal.errors import UsageError
from shoal.layout import Flat, Layout, Rows, Whole
from shoal.tensor import ShardedTensor

Tensors = list[Any]

ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "scalar": lambda x, y: 2 - x * 3,
    "0-d": lambda x, y: x * torch.tensor(3.0),
    "0-d first": lambda x, y: torch.tensor(3.0) - x,
    "compare": lambda x, y: x > y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "between": lambda x, y: x.clamp(min=y, max=y + 1),
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: x.addcmul(x, y, value=0.5),
    "in place": lambda x, y: x.clone().mul_(2).add_(y, alpha=3).div_(1.5),
    "masked": lambda x, y: x.clone().masked_fill_(y > 0, 7.0),
    "out": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "cast": lambda x, y: x.to(torch.bfloat16) + 1,
    "sqrt": lambda x, y: x.abs().sqrt().neg(),
    "finite": lambda x, y: (x / 0).isfinite(),
    "zeros": lambda x, y: torch.zeros_like(x) + torch.ones_like(y),
    "full": lambda x, y: torch.full_like(x, 3, dtype=torch.int64),
    "fill": lambda x, y: x.clone().fill_(2).add_(y.clone().zero_()),
    "fill from": lambda x, y: x.clone().fill_(torch.tensor(5.0)),
    "copy": lambda x, y: x.clone().copy_(y),
    "copy number": lambda x, y: x.clone().copy_(torch.tensor(4.0)),
}

LISTS: dict[str, Callable[[Tensors, Tensors], Any]] = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=2),
    "sqrt": lambda x, y: torch._foreach_sqrt(torch._foreach_abs(x)),
    "scalars": lambda x, y: torch._foreach_mul(x, [float(i) for i in range(len(x))]),
    "tensor": lambda x, y: torch._foreach_mul(x, torch.tensor(3.0)),
    "addcdiv": lambda x, y: torch._foreach_addcdiv(x, x, y, [0.1] * len(x)),
    "numbers": lambda x, y: torch._foreach_div(x, [torch.tensor(2.0) for _ in x]),
    "list second": lambda x, y: torch._foreach_pow(1.0, x),
    "copy": lambda x, y: in_place(torch._foreach_copy_, x, y),
    "zero": lambda x, y: in_place(torch._foreach_zero_, x),
    "lerp": lambda x, y: in_place(torch._foreach_lerp_, x, y, 0.25),
}


def in_place(function: Callable[..., Any], first: Tensors, *rest: Any) -> Tensors:
    targets = [tensor.clone() for tensor in first]
    function(targets, *rest)
    return targets


def check(result: Any, expected: torch.Tensor) -> None:
    assert isinstance(result, ShardedTensor)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(result.full_tensor(), expected)


@profile(40)
@given(
    layout=st.sampled_from(LAYOUTS),
    world_size=st.integers(1, 4),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
)
def test_elementwise_operations(
    layout: Layout, world_size: int, shapes: list[tuple[int, ...]]
) -> None:
    whole = random_tensors(shapes), random_tensors(shapes, 1)

    def rank() -> None:
        x, y = (sharded(tensors, layout) for tensors in whole)
        for name, compute in ELEMENTWISE.items():
            for index in range(len(shapes)):
                try:
                    check(compute(x[index], y[index]), compute(whole[0][index], whole[1][index]))
                except Exception as error:
                    raise AssertionError(f"{name} of {shapes[index]}") from error
        for name, compute in LISTS.items():
            for result, expected in zip(compute(x, y), compute(*whole), strict=True):
                try:
                    check(result, expected)
                except Exception as error:
                    raise AssertionError(f"list {name}") from error

    run_local(world_size, rank)


def test_lists_with_plain_tensors_among_them() -> None:
    whole = random_tensors([(5, 3), (4,)]), random_tensors([(5, 3), (4,)], 1)

    def rank() -> None:
        first, second = ([whole[i][0], sharded(whole[i], Flat())[1]] for i in (0, 1))
        plain, ours = torch._foreach_add(first, second)
        assert type(plain) is torch.Tensor
        assert torch.equal(plain, whole[0][0] + whole[1][0])
        check(ours, whole[0][1] + whole[1][1])
        norms = torch._foreach_norm(first, 2)
        torch.testing.assert_close(list(norms), list(torch._foreach_norm(whole[0], 2)))
        with pytest.raises(NotImplementedError, match="plain tensor of shape"):
            torch._foreach_add(first, whole[1])

    run_local(2, rank)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "aten.mm.default": lambda x: x @ x,
    "aten.t.default": lambda x: x.t(),
    "aten.view.default": lambda x: x.view(-1),
    "aten.slice.Tensor": lambda x: x[1:],
    "aten.cat.default": lambda x: torch.cat([x, x]),
    "aten._local_scalar_dense.default": lambda x: torch.ops.aten._local_scalar_dense(x),
    "aten.cumsum.default": lambda x: x.cumsum(0),
    "aten.randint_like.default": lambda x: torch.randint_like(x, 3),
    "aten.sum.dim_IntList": lambda x: x.sum(dim=0),
    "aten.linalg_vector_norm.default": lambda x: torch.linalg.vector_norm(x, dim=1),
    "aten.add.Tensor": lambda x: x + torch.ones(6, 6),
    "aten.add_.Tensor": lambda x: torch.ones(()).add_(x),
    "aten.copy_.default": lambda x: torch.zeros(6, 6).copy_(x),
    "aten.frexp.Tensor": lambda x: torch.frexp(x),
    "aten.empty_like.default": lambda x: torch.empty_like(x, layout=torch.sparse_coo),
    "aten._foreach_max.default": lambda x: torch._foreach_max([x]),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("layout", [Flat(), Whole()], ids=str)
def test_what_is_not_local_is_refused_by_name(name: str, layout: Layout) -> None:
    def rank() -> None:
        (tensor,) = sharded(random_tensors([(6, 6)]), layout)
        with pytest.raises(NotImplementedError) as raised:
            REFUSED[name](tensor)
        assert str(raised.value).startswith(f"{name}: ")
        assert str(raised.value).endswith(" not supported for ShardedTensor!")
        assert "full_tensor()" in str(raised.value)

    run_local(2, rank)


def test_operands_cut_differently_are_refused_on_every_rank() -> None:
    def rank() -> str:
        whole = random_tensors([(6, 6)])
        (x,), (y,) = sharded(whole, Rows()), sharded(whole, Flat())
        for compute in (lambda: x + y, lambda: torch._foreach_add([x], [y])):
            with pytest.raises(UsageError, match="cut alike") as raised:
                compute()
        with pytest.raises(UsageError, match="cut alike"):
            x.copy_(y)
        return str(raised.value)

    assert len(run_local(2, rank)) == 2


def test_a_0d_tensor_promotes_as_torch_does_or_not_at_all() -> None:
    def rank() -> None:
        (number,) = sharded([torch.tensor(2.0)], Flat())
        with pytest.raises(NotImplementedError, match="cast one first"):
            number * torch.tensor(2.0, dtype=torch.float64)
        (vector,) = sharded([torch.ones(8)], Flat())
        assert (vector * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float32

    run_local(2, rank)


def initialise(weight: Any, bias: Any) -> None:
    torch.manual_seed(5)
    nn.init.kaiming_uniform_(weight, a=5**0.5)
    nn.init.uniform_(bias, -1, 1)
    bias.data.add_(torch.tensor(1.0))
    for fill in (nn.init.xavier_normal_, nn.init.trunc_normal_):
        other = torch.empty_like(weight)
        fill(other)
        weight.data.add_(other.detach())
    nn.init.normal_(bias, 1, 2)
    bias.data.add_(torch.rand_like(bias.detach()) + torch.randn_like(bias.detach()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_random_values_are_those_of_the_unsharded_tensor(layout: Layout) -> None:
    whole = [nn.Parameter(torch.empty(9, 7)), nn.Parameter(torch.empty(9))]
    initialise(*whole)
    after = torch.rand(1)

    def rank() -> None:
        ours = parameters([torch.empty(9, 7), torch.empty(9)], layout)
        initialise(*ours)
        for tensor, expected in zip(ours, whole, strict=True):
            assert torch.equal(tensor.full_tensor(), expected.detach())
        assert torch.equal(torch.rand(1), after), "what is drawn next is the same, too"

    run_local(2, rank)
    run_local(4, rank)
