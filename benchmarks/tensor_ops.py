"""Host time of operations on sharded tensors, over the same on their local tensors.

    python benchmarks/tensor_ops.py --out benchmarks/results/YYYYMMDD-tensor-ops-cpu.json

Tensors have 16 elements, so that the host's work is all there is, and there is one rank. Times are
those of the processor, which others that use it change little; of all rounds the fastest counts.
Layouts come first: the first matrix of listed shards lets every function
of torch come through Python, in this process from then on.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.bench.script import flags, store
from shoal.layout import Flat, ParamSpec
from shoal.tensor import Listed, Packed, ShardedTensor
from shoal.tensor.spec import ChunkShardingSpec

Times = dict[str, dict[str, float]]

LIMIT_US = 10.0
"""What a single operation may cost over the local one."""

OPERATIONS: dict[str, Callable[[Any, Any], object]] = {
    "add_": lambda x, y: x.add_(y),
    "mul_ by a number": lambda x, y: x.mul_(1.0),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "zero_": lambda x, y: x.zero_(),
    "copy_": lambda x, y: x.copy_(y),
    "add": lambda x, y: x + y,
    "sqrt": lambda x, y: x.sqrt(),
    "clone": lambda x, y: x.clone(),
    "detach": lambda x, y: x.detach(),
    "zeros_like": lambda x, y: torch.zeros_like(x),
}

adamw, sgd = torch.optim.AdamW, torch.optim.SGD
STEPS: dict[str, Callable[[list[Any]], Callable[[], object]]] = {
    "AdamW fused": lambda p: adamw(p, fused=True).step,
    "AdamW foreach": lambda p: adamw(p, foreach=True).step,
    "AdamW one by one": lambda p: adamw(p, foreach=False).step,
    "SGD momentum, foreach": lambda p: sgd(p, momentum=0.9, foreach=True).step,
    "SGD momentum, fused": lambda p: sgd(p, momentum=0.9, fused=True).step,
    "clip_grad_norm_, foreach": lambda p: partial(nn.utils.clip_grad_norm_, p, 1e9, foreach=True),
}


def main() -> None:
    """Measure, print two tables, and write a file if one is named."""
    parser = flags(__doc__, rounds=40)
    parser.add_argument("--params", type=int, default=150, help="parameters of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    single: Times = {}
    steps: Times = {}
    for kind, make in (("local", _local), ("layout", _packed), ("shard", _one), ("2 shards", _two)):
        single[kind] = _time_operations(make, options.rounds)
        steps[kind] = _time_steps(make, options.params, options.rounds)
    dist.destroy_process_group()
    _print(f"one operation, in µs; over the local one it may cost {LIMIT_US:.0f}", single)
    _print(f"a step over {options.params} parameters, in µs", steps)
    store(options.out, operations_us=single, steps_us=steps)


def _local(num: int) -> list[Tensor]:
    return [torch.ones(4, 4) for _ in range(num)]


def _packed(num: int) -> list[ShardedTensor]:
    specs = [ParamSpec(name=str(i), shape=(4, 4), dtype=torch.float32) for i in range(num)]
    packing = Flat().pack(specs, 1)
    return [
        ShardedTensor.of(torch.ones(16), Packed(packing=packing, index=i, group=_world(), rank=0))
        for i in range(num)
    ]


def _listed(num: int, num_shards: int) -> list[ShardedTensor]:
    spec = ChunkShardingSpec(0, ["rank:0/cpu"] * num_shards)
    placements = [Listed.of_spec(spec, (4, 4), _world()) for _ in range(num)]
    return [
        ShardedTensor.of([torch.ones(shape) for shape in placement.local_shapes], placement)
        for placement in placements
    ]


_one = partial(_listed, num_shards=1)
_two = partial(_listed, num_shards=2)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _time_operations(make: Callable[[int], list[Any]], rounds: int) -> dict[str, float]:
    (first,) = make(1)
    second = first.clone()
    return {
        name: _best(partial(call, first, second), rounds, number=500)
        for name, call in OPERATIONS.items()
    }


def _time_steps(make: Callable[[int], list[Any]], num: int, rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, build in STEPS.items():
        parameters = [nn.Parameter(tensor) for tensor in make(num)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter.detach())
        found[name] = _best(build(parameters), rounds, number=1)
    return found


def _best(call: Callable[[], object], rounds: int, number: int) -> float:
    return (
        min(timeit.repeat(call, timer=time.process_time, number=number, repeat=rounds))
        / number
        * 1e6
    )


def _print(title: str, times: Times) -> None:
    print(f"\n{title}")
    print(" " * 26 + "".join(f"{kind:>12}" for kind in times))
    for name in times["local"]:
        print(f"{name:26}" + "".join(f"{of[name]:12.2f}" for of in times.values()))


if __name__ == "__main__":
    main()
