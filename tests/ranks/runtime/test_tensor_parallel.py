"""Parameters that are on a mesh already: tensor parallelism, axes of a larger mesh."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Engine,
    check_close,
    check_engines_agree,
    copies,
    error_of,
    needs_mesh_dims,
    seeded,
    train,
)
from harness import ranks
from oracle import full
from shoal._torch.distributed_tensor import spec_of
from shoal.fsdp import FullyShardedDataParallel, MixedPrecision

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Pair(nn.Module):
    """Two layers as tensor parallelism cuts them, and one that it may leave whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 12)
        self.down = nn.Linear(12, 6)
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(x))).clone())


def _tensor_parallel(
    engine: Engine, mesh: DeviceMesh, data: Any, *, whole_head: bool = False, **options: Any
) -> Any:
    model = seeded(Pair)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if not whole_head:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], plan)
    engine.api.fully_shard(model.up, mesh=mesh[data], **options)
    return engine.api.fully_shard(model, mesh=mesh[data], **options)


def _batches_of_data_ranks(mesh: DeviceMesh, num: int = 3) -> tuple[list[Any], list[Any]]:
    """Batches alike on the ranks that share a model, and all of them joined."""
    batches = [
        [torch.randn(4, DIM, generator=torch.Generator().manual_seed(place)) for _ in range(num)]
        for place in range(mesh["shard"].size())
    ]
    mine = batches[mesh["shard"].get_local_rank()]
    return mine, [torch.cat(step) for step in zip(*batches, strict=True)]


_2D = ((2, 2), ("shard", "tensor"))
_3D = ((1, 2, 2), ("replicate", "shard", "tensor"))
# Torch warns of an output that is a view, and tensor parallelism makes such outputs.
_quietly = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


@pytest.mark.compose("Adam and AdamW", "TP")
@pytest.mark.compose("DTensor parameters", "fully_shard", "Even")
@_quietly
@ranks(4)
@pytest.mark.parametrize("sizes", [_2D, _3D], ids=["two_axes", "three_axes"])
@pytest.mark.parametrize(("dim", "max_norm"), [(0, 0.5), (1, 0.5), (0, None)])
def test_tensor_parallel_parameters(
    sizes: tuple[Any, Any], dim: int, max_norm: float | None
) -> None:
    mesh = init_device_mesh("cpu", sizes[0], mesh_dim_names=sizes[1])
    data = "shard" if len(sizes[0]) == 2 else ("replicate", "shard")
    mine, joined = _batches_of_data_ranks(mesh)

    def run(engine: Engine) -> list[Any]:
        # Norms are of parameters on one mesh: with plain ones among them, torch clips nothing.
        model = _tensor_parallel(
            engine,
            mesh,
            data,
            whole_head=max_norm is None,
            shard_placement_fn=lambda p: Shard(min(dim, p.ndim - 1)),
        )
        result = train(engine, model, mine, max_norm=max_norm)
        plain = seeded(Pair)
        train(PLAIN, plain, joined, max_norm=max_norm)
        check_close(model, plain)
        return result

    check_engines_agree(run, exact=True, plain=False)


@pytest.mark.compose("mixed precision", "TP")
@_quietly
@ranks(4)
def test_tensor_parallel_parameters_in_mixed_precision() -> None:
    mesh = init_device_mesh("cpu", _2D[0], mesh_dim_names=_2D[1])
    mine, _ = _batches_of_data_ranks(mesh)

    def run(engine: Engine) -> list[Any]:
        policy = engine.policy(**BF16)
        return train(engine, _tensor_parallel(engine, mesh, "shard", mp_policy=policy), mine)

    check_engines_agree(run, exact=True, plain=False)


