"""Activations on the host between forward and backward, block by block.

    forward of a block    what autograd saves is copied to the host, beside compute
    … of the next one     the device's memory is given back when that copy is there
    backward of a block   what it saved is there; that of the block before is on its way back

    activations_to_host(model.blocks, budget_bytes=64 * 2**30)

The blocks that run first go to the host first: backward comes to them last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal._torch import autograd
from shoal.errors import InvariantError, UsageError
from shoal.runtime.streams import CudaLane

LEAST_BYTES = 1 << 20
"""Smaller tensors stay on the device: a copy costs the host more than their memory is worth."""


def activations_to_host(
    blocks: Iterable[nn.Module], *, budget_bytes: int | None = None, least_bytes: int = LEAST_BYTES
) -> HostActivations:
    """From now on keep what blocks save for backward in host memory.

    The numbers do not change. Parameters are left alone, and so are small tensors, views with
    gaps, tensors of subclasses, and whatever a checkpointed part recomputes.

    Args:
        blocks: Modules that run one after another, such as the layers of a transformer.
        budget_bytes: How much the host holds at most; what comes when it is full stays on the
            device. By default there is no limit.
        least_bytes: Tensors of fewer bytes stay on the device.

    Raises:
        UsageError: There are no blocks, one is inside of another, or a number is negative.
    """
    return HostActivations(list(blocks), budget_bytes, least_bytes)


class HostActivations:
    """Hooks around the forwards of blocks; `remove()` takes them away."""

    def __init__(self, blocks: list[nn.Module], budget_bytes: int | None, least_bytes: int) -> None:
        inside = {one for block in blocks for one in block.modules() if one is not block}
        if not blocks or not inside.isdisjoint(blocks):
            raise UsageError(
                "activations_to_host needs modules that run one after another, and none that is "
                f"inside of another: got {[type(block).__name__ for block in blocks]}"
            )
        for name, value in (("budget_bytes", budget_bytes), ("least_bytes", least_bytes)):
            if value is not None and value < 0:
                raise UsageError(f"expected {name} of 0 or more, got {value}")
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.num_bytes = 0
        """What the host holds now."""
        self.last: weakref.ref[_BlockRun] | None = None
        """The run of a block that has ended last; graphs own runs."""
        self._lanes: dict[torch.device, tuple[CudaLane, CudaLane]] = {}
        self._entered: list[tuple[_BlockRun, AbstractContextManager[Any]] | None] = []
        self._hooks = [
            hook
            for block in blocks
            for hook in (
                block.register_forward_pre_hook(self._enter),
                block.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def remove(self) -> None:
        """Let later forwards keep what they save on the device."""
        for hook in self._hooks:
            hook.remove()

    def lanes(self, device: torch.device) -> tuple[CudaLane, CudaLane] | None:
        """Where copies run to the host, and from it; on CPU there is only the host."""
        if device.type != "cuda":
            return None
        if device not in self._lanes:
            self._lanes[device] = CudaLane(device), CudaLane(device)
        return self._lanes[device]

    def has_room(self, num_bytes: int) -> bool:
        """Whether the host may hold so much more."""
        return self.budget_bytes is None or self.num_bytes + num_bytes <= self.budget_bytes

    def _enter(self, block: nn.Module, _: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() or autograd.inside_backward():
            self._entered.append(None)
            return
        run = _BlockRun(self, block)
        hooks = saved_tensors_hooks(run.pack, run.unpack)
        hooks.__enter__()
        self._entered.append((run, hooks))

    def _leave(self, _: nn.Module, __: tuple[Any, ...], ___: object) -> None:
        entered = self._entered.pop() if self._entered else None
        if entered is None:
            return
        run, hooks = entered
        hooks.__exit__(None, None, None)
        before = None if self.last is None else self.last()
        if before is not None:
            before.give_back()
            before.following = weakref.ref(run)
        run.before = self.last
        self.last = weakref.ref(run)


class _BlockRun:
    """One forward of a block, and what autograd has saved in it."""

    def __init__(self, owner: HostActivations, block: nn.Module) -> None:
        self.owner = owner
        self.before: weakref.ref[_BlockRun] | None = None
        """The run of the block before; backward comes to it next."""
        self.following: weakref.ref[_BlockRun] | None = None
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in _plain(block)}
        """Where the parameters lie: they are freed and gathered by the engine."""
        self._by_place: dict[tuple[Any, ...], _Saved] = {}
        self._is_fetched = False

    def pack(self, tensor: Tensor) -> Tensor | tuple[_BlockRun, _Saved]:
        """Autograd saves a tensor: start to copy it to the host."""
        if not self._goes(tensor):
            return tensor
        place = (
            *(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()),
            *(tensor.device, tensor._version),
        )
        saved = self._by_place.get(place)
        if saved is None:
            if not self.owner.has_room(tensor.nbytes):
                return tensor
            saved = self._by_place[place] = _Saved(self.owner, tensor)
        return self, saved

    def _goes(self, tensor: Tensor) -> bool:
        """Whether a tensor is worth a copy, and a copy is worth as much as it."""
        return (
            type(tensor) is Tensor
            and tensor.nbytes >= self.owner.least_bytes
            and tensor.layout is torch.strided
            and tensor.device.type in ("cpu", "cuda")
            and not (tensor.is_leaf and tensor.requires_grad)
            and tensor.untyped_storage().data_ptr() not in self._weights
            and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        )

    def give_back(self) -> None:
        """The next block has run: the device's memory is not needed until backward."""
        for saved in self._by_place.values():
            saved.give_back()

    def unpack(self, packed: Tensor | tuple[_BlockRun, _Saved]) -> Tensor:
        """Backward needs what was saved; the block before is likely to be next."""
        if isinstance(packed, Tensor):
            return packed
        _, saved = packed
        following = None if self.following is None else self.following()
        if following is not None:
            following.forget()
        self.fetch()
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()
        return saved.wait()

    def fetch(self) -> None:
        """Start to copy everything back, unless that was done."""
        if not self._is_fetched:
            self._is_fetched = True
            for saved in self._by_place.values():
                saved.fetch()

    def forget(self) -> None:
        """Backward has left the block: another one would copy everything back again."""
        if self._is_fetched:
            self._is_fetched = False
            for saved in self._by_place.values():
                saved.give_back()


