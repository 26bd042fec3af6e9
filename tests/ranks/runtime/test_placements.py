"""Where shards lie: on dims beyond the first, in uneven rows, on another mesh."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import (
    Replicate,
    Shard,
)

import shoal.mesh
from differential import (
    DIM,
    SHOAL,
    TORCH,
    Engine,
    check_close,
    check_engines_agree,
    copies,
    error_of,
    loss_of,
    seeded,
    snapshot,
    train,
    train_beside_plain,
    two_axes,
)
from harness import ranks
from oracle import full

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Mixture(nn.Module):
    """Weights of two and three dims, one of them a view's size on every dim."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(DIM, 12)
        self.experts = nn.Parameter(torch.randn(3, 12, 8) / 4)
        self.filters = nn.Conv1d(4, 8, kernel_size=4, padding=2)
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.into(x))
        mixed = torch.einsum("bi,eij->bej", hidden, self.experts).sum(1)
        filtered = self.filters(mixed.unsqueeze(1).expand(-1, 4, -1))
        return self.out(filtered.mean(2))


_BY_DIM: dict[str, Callable[[nn.Parameter], Shard | None]] = {
    "last": lambda p: Shard(p.ndim - 1),
    "counted_from_the_end": lambda p: Shard(-1),
    "second": lambda p: Shard(1) if p.ndim > 1 else None,
    "second_of_the_third_only": lambda p: Shard(2) if p.ndim == 3 else None,
    "first": lambda p: Shard(0),
    "nothing_said": lambda p: None,
}


def _even_mixture() -> Mixture:
    """Sizes that four ranks divide on every dim but the first one."""
    model = Mixture()
    model.out = nn.Linear(8, 4)
    return model


@ranks(2, 4)
@pytest.mark.parametrize("choice", _BY_DIM)
def test_shards_on_other_dims(choice: str) -> None:
    def run(engine: Engine) -> list[Any]:
        model = engine.api.fully_shard(seeded(_even_mixture), shard_placement_fn=_BY_DIM[choice])
        return train_beside_plain(engine, model, _even_mixture)

    check_engines_agree(run, plain=False)


@ranks(4)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_shards_on_other_dims_in_two_units_and_mixed_precision(reshard_after_forward: bool) -> None:
    mesh = two_axes()

    def run(engine: Engine) -> list[Any]:
        model = seeded(_even_mixture)
        options = {
            "mesh": mesh,
            "mp_policy": engine.policy(**BF16),
            "shard_placement_fn": _BY_DIM["second"],
            "reshard_after_forward": reshard_after_forward,
        }
        engine.api.fully_shard(model.filters, **options)
        engine.api.fully_shard(model, **options)
        return train(engine, model, max_norm=0.1)

    check_engines_agree(run, exact=True, plain=False)


class Scraps(nn.Module):
    """Rows from none to seven: fewer than ranks, as many, one more; some ranks hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(
            nn.Parameter(torch.randn(num, *rest))
            for num, rest in [(1, ()), (2, (3,)), (3, (2, 2)), (4, ()), (5, (1,)), (7, (3,))]
        )
        self.into = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.into(x) * row.sin().sum() for row in self.rows], dim=1)


@ranks(2, 4)
@pytest.mark.parametrize("dtypes", [{}, BF16], ids=["precise", "mixed"])
def test_uneven_and_empty_shards(dtypes: dict[str, torch.dtype]) -> None:
    def run(engine: Engine) -> list[Any]:
        policy = engine.policy(**dtypes)
        model = engine.api.fully_shard(seeded(Scraps), mp_policy=policy)
        if dtypes:
            return train(engine, model)
        return train_beside_plain(engine, model, Scraps)

    check_engines_agree(run, plain=False)


@ranks(4)
def test_a_state_dict_of_uneven_and_empty_shards_goes_round() -> None:
    def run(engine: Engine) -> list[Any]:
        source, target = seeded(Scraps), Scraps()
        engine.api.fully_shard(source)
        engine.api.fully_shard(target)
        for assign in (False, True):
            saved = copy.deepcopy(source.state_dict())
            target.load_state_dict(saved, assign=assign)
            for (name, p), (_, q) in zip(
                seeded(Scraps).named_parameters(), target.named_parameters(), strict=True
            ):
                assert torch.equal(full(q), p), name
        return [copies(source.state_dict()), train_beside_plain(engine, target, Scraps)]

    check_engines_agree(run, plain=False)


@ranks(4)
def test_placements_that_are_refused() -> None:
    def refusal(engine: Engine, module: nn.Module, result: Any) -> BaseException | None:
        return error_of(lambda: engine.api.fully_shard(module, shard_placement_fn=lambda p: result))

    def run(engine: Engine) -> list[Any]:
        return [
            refusal(engine, nn.Linear(8, 8), Shard(1)),
            refusal(engine, nn.Linear(8, 8), Replicate()),
            refusal(engine, nn.Linear(8, 8), 0),
        ]

    errors = check_engines_agree(run, plain=False)
    expected = [AssertionError] + [ValueError] * 2
    assert [type(error) for error in errors] == expected


class Experts(nn.Module):
    """A dense part, and one whose weights fewer ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, 12)
        self.expert = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.relu(self.dense(x)))