@_quietly
@ranks(4)
@pytest.mark.parametrize("door", ["fully_shard", "wrapper"])
def test_full_parameters_of_lower_precision_say_their_dtype(door: str) -> None:
    """Operations of DTensors, and compilers, go by the dtype in the spec."""
    mesh = init_device_mesh("cpu", _2D[0], mesh_dim_names=_2D[1])
    mine, _ = _batches_of_data_ranks(mesh, 1)
    if door == "fully_shard":
        policy = SHOAL.policy(**BF16, cast_forward_inputs=True)
        model = _tensor_parallel(SHOAL, mesh, "shard", mp_policy=policy)
    else:
        model = seeded(Pair)
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        precision = MixedPrecision(param_dtype=torch.bfloat16)
        model = FullyShardedDataParallel(
            model, device_mesh=mesh["shard"], mixed_precision=precision, use_orig_params=True
        )
    layer = model.up
    said: list[Any] = []

    def hear(*_: Any) -> None:
        said.append(spec_of(layer.weight).tensor_meta.dtype)

    layer.register_forward_hook(hear)
    model(mine[0]).sum().backward()
    assert said == [torch.bfloat16]
    if door == "fully_shard":
        assert spec_of(layer.weight).tensor_meta.dtype == torch.float32
        assert spec_of(layer.weight.grad).tensor_meta.dtype == torch.float32


@_quietly
@ranks(4)
def test_a_state_dict_of_tensor_parallel_parameters_goes_round() -> None:
    mesh = init_device_mesh("cpu", _2D[0], mesh_dim_names=_2D[1])
    mine, _ = _batches_of_data_ranks(mesh)

    def run(engine: Engine) -> list[Any]:
        model = _tensor_parallel(engine, mesh, "shard")
        train(engine, model, mine)
        saved = copy.deepcopy(model.state_dict())
        whole = {name: full(value) for name, value in get_model_state_dict(model).items()}
        other = _tensor_parallel(engine, mesh, "shard")
        other.load_state_dict(saved)
        again = _tensor_parallel(engine, mesh, "shard")
        set_model_state_dict(again, saved)
        outputs = []
        for one in (model, other, again):
            outputs.append(one(mine[0]))
            one.reshard()  # an optimizer is built next, without this root's full parameters
        return [copies(saved), copies(whole), copies(outputs), train(engine, other, mine)]

    check_engines_agree(run, exact=True, plain=False)


@_quietly
@ranks(4)
def test_a_smaller_group_after_forward() -> None:
    """torch has no number of ranks for DTensor parameters."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=_2D[1])
    mine, joined = _batches_of_data_ranks(mesh)
    model, plain = _tensor_parallel(SHOAL, mesh, "shard", reshard_after_forward=2), seeded(Pair)
    train(SHOAL, model, mine)
    train(PLAIN, plain, joined)
    check_close(model, plain)


@_quietly
@ranks(4)
def test_three_axes_beside_the_one_that_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2, 1), mesh_dim_names=("shard", "a", "b", "c"))
    mine, joined = _batches_of_data_ranks(mesh)
    model, plain = seeded(Pair), seeded(Pair)
    placements = {"up.weight": [Replicate(), Shard(0), Replicate()]}
    for name, parameter in list(model.named_parameters()):
        whole = [Replicate()] * 3
        placed = distribute_tensor(
            parameter.detach(), mesh["a", "b", "c"], placements.get(name, whole)
        )
        owner, _, short = name.rpartition(".")
        setattr(model.get_submodule(owner), short, nn.Parameter(placed))
    SHOAL.api.fully_shard(model, mesh=mesh["shard"])

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        inner = distribute_tensor(x, mesh["a", "b", "c"], [Replicate()] * 3)
        return model(inner).full_tensor().square().mean()

    train(SHOAL, model, mine, loss=loss)
    train(PLAIN, plain, joined)
    check_close(model, plain)


_PLACEMENTS: dict[str, dict[str, Placement]] = {
    "up.weight": {"tensor": Shard(0)},
    "up.bias": {"tensor": Shard(0)},
    "down.weight": {"tensor": Shard(1)},
}


def _on_whole_mesh(mesh: DeviceMesh) -> Pair:
    """Every parameter on every axis: cut over the tensor axis, whole on the others."""

    def distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for short, parameter in list(module.named_parameters(recurse=False)):
            wanted = _PLACEMENTS.get(f"{name}.{short}", {})
            placements = [wanted.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ()]
            data = distribute_tensor(parameter.detach(), mesh, placements)
            setattr(module, short, nn.Parameter(data))

    return distribute_module(seeded(Pair), mesh, distribute)


@_quietly
@needs_mesh_dims
@ranks(4)
def test_a_smaller_group_on_named_axes() -> None:
    """torch has no number of ranks with `dp_mesh_dims`."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("shard", "tensor"))
    model, plain = _on_whole_mesh(mesh), seeded(Pair)
    options: dict[str, Any] = {
        "mesh": mesh,
        "dp_mesh_dims": SHOAL.api.DataParallelMeshDims(shard="shard"),
        "reshard_after_forward": 2,
    }
    SHOAL.api.fully_shard(model.up, **options)
    SHOAL.api.fully_shard(model, **options)
    mine, joined = _batches_of_data_ranks(mesh)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        split = [Shard(0), Replicate()]
        output = model(DTensor.from_local(x, mesh, split))
        return output.redistribute(placements=split).to_local().square().mean()

    train(SHOAL, model, mine, loss=loss)
    train(PLAIN, plain, joined)
    check_close(model, plain)


