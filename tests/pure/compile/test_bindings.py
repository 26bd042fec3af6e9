"""The functions that stand for operators reach the same kernels with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.compile.aot.graph_code import BINDINGS, UNCOUNTED, bound

X, Y, W, V = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
DEEP = torch.randn(2, 4, 8)
SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "_softmax.default": [(X, -1, False)],
    "_native_batch_norm_legit.default": [
        (X, V, V, V.clone(), V.abs(), False, 0.1, 1e-5),
        (X, None, None, V.clone(), V.abs(), False, 0.1, 1e-5),
    ],
    "add.Tensor": [(X, Y), (X, 2.0), (X, Y, {"alpha": 3})],
    "add_.Tensor": [(X, 1), (X, Y), (X, Y, {"alpha": 3})],
    "addmm.default": [(V, X, W), (V, X, W, {"beta": 0.5, "alpha": 2})],
    "bmm.default": [(DEEP, DEEP.mT)],
    "cat.default": [([X, Y],), ([X, Y], 1)],
    "clone.default": [(X.t(),), (X.t(), {"memory_format": torch.contiguous_format})],
    "copy_.default": [(X, Y), (X, Y, True)],
    "detach.default": [(X,)],
    "div.Tensor": [(X, Y), (X, 2)],
    "div_.Tensor": [(X, 2), (X, Y.abs() + 1)],
    "embedding.default": [(W, torch.tensor([1, 2])), (W, torch.tensor([1, 2]), 3, True)],
    "expand.default": [(V, [4, 8]), (V, [2, -1])],
    "flatten.using_ints": [(DEEP,), (DEEP, 1)],
    "mean.dim": [(X, [1]), (X, [0], True), (X, None)],
    "mm.default": [(X, W), (X.t(), Y)],
    "mul.Tensor": [(X, Y), (X, 2)],
    "mul_.Tensor": [(X, 2), (X, Y)],
    "native_dropout.default": [(X, 0.5, True), (X, 0.5, False)],
    "native_layer_norm.default": [(X, [8], V, V, 1e-5), (X, [8], None, None, 1e-5)],
    "permute.default": [(DEEP, [0, 2, 1])],
    "pow.Tensor_Scalar": [(X, 2), (X.abs(), 0.5)],
    "relu.default": [(X,)],
    "reshape.default": [(X, [32]), (X.t(), [4, -1])],
    "rsqrt.default": [(X.abs(),)],
    "select.int": [(X, 0, 1)],
    "split_with_sizes.default": [(X, [1, 3]), (X, [2, 6], 1)],
    "sub.Tensor": [(X, Y), (X, 1, {"alpha": 2})],
    "sum.dim_IntList": [(X, [0]), (X, [0, 1], True), (X, [0], {"dtype": torch.float64}), (X, None)],
    "t.default": [(X,)],
    "transpose.int": [(DEEP, 0, -1)],
    "unsqueeze.default": [(X, 0)],
    "view.default": [(X, [32]), (X, [2, -1])],
}


class Called(TorchDispatchMode):
    """Which operators were reached, with which arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shown = _pytree.tree_map_only(torch.Tensor, id, (args, kwargs or {}))
        self.calls.append((func, shown))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_the_same_call_and_the_same_result(op: Any) -> None:
    samples = SAMPLES[str(op).removeprefix("aten.")]
    for sample in samples:
        named = sample[-1] if isinstance(sample[-1], dict) else {}
        given = sample[: len(sample) - bool(named)]
        results, calls = [], []
        for function in (op, bound(op)):
            torch.manual_seed(0)
            with Called() as called:
                result = function(*given, **named)
            results.append(result)
            calls.append(called.calls)
        # Views in between are other objects each time; what is compared is what was reached first.
        assert [one[0] for one in calls[0]] == [one[0] for one in calls[1]]
        assert calls[0][:1] == calls[1][:1]
        if not str(op).split(".")[1].endswith("_"):
            torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_others_are_called_themselves() -> None:
    op = torch.ops.aten.gelu_backward.default
    assert op not in BINDINGS
    assert torch.equal(bound(op)(X, Y), op(X, Y))


@pytest.mark.parametrize("op", UNCOUNTED, ids=str)
def test_what_is_said_not_to_count_does_not(op: Any) -> None:
    assert op is torch.ops.aten._native_batch_norm_legit.default
    mean, var = torch.zeros(8), torch.ones(8)
    for function in (op, bound(op)):
        before = mean.clone()
        function(X, V, V, mean, var, True, 0.1, 1e-5)
        assert not torch.equal(mean, before)
    assert (mean._version, var._version) == (0, 0)
