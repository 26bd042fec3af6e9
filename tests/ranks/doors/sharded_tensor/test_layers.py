"""Layers with a sharded weight give what they give with the whole one, gradients included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from harness import ranks
from listed_cuts import CUTS, MATRIX_CUTS, chunks, everyone, listed
from sharded_api import Api, compare_errors
from shoal.errors import UsageError
from shoal.sharded_tensor import ones, shard_parameter
from shoal.sharding_spec import ChunkShardingSpec, custom_sharding_spec_op
from shoal.tensor import ShardedTensor

NUM_ROWS, DIM = 17, 13

cuts = pytest.mark.parametrize("cut", MATRIX_CUTS)


def weights(cut: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, Any]:
    shape = NUM_ROWS, DIM
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return nn.Parameter(whole.clone()), nn.Parameter(listed(whole, MATRIX_CUTS[cut](shape)))


def own_generator() -> torch.Generator:
    """Each rank has another batch."""
    return torch.Generator().manual_seed(100 + dist.get_rank())


def check_gradient(whole: nn.Parameter, ours: ShardedTensor) -> None:
    """The gradient of all ranks' losses together lies on the shards."""
    assert whole.grad is not None
    expected = whole.grad.clone()
    dist.all_reduce(expected)
    assert ours.grad is None
    for shard in ours.local_shards():
        if shard.tensor.numel():
            torch.testing.assert_close(shard.tensor.grad, part(expected, shard))


def part(whole: torch.Tensor, shard: Any) -> torch.Tensor:
    offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    return whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


def check_same_step(call: Callable[[Any], torch.Tensor], whole: Any, ours: Any) -> None:
    """Outputs have the same bits; a loss that weighs every element gives the same gradient."""
    expected, found = call(whole), call(ours)
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    factors = torch.arange(1.0, expected.numel() + 1).view_as(expected).cos()
    for output in (expected, found):
        (output * factors).sum().backward()
    check_gradient(whole, ours)


@ranks(1, 2, 4)
@cuts
def test_linear_equals_the_unsharded_one(cut: str) -> None:
    rank, generator = dist.get_rank(), own_generator()
    for lead in ((5,), (), (2, 3), (rank,), (0,)):
        whole, ours = weights(cut)
        biases = [nn.Parameter(torch.linspace(-1, 1, NUM_ROWS)) for _ in range(2)]
        x = torch.randn(*lead, DIM, generator=generator)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        expected = functional.linear(inputs[0], whole, biases[0])
        found = functional.linear(inputs[1], ours, biases[1])
        torch.testing.assert_close(found, expected)
        for output in (expected, found):
            output.square().sum().backward()
        check_gradient(whole, ours)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        torch.testing.assert_close(biases[1].grad, biases[0].grad)


@ranks(2)
def test_linear_without_gradients_and_under_autocast() -> None:
    whole, ours = weights("columns")
    x = torch.randn(4, DIM, generator=own_generator())
    with torch.no_grad():
        torch.testing.assert_close(functional.linear(x, ours), functional.linear(x, whole))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = functional.linear(x, whole), functional.linear(x, ours)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    found.float().sum().backward()
    assert all(shard.tensor.grad.dtype == torch.float32 for shard in ours.local_shards())


@ranks(2)
def test_second_gradients_of_linear() -> None:
    whole, ours = weights("one rank has all", torch.float64)
    x = torch.randn(3, DIM, generator=own_generator(), dtype=torch.float64)
    found = []
    for weight in (whole, ours):
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            functional.linear(given, weight).pow(3).sum(), given, create_graph=True
        )
        gradient.square().sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(*found)
    check_gradient(whole, ours)


@ranks(2)
def test_a_weight_that_was_computed_gets_the_gradient_itself() -> None:
    whole, ours = weights("tiles")
    x = torch.randn(3, DIM, generator=own_generator())
    computed = [weight.detach().requires_grad_() * 2 for weight in (whole, ours.detach().clone())]
    gradients = []
    for weight in computed:
        weight.retain_grad()
        functional.linear(x, weight).square().sum().backward()
        gradients.append(weight.grad)
    dist.all_reduce(gradients[0])
    torch.testing.assert_close(gradients[1].full_tensor(), gradients[0])


