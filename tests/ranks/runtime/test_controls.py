"""The methods of a sharded module, and the functions beside `fully_shard`, one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    register_fsdp_forward_method as torch_register_forward_method,
)
from torch.distributed.tensor import DTensor

from collectives import LoggedGather, LoggedReduce, log_traffic
from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Block,
    Engine,
    check_engines_agree,
    check_like_plain,
    copies,
    error_of,
    gradients,
    loss_of,
    stack,
    train,
)
from harness import ranks


def registered(model: nn.Module) -> list[bool]:
    """Which parameters are shards."""
    return [isinstance(p, DTensor) for p in model.parameters()]


def unsharded(engine: Engine, async_op: bool) -> list[Any]:
    """Parameters after `unshard`, alone; then a step that finds them there."""
    model = engine.shard(stack())
    block = model.blocks[1]
    handle = block.unshard(async_op=async_op)
    assert (handle is None) != async_op
    if handle is not None:
        assert isinstance(handle, engine.api.UnshardHandle)
        handle.wait()
        handle.wait()
    seen: list[Any] = [registered(model), copies(dict(block.named_parameters()))]
    block.unshard()
    loss_of(model(engine.batches(1)[0])).backward()
    seen.append(registered(model))
    return [*seen, gradients(model)]


@ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_unshard_registers_full_parameters(async_op: bool) -> None:
    check_engines_agree(unsharded, async_op, plain=False)


def never_waited(engine: Engine, asks: list[str]) -> list[Any]:
    """Gathers that only the forward waits for."""
    model = engine.shard(stack())
    for batch in engine.batches(2):
        for name in asks:
            model.get_submodule(name).unshard(async_op=True)
        loss_of(model(batch)).backward()
    return [gradients(model), registered(model)]


@ranks(2)
@pytest.mark.parametrize("asks", [[""], ["blocks.2", "blocks.0"], ["blocks.1", "blocks.1", ""]])
def test_forward_waits_for_what_was_unsharded_before(asks: list[str]) -> None:
    check_engines_agree(never_waited, asks, plain=False)


def resharded(engine: Engine) -> list[Any]:
    model = engine.shard(stack())
    seen = []
    loss = loss_of(model(engine.batches(1)[0]))
    seen.append(registered(model))
    model.reshard()
    model.reshard()
    seen.append(registered(model))
    loss.backward()
    model.blocks[0].unshard()
    seen.append(registered(model))
    model.reshard()
    seen.append(registered(model))
    model.blocks[0].reshard()
    seen.append(registered(model))
    return [*seen, gradients(model)]


@ranks(2)
def test_reshard_is_for_one_unit_and_can_come_before_backward() -> None:
    check_engines_agree(resharded, plain=False)


class Fragile(nn.Module):
    """A block that fails when told to, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.fails: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.fails == "forward":
            raise ArithmeticError("told to")
        if self.fails == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ArithmeticError("told to")


def recovered(engine: Engine, fails: str, sync: bool) -> list[Any]:
    """A step that raised and was reset, then ordinary ones."""
    model = engine.shard(stack(Fragile))
    before, failing = engine.batches(2)
    if engine.is_sharded:
        model.set_requires_gradient_sync(sync)
    loss_of(model(before)).backward()
    model.zero_grad()
    model.blocks[1].fails = fails
    error = error_of(lambda: loss_of(model(failing)).backward())
    assert isinstance(error, ArithmeticError)
    model.blocks[1].fails = None
    if engine.is_sharded:
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        assert all(registered(model))
    model.zero_grad()
    return train(engine, model, engine.batches(2))


@ranks(2)
def test_training_goes_on_after_a_reset() -> None:
    check_engines_agree(recovered, "forward", True)


@ranks(2)
@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_reset_forgets_gradients_that_were_not_reduced(fails: str, sync: bool) -> None:
    """Torch's engine says that it does, but adds them to the next step's."""
    expected = recovered(PLAIN, fails, sync)
    check_like_plain(recovered(SHOAL, fails, sync), expected)


def wrong_reset(engine: Engine) -> list[Any]:
    model = engine.shard(stack())
    loss_of(model(engine.batches(1)[0])).backward()
    model.reset_iter_state()
    return [error_of(model.blocks[0].reset_iter_state), gradients(model)]


@ranks(2)
def test_only_the_root_is_reset() -> None:
    check_engines_agree(wrong_reset, plain=False)


class Lookup(nn.Module):
    """Its backward needs no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, DIM)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class Reader(nn.Module):
    """An embedding below blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Lookup(), Block()])
        self.head = nn.Linear(DIM, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](tokens)))


def not_gathered_in_backward(engine: Engine) -> list[Any]:
    torch.manual_seed(0)
    model = engine.shard(Reader())
    log = log_traffic(model)
    model.blocks[0].set_unshard_in_backward(False)
    seen: list[Any] = []
    for batch in engine.batches(2):
        tokens = (batch[:, 0].abs() * 4).long().clamp(max=10)
        loss_of(model(tokens)).backward()
        seen.append(sorted(log))
        log.clear()
    return [*seen, gradients(model)]


@ranks(2)
def test_units_that_backward_need_not_gather() -> None:
    check_engines_agree(not_gathered_in_backward, plain=False)


