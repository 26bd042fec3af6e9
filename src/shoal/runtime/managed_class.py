"""Modules that are managed become instances of a class of their own, as torch has it."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn


def become(module: nn.Module, manager: type, prefix: str, refusal: str) -> None:
    """Make a module an instance of `manager` and of its own class.

    Copies are refused with the given words, in the class itself, so that it wins over a module's
    own: a copy would share the state.
    """
    module.__class__ = _class_of(type(module), manager, prefix, refusal)


@functools.cache
def _class_of(cls: type[nn.Module], manager: type, prefix: str, refusal: str) -> type[nn.Module]:
    def refuse_copy(self: nn.Module, memo: dict[int, Any]) -> NoReturn:
        raise AssertionError(refusal)  # because torch's classes answer with one

    return type(f"{prefix}{cls.__name__}", (manager, cls), {"__deepcopy__": refuse_copy})
