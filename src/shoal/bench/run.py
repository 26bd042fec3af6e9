"""One cell of the matrix: a case, by an engine, in a mode, on a device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch

from shoal.bench.cases import Case

DeviceType = Literal["cpu", "cuda"]


class Mode(StrEnum):
    """Whether, and how, the model is compiled."""

    EAGER = "eager"
    """As written."""
    COMPILED = "compiled"
    """By Inductor: the whole model for `plain` and `ddp`, each block for the sharded engines."""
    CUDAGRAPHS = "cudagraphs"
    """The whole model, replayed from CUDA graphs: the limit of the host-bound case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one set of processes is started for."""

    case: Case
    engine: str
    mode: Mode
    device_type: DeviceType

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return torch.bfloat16 if self.case.mixed_precision else torch.float32

    def __str__(self) -> str:
        return f"{self.case.name} {self.engine} {self.mode}"


def device_type_of(case: Case, *, cuda: bool) -> DeviceType:
    """CUDA where there is one, except for the cases of real gloo ranks."""
    return "cuda" if cuda and case.network is not None else "cpu"
