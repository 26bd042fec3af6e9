"""A file that defines what is to be planned: `model()`, `inputs()`, and more if it likes.

model()                 the model, built on the meta device
inputs()                the arguments of its forward: a tensor, a tuple, or a dict of them
units(model)            modules, or lists of modules, in the order of `fully_shard` calls
loss(output)            what backward starts from
optimizer(parameters)   an optimizer
precision               {"param_dtype": ..., "reduce_dtype": ...}
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.errors import UsageError
from shoal.plan.training import Workload
from shoal.runtime.policy import MixedPrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """What a file defines."""

    model: Callable[[], Any]
    inputs: Callable[..., Any]
    units: Callable[[Any], Any] | None
    loss: Callable[[Any], Any] | None
    optimizer: Callable[[Any], Any] | None
    policy: MixedPrecisionPolicy | None

    def workload(self, sizes: Mapping[str, int]) -> Workload:
        """What is trained, with inputs of a batch or sequence that was asked for."""
        return Workload(
            model=self.model,
            inputs=self._inputs_of(sizes),
            units=self.units,
            loss=self.loss,
            optimizer=self.optimizer,
        )

    def _inputs_of(self, sizes: Mapping[str, int]) -> Callable[[], Any]:
        taken = inspect.signature(self.inputs).parameters
        for name in sizes:
            if name not in taken:
                raise UsageError(
                    f"--{name} needs inputs({name}=...) in the file, which takes "
                    f"{', '.join(taken) or 'nothing'}"
                )
        return lambda: self.inputs(**sizes)


def read_plan_file(path: Path) -> PlanFile:
    """Run a file, and find in it what a plan needs."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        found = runpy.run_path(str(path), run_name="shoal_plan")
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    for name in ("model", "inputs"):
        if not callable(found.get(name)):
            raise UsageError(f"{path} defines no function {name}(): a plan needs it")
    for name in ("units", "loss", "optimizer"):
        if found.get(name) is not None and not callable(found[name]):
            raise UsageError(f"{path}: {name} is a {type(found[name]).__name__}, not a function")
    return PlanFile(
        model=found["model"],
        inputs=found["inputs"],
        units=found.get("units"),
        loss=found.get("loss"),
        optimizer=found.get("optimizer"),
        policy=_policy(path, found.get("precision")),
    )


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


def _policy(path: Path, precision: Any) -> MixedPrecisionPolicy | None:
    if precision is None:
        return None
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if not isinstance(precision, Mapping) or not set(precision) <= set(_DTYPES):
        raise UsageError(
            f"{path}: expected precision to be a dict with {', '.join(_DTYPES)}, got {precision!r}"
        )
    wrong = [name for name, one in precision.items() if not isinstance(one, torch.dtype)]
    if wrong:
        raise UsageError(f"{path}: expected a torch.dtype for precision[{wrong[0]!r}]")
    return MixedPrecisionPolicy(**precision)