def _on_two_meshes(
    engine: Engine,
    everyone: DeviceMesh,
    few: DeviceMesh,
    *,
    infos_of: Engine | None = None,
    **options: Any,
) -> Any:
    """Dense weights over all ranks, the expert's over the inner axis: two groups, one unit."""
    ours = (infos_of or engine) is SHOAL
    result = engine.api.ShardPlacementResult if ours else torch_common.ShardPlacementResult
    info = (shoal.mesh if ours else torch_common).FSDPMeshInfo
    of_dense, of_expert = info(everyone, shard_mesh_dim=0), info(few, shard_mesh_dim=0)
    model = seeded(Experts)
    experts = set(model.expert.parameters())

    def place(parameter: nn.Parameter) -> Any:
        if parameter not in experts:
            return result(None, of_dense)
        return result(Shard(1) if parameter.ndim == 2 else None, of_expert)

    engine.api.fully_shard(model, mesh=everyone, shard_placement_fn=place, **options)
    return model


def _flat_and_folded() -> tuple[DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "few"))
    return mesh._flatten("all"), mesh["few"]


_needs_placement_results = pytest.mark.skipif(
    not hasattr(torch_common, "ShardPlacementResult"),
    reason="this torch has one mesh for all parameters of a unit",
)


def _check_means(model: Any, everyone: DeviceMesh, few: DeviceMesh) -> None:
    """Gradients are means over the ranks of each parameter's own mesh."""
    plain = seeded(Experts)
    loss_of(plain(SHOAL.batches(1)[0])).backward()
    for part, mesh in ((plain.expert, few), (plain.dense, everyone)):
        for parameter in part.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=mesh.get_group())
    check_close(model, plain)


@_needs_placement_results
@ranks(4)
def test_mesh_infos_of_torch_are_taken() -> None:
    """Torch has them in a private module, and nothing else to say a mesh by."""
    everyone, few = _flat_and_folded()
    model = _on_two_meshes(SHOAL, everyone, few, infos_of=TORCH)
    assert model.expert.weight.to_local().shape == (6, 6)
    assert model.dense.weight.to_local().shape == (3, DIM)
    loss_of(model(SHOAL.batches(1)[0])).backward()
    _check_means(model, everyone, few)


@_needs_placement_results
@ranks(4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False, 1, 2])
def test_parameters_on_another_mesh(reshard_after_forward: bool | int | None) -> None:
    everyone, few = _flat_and_folded()

    def run(engine: Engine) -> list[Any]:
        model = _on_two_meshes(engine, everyone, few, reshard_after_forward=reshard_after_forward)
        assert model.expert.weight.to_local().shape == (6, 6)
        assert model.dense.weight.to_local().shape == (3, DIM)
        loss_of(model(engine.batches(1)[0])).backward()
        _check_means(model, everyone, few)
        model.zero_grad()
        return train(engine, model)

    check_engines_agree(run, plain=False)


@_needs_placement_results
@ranks(4)
def test_parameters_on_another_mesh_in_a_smaller_world() -> None:
    everyone, few = _flat_and_folded()

    def run(engine: Engine) -> list[Any]:
        inner = _on_two_meshes(engine, everyone, few, reshard_after_forward=2)
        model = engine.api.fully_shard(nn.Sequential(inner), mesh=everyone)
        seen = []
        for x in engine.batches(2):
            model.zero_grad()
            with torch.no_grad():
                seen.append(loss_of(model(x)))
            loss = loss_of(model(x))
            assert torch.equal(loss, seen[-1])
            # Two ranks share the expert in any case; four shared the dense weights.
            assert inner.dense.weight.device_mesh.shape == (2, 2)
            assert inner.expert.weight.device_mesh.shape == (2,)
            seen.append(copies(dict(model.named_parameters())))
            loss.backward()
            seen.append(snapshot(model))
        model.zero_grad()
        loss_of(model(engine.batches(1)[0])).backward()
        _check_means(inner, everyone, few)
        model.zero_grad()
        return [*seen, train(engine, model)]

    check_engines_agree(run, plain=False)


@_needs_placement_results
@ranks(4)
def test_what_two_meshes_in_one_unit_exclude() -> None:
    everyone, few = _flat_and_folded()

    def run(engine: Engine) -> list[Any]:
        model = _on_two_meshes(engine, everyone, few)
        return [
            error_of(lambda: model.set_all_reduce_hook(print)),
            error_of(lambda: model.set_custom_all_gather(None)),
            error_of(lambda: model.set_custom_reduce_scatter(None)),
        ]

    errors = check_engines_agree(run, plain=False)
    assert all(isinstance(error, ValueError) for error in errors)
