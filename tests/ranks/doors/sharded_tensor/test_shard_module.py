"""Parameters of modules sharded one by one and by plans, and functions replaced for them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import ranks
from sharded_api import OURS, Api, compare, compare_errors
from shoal.tensor.sharded import ShardedTensor


def everyone() -> list[int]:
    return [*range(dist.get_world_size())]


def linear(seed: int = 3, **sizes: int) -> nn.Linear:
    """A layer with other weights on every rank."""
    torch.manual_seed(seed + dist.get_rank())
    return nn.Linear(sizes.get("inputs", 12), sizes.get("outputs", 11))


@ranks(1, 2, 4)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parameters_are_dealt_out_by_one_rank(dim: int) -> None:
    source = dist.get_world_size() - 1

    def script(api: Api) -> Any:
        layer = linear(inputs=16, outputs=16)
        spec = api.chunks(dim, everyone()[::-1])
        api.module.shard_parameter(layer, "weight", spec, src_rank=source)
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.sharding_spec() == spec
        bias = api.module._shard_tensor(layer.bias.detach(), api.chunks(0, everyone()))
        return [layer.weight, bias]

    compare(script)


@ranks(2, 4)
def test_chunks_that_do_not_divide_a_dim_are_dealt_out_too() -> None:
    whole = torch.arange(15.0).view(5, 3)
    for dim, order in ((0, everyone()), (1, everyone() * 2), (0, everyone()[-1:])):
        spec = OURS.chunks(dim, order)
        sharded = spec.shard(whole if dist.get_rank() == 0 else torch.zeros(5, 3))
        assert torch.equal(sharded.full_tensor(), whole)


@ranks(4)
def test_a_subgroup_counts_its_source_rank_itself() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first = dist.get_rank() // 2 * 2

    def script(api: Api) -> Any:
        layer, spec = linear(outputs=12), api.chunks(0, [first + 1, first])
        group = groups[first // 2]
        api.module.shard_parameter(layer, "weight", spec, src_rank=1, process_group=group)
        return layer.weight

    compare(script)


def with_bias(value: Any) -> nn.Linear:
    layer = linear()
    del layer.bias
    layer.bias = value
    return layer


MISTAKES: dict[str, tuple[Any, str]] = {
    "no such parameter": (
        lambda api: api.module.shard_parameter(linear(), "wait", api.chunks(0, [0])),
        "has no attribute",
    ),
    "no tensor": (
        lambda api: api.module.shard_parameter(with_bias("b"), "bias", api.chunks(0, [0])),
        "Expected Linear.bias to be a Tensor, but found str",
    ),
    "strides": (
        lambda api: api.module.shard_parameter(
            with_bias(torch.ones(3, 2).t()), "bias", api.chunks(0, [0])
        ),
        "not a contiguous Tensor",
    ),
    "sources differ": (
        lambda api: api.module._shard_tensor(
            torch.ones(4), api.chunks(0, [0, 1]), src_rank=dist.get_rank()
        ),
        "does not match with src_rank",
    ),
    "specs differ": (
        lambda api: api.module._shard_tensor(torch.ones(4), api.chunks(0, [dist.get_rank(), 1])),
        "does not match with sharding_spec",
    ),
    "listed shards": (
        lambda api: api.module._shard_tensor(torch.ones(4), api.listed([([0], [4], 0)])),
        "not implemented yet",
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_sharding(name: str) -> None:
    compare_errors(*MISTAKES[name])


@ranks(2)
def test_a_tensor_that_one_rank_cannot_send_raises_on_all() -> None:
    whole = torch.ones(4, 4)
    tensor = whole.t()[:, :3] if dist.get_rank() == 1 else whole
    with pytest.raises(ValueError, match="not a contiguous Tensor"):
        OURS.module._shard_tensor(tensor, OURS.chunks(0, [0, 1]))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(1), linear(2, inputs=11, outputs=8)


@ranks(1, 2)
def test_plans() -> None:
    def script(api: Api) -> Any:
        class Doubler(OURS.plan.Sharder):
            def shard(self, module: nn.Module) -> nn.Module:
                for parameter in module.parameters():
                    parameter.data.fill_(2)
                return module

        class Planner(api.plan.ShardingPlanner):
            def build_plan(self, module: nn.Module) -> Any:
                specs: dict[str, Any] = {"first.weight": api.chunks(0, everyone())}
                specs |= {"first.bias": api.chunks(0, everyone()), "second": Doubler()}
                return api.plan.ShardingPlan(plan=specs)

        module = Pair()
        api.module.shard_module(module, Planner().build_plan(module))
        return [module.first.weight, module.first.bias, module.second.weight.detach()]

    compare(script)


class Sharded(nn.Module):
    """A module whose output is sharded."""

    def __init__(self, api: Api, dim: int, *size: int) -> None:
        super().__init__()
        self.value = api.tensor.rand(api.chunks(dim, everyone()), size)

    def forward(self) -> Any:
        return self.value


@ranks(1, 2, 4)
def test_outputs_are_resharded_or_collected() -> None:
    world_size = dist.get_world_size()

    def script(api: Api) -> Any:
        resharded = api.module._reshard_output(
            Sharded(api, 0, 8, 4 * world_size), api.chunks(1, everyone())
        )
        rows = api.module._collect_local_shard(Sharded(api, 0, world_size, 5))
        plan = api.plan.ShardingPlan(
            plan={}, output_plan={"": api.chunks(1, everyone())}, return_local_tensor=[""]
        )
        both = Sharded(api, 0, 4, 3 * world_size)
        api.module.shard_module(both, plan)
        return [resharded().local_tensor(), rows(), both()]

    compare(script)


PLAN_MISTAKES: dict[str, tuple[Any, str]] = {
    "no spec": (
        lambda api: {"plan": {"first.weight": torch.ones(1)}},
        "Only `ShardingSpec` and `Sharder` are supported to shard",
    ),
    "no output spec": (
        lambda api: {"plan": {}, "output_plan": {"": torch.ones(1)}},
        "Only `ShardingSpec` is supported as output_plan",
    ),
    "no module": (lambda api: {"plan": {"third.weight": api.chunks(0, [0])}}, "has no attribute"),
    "no parameter": (lambda api: {"plan": {"first.wait": api.chunks(0, [0])}}, "has no attribute"),
}


@ranks(1)
@pytest.mark.parametrize("name", PLAN_MISTAKES)
def test_mistakes_of_plans(name: str) -> None:
    make, match = PLAN_MISTAKES[name]
    compare_errors(
        lambda api: api.module.shard_module(Pair(), api.plan.ShardingPlan(**make(api))), match
    )


@ranks(1)
def test_mistakes_of_sharders() -> None:
    class Nothing(OURS.plan.Sharder):
        def shard(self, module: nn.Module) -> nn.Module:
            return nn.Module()

    shard, plan = OURS.module.shard_module, OURS.plan.ShardingPlan
    with pytest.raises(KeyError, match="path must not be empty"):
        shard(Pair(), plan(plan={"": Nothing()}))
    with pytest.raises(RuntimeError, match="should not conflict with the submodule tree"):
        shard(Pair(), plan(plan={"first.weight": OURS.chunks(0, [0]), "first": Nothing()}))
    module = Pair()
    first = module.first
    shard(module, plan(plan={"first": Nothing()}))
    assert module.first is first, "what cannot be called replaces nothing"

    class Other(OURS.plan.Sharder):
        def shard(self, module: nn.Module) -> nn.Module:
            return nn.Identity()

    shard(module, plan(plan={"first": Other()}))
    assert isinstance(module.first, nn.Identity)


@ranks(2, fresh=True)
def test_functions_are_replaced_for_all_or_for_one_spec() -> None:
    def script(api: Api) -> Any:
        @api.tensor.custom_sharded_op_impl(torch.asin)
        def asin(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
            assert process_group is dist.group.WORLD
            return torch.asin(args[0].local_shards()[0].tensor)

        @api.spec_api.custom_sharding_spec_op(api.spec.ChunkShardingSpec, nn.functional.linear)
        def project(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
            return torch.full((2,), 4.0)

        tensor = api.tensor.rand(api.chunks(0, everyone()), 10, 10)
        layer = linear()
        api.module.shard_parameter(layer, "weight", api.chunks(0, everyone()))
        return [torch.asin(tensor), layer(torch.ones(3, 12)), tensor.shape, tensor.dtype]

    plain = OURS.tensor.ones(OURS.chunks(0, everyone()), 4)
    assert "__torch_function__" not in vars(ShardedTensor)
    compare(script)
    assert torch.equal((plain * 2 + plain).full_tensor(), torch.full((4,), 3.0))
    other = OURS.tensor.ones(OURS.chunks(0, [0]), 4, process_group=dist.new_group())
    with pytest.raises(RuntimeError, match="same ProcessGroup"):
        nn.functional.linear(plain, other)


@ranks(1, fresh=True)
def test_a_replacement_takes_four_arguments() -> None:
    def script(api: Api) -> Any:
        @api.tensor.custom_sharded_op_impl(torch.asin)
        def asin(types: Any) -> None:
            pass

    compare_errors(script, "expects signature")
    assert "__torch_function__" not in vars(ShardedTensor)
