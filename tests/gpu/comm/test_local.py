"""Ranks as threads that share one GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal.comm import Transport
from shoal.comm.local import run_local


def test_collectives_wait_for_the_streams_of_all_ranks() -> None:
    def body() -> list[Tensor]:
        group = dist.group.WORLD
        assert group is not None
        transport = Transport(group)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            shard = torch.zeros(1 << 20, device="cuda")
            for _ in range(200):
                shard += 1  # still being computed when the gather is launched
            shard *= transport.rank + 1
            gathered = torch.empty((1 << 20) * transport.size, device="cuda")
            transport.all_gather(gathered, shard).wait()
            reduced = torch.empty(1 << 20, device="cuda")
            transport.reduce_scatter(reduced, gathered, ReduceOp.AVG).wait()
            total = gathered.view(transport.size, -1).sum(1)
        stream.synchronize()
        return [total.cpu(), reduced[:1].cpu()]

    for rank, (total, reduced) in enumerate(run_local(4, body)):
        assert torch.equal(total, 200.0 * (1 << 20) * torch.tensor([1.0, 2, 3, 4]))
        assert reduced.item() == 200.0 * (rank + 1)


def test_random_numbers_on_the_device_belong_to_a_rank() -> None:
    def body() -> float:
        torch.cuda.manual_seed(dist.get_rank())
        dist.barrier()
        return torch.rand((), device="cuda").item()

    drawn = run_local(3, body)
    for rank, number in enumerate(drawn):
        torch.cuda.manual_seed(rank)
        assert number == torch.rand((), device="cuda").item()


def test_fsdp2_trains_like_one_process() -> None:
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).cuda()

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5)).cuda()

    def train(model: nn.Module, inputs: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def body() -> list[Tensor]:
        model = make_model()
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        train(model, batch.chunk(4)[dist.get_rank()])
        full = []
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            full.append(parameter.full_tensor().detach())
        return full

    expected = make_model()
    train(expected, batch)
    for parameters in run_local(4, body):
        for found, wanted in zip(parameters, expected.parameters(), strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)
