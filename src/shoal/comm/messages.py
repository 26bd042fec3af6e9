"""Messages between some pairs of ranks, to and from several ranks at once.

On gloo they are sends and receives: 0.8 of the time of its all-to-all, and every message has memory
of its own, so that nothing is packed that lies in one run.

On other backends they are an all-to-all of lists, which NCCL groups as sends and receives, without
the empty ones. Every rank enters it. NCCL connects a group at its first collective, and would wait
there for a rank that stays away since it has nothing to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.comm import observer
from shoal.comm.pending import Pending
from shoal.errors import RankError, ShoalError, UsageError

Addressed: TypeAlias = tuple[int, Tensor]
"""A rank of the group, and a flat tensor to send there or to receive from there."""

# Keeps these messages apart from those that a user sends with the default tag.
_TAG = 0x5A0A1


def send_messages(
    group: ProcessGroup,
    sends: Iterable[Addressed],
    receives: Sequence[Addressed],
    *,
    device: torch.device,
    reason: str = "messages",
) -> list[Pending]:
    """Start messages on `device`, at most one in each direction between two ranks.

    Collective: every rank of the group calls it, with or without messages. Receives are ready
    before the first send is asked for, so `sends` may be made one by one while others travel.
    """
    if group.size() == 1:
        return []
    launched = observer.launching(reason, group, None)
    try:
        if backend_of(group, device) == "gloo":
            return _by_messages(group, sends, receives, reason)
        return [_by_all_to_all(group, list(sends), receives, device, reason, launched)]
    except (ShoalError, NotImplementedError):
        raise
    except RuntimeError as error:
        raise RankError(f"{reason} could not be started: {error}") from error


def carrier_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where bytes must lie to travel: the device itself, or one that the group's backend reaches.

    gloo sends and receives host memory only.
    """
    backend = backend_of(group, device)
    if backend is not None and (backend != "gloo" or device.type == "cpu"):
        return device
    if backend_of(group, torch.device("cpu")) is not None:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def backend_of(group: ProcessGroup, device: torch.device) -> str | None:
    """Name the backend that serves a device's tensors, if one does."""
    return backends_of(group).get(device.type)


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """Name the backend of each device type: "cpu:gloo,cuda:nccl" in c10d's words."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def _by_messages(
    group: ProcessGroup, sends: Iterable[Addressed], receives: Sequence[Addressed], reason: str
) -> list[Pending]:
    started: list[Pending] = []
    for peer, tensor in receives:
        work = dist.irecv(_as_bytes(tensor), group=group, group_src=peer, tag=_TAG)
        started.append(Pending(tensor, work, f"{reason}, from rank {peer} of the group"))
    for peer, tensor in sends:
        work = dist.isend(_as_bytes(tensor), group=group, group_dst=peer, tag=_TAG)
        started.append(Pending(tensor, work, f"{reason}, to rank {peer} of the group"))
    return started


def _by_all_to_all(
    group: ProcessGroup,
    sends: Sequence[Addressed],
    receives: Sequence[Addressed],
    device: torch.device,
    reason: str,
    launched: object,
) -> Pending:
    outputs, inputs = _listed(group, receives, device), _listed(group, sends, device)
    work = dist.all_to_all(outputs, inputs, group=group, async_op=True)
    # Until it is waited for, somebody has to keep the memory of messages alive.
    return Pending(outputs[0], work, reason, [*outputs, *inputs].clear, launched)


def _listed(
    group: ProcessGroup, messages: Sequence[Addressed], device: torch.device
) -> list[Tensor]:
    """One tensor for each rank, an empty one where there is no message."""
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    listed = [nothing] * group.size()
    for peer, tensor in messages:
        listed[peer] = _as_bytes(tensor)
    return listed


def _as_bytes(tensor: Tensor) -> Tensor:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise UsageError(
            f"a message must be one-dimensional and contiguous, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    return tensor.view(torch.uint8)
