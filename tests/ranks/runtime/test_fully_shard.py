"""The engine on gloo ranks against its oracles, and in the situations a step can get into."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness import ranks
from oracle import (
    CHECKPOINTS,
    Checkpoint,
    Model,
    batches,
    build,
    check_bitwise_equal_to_torch,
    check_training_equals_unsharded,
    full,
    loss_of,
    shard,
)
from shoal.errors import InvariantError, UsageError
from shoal.runtime.fully_shard import FSDPModule, fully_shard
from shoal.runtime.observe import watch
from shoal.runtime.policy import MixedPrecisionPolicy


@ranks(1, 2, 4)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_training_equals_the_unsharded_model(checkpoint: Checkpoint) -> None:
    check_training_equals_unsharded("cpu", checkpoint)


@ranks(2)
@pytest.mark.parametrize("precise", [True, False])
def test_bitwise_equal_to_torch(precise: bool) -> None:
    check_bitwise_equal_to_torch("cpu", precise)


@ranks(2)
def test_what_is_registered_and_what_memory_it_has() -> None:
    model = shard(build())
    assert isinstance(model, (FSDPModule, TorchFSDPModule, Model))
    names = [name for name, _ in build().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
    block = model.blocks[0]
    block.unshard()
    gathered = block.up.weight
    assert not isinstance(gathered, DTensor)
    assert torch.equal(gathered, build().blocks[0].up.weight)
    assert gathered.untyped_storage().nbytes() > 0
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    assert gathered.shape == (15, 7)
    for read in (torch.sum, lambda p: p + 1, lambda p: p.data, torch.Tensor.untyped_storage):
        with pytest.raises(InvariantError, match=r"'up\.weight' of .* its unit is freed"):
            read(gathered)
    assert model.head.weight is model.embedding.weight


@ranks(2)
def test_gradients_accumulate_over_backwards() -> None:
    plain, sharded = build(), shard(build())
    for whole, part in batches(3, dist.get_rank(), 2):
        loss_of(plain, whole).backward()
        loss_of(sharded, part).backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q.grad), p.grad)


@ranks(2)
def test_frozen_parameters_and_unused_ones_get_no_gradient() -> None:
    def freeze(model: Model) -> Model:
        model.blocks[0].up.weight.requires_grad_(False)
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(False)
        model.blocks[2].unused = nn.Parameter(torch.ones(3))
        return model

    plain, sharded = freeze(build()), shard(freeze(build()))
    ((whole, part),) = batches(1, dist.get_rank(), 2)
    loss_of(plain, whole).backward()
    loss_of(sharded, part).backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(full(q.grad), p.grad)


class FrozenFirst(nn.Module):
    """Backward needs the frozen layer after the last trained parameter has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.trained = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.trained(torch.relu(self.frozen(x))) + sum(others)


def frozen_first() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(6, 6), FrozenFirst(), FrozenFirst()])


@ranks(2)
@pytest.mark.parametrize("how", ["in a row", "twice", "two inputs", "leaf input", "retained"])
def test_units_are_freed_when_backward_has_left_them(how: str) -> None:
    plain, sharded = frozen_first(), frozen_first()
    for block in sharded:
        fully_shard(block)
    x = torch.randn(3, 6, requires_grad=how == "leaf input")
    grads = []
    for blocks in (plain, sharded):
        first, second, third = blocks
        for _ in range(3):
            y = x if how == "leaf input" else first(x)
            y = second(y, y) if how == "two inputs" else second(y)
            y = third(second(y)) if how == "twice" else third(y)
            if how == "retained":
                y.sum().backward(retain_graph=True)
            y.sum().backward()
        grads.append([p.grad for p in blocks.parameters()])
        if how == "leaf input":
            grads[-1].append(x.grad)
            x.grad = None
    for p, q in zip(*grads, strict=True):
        assert (p is None) == (q is None)
        if p is not None:
            torch.testing.assert_close(full(q), p)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    assert len(x._backward_hooks or ()) <= 1


@ranks(2)
def test_evaluation_between_steps_sees_the_new_weights() -> None:
    plain, sharded = build(), shard(build())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, sharded)]
    for whole, part in batches(3, dist.get_rank(), 2):
        with torch.no_grad():
            torch.testing.assert_close(loss_of(sharded, whole), loss_of(plain, whole))
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
        loss_of(plain, whole).backward()
        loss_of(sharded, part).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_held_parameters_are_gathered_again_after_an_update() -> None:
    """The root keeps its parameters for backward; an update before the next forward counts."""
    plain, sharded = build(), shard(build())
    ((whole, _),) = batches(1, dist.get_rank(), 2)
    loss_of(sharded, whole)
    assert sharded.embedding.weight.untyped_storage().nbytes() > 0
    state = {name: 2 * value for name, value in plain.state_dict().items()}
    plain.load_state_dict(state)
    with torch.no_grad():
        for (_, p), q in zip(sharded.state_dict().items(), state.values(), strict=True):
            p.copy_(
                distribute_tensor(q, p.device_mesh, p.placements) if isinstance(p, DTensor) else q
            )
    torch.testing.assert_close(loss_of(sharded, whole), loss_of(plain, whole))


