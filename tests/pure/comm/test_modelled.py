"""Rank 0 of N: sizes, values, traffic and time, in one process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal._torch import collectives
from shoal.comm import Transport
from shoal.comm.modelled import (
    FREE,
    Count,
    Kind,
    ModelledGroup,
    Network,
    init_modelled,
)
from shoal.errors import UsageError

Init = Callable[..., ModelledGroup]
CPU = torch.device("cpu")


@pytest.fixture
def init() -> Iterator[Init]:
    """Make modelled jobs on CPU that end with the test."""

    def make(world_size: int, network: Network = FREE) -> ModelledGroup:
        if dist.is_initialized():
            dist.destroy_process_group()
        return init_modelled(world_size, network, "cpu")

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def counts(group: ModelledGroup) -> dict[str, tuple[int, int]]:
    return {
        str(kind): (count.num_collectives, count.num_bytes)
        for kind, count in group.traffic.by_kind.items()
    }


def test_this_process_is_rank_0_of_n(init: Init) -> None:
    group = init(1024)
    assert dist.group.WORLD is group
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1024)
    assert dist.get_backend() == "shoal-modelled"
    assert group.network is FREE


def test_a_gather_writes_every_piece(init: Init) -> None:
    transport = Transport(init(3))
    output = torch.full((6,), 7.0)
    transport.all_gather(output, torch.tensor([1.0, 2.0])).wait()
    assert torch.equal(output, torch.tensor([1.0, 2, 1, 2, 1, 2]))

    in_place = torch.tensor([3.0, 4, 7, 7, 7, 7])
    transport.all_gather(in_place, in_place[:2]).wait()
    assert torch.equal(in_place, torch.tensor([3.0, 4, 3, 4, 3, 4]))

    received = torch.full((6,), 7.0)
    transport.all_to_all(received, torch.arange(6.0)).wait()
    assert torch.equal(received, torch.tensor([0.0, 1, 0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [4.0, 8.0]),
        (ReduceOp.AVG, [1.0, 2.0]),
        (ReduceOp.MAX, [1.0, 2.0]),
        (ReduceOp.MIN, [1.0, 2.0]),
        (ReduceOp.PRODUCT, [1.0, 16.0]),
        (dist._make_nccl_premul_sum(0.5), [2.0, 4.0]),
    ],
)
def test_the_other_ranks_hold_the_same_values(init: Init, op, expected: list[float]) -> None:
    group = init(4)
    reduced = torch.empty(2)
    whole = torch.tensor([1.0, 2, 0, 0, 0, 0, 0, 0])
    collectives.scatter_method(group, op)(reduced, whole).wait()
    assert reduced.tolist() == expected

    tensor = torch.tensor([1.0, 2.0])
    dist.all_reduce(tensor, op=op)
    assert tensor.tolist() == expected


def test_whole_numbers_and_truth_values_reduce(init: Init) -> None:
    init(4)
    for op, number in ((ReduceOp.SUM, 20), (ReduceOp.BOR, 5), (ReduceOp.BXOR, 0)):
        tensor = torch.tensor([5])
        dist.all_reduce(tensor, op=op)
        assert tensor.item() == number
    truth = torch.tensor([True, False])
    dist.all_reduce(truth)
    assert truth.tolist() == [True, False]


def test_collectives_are_hidden_from_autograd(init: Init) -> None:
    init(4)
    buffer = torch.ones(2)
    product = torch.ones(2, requires_grad=True) * buffer
    version = buffer._version
    dist.all_reduce(buffer)
    product.sum().backward()
    assert buffer._version == version


def test_an_input_may_be_freed_once_it_was_waited_for(init: Init) -> None:
    group = init(2)
    shard = torch.zeros(2)
    alive = weakref.ref(shard)
    work = collectives.gather_method(group)(torch.zeros(4), shard)
    del shard
    assert alive() is not None, "it is being sent"
    work.wait()
    assert alive() is None, "a peak that the real network does not have"


def test_rooted_collectives_and_messages(init: Init) -> None:
    init(3)
    gathered = [torch.zeros(2) for _ in range(3)]
    dist.gather(torch.ones(2), gathered, dst=0)
    assert all(torch.equal(piece, torch.ones(2)) for piece in gathered)
    dealt = torch.zeros(1)
    dist.scatter(dealt, [torch.tensor([float(5 + index)]) for index in range(3)], src=0)
    assert dealt.item() == 5
    tensor = torch.tensor([1.0])
    dist.reduce(tensor, dst=0)
    assert tensor.item() == 3
    dist.broadcast(tensor, src=2)
    assert tensor.item() == 3
    dist.send(tensor, dst=1)
    dist.recv(tensor, src=2)
    assert tensor.item() == 0
    dist.barrier()


def test_objects_come_from_clones(init: Init) -> None:
    init(64)
    gathered: list[object] = [None] * 64
    dist.all_gather_object(gathered, {"answer": 42})
    assert gathered == [{"answer": 42}] * 64
    sent: list[object] = ["hello"]
    dist.broadcast_object_list(sent)
    assert sent == ["hello"]


def test_meshes_have_groups_of_their_own_size(init: Init) -> None:
    init(4096)
    start = time.perf_counter()
    flat = init_device_mesh("cpu", (4096,))
    mesh = init_device_mesh("cpu", (512, 8), mesh_dim_names=("replicate", "shard"))
    assert time.perf_counter() - start < 5
    assert flat.get_group().size() == 4096
    assert mesh.get_group("replicate").size() == 512
    assert mesh.get_group("shard").size() == 8
    assert dist.get_process_group_ranks(mesh.get_group("replicate"))[1] == 8


def test_traffic_is_counted_by_group_and_for_the_whole_job(init: Init) -> None:
    job = init(8)
    part = dist.new_group([0, 1])
    assert isinstance(part, ModelledGroup)
    dist.all_reduce(torch.zeros(10))
    dist.all_reduce(torch.zeros(3), group=part)
    Transport(part).all_gather(torch.zeros(6), torch.zeros(3)).wait()
    assert counts(part) == {"all_reduce": (1, 12), "all_gather": (1, 24)}
    assert counts(job) == {"all_reduce": (2, 52), "all_gather": (1, 24)}
    reading = job.traffic
    assert (reading.num_collectives, reading.num_bytes) == (3, 76)
    assert reading.by_kind[Kind.ALL_GATHER] == Count(num_collectives=1, num_bytes=24)
    job.reset_traffic()
    assert job.traffic.num_collectives == 0
    assert reading.num_collectives == 3, "a reading stays as it was read"
    assert part.traffic.num_collectives == 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU())


def by_fsdp1(model: nn.Sequential) -> nn.Module:
    for index in (0, 2):
        model[index] = FullyShardedDataParallel(model[index], device_id=CPU)
    return FullyShardedDataParallel(model, device_id=CPU)


def by_fsdp2(model: nn.Sequential) -> nn.Module:
    for index in (0, 2):
        fully_shard(model[index])
    fully_shard(model)
    return model


def train(model: nn.Module, num_steps: int = 2) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters())
    loss = torch.zeros(())
    for _ in range(num_steps):
        loss = model(torch.ones(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("size", [8, 1024])
@pytest.mark.parametrize("engine", [by_fsdp1, by_fsdp2, DistributedDataParallel])
def test_torch_engines_train(
    init: Init, engine: Callable[[nn.Sequential], nn.Module], size: int
) -> None:
    init(size)
    assert torch.isfinite(train(engine(make_model())))


@pytest.mark.parametrize("engine", [by_fsdp1, by_fsdp2])
def test_a_step_gathers_twice_and_reduces_once(
    init: Init, engine: Callable[[nn.Sequential], nn.Module]
) -> None:
    size = 4
    group = init(size)
    model = engine(make_model())
    train(model, num_steps=1)  # FSDP1 exchanges its execution order in the first step
    group.reset_traffic()
    train(model, num_steps=1)
    layers = (32 * 64 + 64, 64 * 32 + 32)  # both divisible by 4 per row, so nothing is padded
    num_bytes = 4 * sum(layers)
    assert counts(group) == {"all_gather": (4, 2 * num_bytes), "reduce_scatter": (2, num_bytes)}


def test_ddp_reduces_every_gradient_once(init: Init) -> None:
    group = init(1024)
    model = DistributedDataParallel(make_model())
    train(model, num_steps=2)
    group.reset_traffic()
    train(model, num_steps=1)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert group.traffic.by_kind[Kind.ALL_REDUCE].num_bytes == 4 * num_parameters


def test_host_work_does_not_grow_with_the_world(init: Init) -> None:
    def cpu_us(size: int) -> float:
        transport = Transport(init(size))
        output, shard = torch.zeros(2 * size), torch.zeros(2)
        best_us = float("inf")
        for _ in range(5):
            start = time.thread_time()
            for _ in range(200):
                transport.all_gather(output, shard).wait()
                transport.reduce_scatter(shard, output).wait()
            best_us = min(best_us, (time.thread_time() - start) / 400 * 1e6)
        return best_us

    small, large = cpu_us(8), cpu_us(4096)
    assert large < 2 * small + 20
    assert large < 300, "some ten µs on an idle core"


SLOW = Network("slow", 0.001, 100_000.0)  # 100 ms + 1 µs per byte


def test_a_work_ends_when_the_network_has_carried_it(init: Init) -> None:
    group = init(4, SLOW)
    start = time.perf_counter()
    shard = torch.ones(10_000, dtype=torch.uint8)
    pending = Transport(group).all_gather(torch.empty(40_000, dtype=torch.uint8), shard)
    launched_s = time.perf_counter() - start
    pending.wait()
    took_s = time.perf_counter() - start
    assert launched_s < 0.08, "launching must not wait"
    assert 0.13 <= took_s < 0.3, "100 ms + 3/4 of 40 kB at 1 µs per byte"


def test_collectives_of_a_group_share_its_link(init: Init) -> None:
    transport = Transport(init(4, SLOW))
    start = time.perf_counter()
    pendings = [transport.all_reduce(torch.ones(1)) for _ in range(3)]
    for pending in pendings:
        pending.wait()
    assert time.perf_counter() - start >= 0.3


def test_groups_of_a_rank_share_its_link(init: Init) -> None:
    """A second communicator brings no second wire."""
    init(4, SLOW)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    start = time.perf_counter()
    works = [group.barrier() for group in groups if isinstance(group, ModelledGroup)]
    for work in works:
        work.wait()
    assert 0.3 <= time.perf_counter() - start < 0.6


@pytest.mark.parametrize("numel", [1, 3, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("offset", [0, 1])
def test_pieces_of_any_width_are_written_bit_by_bit(
    init: Init, numel: int, dtype: torch.dtype, offset: int
) -> None:
    transport = Transport(init(5))
    bits = torch.randint(-(2**15), 2**15, (5 * numel + offset,), dtype=torch.int16)
    output = bits.repeat_interleave(dtype.itemsize // 2).view(dtype)[offset : 5 * numel + offset]
    piece = output[:numel]  # in place; some of it is NaN
    expected = piece.clone().repeat(5)
    transport.all_gather(output, piece).wait()
    assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("offset", [1, 4])
def test_a_piece_that_begins_elsewhere_than_its_slot(init: Init, offset: int) -> None:
    transport = Transport(init(3))
    piece = torch.randn(8 + offset)[offset:]
    output = torch.empty(24)
    transport.all_gather(output, piece).wait()
    assert torch.equal(output, piece.repeat(3))


def test_gathers_are_sampled_as_their_readers_find_them(init: Init) -> None:
    group = init(4)
    part = Transport(dist.new_group([0, 1]))
    small, large = torch.zeros(4), torch.zeros(40_000)

    def step() -> None:
        part.all_gather(small, torch.tensor([1.0, 2.0])).wait()
        Transport(group).all_gather(large, torch.full((10_000,), 3.0)).wait()
        dist.all_reduce(torch.ones(3))

    samples = group.sample_gathers(step)
    assert [sample.numel() for sample in samples] == [4, 4096]
    assert samples[0].tolist() == [1.0, 2, 1, 2]
    assert samples[1].unique().tolist() == [3.0]
    assert group.sample_gathers(lambda: None) == []


def test_on_cpu_gathers_are_always_written(init: Init) -> None:
    group = init(3)
    group.keep_gathers()
    output = torch.full((6,), 7.0)
    Transport(group).all_gather(output, torch.tensor([1.0, 2.0])).wait()
    assert output.tolist() == [1.0, 2, 1, 2, 1, 2]


def test_computing_hides_the_network(init: Init) -> None:
    work = init(4, SLOW).barrier()
    assert not work.is_completed()
    time.sleep(0.12)
    assert work.is_completed()
    start = time.perf_counter()
    work.wait()
    assert time.perf_counter() - start < 0.05


def test_ddp_waits_for_the_network(init: Init) -> None:
    init(4, Network("slow", None, 50_000.0))
    model = DistributedDataParallel(nn.Linear(4, 4))
    output = model(torch.ones(1, 4)).sum()
    start = time.perf_counter()
    output.backward()
    assert time.perf_counter() - start >= 0.045


def test_what_is_not_served_says_so(init: Init) -> None:
    init(4)
    with pytest.raises(NotImplementedError, match="does not receive from any source"):
        dist.recv(torch.zeros(1))


def test_nobody_waits_long_for_the_key_of_an_imagined_rank(init: Init) -> None:
    init(4)
    store = dist.distributed_c10d._get_default_store()
    store.set("mine", "1")
    assert store.get("mine") == b"1"
    assert store.timeout <= timedelta(seconds=5)


def test_wrong_use_is_answered(init: Init) -> None:
    with pytest.raises(UsageError, match="world_size must be at least 1, got 0"):
        init(0)
    with pytest.raises(UsageError, match="device_type must be 'cpu' or 'cuda', got 'tpu'"):
        init_modelled(4, FREE, "tpu")
    init(4)
    with pytest.raises(UsageError, match=r"call torch.distributed.destroy_process_group"):
        init_modelled(4, FREE, "cpu")