class _Saved:
    """A tensor that autograd has saved, on the host, on the device, or on its way."""

    def __init__(self, owner: HostActivations, tensor: Tensor) -> None:
        self._owner = owner
        self._version = tensor._version
        self._device = tensor.device
        self._on_device: Tensor | None = tensor.detach()
        self._lanes = owner.lanes(tensor.device)
        self._mark: torch.cuda.Event | None = None
        """Of the copy that is on its way, to the host or back."""
        self._lane: CudaLane | None = None
        self._num_bytes = 0
        pins = self._lanes is not None
        self._host = torch.empty_like(self._on_device, device="cpu", pin_memory=pins)
        owner.num_bytes += tensor.nbytes
        self._num_bytes = tensor.nbytes
        if self._lanes is None:
            self._host.copy_(self._on_device)
            return
        self._lane = self._lanes[0]
        with self._lane:
            self._host.copy_(self._on_device, non_blocking=True)
            self._mark = self._lane.mark()

    def __del__(self) -> None:
        # The host's allocator waits by itself for copies that read or write its memory; compute
        # has to wait before what it allocated is used again.
        self._join()
        self._owner.num_bytes -= self._num_bytes

    def _join(self) -> None:
        """Let compute come after the copy that is on its way."""
        mark, self._mark = self._mark, None
        if mark is not None and self._lane is not None:
            self._lane.join(mark)

    def give_back(self) -> None:
        """Let go of the device's memory."""
        self._join()
        self._check()
        self._on_device = None

    def _check(self) -> None:
        """Raise if a tensor was changed in place since it was saved, as autograd would."""
        if self._on_device is not None and self._on_device._version != self._version:
            raise InvariantError(
                f"a tensor of shape {tuple(self._on_device.shape)} that is needed for backward was "
                "changed in place after it was saved, so its copy on the host may be of either "
                "value; do not change it in place, or leave the block out of activations_to_host"
            )

    def fetch(self) -> None:
        """Start to copy it back, unless the device has it."""
        if self._on_device is not None:
            return
        self._on_device = torch.empty_like(self._host, device=self._device)
        if self._lanes is None:
            self._on_device.copy_(self._host)
        else:
            self._lane = self._lanes[1]
            with self._lane:
                self._on_device.copy_(self._host, non_blocking=True)
                self._mark = self._lane.mark()
        self._version = self._on_device._version

    def wait(self) -> Tensor:
        """The tensor on the device, for compute."""
        self._join()
        self._check()
        assert self._on_device is not None
        return self._on_device


def _plain(block: nn.Module) -> list[Tensor]:
    """The parameters of a block that have memory of their own to look at."""
    return [p for p in block.parameters() if type(p.data) is Tensor and not p.is_meta]