@ranks(2)
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_an_optimizer_step_outdates_what_was_gathered(options: dict[str, bool]) -> None:
    plain, sharded = build(), shard(build())
    ((whole, _),) = batches(1, dist.get_rank(), 2)
    for model in (plain, sharded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, **options)
        loss_of(model, whole).backward()
        held = loss_of(model, whole)
        optimizer.step()
        if model is sharded:
            with pytest.raises(InvariantError, match="changed between"):
                held.backward()
    torch.testing.assert_close(loss_of(sharded, whole), loss_of(plain, whole))


@ranks(2)
def test_two_forwards_before_two_backwards() -> None:
    plain, sharded = build(), shard(build())
    (first, second) = batches(2, dist.get_rank(), 2)
    for model, index in ((plain, 0), (sharded, 1)):
        losses = [loss_of(model, first[index]), loss_of(model, second[index])]
        losses[1].backward()
        losses[0].backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q.grad), p.grad)


@ranks(2)
def test_a_step_that_raised_leaves_nothing_behind() -> None:
    plain, sharded = build(), shard(build())
    ((whole, part),) = batches(1, dist.get_rank(), 2)
    loss = loss_of(sharded, part)
    handle = sharded.blocks[1].down.register_full_backward_hook(lambda *_: 1 / 0)
    loss_with_hook = loss_of(sharded, part)
    with pytest.raises(ZeroDivisionError):
        loss_with_hook.backward()
    handle.remove()
    del loss
    for parameter in sharded.parameters():
        parameter.grad = None
    loss_of(plain, whole).backward()
    loss_of(sharded, part).backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q.grad), p.grad)


@ranks(2)
def test_weights_changed_between_forward_and_backward() -> None:
    sharded = shard(build())
    ((_, part),) = batches(1, dist.get_rank(), 2)
    loss = loss_of(sharded, part)
    sharded.reshard()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.mul_(2)
    with pytest.raises(InvariantError, match="changed between its forward and its backward"):
        loss.backward()


@ranks(2)
def test_replaced_parameters_are_found() -> None:
    ((_, part),) = batches(1, dist.get_rank(), 2)
    replaced = shard(build())
    block = replaced.blocks[2]
    block.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(InvariantError, match=r"'scale' of unit 'blocks\.2' was replaced"):
        loss_of(replaced, part)


@ranks(2)
def test_the_record_of_a_step() -> None:
    model = shard(build())
    ((_, part),) = batches(1, dist.get_rank(), 2)
    with watch(model) as recorder:
        loss_of(model, part).backward()
        with pytest.raises(InvariantError, match="watched already"), watch(model):
            pass
    units = {"root", "blocks.0", "blocks.1", "blocks.2"}
    actions = recorder.actions()
    seen: dict[str, list[str]] = {}
    for action in actions:
        seen.setdefault(action.kind, []).append(action.unit)
    for kind in ("forward", "backward", "take", "reduce", "finish"):
        assert sorted(seen[kind]) == sorted(units)
    # The root holds its parameters from forward to backward, the blocks gather twice.
    for kind in ("gather", "wait", "free"):
        assert sorted(seen[kind]) == sorted([*units, *(units - {"root"})])
    loss_of(model, part).backward()
    assert len(recorder.actions()) == len(actions)


@ranks(2)
def test_refusals_name_what_they_refuse() -> None:
    def linear(**options) -> nn.Linear:
        return nn.Linear(4, 4, **options)

    shared = linear()
    shared.weight = nn.Parameter(torch.ones(4).expand(4, 4))
    twice = fully_shard(linear())
    cases = [
        (UsageError, "list of modules", lambda: fully_shard(3)),
        (UsageError, "got a int", lambda: fully_shard([linear(), 3])),
        (UsageError, "to divide the 2", lambda: fully_shard(linear(), reshard_after_forward=3)),
        (NotImplementedError, "symmetric memory", lambda: twice.set_symm_mem_for_comm()),
        (AssertionError, "does not support deepcopy", lambda: copy.deepcopy(twice)),
        (UsageError, "'weight'.* several of its elements are one", lambda: fully_shard(shared)),
        (UsageError, "each of its children", lambda: fully_shard(nn.ModuleList([linear()]))),
        (UsageError, "manages this FSDPLinear already", lambda: fully_shard(twice)),
        (UsageError, "floating-point", lambda: MixedPrecisionPolicy(param_dtype=torch.int8)),
        (UsageError, "was not given to fully_shard", lambda: watch(linear()).__enter__()),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


@ranks(2)
def test_state_dict_round_trip_is_bitwise() -> None:
    model = shard(build())
    ((_, part),) = batches(1, dist.get_rank(), 2)
    loss_of(model, part)
    saved = copy.deepcopy({name: full(value) for name, value in model.state_dict().items()})
    for name, value in build().state_dict().items():
        assert torch.equal(saved[name], value)
