"""Tensors that say themselves how they are gathered: few bits and a rest instead of weights."""

import types
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from differential import (
    DIM,
    all_batches,
    check_engines_agree,
    error_of,
    full,
    my_batches,
    seeded,
    square_loss,
    state_of_model,
    train,
)
from harness import ranks

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_STEP = 1 / 64
_aten = torch.ops.aten
_KEPT = {
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
    _aten.detach.default,
}
"""What quantisation libraries keep their own class for; everything else gives plain tensors."""


class Gathered(torch.Tensor):
    """A weight that travels as two tensors of fewer bits."""

    whole: torch.Tensor
    calls: list[Any]
    """What the engine said at each gather, for tests to look at."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, calls: list[Any]) -> "Gathered":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            whole.size(),
            strides=whole.stride(),
            storage_offset=whole.storage_offset(),
            dtype=whole.dtype,
            device=whole.device,
            requires_grad=whole.requires_grad,
        )

    def __init__(self, whole: torch.Tensor, calls: list[Any]) -> None:
        self.whole, self.calls = whole, calls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.whole})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        calls: list[list[Any]] = []

        def unwrap(tensor: Gathered) -> torch.Tensor:
            calls.append(tensor.calls)
            return tensor.whole

        args, kwargs = tree_map_only(Gathered, unwrap, (args, kwargs or {}))
        output = func(*args, **kwargs)
        if func not in _KEPT:
            return output
        return tree_map_only(torch.Tensor, lambda whole: cls(whole, calls[0]), output)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        shapes = [(tuple(output.shape), output.dtype) for output in all_gather_outputs]
        self.calls.append([metadata, shapes, param_dtype])
        weight = self.join(all_gather_outputs, metadata).to(param_dtype)
        if out is None:
            return weight, (weight,)
        # The rows that padding added come last.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(weight[: out.size(0)])
        return None


class WithEverything(Gathered):
    """Whole steps in eight bits and the rest in sixteen; the signature with all surroundings."""

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        policy = (mp_policy.param_dtype, mp_policy.reduce_dtype)
        self.calls.append(
            [mesh.mesh.tolist(), outer_size, outer_stride, type(module).__name__, policy]
        )
        # As many rows as the first rank has, which has most.
        num_missing = -(-outer_size[0] // mesh.size()) - self.whole.size(0)
        rows = torch.cat([self.whole, self.whole.new_zeros(num_missing, *outer_size[1:])])
        return self.cut(rows), _STEP

    @staticmethod
    def cut(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors of the same size: torch asks for that where shards are uneven."""
        steps = (rows / _STEP).round()
        return steps.to(torch.int8), (rows - steps * _STEP).half()

    @staticmethod
    def join(parts: tuple[torch.Tensor, ...], metadata: Any) -> torch.Tensor:
        """Undo `cut`."""
        steps, rest = parts
        return steps.float() * metadata + rest.float()


class WithMesh(Gathered):
    """Eight bits for each number, a scale for each row; the older signature."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        self.calls.append([mesh.mesh.tolist(), mesh.ndim])
        return self.cut(self.whole), None

    @staticmethod
    def cut(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors of different sizes."""
        scale = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scale).round().to(torch.int8), scale

    @staticmethod
    def join(parts: tuple[torch.Tensor, ...], metadata: Any) -> torch.Tensor:
        """Undo `cut`."""
        numbers, scale = parts
        return numbers.float() * scale


class Layers(nn.Module):
    """Parameters with hooks and without in one unit; rows that may not divide the world."""

    def __init__(self, kind: type[Gathered], num_rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, num_rows)
        self.down = nn.Linear(num_rows, 4)
        self.calls: list[Any] = []
        for layer in (self.up, self.down):
            layer.weight = nn.Parameter(kind(layer.weight.detach(), self.calls))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _plain(kind: type[Any], num_rows: int) -> nn.Module:
    """The layers with the weights that arrive after the gather."""
    model = seeded(lambda: Layers(kind, num_rows))
    for layer in (model.up, model.down):
        parts = kind.cut(layer.weight.detach().whole)
        layer.weight = nn.Parameter(kind.join(parts, _STEP))
    return model


def _check_gradients(model: Layers, kind: type[Gathered]) -> None:
    """Gradients are those of the weights that arrived, in full precision."""
    plain = _plain(kind, model.up.out_features)
    square_loss(plain, all_batches(1)[0]).backward()
    square_loss(model, my_batches(1)[0]).backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(q.grad, DTensor)
        assert type(q.grad._local_tensor) is torch.Tensor
        torch.testing.assert_close(full(q.grad), p.grad, msg=lambda m, n=name: f"{n}: {m}")
    model.zero_grad()


def _what_was_said(model: Layers) -> list[str]:
    """Each thing once: how often an engine gathers is its own affair."""
    return sorted({repr(call) for call in model.calls})


