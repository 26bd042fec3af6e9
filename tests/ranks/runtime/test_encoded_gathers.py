"""Gathers in few bits: weights are what the format makes of them, and nothing else changes.

The truth is the unsharded model whose weights pass through the format, with gradients past it.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from collectives import OwnGather
from harness import ranks
from oracle import full
from shoal import compile_step
from shoal.checkpoint import load_model, save_training
from shoal.comm import observer
from shoal.errors import RankError, UsageError
from shoal.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    full_parameters,
    fully_shard,
    plan_of,
)
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.low_precision import MXFP8, NVFP4, Float8, GatherFormat, Wire
from shoal.runtime.fully_shard import replicate
from shoal.runtime.observe import watch
from shoal.step.action import ActionKind

FORMATS: list[GatherFormat] = [Float8(), MXFP8(), NVFP4()]
LAYOUTS: list[Layout] = [Even(), Rows(), Block(128), Whole()]
BF16 = torch.bfloat16


class Mlp(nn.Module):
    """A block with matrices, vectors, and a filter that travels as it is."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.filter = nn.Parameter(torch.randn(5, 3) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.filter.mean()


class Net(nn.Module):
    """An embedding that is tied to the head, and blocks."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, dim)
        self.blocks = nn.ModuleList(Mlp(dim) for _ in range(3))
        self.head = nn.Linear(dim, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(dim: int = 64) -> Net:
    torch.manual_seed(0)
    return Net(dim)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return loss_of_logits(model(tokens[:, :-1]), tokens[:, 1:])


def loss_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def tokens_of(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(19, (4, 6), generator=generator)


class PastTheFormat(torch.autograd.Function):
    """The round trip of a weight; its gradient is that of what arrives."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, form: GatherFormat, dtype: torch.dtype) -> Any:
        ctx.dtype = weight.dtype
        return form.round_trip(weight, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.to(ctx.dtype), None, None


class Oracle:
    """The unsharded model on one rank's input after another; gradients are averaged in fp32."""

    def __init__(self, form: GatherFormat, dtype: torch.dtype, prepare: Callable[..., object]):
        self.model = build()
        prepare(self.model)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.weights = list(self.model.parameters())
        self.form, self.dtype = form, dtype

    def gradients(self, inputs: list[torch.Tensor]) -> tuple[list[float], list[Any]]:
        losses, sums = [], [None] * len(self.weights)
        for tokens in inputs:
            arrived = {
                name: PastTheFormat.apply(weight, self.form, self.dtype)
                for name, weight in zip(self.names, self.weights, strict=True)
            }
            arrived["head.weight"] = arrived["embedding.weight"]
            loss = loss_of(lambda x, given=arrived: call(self.model, given, x), tokens)
            trained = [weight for weight in self.weights if weight.requires_grad]
            grads = iter(torch.autograd.grad(loss, trained))
            losses.append(loss.item())
            for index, weight in enumerate(self.weights):
                if weight.requires_grad:
                    grad, before = next(grads), sums[index]
                    sums[index] = grad if before is None else before + grad
        return losses, [None if s is None else s / len(inputs) for s in sums]


def call(model: nn.Module, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, weights, (tokens,), tie_weights=False)


def shard(model: Net, policy: MixedPrecisionPolicy, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def nothing(model: nn.Module) -> None:
    """As it is built."""


def freeze(model: Any) -> None:
    model.blocks[1].up.weight.requires_grad_(False)
    model.blocks[2].requires_grad_(False)


def check_training(
    form: GatherFormat,
    dtype: torch.dtype = BF16,
    prepare: Callable[..., object] = nothing,
    configure: Callable[..., object] = nothing,
    micro_batches: int = 1,
    **options: Any,
) -> None:
    """Losses are bitwise those of the oracle, and so are gradients on two ranks."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, gather_format=form)
    oracle = Oracle(form, dtype, prepare)
    model = build()
    prepare(model)
    model = shard(model, policy, **options)
    configure(model)
    optimizers = [torch.optim.AdamW(ps, lr=1e-2) for ps in (oracle.weights, model.parameters())]
    rank, size = dist.get_rank(), dist.get_world_size()
    exact = size == 2 and micro_batches == 1
    for step in range(3):
        losses: list[float] = []
        totals: list[Any] = [None] * len(oracle.weights)
        for micro in range(micro_batches):
            inputs = [tokens_of(10 * step + micro, part) for part in range(size)]
            losses, grads = oracle.gradients(inputs)
            totals = [g if t is None else t + g for t, g in zip(totals, grads, strict=True)]
            if isinstance(model, FSDPModule) and micro_batches > 1:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss = loss_of(model, inputs[rank])
            assert loss.item() == losses[rank]
            loss.backward()
        for name, weight, total, p in zip(
            oracle.names, oracle.weights, totals, model.parameters(), strict=True
        ):
            weight.grad = total
            assert (p.grad is None) == (total is None), name
            if total is not None and exact:
                assert torch.equal(full(p.grad), total), name
            elif total is not None:
                torch.testing.assert_close(full(p.grad), total, rtol=2e-2, atol=1e-4)
                weight.grad = full(p.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, weight, p in zip(oracle.names, oracle.weights, model.parameters(), strict=True):
            assert p.dtype == torch.float32
            torch.testing.assert_close(full(p), weight.detach(), rtol=1e-6, atol=1e-7, msg=name)
            with torch.no_grad():
                weight.copy_(full(p))


@pytest.mark.compose("low-precision gathers", "fully_shard", "Even", "Rows", "Block", "Whole")
@pytest.mark.compose("Adam and AdamW", "fp8")
@pytest.mark.compose("mixed precision", "fp8")
@pytest.mark.compose("tied parameters in one unit", "fp8")
@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_training_is_that_of_the_rounded_weights(form: GatherFormat, layout: Layout) -> None:
    check_training(form, layout=layout)


@pytest.mark.compose("low-precision gathers", "HSDP")
@ranks(4)
@pytest.mark.parametrize("layout", [Even(), Rows()], ids=repr)
def test_replicas_of_shards(layout: Layout) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_training(MXFP8(), layout=layout, mesh=mesh)


@ranks(2)
@pytest.mark.parametrize("reshards", [True, False, 1], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_dtypes_and_when_parameters_are_freed(dtype: torch.dtype, reshards: bool | int) -> None:
    check_training(NVFP4(), dtype, reshard_after_forward=reshards)


@pytest.mark.compose("reshard_after_forward as a number", "fp8")
@ranks(4)
def test_pieces_between_forward_and_backward() -> None:
    check_training(MXFP8(), reshard_after_forward=2)


@pytest.mark.compose("gradient accumulation", "fp8")
@ranks(2)
def test_accumulation() -> None:
    check_training(MXFP8(), micro_batches=3)


@pytest.mark.compose("frozen parameters", "fp8")
@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Whole()], ids=repr)
def test_frozen_parameters(layout: Layout) -> None:
    check_training(Float8(), prepare=freeze, layout=layout)


@pytest.mark.compose("low-precision gathers", "offload")
@ranks(2)
def test_shards_on_the_host() -> None:
    check_training(MXFP8(), offload_policy=CPUOffloadPolicy())


def keep(model: Any) -> None:
    model.set_keep_low_precision_shards(True)


def gather_by_hand(model: Any) -> None:
    for block in model.blocks:
        block.set_custom_all_gather(OwnGather())


@ranks(2)
@pytest.mark.parametrize("configure", [keep, gather_by_hand])
@pytest.mark.parametrize("layout", [Even(), Rows()], ids=repr)
def test_setters(configure: Callable[..., object], layout: Layout) -> None:
    check_training(NVFP4(), configure=configure, layout=layout)


@ranks(2)
def test_kept_shards_are_encoded_once_in_a_step() -> None:
    model = shard(build(), MixedPrecisionPolicy(param_dtype=BF16, gather_format=MXFP8()))
    model.set_keep_low_precision_shards(True)
    plan = plan_of(model)
    assert plan.kept_bytes == sum(unit.encoded_bytes for unit in plan.units) // 2
    with patch.object(Wire, "encode", autospec=True, side_effect=Wire.encode) as encode:
        for _ in range(2):
            loss_of(model, tokens_of(0, 0)).backward()
        assert encode.call_count == len(plan.units)
        model.set_keep_low_precision_shards(False)
        loss_of(model, tokens_of(0, 0)).backward()
        assert encode.call_count == 3 * len(plan.units) - 1  # in backward the root is there


@pytest.mark.compose("low-precision gathers", "checkpoint")
@ranks(2)
def test_state_dicts_and_full_parameters_are_not_rounded(tmp_path: Any) -> None:
    """Neither what is saved nor what is exported; and writing back keeps the shards' precision."""
    policy = MixedPrecisionPolicy(gather_format=NVFP4())
    model, plain = shard(build(), policy), build()
    optimizer = torch.optim.SGD(model.parameters())
    loss_of(model, tokens_of(0, 0))  # between forward and backward the root is full, and rounded
    save_training(tmp_path / "saved", model, optimizer, {})
    other = shard(Net(), policy)
    load_model(tmp_path / "saved", other)
    for name, weight in plain.state_dict().items():
        assert torch.equal(full(model.state_dict()[name]), weight), name
        assert torch.equal(full(other.state_dict()[name]), weight), name
    with full_parameters(model):
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, plain.state_dict()[name]), name
        exact = model(tokens_of(1, 0))
    assert torch.equal(exact, plain(tokens_of(1, 0)))
    rounded = model(tokens_of(1, 0))
    assert not torch.equal(rounded, exact)
    with full_parameters(model, writeback=True), torch.no_grad():
        for net in (model, plain):
            net.blocks[0].up.bias.add_(1)
    for name, weight in plain.state_dict().items():
        assert torch.equal(full(model.state_dict()[name]), weight), name
    model.unshard()
    with full_parameters(model):
        pass
    assert torch.equal(model(tokens_of(1, 0)), model(tokens_of(1, 0)))


@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(
    ("form", "share"), [(Float8(), 0.50), (MXFP8(), 0.52), (NVFP4(), 0.28)], ids=repr
)
def test_bytes(form: GatherFormat, share: float, layout: Layout) -> None:
    """Of what gathers send, beside bf16; and the plan says so before and after the first step."""
    size = dist.get_world_size()
    cut = Block(4096) if isinstance(layout, Block) else layout
    moved: list[int] = []
    for one in (None, form):
        policy = MixedPrecisionPolicy(param_dtype=BF16, gather_format=one)
        model = nn.Sequential(*(nn.Linear(4096, 32 * size, bias=False) for _ in range(2)))
        early = plan_of(model, world=size, units=list(model), mp_policy=policy, layout=cut)
        for layer in model:
            fully_shard(layer, mp_policy=policy, layout=cut)
        first: Any = model[0]
        first(torch.ones(2, 4096))  # ranks are compared
        first.reshard()
        launches = Launches()
        with watch(first) as recorder, observer.observing(launches):
            first(torch.ones(2, 4096))
        moved.append(sum(launches.num_bytes))
        fully_shard(model, mp_policy=policy, layout=cut)
        model_plan = plan_of(model)
        for plan in (early, model_plan):
            unit = next(u for u in plan.units if u.name == "0")
            assert unit.encoded_bytes == (0 if one is None else moved[-1])
            assert unit.gathered_bytes == 2 * 4096 * 32 * size * (size if cut == Whole() else 1)
            gather = next(a for a in plan.schedule() if str(a) == "gather 0")
            assert gather.num_bytes == moved[-1]
        gathers = [a for a in recorder.actions() if a.kind is ActionKind.GATHER]
        assert [a.num_bytes for a in gathers] == [moved[-1]]
    assert moved[1] / moved[0] == pytest.approx(share, abs=0.005)


class Launches:
    """Counts the bytes of collectives."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    def launching(self, reason: str, group: Any, tensor: torch.Tensor | None) -> None:
        assert tensor is not None
        self.num_bytes.append(tensor.nbytes)

    def in_stream(self, launched: Any = None) -> None:
        """No time is taken."""

    def waiting(self, reason: str) -> None:
        """No time is taken."""

    def arrived(self) -> None:
        """No time is taken."""

    def explained(self, failure: str) -> str:
        return failure


@pytest.mark.compose(
    "low-precision gathers", "wrapper", "Flat", refused="shards are cut at any element"
)
@ranks(2)
def test_mistakes() -> None:
    form = MXFP8()
    policy = MixedPrecisionPolicy(gather_format=form)
    with pytest.raises(UsageError, match=r"pass MXFP8\(\) of shoal.low_precision"):
        MixedPrecisionPolicy(gather_format=MXFP8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"parameter 'weight' of shape .*use Even"):
        fully_shard(nn.Linear(32, 3, bias=False), mp_policy=policy, layout=Flat())
    with pytest.raises(UsageError, match="replicated on every rank"):
        replicate(nn.Linear(32, 4), mp_policy=policy)
    with pytest.raises(TypeError, match=r"must be a MixedPrecision, got .*gather_format"):
        FullyShardedDataParallel(nn.Linear(32, 4), mixed_precision=policy)
    mine = Float8() if dist.get_rank() else NVFP4()
    odd: Any = fully_shard(nn.Linear(32, 4), mp_policy=MixedPrecisionPolicy(gather_format=mine))
    with pytest.raises(RankError, match=r"gathered as NVFP4\(group=None\)"):
        odd(torch.ones(2, 32))


@pytest.mark.compose("low-precision gathers", "TP")
@ranks(4)
def test_beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    torch.manual_seed(0)
    for weight in plain.parameters():
        nn.init.normal_(weight, std=0.1)
    model = deepcopy(plain)
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(gather_format=MXFP8()))
    with torch.no_grad():
        for weight in plain.parameters():
            weight.copy_(MXFP8().round_trip(weight))
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q.grad), p.grad)


@pytest.mark.compose("low-precision gathers", "compiled")
@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [Float8(), MXFP8(), NVFP4()], ids=repr)
def test_a_graph_gathers_what_the_engine_gathers(form: GatherFormat, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, gather_format=form)
    models = [build(), build()]
    for model in models:
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, layout=Rows())
        fully_shard(model, mp_policy=policy)
    runs: list[Any] = [torch.compile(models[0], backend="shoal", fullgraph=True), models[1]]
    for step in range(3):
        losses: list[torch.Tensor] = []
        for model, run in zip(models, runs, strict=True):
            losses.append(loss_of(run, tokens_of(step, dist.get_rank())))
            losses[-1].backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
        assert torch.equal(*losses)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(p), full(q))


@ranks(2)
def test_a_whole_step_gathers_what_the_engine_gathers() -> None:
    policy = MixedPrecisionPolicy(gather_format=MXFP8())
    models = [fully_shard(build(), mp_policy=policy) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    step = compile_step(models[0], lambda logits, y: loss_of_logits(logits, y), optimizers[0])
    for number in range(4):
        tokens = tokens_of(number, dist.get_rank())
        first = step(tokens[:, :-1], tokens[:, 1:])
        second = loss_of(models[1], tokens)
        second.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.allclose(first, second)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(full(p), full(q), atol=1e-6)