@_quietly
@needs_mesh_dims
@ranks(4)
@pytest.mark.parametrize(
    ("shape", "names", "shard", "replicate"),
    [
        ((2, 2), ("a", "tensor"), "a", None),
        ((2, 2), ("a", "tensor"), None, "a"),
        ((2, 2), ("a", "b"), "b", "a"),
        ((2, 2), ("a", "b"), ("a", "b"), None),
        ((2, 2), ("a", "b"), None, ("a", "b")),
        ((1, 2, 2), ("a", "b", "tensor"), "b", "a"),
        ((2, 1, 2), ("a", "b", "tensor"), ("a", "b"), None),
    ],
    ids=str,
)
def test_data_parallel_axes_of_a_larger_mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    shard: str | tuple[str, ...] | None,
    replicate: str | tuple[str, ...] | None,
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    split = [Replicate() if name == "tensor" else Shard(0) for name in names]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, DIM, generator=generator) for _ in range(3)]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = model(distribute_tensor(x, mesh, split))
        return output.redistribute(placements=split).to_local().pow(2).mean()

    def run(engine: Engine) -> list[Any]:
        dims = engine.api.DataParallelMeshDims(shard=shard, replicate=replicate)
        model = _on_whole_mesh(mesh)
        engine.api.fully_shard(model.up, mesh=mesh, dp_mesh_dims=dims)
        engine.api.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        result = train(engine, model, batches, loss=loss)
        plain = seeded(Pair)
        train(PLAIN, plain, batches)
        check_close(model, plain)
        return result

    check_engines_agree(run, exact="tensor" in names, plain=False)


@needs_mesh_dims
@ranks(4)
def test_data_parallel_axes_that_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "tensor"))
    nameless = init_device_mesh("cpu", (2, 2))
    other = init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "tensor"))

    def refusal(engine: Engine, model: nn.Module, **options: Any) -> BaseException | None:
        dims = engine.api.DataParallelMeshDims(**options.pop("dims", {"shard": "a"}))
        return error_of(
            lambda: engine.api.fully_shard(model, **{"mesh": mesh, "dp_mesh_dims": dims, **options})
        )

    def cut() -> nn.Module:
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)] * 2))
        return layer

    def run(engine: Engine) -> list[Any]:
        return [
            error_of(engine.api.DataParallelMeshDims),
            refusal(engine, seeded(Pair)),
            refusal(engine, _on_whole_mesh(mesh), dims={"shard": "data"}),
            refusal(engine, _on_whole_mesh(mesh), dims={"replicate": "data"}),
            refusal(engine, cut()),
            refusal(engine, cut(), dims={"replicate": "a"}),
            refusal(engine, seeded(Pair), mesh=nameless),
            refusal(engine, _on_whole_mesh(other)),
        ]

    errors = check_engines_agree(run, plain=False)
    assert [type(error) for error in errors] == [ValueError] * 8
