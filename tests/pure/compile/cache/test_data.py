"""Signatures and arrangements survive a file, and only what is of their types comes out of one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from shoal.compile.aot.arrange import Arrangement, Constant, Itself, Within
from shoal.compile.aot.signature import (
    Base,
    Input,
    Mutation,
    Output,
    OutputKind,
    Reshape,
    Signature,
    ViewStep,
)
from shoal.compile.cache.data import from_json, to_json
from shoal.compile.cache.errors import DamagedError, NotExactError

STEP = ViewStep(op="aten.view.dtype", args=((2, 3), torch.int32), kwargs=(("alpha", 2),), item=1)
SIGNATURE = Signature(
    inputs=(
        Input(is_tensor=True, requires_grad=True, mutation=Mutation(data=True, num_versions=2)),
        Input(is_tensor=True, is_wrapper=True),
    ),
    outputs=(
        Output(kind=OutputKind.VIEW_OF_BASE, of=0, steps=(STEP,), requires_grad=True),
        Output(kind=OutputKind.CONSTANT, value=(1, None, float("inf")), is_tensor=False),
    ),
    bases=(Base(requires_grad=True),),
    reshapes=(Reshape(argument=1, steps=(STEP,)),),
    trains=True,
    grad_mode_after=False,
)
ARRANGEMENT = Arrangement(
    places=(
        Itself(0),
        Constant(None),
        Within(1, (2, 3), (3, 1), 0, torch.float32, True),
    ),
    sources=(0, 2),
    is_memory=(False, True),
)


@pytest.mark.parametrize("value", [SIGNATURE, ARRANGEMENT])
def test_they_come_back(value: Any) -> None:
    text = json.dumps(to_json(value, type(value)), allow_nan=False)
    assert from_json(json.loads(text), type(value)) == value


def changed(path: str, value: Any) -> Any:
    """The signature as JSON with another value somewhere."""
    described = copy.deepcopy(to_json(SIGNATURE, Signature))
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inside = described
    for part in way:
        inside = inside[part]
    inside[last] = value
    return described


@pytest.mark.parametrize(
    ("path", "value"),
    [
        # Each of these is written into generated code.
        ("grad_mode_after", "print('owned')"),
        ("grad_mode", 1),
        ("outputs.0.of", "0); print('owned'"),
        ("outputs.0.of", True),
        ("outputs.0.kind", "something"),
        ("outputs.0.steps.0.item", "0]; print('owned')"),
        ("outputs.0.steps.0.op", "load_library"),
        ("outputs.0.steps.0.op", "ops.load_library.default"),
        ("outputs.0.steps.0.op", "mylib.view.default"),
        ("outputs.0.steps.0.kwargs", [["x=print('owned'), y", 1]]),
        ("outputs.0.steps.0.kwargs", [["lambda", 1]]),
        ("outputs.0.steps.0.kwargs", [["alpha"]]),
        ("inputs.0.mutation.num_versions", 1.5),
        ("inputs", {}),
        ("inputs.0.new", 1),
        ("num_symbols", None),
    ],
)
def test_nothing_else_comes_out_of_a_file(path: str, value: Any) -> None:
    with pytest.raises(DamagedError):
        from_json(changed(path, value), Signature)


@pytest.mark.parametrize(
    "value",
    [
        Signature(inputs=(), outputs=(Output(kind=OutputKind.CONSTANT, value=object()),)),
        Signature(
            inputs=(),
            outputs=(
                Output(kind=OutputKind.FRESH, steps=(ViewStep(op="mylib.view.default", args=()),)),
            ),
        ),
        Arrangement(places=(Constant(object()),), sources=(), is_memory=()),
    ],
)
def test_what_is_not_exact_is_refused(value: Any) -> None:
    with pytest.raises(NotExactError):
        to_json(value, type(value))
