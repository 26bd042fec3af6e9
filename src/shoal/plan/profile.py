"""How long operators take on the device at hand: each distinct one is run once, and remembered.

Operators are told apart by their name, and the shapes, strides and dtypes of their arguments. A
model of equal blocks has some hundred of them, so a profile takes seconds. It is kept in a file, by
device and release of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shoal._torch import cuda, trees
from shoal.errors import UsageError
from shoal.files import read_regular, replace
from shoal.plan.accelerators import Accelerator, accelerator

_WARM, _TIMED = 3, 10
_LONG_S = 0.02
"""An operator that takes longer is timed once."""
_MOST_BYTES = 1 << 26


class Profile:
    """What was measured on one device."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        self._device = device
        self._path = path
        self._is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if self._is_cuda else f"{device.type} core"
        self.name = f"{name}, torch {torch.__version__}"
        self.num_measured = 0
        """How many operators were run for it, not found in the file."""
        self.unmeasured: set[str] = set()
        """Operators that could not be run by themselves."""
        self._took_us: dict[str, float | None] = {} if path is None else _read(path, self.name)

    def time_us(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> float | None:
        """How long an operator takes with arguments like these; None if it cannot be run."""
        key = f"{func}({_said(args)}, {_said(sorted((kwargs or {}).items()))})"
        if key not in self._took_us:
            self.num_measured += 1
            self._took_us[key] = self._measured(func, args, kwargs or {})
        took = self._took_us[key]
        if took is None:
            self.unmeasured.add(str(func.overloadpacket))
        return took

    def store(self) -> None:
        """Write what was measured to the file."""
        if self._path is None or not self.num_measured:
            return
        content = {"device": self.name, "took_us": self._took_us}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace(self._path, json.dumps(content).encode()).close()
        except OSError as error:
            raise UsageError(f"cannot write the profile {self._path}: {error.strerror}") from error

    def _measured(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
        try:
            with torch.no_grad():
                real_args = trees.tree_map(self._real, tuple(args))
                real_kwargs = {
                    name: trees.tree_map(self._real, one) for name, one in kwargs.items()
                }
                return self._timed(lambda: func(*real_args, **real_kwargs))
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            return None  # out of memory, or arguments that numbers alone do not make valid

    def _real(self, one: Any) -> Any:
        if isinstance(one, torch.device):
            return self._device
        if not isinstance(one, Tensor):
            return one
        # Elements may share memory, as those of expanded tensors do.
        last = sum((n - 1) * stride for n, stride in zip(one.shape, one.stride(), strict=True))
        flat = torch.empty(last + 1 if one.numel() else 0, dtype=one.dtype, device=self._device)
        filled = flat.normal_() if one.is_floating_point() else flat.zero_()
        return filled.as_strided(one.shape, one.stride())

    def _timed(self, run: Any) -> float:
        self._elapsed_us(run, 1)  # loads kernels
        once = self._elapsed_us(run, 1)
        if once > _LONG_S * 1e6:
            return once
        self._elapsed_us(run, _WARM)
        return self._elapsed_us(run, _TIMED)

    def _elapsed_us(self, run: Any, times: int) -> float:
        if not self._is_cuda:
            start = perf_counter()
            for _ in range(times):
                run()
            return (perf_counter() - start) * 1e6 / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device is kept busy until all are launched: else the host's time would be measured.
        cuda.spin(1000.0)
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / times


def profile_for(device: str | Accelerator, path: Path | None = None) -> Profile:
    """A profile of the device here, which must be of the kind that is planned for."""
    kind = "cpu" if accelerator(device).is_cpu else "cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "a profile is measured on the device that is planned for, and there is no CUDA device "
            "here: measure where there is one, or plan --device cpu"
        )
    return Profile(torch.device(kind), path)


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_said, value))}]"
    return repr(value)


def _read(path: Path, name: str) -> dict[str, float | None]:
    """What a file has for this device; nothing if it is another's, or damaged."""
    try:
        content = json.loads(read_regular(path, _MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the profile {path}: {error}; remove it") from error
    took = content.get("took_us") if isinstance(content, dict) else None
    if not isinstance(took, dict) or content.get("device") != name:
        return {}
    return {
        key: value
        for key, value in took.items()
        if value is None or (isinstance(value, int | float) and 0 <= value < 1e12)
    }
