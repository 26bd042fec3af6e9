"""Distant replicas: the truth is DiLoCo, written down on plain modules in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from diloco import (
    Outer,
    adamw,
    batch_of,
    check_equal,
    mesh_of,
    outer_of,
    reference,
    sgd,
    train,
    units_of_model,
)
from harness import on_ranks, ranks
from oracle import Model, build, full, loss_of, shard
from shoal import replicate as replicate_plain
from shoal.checkpoint import load_model, load_training, read_manifest, save_training
from shoal.comm import observer
from shoal.distant import DistantReplicas
from shoal.errors import CheckpointError, InvariantError, UsageError
from shoal.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.fully_shard import replicate
from shoal.watch import check_replicas

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]


@pytest.mark.compose("distant replicas", "fully_shard", "every layout")
@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_replicas_train_as_diloco_to_the_bit(layout: Layout) -> None:
    mesh, outer = mesh_of(2), Outer(every=3)
    model = shard(build(), mesh=mesh, layout=layout)
    train(model, outer_of(model, outer), range(1, 9), sgd(model.parameters()))
    check_equal(model, reference(8, outer)[mesh.get_local_rank("replicate")])


STREAMED = Outer(every=5, streamed=True)
DELAYED = Outer(every=4, delay=2, share=0.5)
BOTH = Outer(every=4, delay=3, share=0.25, streamed=True, lr=0.5, momentum=0.75)


@ranks(4)
@pytest.mark.parametrize("outer", [STREAMED, DELAYED, BOTH], ids=["streamed", "delayed", "both"])
def test_streamed_and_delayed_outer_steps_to_the_bit(outer: Outer) -> None:
    mesh = mesh_of(2)
    model = shard(build(), mesh=mesh)
    train(model, outer_of(model, outer), range(1, 14), sgd(model.parameters()))
    expected = reference(13, outer, parts_of=units_of_model)
    check_equal(model, expected[mesh.get_local_rank("replicate")])


@ranks(4)
def test_in_every_step_with_an_outer_rate_of_one_it_is_parameter_averaging() -> None:
    mesh = mesh_of(4)
    model = shard(build(), mesh=mesh)
    outer = DistantReplicas(model, every=1, lr=1.0, momentum=0.0)
    plain = [build() for _ in range(4)]
    optimizers = [adamw(one.parameters()) for one in plain]
    optimizer = adamw(model.parameters())
    for step in range(1, 5):
        train(model, outer, range(step, step + 1), optimizer)
        for rank, (one, own) in enumerate(zip(plain, optimizers, strict=True)):
            own.zero_grad()
            loss_of(one, batch_of(step, rank)).backward()
            own.step()
        with torch.no_grad():
            for same in zip(*(one.parameters() for one in plain), strict=True):
                mean = torch.stack([*same]).mean(0)
                for parameter in same:
                    parameter.copy_(mean)
    for p, q in zip(plain[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q.detach()), p.detach(), rtol=1e-5, atol=1e-6)


@ranks(4)
def test_replicas_begin_with_the_weights_of_the_first_and_meet_again() -> None:
    torch.manual_seed(dist.get_rank() // 2)
    model = shard(Model(), mesh=mesh_of(2))
    outer = DistantReplicas(model, every=2)
    assert check_replicas(model) == len(list(model.parameters()))
    for step in range(1, 5):
        train(model, outer, range(step, step + 1), adamw(model.parameters()))
        assert check_replicas(model) > 0, "the anchors are compared"
        own = torch.cat([full(p.detach()).reshape(-1) for p in model.parameters()])
        other = own.clone()
        dist.broadcast(other, 0)
        apart = torch.tensor([float(not torch.equal(own, other))])
        dist.all_reduce(apart)
        assert (apart.item() > 0) == (step % 2 == 1)


class _Bytes:
    """Counts what goes over each group."""

    def __init__(self) -> None:
        self.by_group: dict[str, int] = {}

    def launching(self, reason: str, group: dist.ProcessGroup, tensor: torch.Tensor | None) -> None:
        name = group.group_name
        self.by_group[name] = self.by_group.get(name, 0) + (0 if tensor is None else tensor.nbytes)

    def in_stream(self, launched: Any = None) -> None: ...
    def waiting(self, reason: str) -> None: ...
    def arrived(self) -> None: ...


@contextmanager
def counted(group: dist.ProcessGroup) -> Iterator[Callable[[], int]]:
    before, observer.current = observer.current, _Bytes()  # pyright: ignore
    counter: Any = observer.current
    try:
        yield lambda: counter.by_group.get(group.group_name, 0)
    finally:
        observer.current = before


@ranks(4)
def test_the_replicate_axis_carries_one_part_in_h_of_the_bytes() -> None:
    mesh, every = mesh_of(2), 4
    group = mesh.get_group("replicate")
    usual, distant = (shard(build(), mesh=mesh, layout=Flat()) for _ in range(2))
    outer = DistantReplicas(distant, every=every, streamed=True)
    optimizer = sgd(distant.parameters())
    with counted(group) as num_bytes:
        for step in range(every):
            loss_of(usual, batch_of(step, dist.get_rank())).backward()
        expected = num_bytes()
    with counted(group) as num_bytes:
        train(distant, outer, range(every), optimizer)
        sent = num_bytes()
    held = sum(parameter.local.nbytes for parameter in distant.parameters())
    assert sent == held, "each unit is exchanged once in a round"
    assert held * every <= expected, "without, gradients go there in every step, with padding"


@pytest.mark.compose("distant replicas", "wrapper")
@ranks(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_wrapper_trains_as_diloco(use_orig_params: bool) -> None:
    mesh, outer = mesh_of(2), Outer(every=3)

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=use_orig_params,
        )

    model: Any = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    model = wrap(model)
    train(model, outer_of(model, outer), range(1, 8), sgd(model.parameters()))
    expected = reference(7, outer)[mesh.get_local_rank("replicate")]
    found = model.state_dict()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="FullyShardedDataParallel are not supported"):
        save_training("nowhere", model, sgd(model.parameters()), {})
    dist.barrier()


@pytest.mark.compose("distant replicas", "replicate")
@ranks(2)
@pytest.mark.parametrize("by", [replicate, replicate_plain], ids=["units", "buckets"])
def test_replicas_of_one_rank_each(by: Any) -> None:
    outer, model = Outer(every=3), build()
    if by is replicate:
        shard(model, replicate, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",)))
    else:
        replicate_plain(model)
    train(model, outer_of(model, outer), range(1, 8), sgd(model.parameters()))
    check_equal(model, reference(7, outer, num_shards=1)[dist.get_rank()])


@pytest.mark.compose("distant replicas", "compiled")
@ranks(4)
@pytest.mark.parametrize("first", [False, True], ids=["parted first", "captured first"])
def test_a_graph_reduces_within_its_replica(first: bool) -> None:
    mesh, outer = mesh_of(2), Outer(every=3)
    model = shard(build(), mesh=mesh)
    compiled: Any = torch.compile(model, backend="shoal")
    if first:
        loss_of(compiled, batch_of(0, dist.get_rank())).backward()
        model.zero_grad()
    distant, optimizer = outer_of(model, outer), sgd(model.parameters())
    for step in range(1, 5):
        optimizer.zero_grad()
        loss_of(compiled, batch_of(step, dist.get_rank())).backward()
        optimizer.step()
        distant.step()
    expected = reference(4, outer)[mesh.get_local_rank("replicate")]
    for p, q in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q.detach()), p.detach(), rtol=1e-5, atol=1e-6)


@ranks(2)
def test_kept_low_precision_shards_follow_an_outer_step() -> None:
    mesh = mesh_of(2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [shard(build(), mesh=mesh, mp_policy=policy) for _ in range(2)]
    models[1].set_keep_low_precision_shards(True)  # type: ignore[operator]
    for model in models:
        train(model, DistantReplicas(model, every=2), range(1, 6), sgd(model.parameters()))
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(p.detach()), full(q.detach()))


# Checkpoints in the middle of a round.


def start(num_replicas: int, outer: Outer) -> tuple[Model, DistantReplicas, Any]:
    model = shard(build(), mesh=mesh_of(num_replicas))
    return model, outer_of(model, outer), adamw(model.parameters())


def state_of(model: Any, outer: DistantReplicas, optimizer: Any) -> list[torch.Tensor]:
    """Everything that has to be the same, of this replica and whole."""
    parameters = list(model.parameters())
    anchors, momenta = outer.anchors(), outer.momenta()
    moments = [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
    shared = [one[p] for one in (anchors, momenta) for p in parameters]
    return [full(value.detach()).clone() for value in (*parameters, *moments, *shared)]


def accumulated(model: Any, outer: DistantReplicas, steps: range, optimizer: Any) -> None:
    """On one rank what two ranks of a replica do: their batches, and the mean of gradients."""
    for step in steps:
        optimizer.zero_grad()
        for rank in range(2):
            loss_of(model, batch_of(step, 2 * dist.get_rank() + rank)).backward()
        for parameter in model.parameters():
            parameter.grad *= 0.5
        optimizer.step()
        outer.step()


def save_in_the_middle(folder: Path, outer: Outer, then: int) -> list[torch.Tensor]:
    """Train to the middle of a round, save, go on; return what that leads to."""
    model, distant, optimizer = start(2, outer)
    train(model, distant, range(1, 8), optimizer)
    save_training(folder, model, optimizer, {"step": 7})
    train(model, distant, range(8, then), optimizer)
    return state_of(model, distant, optimizer)


def resume(folder: Path, outer: Outer, then: int, *, alone: bool) -> list[torch.Tensor]:
    """Begin elsewhere, load, and go on."""
    model, distant, optimizer = start(2, outer)
    assert load_training(folder, model, optimizer) == {"step": 7}
    (accumulated if alone else train)(model, distant, range(8, then), optimizer)
    return state_of(model, distant, optimizer)


ROUNDS = {"at once": Outer(every=3), "in flight": Outer(every=4, delay=2, share=0.5, streamed=True)}


@pytest.mark.compose("distant replicas", "checkpoint")
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_run_resumes_in_the_middle_of_a_round_to_the_bit(rounds: str, tmp_path: Path) -> None:
    outer, folder = ROUNDS[rounds], tmp_path / "saved"
    saved = on_ranks(4, save_in_the_middle, folder, outer, 13)
    resumed = on_ranks(4, resume_sharded, folder, outer, 13)
    for before, after in zip(saved, resumed, strict=True):
        assert all(map(torch.equal, before, after))
    alone = on_ranks(2, resume_alone, folder, outer, 13)
    for before, after in zip(saved[::2], alone, strict=True):
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0)


def resume_sharded(folder: Path, outer: Outer, then: int) -> list[torch.Tensor]:
    return resume(folder, outer, then, alone=False)


def resume_alone(folder: Path, outer: Outer, then: int) -> list[torch.Tensor]:
    return resume(folder, outer, then, alone=True)


@ranks(4)
def test_checkpoints_hold_the_anchor_as_the_model(tmp_path: Path) -> None:
    model, outer, optimizer = start(2, Outer(every=3))
    train(model, outer, range(1, 6), optimizer)
    folder = tmp_path / "saved"
    save_training(folder, model, optimizer, {})
    anchors = {n: full(outer.anchors()[p]) for n, p in model.named_parameters()}
    stored = read_manifest(folder).tensors
    assert stored["replicas/model/embedding.weight"].shape == (2, 11, 7)
    plain = build()
    load_model(folder, plain)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, anchors[name]), name
    other = shard(build(), mesh=mesh_of(2))
    with pytest.raises(CheckpointError, match=r"build DistantReplicas.* before load_training"):
        load_training(folder, other, adamw(other.parameters()))
    changed, _, its = start(2, Outer(every=4))
    with pytest.raises(CheckpointError, match="every=3, here 4"):
        load_training(folder, changed, its)
    more, _, its = start(4, Outer(every=3))
    with pytest.raises(CheckpointError, match="replicas=2, here 4"):
        load_training(folder, more, its)


@ranks(4)
def test_a_checkpoint_of_replicas_that_were_not_apart_is_a_beginning(tmp_path: Path) -> None:
    model = shard(build(), mesh=mesh_of(2))
    optimizer = adamw(model.parameters())
    loss_of(model, batch_of(0, dist.get_rank())).backward()
    optimizer.step()
    save_training(tmp_path / "saved", model, optimizer, {})
    other, outer, its = start(2, Outer(every=3))
    train(other, outer, range(1, 5), its)
    load_training(tmp_path / "saved", other, its)
    assert outer.num_steps == 0
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(p.detach()), full(q.detach()))
        assert torch.equal(full(outer.anchors()[q]), full(p.detach()))
        assert not full(outer.momenta()[q]).any()


# Refusals.


@ranks(2)
def test_wrong_arguments_are_refused() -> None:
    model = shard(build(), mesh=mesh_of(2))
    for arguments, said in (
        ({"every": 0}, "every=0"),
        ({"every": 2, "delay": 2}, "delay=2, expected less than every=2"),
        ({"every": 2, "lr": -1.0}, "lr=-1.0"),
        ({"every": 2, "momentum": 1.0}, "momentum=1.0"),
        ({"every": 2, "share": 1.0}, "share=1.0"),
    ):
        with pytest.raises(UsageError, match=said):
            DistantReplicas(model, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"units \['"):
        DistantReplicas(shard(build()), every=2)
    with pytest.raises(UsageError, match="call fully_shard with a mesh of two axes"):
        DistantReplicas(build(), every=2)
    outer = DistantReplicas(model, every=1)
    with pytest.raises(InvariantError, match="has DistantReplicas already"):
        DistantReplicas(model, every=2)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(UsageError, match="frozen or unfrozen"):
        outer.step()


@ranks(2)
def test_frozen_parameters_are_not_exchanged() -> None:
    model = build()
    model.embedding.weight.requires_grad_(False)
    shard(model, mesh=mesh_of(2))
    outer = DistantReplicas(model, every=1)
    assert set(outer.anchors()) == {p for p in model.parameters() if p.requires_grad}
    train(model, outer, range(1, 3), sgd([p for p in model.parameters() if p.requires_grad]))
    assert torch.equal(full(model.embedding.weight.detach()), build().embedding.weight)
