"""A module before it is sharded: ignored parts, memory, device, equal values on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal._torch import composable
from shoal.comm.transport import Transport
from shoal.ddp.broadcast import broadcast
from shoal.doors.fsdp1.parameters import flattened
from shoal.doors.fsdp1.wrapper import wrappers_below
from shoal.errors import ShardedTwiceError
from shoal.runtime.collect import Found, check_strides, collect, without_borrowed
from shoal.runtime.module_state import state_of
from shoal.runtime.parameter_wrapping import bytes_of
from shoal.runtime.rank_guard import check_tensors_agree
from shoal.runtime.unit import Borrowed


def ignored_of(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules to leave alone with all below them, and the parameters to leave alone."""
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time: pass "
            "ignored_states alone"
        )
    states: list[Any] = list(ignored_states or ())
    try:
        roots: list[Any] = list(ignored_modules or ())
    except TypeError as error:
        raise TypeError(
            "`ignored_modules` should be an iterable of `torch.nn.Module`s but got "
            f"{type(ignored_modules)}"
        ) from error
    kinds = sorted({type(state) for state in (*states, *roots)}, key=repr)
    parameters: set[nn.Parameter] = set()
    if states and all(isinstance(state, nn.Parameter) for state in states):
        parameters.update(states)
    elif states and all(isinstance(state, nn.Module) for state in states):
        roots = states
    elif states:
        raise ValueError(
            "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
            f"{kinds}"
        )
    for root in roots:
        if not isinstance(root, nn.Module):
            raise ValueError(
                f"ignored_modules expects nn.Module list elements but got types {kinds}"
            )
        if state_of(root) is not None:
            raise ValueError("`ignored_modules` should not include FSDP modules")
    modules = {child for root in roots for child in root.modules() if state_of(child) is None}
    if module in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored and is not well-supported: {module}",
            stacklevel=3,
        )
    for child in modules:
        parameters.update(p for p in child._parameters.values() if p is not None)
    # What a wrapper inside leaves alone, this one does too.
    for one in wrappers_below(module):
        parameters.update(one._ignored_params)
    return modules, parameters


def device_of(
    module: nn.Module, ignored: set[nn.Parameter], device_id: int | torch.device | None
) -> torch.device:
    """Where a module computes: where it is, or where it was told to go from the host."""
    told = _told(device_id)
    # Not what wrappers inside have sharded: it may be offloaded, or not moved yet.
    own = (p for child in own_modules(module) for p in child.parameters(recurse=False))
    found = {p.device for p in own if p not in ignored}
    elsewhere = {device for device in found if device.type not in ("cpu", "meta")}
    if len(elsewhere) > 1:
        raise RuntimeError(
            f"FSDP only supports single device modules but got params on {sorted(map(str, found))}"
        )
    if told is None and elsewhere and torch.device("cpu") in found:
        raise RuntimeError(
            "To support a module with both CPU and GPU params, please pass in device_id argument."
        )
    device = next(iter(elsewhere), told or _current_device())
    if told is not None and device != told:
        raise ValueError(
            f"Inconsistent compute device and `device_id` on rank {dist.get_rank()}: {device} vs "
            f"{told}: move the module there before, or leave it on the CPU"
        )
    return device


def _told(device_id: int | torch.device | None) -> torch.device | None:
    if device_id is None:
        return None
    device = torch.device(device_id)
    if device.type == "cpu":
        return torch.device("cpu")  # tensors say so, whatever index they are given
    if device.index is not None:
        return device
    current = _current_device()
    warnings.warn(
        f"FSDP got the argument `device_id` {device_id} on rank {dist.get_rank()}, which does not "
        f"have an explicit index: it will use the current device {current}. Pass an index, or call "
        f"torch.{device.type}.set_device() before, if that is another one.",
        stacklevel=4,
    )
    return current


