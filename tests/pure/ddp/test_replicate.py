"""Where a replica's inputs go."""

import pytest
import torch
from torch import nn

from shoal.ddp.replicate import device_of_inputs, move_inputs
from shoal.errors import UsageError

CPU, FIRST = torch.device("cpu"), torch.device("cuda", 0)


def test_devices_as_torch_names_them() -> None:
    assert device_of_inputs(CPU, None, None) is None
    assert device_of_inputs(CPU, CPU, None) is None
    assert device_of_inputs(CPU, None, [CPU]) is None
    assert device_of_inputs(FIRST, 0, None) == FIRST
    assert device_of_inputs(FIRST, None, [0]) == FIRST
    assert device_of_inputs(FIRST, FIRST, None) == FIRST


def test_devices_that_the_module_is_not_on() -> None:
    for home, device in ((CPU, 0), (FIRST, 1), (FIRST, CPU), (CPU, FIRST)):
        with pytest.raises(UsageError, match=f"the module is on {home}"):
            device_of_inputs(home, device, None)
    for device_id, device_ids in ((0, [0]), (None, [0, 1]), (None, [])):
        with pytest.raises(UsageError, match="one device"):
            device_of_inputs(FIRST, device_id, device_ids)
    with pytest.raises(RuntimeError, match=r"to be int or torch\.device"):
        device_of_inputs(CPU, [CPU], None)  # pyright: ignore[reportArgumentType]


def test_inputs_are_moved_in_any_container() -> None:
    class Sum(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, int], *, more: dict[str, torch.Tensor]) -> bool:
            return pair[0].is_meta and pair[1] == 3 and more["x"].is_meta

    module = Sum()
    move_inputs(module, torch.device("meta"))
    assert module((torch.ones(2), 3), more={"x": torch.ones(1)})
