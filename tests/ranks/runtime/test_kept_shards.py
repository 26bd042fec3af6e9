"""Shards kept in the compute dtype: the same bits as without, and one read of the shards a step."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal.optim
from differential import DIM, SHOAL, Block, check_same, loss_of, snapshot, stack
from harness import ranks
from shoal.checkpoint import load_model, save_training
from shoal.errors import InvariantError
from shoal.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, full_parameters, plan_of
from shoal.layout import Block as RowBlocks
from shoal.layout import Even, Flat, Layout, Rows, Whole
from shoal.runtime.fsdp_module import own_state
from shoal.runtime.unit import Unit

BF16, FP32 = torch.bfloat16, torch.float32
HALF = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), RowBlocks(5), Whole()]

Step = Callable[[], object]


def steps_of(model: Any, optimizers: Iterable[torch.optim.Optimizer], num: int) -> list[Any]:
    """Losses and what is left behind, of ordinary steps."""
    seen: list[Any] = []
    for x in SHOAL.batches(num):
        loss = loss_of(model(x))
        loss.backward()
        seen.append([loss.detach().clone(), snapshot(model)])
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return [*seen, snapshot(model)]


def loss_without_gradients(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return loss_of(model(SHOAL.batches(1)[0])).clone()


def adamw(model: Any) -> list[Any]:
    return steps_of(model, [torch.optim.AdamW(model.parameters(), lr=1e-2)], 4)


def fused_on_local_tensors(model: Any) -> list[Any]:
    return steps_of(model, [shoal.optim.AdamW(model.parameters(), lr=1e-2, fused=True)], 4)


def momentum(model: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    return steps_of(model, [optimizer], 4)


def two_optimizers(model: Any) -> list[Any]:
    parameters = list(model.parameters())
    halves = (parameters[::2], parameters[1::2])
    return steps_of(model, [torch.optim.SGD(half, lr=0.1) for half in halves], 4)


def stepped_in_backward(model: Any) -> list[Any]:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, one=optimizer: one.step())
    return steps_of(model, [], 4)


def evaluated(model: Any) -> list[Any]:
    """Before the first step, and between steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = [loss_without_gradients(model)]
    for _ in range(3):
        seen += [steps_of(model, [optimizer], 1), loss_without_gradients(model)]
    return seen


def accumulated(model: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for index, x in enumerate(SHOAL.batches(6)):
        model.set_requires_gradient_sync(index % 3 == 2)
        loss = loss_of(model(x))
        loss.backward()
        seen.append(loss.detach().clone())
        if index % 3 == 2:
            seen.append(snapshot(model))
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, snapshot(model)]


