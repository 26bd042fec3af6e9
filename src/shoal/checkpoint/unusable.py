"""Models that must not be used: a load stopped when some of their tensors were written."""

from __future__ import annotations

from typing import NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.errors import CheckpointError

_MARK = "_shoal_unusable"


def mark_unusable(model: nn.Module, reason: str) -> None:
    """Let every use of the model raise until a load succeeds."""
    clear_mark(model)

    def refuse(*_: object) -> NoReturn:
        raise CheckpointError(reason)

    handle = model.register_forward_pre_hook(refuse, prepend=True)
    # Beside the module's own attributes: no state dict and no repr shows it.
    model.__dict__[_MARK] = (handle, reason)


def clear_mark(model: nn.Module) -> None:
    """Let the model be used again."""
    mark: tuple[RemovableHandle, str] | None = model.__dict__.pop(_MARK, None)
    if mark is not None:
        mark[0].remove()


def check_usable(model: nn.Module) -> None:
    """Raise CheckpointError if the model holds a mixture of two states."""
    mark: tuple[RemovableHandle, str] | None = model.__dict__.get(_MARK)
    if mark is not None:
        raise CheckpointError(mark[1])
