"""Tensor operations on listed shards that torch's ShardedTensor has too, and their errors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_optim as torch_optim

from harness import ranks
from listed_cuts import CUTS, MATRIX_CUTS, chunks, everyone, listed
from sharded_api import OURS, TORCHS, Api, compare, compare_errors
from shoal import sharded_optim
from shoal.sharded_tensor import ones, rand, zeros

COMPARISONS = pytest.mark.parametrize("same", [torch.equal, torch.allclose])


@ranks(2, 4)
@COMPARISONS
def test_comparisons_see_values_metadata_and_all_ranks(same: Callable[..., bool]) -> None:
    spec, other = chunks(0, everyone()), chunks(0, everyone()[::-1])
    tensor = ones(spec, 10, 10)
    assert same(tensor, ones(spec, 10, 10))
    for different in (
        zeros(spec, 10, 10),
        ones(spec, 10, 5),
        ones(other, 10, 10),
        ones(chunks(1, everyone()), 10, 10),
        ones(spec, 10, 10, dtype=torch.float64),
        ones(spec, 10, 10, requires_grad=True),
    ):
        assert not same(tensor, different)
        assert not same(different, tensor)
    changed: Any = tensor.clone()
    if dist.get_rank() == 1:
        changed.local_tensor()[0, 0] = 3
    assert not same(tensor, changed), "on the ranks that see no difference, too"


@ranks(2)
def test_close_is_as_close_as_was_asked() -> None:
    spec = chunks(0, everyone() * 2)
    tensor = ones(spec, 10, 3)
    near = tensor + 1e-3
    assert not torch.allclose(tensor, near)
    assert torch.allclose(tensor, near, atol=1e-2)
    torch.testing.assert_close(tensor, tensor.clone())
    torch.testing.assert_close(tensor, near, atol=1e-2, rtol=0)


@ranks(2)
@COMPARISONS
def test_comparisons_of_what_cannot_be_compared(same: Callable[..., bool]) -> None:
    spec = chunks(0, everyone())
    with pytest.raises(TypeError, match="need to be of type ShardedTensor"):
        same(ones(spec, 4, 4), torch.ones(4, 4))
    for order in ([0, 1], [1, 0]):
        group = dist.new_group(order)
        with pytest.raises(RuntimeError, match="All distributed tensors should use the same"):
            same(ones(spec, 4, 4), ones(spec, 4, 4, process_group=group))


@ranks(1, 2, 4)
@pytest.mark.parametrize("cut", CUTS)
def test_copies_are_torchs(cut: str) -> None:
    def script(api: Api) -> Any:
        spec = CUTS[cut]((8, 5))
        tensor = api.tensor.rand(spec, 8, 5)
        trained = api.tensor.rand(spec, 8, 5, requires_grad=True)
        detached = trained.detach()
        copied = copy.deepcopy(trained)
        assert all(not shard.tensor.requires_grad for shard in detached.local_shards())
        assert all(shard.tensor.requires_grad for shard in copied.local_shards())
        into = api.tensor.zeros(spec, 8, 5)
        made = [
            tensor.clone(),
            copy.deepcopy(tensor),
            detached,
            copied,
            into.copy_(tensor),
            tensor.requires_grad_(),
            api.tensor.rand(spec, 8, 5).type_as(torch.ones(1, dtype=torch.float64)),
            *(like(into) for like in (torch.zeros_like, torch.ones_like)),
            torch.full_like(into, 3.0),
            torch.rand_like(into),
            torch.randn_like(into),
            torch.zeros_like(into, dtype=torch.int32),
        ]
        assert made[0] is not tensor
        assert made[1] is not tensor
        assert all(shard.tensor.requires_grad for shard in tensor.local_shards())
        return made

    compare(script)


@ranks(2)
def test_shards_share_memory_with_what_is_detached_from_them() -> None:
    tensor = rand(chunks(0, everyone() * 2), 8, 3, requires_grad=True)
    detached = tensor.detach()
    detached.zero_()
    assert not any(shard.tensor.any() for shard in tensor.local_shards())


@ranks(1)
def test_mistakes_of_copies_are_torchs() -> None:
    def set_flag(api: Api) -> None:
        api.tensor.ones(api.chunks(0, [0]), 4, 4).requires_grad = True

    compare_errors(set_flag, "not supported")
    compare_errors(
        lambda api: api.tensor.ones(api.chunks(0, [0]), 4, 4).svd(),
        "not supported for ShardedTensor!",
    )


@ranks(2)
@pytest.mark.parametrize("cut", MATRIX_CUTS)
def test_reductions_give_the_global_result(cut: str) -> None:
    whole = torch.randn(11, 7, generator=torch.Generator().manual_seed(3))
    ours = listed(whole, MATRIX_CUTS[cut]((11, 7)))
    for call in (
        torch.sum,
        torch.mean,
        torch.max,
        torch.min,
        torch.norm,
        lambda x: torch.linalg.vector_norm(x, 1),
        lambda x: torch.linalg.vector_norm(x, torch.inf),
        lambda x: (x > 0).any(),
        lambda x: (x > 0).all(),
    ):
        found = call(ours)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, call(whole))


INITS: dict[str, Callable[[Any], Any]] = {
    "constant_": lambda x: nn.init.constant_(x, 2.5),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
}
DRAWN: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: nn.init.uniform_(x, 10, 20),
    "normal_": lambda x: nn.init.normal_(x, 10, 5),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=0, mode="fan_in"),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
}


@ranks(2)
@pytest.mark.parametrize("cut", MATRIX_CUTS)
def test_initialisers_of_one_value_for_each_place(cut: str) -> None:
    for name, init in INITS.items():
        ours = listed(torch.full((8, 6), 7.0), MATRIX_CUTS[cut]((8, 6)))
        shards = [shard.tensor for shard in ours.local_shards()]
        assert init(ours) is ours
        assert torch.equal(ours.full_tensor(), init(torch.empty(8, 6))), name
        assert all(s.tensor is t for s, t in zip(ours.local_shards(), shards, strict=True))


@ranks(2)
def test_initialisers_draw_each_shard_by_itself() -> None:
    for name, init in DRAWN.items():
        # Rows are whole, so that a shard has the fan of the whole.
        ours: Any = nn.Parameter(rand(chunks(0, everyone()), 8, 6, dtype=torch.float64))
        local = ours.local_tensor().detach().clone()
        torch.manual_seed(1234)
        init(ours)
        torch.manual_seed(1234)
        init(local)
        assert torch.equal(ours.local_tensor(), local), name


@ranks(2)
def test_what_is_not_supported_names_itself_the_layout_and_the_alternatives() -> None:
    tensor = ones(chunks(0, everyone()), 6, 4)
    for call, name in (
        (lambda: tensor.t(), "aten.t"),
        (lambda: torch.linalg.qr(tensor), "aten.linalg_qr"),
        (lambda: tensor.sum(0), "aten.sum"),
        (lambda: tensor + torch.ones(6, 4), "aten.add"),
        (lambda: torch.cat([tensor, tensor]), "aten.cat"),
        (lambda: nn.init.orthogonal_(tensor), "aten"),
    ):
        with pytest.raises(NotImplementedError) as caught:
            call()
        message = str(caught.value)
        for part in (name, f"rank {dist.get_rank()} of 2", "(6, 4)", "ChunkShardingSpec"):
            assert part in message, message
        assert "full_tensor()" in message
        assert "reshard" in message


class Model(nn.Module):
    """A sharded attribute beside a plain parameter, used shard by shard."""

    def __init__(self, api: Api) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Parameter(torch.rand(2, 3))
        spec = api.chunks(0, everyone())
        self.sharded = api.tensor.rand(spec, 2 * len(everyone()), 3, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain + self.sharded.local_shards()[0].tensor + x


@ranks(1, 2)
def test_optimizers_of_shards_are_torchs() -> None:
    def script(api: Api) -> Any:
        optim = torch_optim if api is TORCHS else sharded_optim
        model = Model(api)
        replaced = torch.full((2, 3), 0.5, requires_grad=True)
        model.sharded.local_shards()[0].tensor = replaced
        assert model.sharded.local_tensor() is replaced
        named = dict(optim.named_params_with_sharded_tensor(model))
        optimizer = optim.ShardedOptimizer(named, torch.optim.SGD, lr=0.1)
        before = copy.deepcopy(optimizer.named_params)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return [[*named], [*before.values()], model.plain.detach(), model.sharded]

    compare(script)
    for name in ("state_dict", "load_state_dict", "add_param_group"):

        def call(api: Api, name: str = name) -> Any:
            optim = torch_optim if api is TORCHS else sharded_optim
            named = {"sharded": api.tensor.ones(api.chunks(0, everyone()), 2 * len(everyone()), 3)}
            optimizer = optim.ShardedOptimizer(named, torch.optim.SGD, lr=0.1)
            return getattr(optimizer, name)(*([] if name == "state_dict" else [{}]))

        compare_errors(call, f"{name} not implemented")


@ranks(1)
def test_a_shard_takes_only_tensors_that_fit() -> None:
    tensor = OURS.tensor.ones(OURS.chunks(0, [0, 0]), 4, 3)
    first, second = tensor.local_shards()
    second.tensor = torch.full((2, 3), 5.0)
    assert tensor.full_tensor()[2:].eq(5).all()
    with pytest.raises(ValueError, match="size does not match"):
        first.tensor = torch.ones(3, 3)
    with pytest.raises(ValueError, match="float32"):
        first.tensor = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(tensor.full_tensor()[:2], torch.ones(2, 3))
    copied = copy.deepcopy(tensor.local_shards())
    copied[0].tensor = torch.zeros(2, 3)
    assert tensor.full_tensor()[:2].all(), "a copy is nobody's"
