"""The state of every random generator of this process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """What torch, numpy and Python will draw next."""

    torch_cpu: Tensor
    torch_cuda: tuple[Tensor, ...]
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> RandomState:
        """Take the present state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
        return cls(
            torch_cpu=torch.get_rng_state(),
            torch_cuda=tuple(cuda),
            numpy=np.random.get_state(),
            python=random.getstate(),
        )

    def restore(self) -> None:
        """Make this the present state."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