@ranks(2, 4)
@pytest.mark.parametrize("num_rows", [12, 13])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_gather_of_two_tensors_with_metadata(num_rows: int, reshard_after_forward: bool) -> None:
    def run(fsdp: ModuleType) -> list[Any]:
        model = seeded(lambda: Layers(WithEverything, num_rows))
        fsdp.fully_shard(model, reshard_after_forward=reshard_after_forward)
        assert isinstance(model.up.weight, DTensor)
        assert type(model.up.weight._local_tensor) is WithEverything
        _check_gradients(model, WithEverything)
        return [train(model, my_batches()), _what_was_said(model)]

    check_engines_agree(run)


@ranks(2, 4)
def test_the_signature_with_the_mesh_alone() -> None:
    def run(fsdp: ModuleType) -> list[Any]:
        model = seeded(lambda: Layers(WithMesh, 12))
        fsdp.fully_shard(model.up)
        fsdp.fully_shard(model)
        _check_gradients(model, WithMesh)
        return [train(model, my_batches()), _what_was_said(model)]

    check_engines_agree(run)


@ranks(2)
@pytest.mark.parametrize("kind", [WithEverything, WithMesh])
def test_mixed_precision_reaches_the_hooks(kind: type[Gathered]) -> None:
    def run(fsdp: ModuleType) -> list[Any]:
        model = seeded(lambda: Layers(kind, 12))
        fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(**BF16))
        result = train(model, my_batches())
        assert torch.bfloat16 in [call[-1] for call in model.calls]
        return [result, _what_was_said(model)]

    check_engines_agree(run)


@ranks(4)
def test_hooks_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def run(fsdp: ModuleType) -> list[Any]:
        model = seeded(lambda: Layers(WithEverything, 13))
        fsdp.fully_shard(model, mesh=mesh)
        _check_gradients(model, WithEverything)
        return [train(model, my_batches()), _what_was_said(model)]

    check_engines_agree(run, exact=True)


@ranks(2)
def test_hooks_given_to_plain_shards_before_the_first_forward() -> None:
    def give(shard: torch.Tensor, seen: list[Any]) -> None:
        def before(self: torch.Tensor, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
            seen.append(mesh.size())
            return (self.to(torch.bfloat16),), None

        def after(
            self: torch.Tensor,
            outputs: tuple[torch.Tensor, ...],
            metadata: Any,
            param_dtype: torch.dtype,
            *,
            out: torch.Tensor | None = None,
        ) -> Any:
            (output,) = outputs
            if out is None:
                weight = output.to(param_dtype)
                return weight, (weight,)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(output)
            return None

        shard.fsdp_pre_all_gather = types.MethodType(before, shard)
        shard.fsdp_post_all_gather = types.MethodType(after, shard)

    def run(fsdp: ModuleType) -> list[Any]:
        model = seeded(lambda: nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, 4)))
        fsdp.fully_shard(model)
        seen: list[Any] = []
        give(model[2].weight._local_tensor, seen)
        loss = square_loss(model, my_batches(1)[0])
        loss.backward()
        assert seen
        plain = seeded(lambda: nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, 4)))
        plain[2].weight.data = plain[2].weight.data.bfloat16().float()
        assert torch.equal(square_loss(plain, my_batches(1)[0]), loss)
        return [loss, state_of_model(model)]

    check_engines_agree(run)


class WithTooMuch(Gathered):
    """A signature that no engine knows."""

    def fsdp_pre_all_gather(self, mesh: Any, module: nn.Module) -> Any:
        raise AssertionError("never called")


class OnlyAfter(Gathered):
    """Inherits the hook after the gather, and has none before."""


@ranks(2)
def test_hooks_that_are_refused() -> None:
    def refusal(fsdp: ModuleType, kind: type[Gathered]) -> BaseException | None:
        model = seeded(lambda: Layers(kind, 12))
        error = error_of(lambda: fsdp.fully_shard(model))
        return error or error_of(lambda: model(my_batches(1)[0]))

    def run(fsdp: ModuleType) -> list[Any]:
        return [refusal(fsdp, WithTooMuch), refusal(fsdp, OnlyAfter)]

    errors = check_engines_agree(run)
    assert [type(error) for error in errors] == [AssertionError] * 2


@ranks(2)
def test_an_evaluation_between_steps_gathers_anew() -> None:
    def run(fsdp: ModuleType) -> list[Any]:
        model = seeded(lambda: Layers(WithEverything, 13))
        fsdp.fully_shard(model.up)
        fsdp.fully_shard(model)
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in my_batches():
            with torch.no_grad():
                seen.append(square_loss(model, x))
            loss = square_loss(model, x)
            assert torch.equal(loss, seen[-1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [seen, state_of_model(model)]

    check_engines_agree(run)