def frozen_for_a_while(model: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for flag in (True, False, True):
        model.blocks[1].requires_grad_(flag)
        seen += steps_of(model, [optimizer], 2)
    return seen


def loaded(model: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[Any] = []
    for assign in (False, True):
        seen.append(steps_of(model, [optimizer], 2))
        copies = {name: value.clone() for name, value in before.items()}
        model.load_state_dict(copies, assign=assign)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen += [loss_without_gradients(model), steps_of(model, [optimizer], 2)]
    return seen


def restored(model: Any) -> list[Any]:
    """From a checkpoint, whose bytes go straight to where the shards are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path = f"{folder[0]}/checkpoint"
    save_training(path, model, optimizer, extra={})
    seen = steps_of(model, [optimizer], 2)
    load_model(path, model)
    return [*seen, loss_without_gradients(model), steps_of(model, [optimizer], 2)]


def changed_in_place(model: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(3):
        seen += steps_of(model, [optimizer], 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    return [*seen, loss_without_gradients(model)]


def changed_unseen(model: Any) -> list[Any]:
    """In a way that nothing counts, and said so."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = steps_of(model, [optimizer], 2)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
    for module in (model, *model.blocks):
        module.reshard()
    return [*seen, loss_without_gradients(model), steps_of(model, [optimizer], 2)]


def moved(model: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = steps_of(model, [optimizer], 2)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    seen += [loss_without_gradients(model), steps_of(model, [optimizer], 2)]
    model.double()
    return [*seen, loss_without_gradients(model), steps_of(model, [optimizer], 2)]


def written_in_full(model: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = steps_of(model, [optimizer], 1)
    with full_parameters(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return [*seen, loss_without_gradients(model), steps_of(model, [optimizer], 2)]


def kept_gathered(model: Any) -> list[Any]:
    model.set_reshard_after_forward(False)
    seen = adamw(model)
    model.set_reshard_after_backward(False)
    return [*seen, *evaluated(model)]


SCENARIOS: dict[str, Callable[[Any], list[Any]]] = {
    one.__name__: one
    for one in (
        *(adamw, fused_on_local_tensors, momentum, two_optimizers, stepped_in_backward),
        *(evaluated, accumulated, frozen_for_a_while, loaded, restored),
        *(changed_in_place, changed_unseen, moved, written_in_full, kept_gathered),
    )
}


def build(keep: bool, make: Callable[[], nn.Module] = Block, **options: Any) -> Any:
    model = SHOAL.shard(stack(make), **{"mp_policy": HALF, **options})
    model.set_keep_low_precision_shards(keep)
    return model


def units_of(model: Any) -> list[Unit]:
    return [own_state(module).units[0] for module in (model, *model.blocks)]


def check_bits(scenario: Callable[[Any], list[Any]], **options: Any) -> None:
    seen = [scenario(build(keep, **options)) for keep in (False, True)]
    check_same(seen[1], seen[0], exact=True, where="kept against cast anew")


@ranks(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_bits_are_those_of_gathers_that_cast(scenario: str, layout: Layout) -> None:
    check_bits(SCENARIOS[scenario], layout=layout)


@ranks(2)
@pytest.mark.parametrize("layout", [Rows(), RowBlocks(5), Whole()], ids=repr)
def test_other_layouts(layout: Layout) -> None:
    check_bits(evaluated, layout=layout)


@ranks(1, 3)
@pytest.mark.parametrize("layout", [Even(), Flat(), Whole()], ids=repr)
def test_on_other_numbers_of_ranks(layout: Layout) -> None:
    check_bits(evaluated, layout=layout)


@ranks(4)
@pytest.mark.parametrize("reshard_after_forward", [True, 2])
def test_pieces_between_forward_and_backward(reshard_after_forward: bool | int) -> None:
    check_bits(adamw, reshard_after_forward=reshard_after_forward)


@ranks(2)
def test_where_storages_cannot_exchange_their_memory() -> None:
    with patch("shoal._torch.storage.can_swap_memory", return_value=False):
        check_bits(evaluated)


@ranks(2)
def test_offloaded_shards() -> None:
    check_bits(adamw, offload_policy=CPUOffloadPolicy())


class Mixed(Block):
    """Parameters of several dtypes, of which compute casts some."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(DIM, dtype=torch.complex64))
        self.low = nn.Parameter(torch.ones(3, DIM, dtype=BF16))
        self.codes = nn.Parameter(torch.arange(5, dtype=torch.int32), requires_grad=False)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        turned = (x * self.turn).real + 0.1 * self.low.sum(0) + 0.01 * self.codes.sum()
        return super().compute(turned.to(self.low.dtype))


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_units_of_several_dtypes(layout: Layout) -> None:
    check_bits(momentum, make=Mixed, layout=layout)


class Recounted(TorchDispatchMode):
    """Counts the copies out of each unit's shards."""

    def __init__(self, units: list[Unit]) -> None:
        super().__init__()
        self._buffers = {unit: unit.shards.buffer for unit in units}
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default):
            sources = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            for unit, buffer in self._buffers.items():
                if any(_is_in(source, buffer) for source in sources):
                    self.reads[unit.name] += 1
        return func(*args, **(kwargs or {}))


def _is_in(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    return 0 <= tensor.data_ptr() - buffer.data_ptr() < buffer.nbytes


def reads_of(model: Any, act: Step) -> list[int]:
    """How often something reads each unit's shards."""
    units = units_of(model)
    with Recounted(units) as mode:
        act()
    return [mode.reads[unit.name] for unit in units]


def backwards(model: Any, num: int = 1) -> None:
    for x in SHOAL.batches(num):
        loss_of(model(x)).backward()


@ranks(2)
@pytest.mark.parametrize("make", [Block, Mixed])
@pytest.mark.parametrize("layout", [Even(), Flat(), Whole()], ids=repr)
def test_shards_are_read_once_by_the_optimizers_step(
    layout: Layout, make: Callable[[], nn.Module]
) -> None:
    cast_anew, kept = (build(keep, make, layout=layout) for keep in (False, True))
    assert reads_of(cast_anew, lambda: backwards(cast_anew)) == [1, 2, 2, 2]
    assert reads_of(kept, lambda: backwards(kept)) == [1, 1, 1, 1]
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)

    def act() -> None:
        optimizer.step()
        optimizer.step()

    for _ in range(2):
        assert reads_of(kept, lambda: backwards(kept, 3)) == [0, 0, 0, 0]
        assert reads_of(kept, lambda: loss_without_gradients(kept)) == [0, 0, 0, 0]
        assert reads_of(kept, optimizer.step) == [1, 1, 1, 1]
    assert reads_of(kept, act) == [0, 0, 0, 0]  # nobody has sent what the step before wrote
    assert reads_of(kept, lambda: backwards(kept)) == [1, 1, 1, 1]


@ranks(2)
def test_shards_that_change_after_the_optimizers_step_are_read_once_by_a_gather() -> None:
    model = build(True)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in (parameters[::2], parameters[1::2])]

    def step() -> None:
        backwards(model)
        for optimizer in optimizers:
            optimizer.step()

    step()
    step()  # from here on it is known that the first optimizer's write is in vain
    for _ in range(3):
        assert reads_of(model, step) == [1, 1, 1, 1]


@ranks(2)
def test_a_state_dict_between_steps_keeps_the_optimizer_writing() -> None:
    model = build(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backwards(model)
    optimizer.step()
    model.state_dict()
    assert reads_of(model, lambda: backwards(model)) == [1, 1, 1, 1]
    assert reads_of(model, optimizer.step) == [1, 1, 1, 1]
    assert reads_of(model, lambda: backwards(model)) == [0, 0, 0, 0]


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_changes_between_forward_and_backward_are_refused(layout: Layout) -> None:
    model = build(True, layout=layout)
    backwards(model)
    for change in (lambda p: p.mul_(2), lambda p: p.copy_(p + 1)):
        loss = loss_of(model(SHOAL.batches(1)[0]))
        with torch.no_grad():
            for parameter in model.blocks[1].parameters():
                change(parameter)
        with pytest.raises(InvariantError, match="changed between its forward and its backward"):
            loss.backward()
    fresh = build(False, layout=layout)
    fresh.load_state_dict(model.state_dict())
    check_same(loss_without_gradients(model), loss_without_gradients(fresh), exact=True, where="")


@ranks(2)
def test_a_compiled_optimizer_leaves_the_cast_to_the_gather() -> None:
    def compiled(model: Any) -> list[Any]:
        torch._dynamo.reset()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="aot_eager")
        seen: list[Any] = []
        for _ in range(3):
            backwards(model)
            step()
            seen.append(snapshot(model))
            model.zero_grad()
        return [*seen, loss_without_gradients(model)]

    check_bits(compiled)


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_graphs_keep_nothing(layout: Layout) -> None:
    def in_a_graph(model: Any) -> list[Any]:
        torch._dynamo.reset()
        run = torch.compile(model, backend="shoal")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        for x in SHOAL.batches(3):
            loss = loss_of(run(x))
            loss.backward()
            optimizer.step()
            seen.append([loss.detach().clone(), snapshot(model)])
            model.zero_grad()
        # What it computes without the graph is of these weights too.
        return [*seen, loss_without_gradients(model), steps_of(model, [optimizer], 2)]

    check_bits(in_a_graph, layout=layout)


def kept_buffers(model: Any) -> list[torch.Tensor]:
    return [unit._kept[0].buffer for unit in units_of(model) if unit._kept is not None]


@ranks(1, 2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_plans_show_the_memory(layout: Layout) -> None:
    model = build(True, layout=layout)
    backwards(model)
    kept = kept_buffers(model)
    plan = plan_of(model)
    assert len(kept) == 4
    assert [unit.kept_bytes for unit in plan.units] == [buffer.nbytes for buffer in kept]
    assert plan.kept_bytes == sum(unit.shard_bytes for unit in plan.units) // 2
    assert f"{plan.kept_bytes / 2**20:.1f} MiB of shards kept" in str(plan)
    with torch.device("meta"):
        declared = plan_of(
            stack(),
            world=dist.get_world_size(),
            layout=layout,
            mp_policy=HALF,
            keep_low_precision_shards=True,
        )
    assert declared == plan
    pointers = [weakref.ref(buffer) for buffer in kept]
    del kept
    model.set_keep_low_precision_shards(False)
    backwards(model)
    gc.collect()
    assert [pointer() for pointer in pointers] == [None] * 4
    assert plan_of(model).kept_bytes == 0
    assert "kept" not in str(plan_of(model))


@ranks(2)
@pytest.mark.parametrize("dtype", [None, FP32, torch.float64])
def test_nothing_is_kept_that_would_take_as_many_bytes(dtype: torch.dtype | None) -> None:
    model = build(True, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    backwards(model)
    assert kept_buffers(model) == []
    assert plan_of(model).kept_bytes == 0


@ranks(2)
def test_one_unit_alone() -> None:
    model = build(False)
    model.set_keep_low_precision_shards(True, recurse=False)
    backwards(model)
    assert [unit.kept_bytes > 0 for unit in plan_of(model).units] == [True, False, False, False]
    assert len(kept_buffers(model)) == 1