@ranks(1, 2, 4)
@cuts
def test_embedding_equals_the_unsharded_one(cut: str) -> None:
    generator = own_generator()
    for shape, padding in (((5, 4), None), ((7,), 3), ((2, 3, 4), -2), ((), None), ((0,), None)):
        indices = torch.randint(NUM_ROWS, shape, generator=generator)

        def call(weight: Any, indices: torch.Tensor = indices, padding: Any = padding) -> Any:
            return functional.embedding(indices, weight, padding_idx=padding)

        check_same_step(call, *weights(cut))


@ranks(2)
@cuts
def test_all_ranks_lookups_limit_norms_first(cut: str) -> None:
    generator = own_generator()
    for order in (2.0, 1.0, torch.inf):
        whole, ours = weights(cut)
        indices = torch.randint(NUM_ROWS, (6,), generator=generator)
        every = [torch.empty_like(indices) for _ in everyone()]
        dist.all_gather(every, indices)
        limit: dict[str, Any] = {"max_norm": 1.5, "norm_type": order}
        functional.embedding(torch.cat(every), whole, **limit)
        expected = functional.embedding(indices, whole)
        found = functional.embedding(indices, ours, **limit)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours.full_tensor(), whole.detach())
        bags = functional.embedding_bag(indices.view(2, 3), ours, mode="sum", **limit)
        torch.testing.assert_close(
            bags, functional.embedding_bag(indices.view(2, 3), whole, mode="sum")
        )


@ranks(2, 4)
@cuts
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_equal_the_unsharded_ones(cut: str, mode: str) -> None:
    generator = own_generator()
    rows = torch.randint(NUM_ROWS, (4, 3), generator=generator)
    flat, offsets = rows.view(-1), torch.tensor([0, 2, 2, 7])
    closed = torch.tensor([0, 5, 12])
    cases: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (rows, {}),
        (rows, {"padding_idx": int(rows[1, 1])}),
        (flat, {"offsets": offsets, "padding_idx": 4}),
        (flat.int(), {"offsets": offsets.int()}),
        (flat, {"offsets": closed, "include_last_offset": True}),
    ]
    if mode == "sum":
        factors = torch.rand(4, 3, generator=generator)
        cases += [
            (rows, {"per_sample_weights": factors}),
            (flat, {"per_sample_weights": factors.view(-1), "offsets": offsets}),
        ]
    for indices, options in cases:

        def call(weight: Any, indices: Any = indices, options: Any = options) -> torch.Tensor:
            return functional.embedding_bag(indices, weight, mode=mode, **options)

        check_same_step(call, *weights(cut))


@ranks(2)
def test_factors_of_bags_have_gradients() -> None:
    whole, ours = weights("columns")
    rows = torch.randint(NUM_ROWS, (4, 3), generator=own_generator())
    gradients = []
    for weight in (whole, ours):
        factors = torch.ones(4, 3, requires_grad=True)
        bags = functional.embedding_bag(rows, weight, mode="sum", per_sample_weights=factors)
        bags.square().sum().backward()
        gradients.append(factors.grad)
    torch.testing.assert_close(*gradients)


@ranks(2, 4)
@pytest.mark.parametrize("cut", CUTS)
def test_modules_train_with_sharded_weights(cut: str) -> None:
    torch.manual_seed(0)
    whole: Any = nn.Sequential(nn.Embedding(NUM_ROWS, 6, padding_idx=1), nn.Linear(6, 5))
    torch.manual_seed(0)
    ours: Any = nn.Sequential(nn.Embedding(NUM_ROWS, 6, padding_idx=1), nn.Linear(6, 5))
    for layer in ours:
        shard_parameter(layer, "weight", CUTS[cut](tuple(layer.weight.shape)))
    indices = torch.randint(NUM_ROWS, (3, 2), generator=own_generator())
    expected, found = whole(indices), ours(indices)
    torch.testing.assert_close(found, expected)
    for output in (expected, found):
        output.square().sum().backward()
    for plain, layer in zip(whole, ours, strict=True):
        check_gradient(plain.weight, layer.weight)


@ranks(2)
def test_a_mistake_of_one_rank_is_raised_on_all() -> None:
    _, ours = weights("one shard each")
    is_wrong = dist.get_rank() == 1
    with pytest.raises(ValueError, match="Index out of range in Input" if is_wrong else r"\[1\]"):
        functional.embedding(torch.tensor([NUM_ROWS if is_wrong else 0]), ours)
    with pytest.raises(ValueError, match="Input dim: 4 does not match" if is_wrong else r"\[1\]"):
        functional.linear(torch.ones(2, 4 if is_wrong else DIM), ours)


