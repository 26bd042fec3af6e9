"""The engine where ranks are threads of one process."""

import torch
import torch.distributed as dist
from torch import nn

from oracle import full
from shoal.comm.local import run_local
from shoal.fsdp import fully_shard


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def _gradients() -> dict[str, torch.Tensor]:
    model = _model()
    fully_shard(model[0])
    fully_shard(model)
    model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def test_threads_agree_on_the_model_as_processes_do() -> None:
    """What is counted for the comparison of ranks is counted for each of them."""
    for _ in range(2):  # again in the same process, with another store
        found = run_local(2, _gradients)
        plain = _model()
        for rank in range(2):
            (plain(torch.full((2, 4), 1.0 + rank)).square().sum() / 2).backward()
        for gradients in found:
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad)
