"""Where gradients are unscaled: on the host nothing may be read before it has arrived there."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import sharded_grad_scaler as by_torch

from shoal.fsdp.sharded_grad_scaler import ShardedGradScaler


@pytest.mark.parametrize(
    ("places", "expected"),
    [(["cuda", "cuda"], "cuda"), (["cuda", "cpu"], "cpu"), (["cpu"], "cpu"), ([], "cuda")],
)
def test_the_host_is_waited_for_only_where_it_has_gradients(
    places: list[str], expected: str
) -> None:
    with FakeTensorMode():  # tensors with a device and no memory, on any machine
        parameters = [nn.Parameter(torch.ones(2, device=place)) for place in places]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        parameters.append(nn.Parameter(torch.ones(2)))  # without gradient: it has no say
        inverse, flag = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = ShardedGradScaler(device="cpu")
    with patch.object(by_torch.ShardedGradScaler, "_unscale_grads_", return_value={}) as unscale:
        scaler._unscale_grads_(optimizer, inverse, flag)
    _, inv_scale, found_inf, _ = unscale.call_args.args
    assert [inv_scale.device.type, found_inf.device.type] == [expected] * 2


def test_it_is_one_of_torchs() -> None:
    assert issubclass(ShardedGradScaler, by_torch.ShardedGradScaler)
