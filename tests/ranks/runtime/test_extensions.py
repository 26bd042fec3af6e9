"""Tensors that say themselves how they are gathered: few bits and a rest instead of weights."""

import types
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Engine,
    check_engines_agree,
    error_of,
    loss_of,
    seeded,
    snapshot,
    train,
    two_axes,
)
from harness import ranks
from oracle import full
from wrapped import Wrapped

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_STEP = 1 / 64


class Gathered(Wrapped):
    """A weight that travels as two tensors of fewer bits."""

    calls: list[Any]
    """What the engine said at each gather, for tests to look at."""

    def __init__(self, whole: torch.Tensor, calls: list[Any]) -> None:
        super().__init__(whole)
        self.calls = calls

    def like(self, whole: torch.Tensor) -> Self:
        return type(self)(whole, self.calls)

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
    loss_of(plain(PLAIN.batches(1)[0])).backward()
    loss_of(model(SHOAL.batches(1)[0])).backward()
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
    def run(engine: Engine) -> list[Any]:
        model = seeded(lambda: Layers(WithEverything, num_rows))
        engine.api.fully_shard(model, reshard_after_forward=reshard_after_forward)
        assert isinstance(model.up.weight, DTensor)
        assert type(model.up.weight._local_tensor) is WithEverything
        _check_gradients(model, WithEverything)
        return [train(engine, model), _what_was_said(model)]

    check_engines_agree(run, plain=False)


@ranks(2, 4)
def test_the_signature_with_the_mesh_alone() -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(lambda: Layers(WithMesh, 12))
        engine.api.fully_shard(model.up)
        engine.api.fully_shard(model)
        _check_gradients(model, WithMesh)
        return [train(engine, model), _what_was_said(model)]

    check_engines_agree(run, plain=False)


@ranks(2)
@pytest.mark.parametrize("kind", [WithEverything, WithMesh])
def test_mixed_precision_reaches_the_hooks(kind: type[Gathered]) -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(lambda: Layers(kind, 12))
        engine.api.fully_shard(model, mp_policy=engine.policy(**BF16))
        result = train(engine, model)
        assert torch.bfloat16 in [call[-1] for call in model.calls]
        return [result, _what_was_said(model)]

    check_engines_agree(run, plain=False)


@ranks(4)
def test_hooks_on_two_axes() -> None:
    mesh = two_axes()

    def run(engine: Engine) -> list[Any]:
        model = seeded(lambda: Layers(WithEverything, 13))
        engine.api.fully_shard(model, mesh=mesh)
        _check_gradients(model, WithEverything)
        return [train(engine, model), _what_was_said(model)]

    check_engines_agree(run, exact=True, plain=False)


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

    def run(engine: Engine) -> list[Any]:
        model = seeded(lambda: nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, 4)))
        engine.api.fully_shard(model)
        seen: list[Any] = []
        give(model[2].weight._local_tensor, seen)
        loss = loss_of(model(engine.batches(1)[0]))
        loss.backward()
        assert seen
        plain = seeded(lambda: nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, 4)))
        plain[2].weight.data = plain[2].weight.data.bfloat16().float()
        assert torch.equal(loss_of(plain(engine.batches(1)[0])), loss)
        return [loss, snapshot(model)]

    check_engines_agree(run, plain=False)


class WithTooMuch(Gathered):
    """A signature that no engine knows."""

    def fsdp_pre_all_gather(self, mesh: Any, module: nn.Module) -> Any:
        raise AssertionError("never called")


class OnlyAfter(Gathered):
    """Inherits the hook after the gather, and has none before."""


@ranks(2)
def test_hooks_that_are_refused() -> None:
    def refusal(engine: Engine, kind: type[Gathered]) -> BaseException | None:
        model = seeded(lambda: Layers(kind, 12))
        error = error_of(lambda: engine.api.fully_shard(model))
        return error or error_of(lambda: model(engine.batches(1)[0]))

    def run(engine: Engine) -> list[Any]:
        return [refusal(engine, WithTooMuch), refusal(engine, OnlyAfter)]

    errors = check_engines_agree(run, plain=False)
    assert [type(error) for error in errors] == [AssertionError] * 2


@ranks(2)
def test_an_evaluation_between_steps_gathers_anew() -> None:
    def run(engine: Engine) -> list[Any]:
        model = seeded(lambda: Layers(WithEverything, 13))
        engine.api.fully_shard(model.up)
        engine.api.fully_shard(model)
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in engine.batches():
            with torch.no_grad():
                seen.append(loss_of(model(x)))
            loss = loss_of(model(x))
            assert torch.equal(loss, seen[-1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [seen, snapshot(model)]

    check_engines_agree(run, plain=False)