def _current_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_unreplicated(module: nn.Module) -> None:
    """Refuse a module of which `replicate` manages a part."""
    for name, one in module.named_modules():
        if composable.replicates(one):
            raise ShardedTwiceError(
                f"replicate() manages {name or type(one).__name__!r} already, so it cannot be "
                "sharded; use one of the two"
            )


def own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and what is below it, down to other wrappers."""
    if state_of(module) is not None:
        return
    yield module
    for child in module.children():
        yield from own_modules(child)


def prepared(
    module: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    device: torch.device,
    *,
    moves: bool,
    param_init_fn: Callable[[nn.Module], None] | None,
    synchronised_over: Sequence[dist.ProcessGroup],
) -> tuple[list[Found], list[Borrowed]]:
    """Make a module ready, and find the parameters in it: its own, and those of other wrappers."""
    modules = [child for child in own_modules(module) if child not in ignored_modules]
    _materialise(modules, param_init_fn, device)
    found, borrowed = without_borrowed(collect([module], ignored_params))
    found, flat = _without_flattened(found)
    parameters = [item.parameter for item in found]
    buffers = [buffer for child in modules for buffer in child.buffers(recurse=False)]
    for item in found:
        check_strides(item.name, bytes_of(item.parameter))
    _move([*parameters, *buffers], device if moves else None)
    for buffer in buffers:
        if not buffer.is_contiguous():
            buffer.data = buffer.contiguous()
    if not moves and any(p.device.type != device.type for p in parameters):
        warnings.warn(
            f"The passed-in `module` is on CPU and will compute on {device}: sharding on the CPU "
            f"is slow. Pass device_id, or move it to {device} first; at the latest before it runs.",
            stacklevel=3,
        )
    if synchronised_over:
        _synchronise(found, buffers, device, synchronised_over)
    return found, [*borrowed, *flat]


def _without_flattened(found: Sequence[Found]) -> tuple[list[Found], list[Borrowed]]:
    """The parameters that no flat parameter has, and those that one has."""
    own: list[Found] = []
    borrowed: list[Borrowed] = []
    for item in found:
        known = flattened(item)
        unit = None if known is None else known[0].unit
        if known is None or unit is None:
            own.append(item)
            continue
        flat, index = known
        flat.share(index, item)
        (member,) = unit.shards.members
        borrowed.append(Borrowed(unit=unit, member=member, homes=(), name=item.name))
    return own, borrowed


def _materialise(
    modules: Sequence[nn.Module],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Give modules that were made on the meta device memory and values."""
    empty = [child for child in modules if _is_meta(child)]
    if not empty:
        return
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(
                f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}"
            )
        for child in modules:  # also those that only contain others: it may look into them
            param_init_fn(child)
        return
    for child in empty:
        child.to_empty(device=device, recurse=False)
        reset = getattr(child, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"Module {type(child).__name__} has parameters on the meta device and no "
                "reset_parameters(): pass param_init_fn"
            )
        with torch.no_grad():
            reset()


def _is_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


@torch.no_grad()
def _move(tensors: Sequence[torch.Tensor], device: torch.device | None) -> None:
    for tensor in tensors:
        if device is not None and tensor.device != device:
            tensor.data = tensor.to(device)


@torch.no_grad()
def _synchronise(
    found: Sequence[Found],
    buffers: Sequence[torch.Tensor],
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
) -> None:
    """Let all ranks have the values of the first one."""
    tensors = [bytes_of(t.detach()) for t in (*(item.parameter for item in found), *buffers)]
    if any(tensor.device != device for tensor in tensors):
        raise ValueError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which "
            f"requires them to be on {device}: specify the `device_id` argument, or move the "
            "module there before passing it to FSDP."
        )
    names = [*(item.name for item in found), *(f"buffer {i}" for i in range(len(buffers)))]
    for group in groups:
        check_tensors_agree(group, dict(zip(names, tensors, strict=True)))
        broadcast(tensors, Transport(group), reason="sync_module_states")
