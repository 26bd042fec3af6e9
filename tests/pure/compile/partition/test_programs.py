"""Random programs, randomly tagged, taken apart at random budgets: the parts are the whole."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointPolicy

from joint_graphs import Traced, run_split, split_as_traced, split_by_min_cut, trace_joint

SIDE = 4

STEPS = {
    "sin": lambda a, b: a.sin(),
    "relu": lambda a, b: a.relu(),
    "tanh": lambda a, b: a.tanh(),
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "mm": lambda a, b: a @ b,
    "transpose": lambda a, b: a.t(),
    "view": lambda a, b: a.reshape(-1).view(SIDE, SIDE),
    "halves": lambda a, b: torch.cat(a.chunk(2)[::-1]),
    "norm": lambda a, b: torch.nn.functional.layer_norm(a, [SIDE]),
    "softmax": lambda a, b: a.softmax(-1),
    "reduce": lambda a, b: a - b.mean(-1, keepdim=True),
    "dropout": lambda a, b: torch.nn.functional.dropout(a, 0.4),
    "noise": lambda a, b: a * torch.rand_like(b),
    "detach": lambda a, b: a.detach() * b,
}

programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=12,
)


def trace_program(program: list[tuple[str, int, int]], num_outputs: int) -> Traced:
    def function(*inputs):
        values = list(inputs)
        for name, left, right in program:
            values.append(STEPS[name](values[left % len(values)], values[right % len(values)]))
        return [one * 1 for one in values[-num_outputs:]]

    torch.manual_seed(0)
    return trace_joint(function, [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2)])


def tag_at_random(traced: Traced, choose: random.Random) -> None:
    region = 0
    for node in traced.module.graph.nodes:
        if node.meta.get("phase") == "forward":
            policy = choose.choice([None, None, *CheckpointPolicy])
            region += choose.random() < 0.2
            if policy is not None:
                node.meta.update(recompute=policy, ac_graph_id=region)


@settings(max_examples=80, deadline=None)
@given(
    programs,
    st.integers(1, 2),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1.0, 0.6, 0.2, 0.0]),
)
def test_the_parts_give_what_the_whole_gives(
    program, num_outputs, seed, tagged, overwritten, budget
):
    traced = trace_program(program, num_outputs)
    expected = traced.run()
    if tagged:
        tag_at_random(traced, random.Random(seed))
    mutated = (0,) if overwritten else ()
    if budget is None:
        parts = split_as_traced(
            traced.module, num_fwd_outputs=traced.num_fwd_outputs, mutated_inputs=mutated
        )
    else:
        parts = split_by_min_cut(
            traced.module,
            num_fwd_outputs=traced.num_fwd_outputs,
            memory_budget=budget,
            mutated_inputs=mutated,
        )
    for got, one in zip(run_split(traced, parts, overwrite=mutated), expected, strict=True):
        assert (got is None and one is None) or torch.equal(got, one)
