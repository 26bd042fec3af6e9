"""Packing is optimal, and a budget means what it says on chains of known cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joint_graphs import held_bytes, kept_of, run_split, split_by_min_cut, trace_joint
from shoal.compile.partition.joint import read_joint
from shoal.compile.partition.saved_values import MAX_STEPS, keep_within, most_worth

things = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(things, st.integers(0, 60))
def test_nothing_else_that_fits_is_worth_more(pairs, capacity):
    sizes, worth = [size for size, _ in pairs], [gain for _, gain in pairs]
    best = max(
        sum(worth[i] for i in some)
        for count in range(len(pairs) + 1)
        for some in itertools.combinations(range(len(pairs)), count)
        if sum(sizes[i] for i in some) <= capacity
    )
    chosen = most_worth(sizes, worth, capacity)
    assert sum(sizes[i] for i in chosen) <= capacity
    assert sum(worth[i] for i in chosen) == best


def test_large_sizes_never_overflow_the_capacity():
    sizes = [7 * MAX_STEPS + 1, 5 * MAX_STEPS + 3, 11 * MAX_STEPS + 7]
    chosen = most_worth(sizes, [7, 5, 11], 13 * MAX_STEPS)
    assert sum(sizes[i] for i in chosen) <= 13 * MAX_STEPS
    assert chosen == [0, 1]


SIDE = 16
UNIT = SIDE * SIDE * 4


def matrices(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def intermediate_units(traced, budget: float) -> tuple[float, int]:
    """How much is kept besides inputs, in squares, and how many matrix products are done again."""
    parts = split_by_min_cut(
        traced.module, num_fwd_outputs=traced.num_fwd_outputs, memory_budget=budget
    )
    with torch.no_grad():
        kept = kept_of(traced, parts, parts.forward(*traced.primals))[1]
    mine = [one for one in kept if all(one is not given for given in traced.primals)]
    assert all(map(torch.equal, run_split(traced, parts), traced.run()))
    again = [
        node
        for node in parts.backward.graph.nodes
        if node.target == torch.ops.aten.mm.default and node.meta["phase"] == "forward"
    ]
    return held_bytes(mine) / UNIT, len(again)


def test_a_chain_of_equal_products_gives_them_up_one_by_one():
    def function(x, *weights):
        x = x.cos()
        for weight in weights:
            x = torch.mm(x, weight).cos()
        return x.sum()

    traced = trace_joint(function, matrices(*[(SIDE, SIDE)] * 6))
    for tenths in range(11):
        units, again = intermediate_units(traced, tenths / 10)
        if tenths <= 5:
            assert (units, again) == (tenths, 5 - tenths)
        elif tenths < 10:
            assert (units, again) == (5, 0)  # only the cosines are done again
        else:
            assert (units, again) == (10, 0)  # and not even those, which products read from memory


@pytest.mark.parametrize(
    ("budget", "kept", "again"), [(28 / 40, 28, [(2, 6)]), (16 / 40, 12, [(2, 6), (4, 4)])]
)
def test_cheap_products_are_done_again_before_dear_ones(budget, kept, again):
    # Each pair keeps inner * outer squares and costs inner * inner * outer.
    pairs = [(4, 4), (6, 2), (2, 6)]
    left = matrices(*[(inner * SIDE, inner * SIDE) for inner, _ in pairs])
    right = matrices(*[(inner * SIDE, outer * SIDE) for inner, outer in pairs])

    def function(*both):
        products = [torch.mm(x, w).cos() for x, w in zip(both[:3], both[3:], strict=True)]
        return sum(one.sum() for one in products)

    traced = trace_joint(function, [*left, *right])
    units, count = intermediate_units(traced, budget)
    assert (units, count) == (kept, len(again))


@pytest.mark.parametrize("budget", [-0.1, 1.1])
def test_a_budget_is_a_fraction(budget):
    traced = trace_joint(torch.sin, matrices((2, 2)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        keep_within(read_joint(traced.module, 1), budget, static=())


@pytest.mark.parametrize("budget", [1.1, -0.1, float("nan")])
def test_a_budget_is_a_share(budget: float) -> None:
    traced = trace_joint(lambda x: x.cos().sum(), matrices((SIDE, SIDE)))
    with pytest.raises(ValueError, match=f"memory_budget={budget}"):
        intermediate_units(traced, budget)
    with (
        torch._functorch.config.patch(activation_memory_budget=budget),
        pytest.raises(ValueError, match=f"activation_memory_budget={budget}"),
    ):
        intermediate_units(traced, 1.0)