def with_setting(engine: Engine, setting: Callable[[Any], None]) -> list[Any]:
    model = engine.shard(stack())
    if engine.is_sharded:
        setting(model)
    return train(engine, model)


def _separate(model: Any) -> None:
    model.set_separate_reduce_scatter_group()


def _separate_and_back(model: Any) -> None:
    model.set_separate_reduce_scatter_group(True)
    model.set_separate_reduce_scatter_group(False, recurse=False)


def _event(model: Any) -> None:
    model.set_post_optim_event(torch.cpu.Event())


SETTINGS: dict[str, Callable[[Any], None]] = {
    "one buffer": lambda model: model.set_reduce_scatter_max_input_buffers(1),
    "three buffers": lambda model: model.set_reduce_scatter_max_input_buffers(3),
    "of the root": lambda model: model.set_reduce_scatter_max_input_buffers(2, recurse=False),
    "separate group": _separate,
    "separate and back": _separate_and_back,
    "event": _event,
    "memory from the group": lambda m: m.set_allocate_memory_from_process_group_for_comm(True),
    "not from the group": lambda m: m.set_allocate_memory_from_process_group_for_comm(False),
}


@ranks(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_change_no_number(setting: str) -> None:
    check_engines_agree(with_setting, SETTINGS[setting])


class Spoken(nn.Module):
    """Has forwards by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, 3)

    def features(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)) * scale

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.features(x))


def spoken(engine: Engine, dtypes: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    model = engine.shard(Spoken(), dtypes)
    if engine.is_sharded:
        engine.api.register_fsdp_forward_method(model, "features")
        # Frameworks call torch's own, whichever engine made the model.
        torch_register_forward_method(model, "score")
    seen: list[Any] = []
    for batch in engine.batches(2):
        x = model.features(batch, scale=0.5)
        loss = loss_of(model.score(x))
        loss.backward()
        seen.append([x.dtype, engine.mean(loss), gradients(model)])
        loss_of(model(batch)).backward()
        seen.append(gradients(model))
    return seen


@ranks(2)
def test_forwards_by_other_names() -> None:
    check_engines_agree(spoken, {})
    check_engines_agree(spoken, {"param_dtype": torch.bfloat16}, plain=False)


def misnamed(engine: Engine) -> list[Any]:
    plain = Spoken()
    bound = plain.features
    engine.api.register_fsdp_forward_method(plain, "features")
    return [
        plain.features == bound,
        error_of(lambda: engine.api.register_fsdp_forward_method(plain, "nothing")),
        error_of(lambda: engine.api.register_fsdp_forward_method(engine.shard(plain), "nothing")),
    ]


@ranks(2)
def test_forward_methods_that_do_not_exist() -> None:
    check_engines_agree(misnamed, plain=False)


def chunked(engine: Engine) -> list[Any]:
    """Two roots, as in a pipeline: the second continues where the first ended."""
    first, second = (engine.shard(stack(num=2)) for _ in range(2))
    if engine.is_sharded:
        engine.api.share_comm_ctx([first, second])
        engine.api.share_comm_ctx([])
    seen: list[Any] = []
    for batch in engine.batches(3):
        middle = nn.functional.pad(first(batch), (0, DIM - 3))
        loss = loss_of(second(middle))
        loss.backward()
        seen.append([engine.mean(loss), gradients(first), gradients(second)])
    return seen


@ranks(2)
def test_roots_that_share_their_communication() -> None:
    check_engines_agree(chunked)


def mistakes(engine: Engine) -> list[Any]:
    model = engine.shard(stack(num=1))
    block, api = model.blocks[0], engine.api
    gather, reduce = LoggedGather("", []), LoggedReduce("", [])

    def after(setting: Callable[[], None], call: Callable[[], None]) -> Exception | None:
        setting()
        return error_of(call)

    return [
        error_of(lambda: block.set_modules_to_forward_prefetch([nn.Linear(2, 2)])),
        error_of(lambda: block.set_modules_to_backward_prefetch([model, None])),
        error_of(lambda: block.set_reduce_scatter_max_input_buffers(0)),
        error_of(lambda: block.set_reduce_scatter_max_input_buffers(True)),
        error_of(lambda: block.set_reduce_scatter_max_input_buffers(1.5)),
        error_of(lambda: api.share_comm_ctx([model, nn.Linear(2, 2)])),
        after(
            lambda: block.set_custom_all_gather(gather),
            lambda: block.set_allocate_memory_from_process_group_for_comm(True),
        ),
        after(
            lambda: model.set_custom_reduce_scatter(reduce),
            lambda: model.set_allocate_memory_from_process_group_for_comm(True),
        ),
    ]


@ranks(2)
def test_mistakes_are_refused_as_torch_refuses_them() -> None:
    check_engines_agree(mistakes, plain=False)


@ranks(2)
def test_symmetric_memory_is_refused_where_there_is_none() -> None:
    model = SHOAL.shard(stack(num=1))
    with pytest.raises(RuntimeError, match=r"(?i)symm"):
        model.set_symm_mem_for_comm()
    assert error_of(lambda: loss_of(model(SHOAL.batches(1)[0])).backward()) is None