@ranks(2)
def test_a_mistake_of_one_rank_is_of_the_same_type_on_all() -> None:
    _, ours = weights("one shard each")
    is_wrong = dist.get_rank() == 1
    dtype = torch.float64 if is_wrong else torch.float32
    with pytest.raises(RuntimeError, match="expected an input of" if is_wrong else r"\[1\]"):
        functional.linear(torch.ones(2, DIM, dtype=dtype), ours)


@ranks(2)
def test_a_rank_outside_of_the_group_has_no_part_in_it() -> None:
    group = dist.new_group([1])
    weight = ones(chunks(0, [1]), 4, 3, process_group=group)
    x = torch.ones(2, 3)
    if dist.get_rank() == 0:
        with pytest.raises(UsageError, match="this rank is in none"):
            functional.linear(x, weight)
    else:
        assert torch.equal(functional.linear(x, weight), torch.full((2, 4), 3.0))


MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "negative": (lambda f, w: f.embedding(torch.tensor([-1]), w), "Index out of range"),
    "too large": (lambda f, w: f.embedding(torch.tensor([8]), w), "Index out of range"),
    "sparse": (lambda f, w: f.embedding(torch.tensor([1]), w, sparse=True), "not supported"),
    "by frequency": (
        lambda f, w: f.embedding(torch.tensor([1]), w, scale_grad_by_freq=True),
        "not supported",
    ),
    "no offsets": (lambda f, w: f.embedding_bag(torch.tensor([1]), w), "offsets is required"),
    "offsets of rows": (
        lambda f, w: f.embedding_bag(torch.tensor([[1]]), w, offsets=torch.tensor([0])),
        "exactly 1 dim",
    ),
    "three dims": (
        lambda f, w: f.embedding_bag(torch.tensor([[[1]]]), w),
        "Input more than 2 dims not supported",
    ),
    "last offset": (
        lambda f, w: f.embedding_bag(
            torch.tensor([1, 2]), w, offsets=torch.tensor([0, 1]), include_last_offset=True
        ),
        "offsets need to have the input size",
    ),
    "factors": (
        lambda f, w: f.embedding_bag(
            torch.tensor([[1, 2]]), w, mode="sum", per_sample_weights=torch.ones(3)
        ),
        "per_sample_weights size",
    ),
    "norm": (lambda f, w: f.embedding(torch.tensor([1]), w, max_norm=-1.0), "larger than zero"),
}


@ranks(1)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_torchs(name: str) -> None:
    call, match = MISTAKES[name]

    def script(api: Api) -> Any:
        return call(functional, api.tensor.ones(api.chunks(0, everyone()), 8, 4))

    compare_errors(script, match)


@ranks(1)
def test_linear_names_the_argument_that_is_wrong() -> None:
    weight = listed(torch.ones(4, 3), chunks(0, everyone()))
    bias = listed(torch.ones(4), chunks(0, everyone()))
    x = torch.ones(2, 3)
    for error, match, args in (
        (TypeError, "bias needs to be torch.Tensor", (x, weight, bias)),
        (TypeError, "input needs to be torch.Tensor", (bias, torch.ones(4, 3))),
        (TypeError, "input needs to be torch.Tensor", (weight, weight)),
        (ValueError, "Input needs to have at least 1 dim", (torch.tensor(1.0), weight)),
        (ValueError, "Bias needs to have exactly 1 dim", (x, weight, torch.ones(4, 4))),
        (ValueError, "expected a bias of 4 features", (x, weight, torch.ones(3))),
        (RuntimeError, "expected an input of torch.float32", (x.double(), weight)),
    ):
        with pytest.raises(error, match=match):
            functional.linear(*args)


@ranks(1)
def test_users_replace_functions_for_one_kind_of_spec() -> None:
    weight = listed(torch.ones(4, 3), chunks(0, everyone()))

    @custom_sharding_spec_op(ChunkShardingSpec, functional.bilinear)
    def replaced(types: Any, args: Any, kwargs: Any, group: Any) -> str:
        return f"{len(args)} over {group.size()}"

    assert functional.bilinear(torch.ones(2), torch.ones(2), weight) == "3 over 1"
    enumerated = listed(torch.ones(4, 3), MATRIX_CUTS["tiles"]((4, 3)))
    with pytest.raises(Exception, match="linear"):
        functional.bilinear(torch.ones(1, 2), torch.ones(1, 3), enumerated)
