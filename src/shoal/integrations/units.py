"""Which modules of a model become units: by class, by class name, or by a function's answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.errors import UsageError
from shoal.layout import Layout
from shoal.runtime.fsdp_module import FSDPModule
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.policy import MixedPrecisionPolicy, OffloadPolicy

Units = Collection[type[nn.Module] | str] | Callable[[nn.Module], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The arguments of `fully_shard` for a whole model."""

    units: Units = ()
    layout: Layout | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    reshard_after_forward: bool | int | None = None

    def apply(self, model: nn.Module, mesh: DeviceMesh | None, *, root: bool = True) -> nn.Module:
        """Shard the units, then what is left of the model; one that is sharded stays as it is."""
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return model
        for unit in find_units(model, self.units):
            self._shard(unit, mesh, reshard_after_forward=self.reshard_after_forward)
        if root:
            self._shard(model, mesh)
        return model

    def apply_to_children(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Shard the units, then what is left of each child; the model itself is no unit."""
        self.apply(model, mesh, root=False)
        for child in model.children():
            if next(child.parameters(), None) is not None and not isinstance(child, FSDPModule):
                self._shard(child, mesh)

    def _shard(self, module: nn.Module, mesh: DeviceMesh | None, **options: Any) -> None:
        fully_shard(
            module,
            mesh=mesh,
            layout=self.layout,
            mp_policy=self.mp_policy,
            offload_policy=self.offload_policy,
            **options,
        )


def find_units(model: nn.Module, units: Units) -> list[nn.Module]:
    """The modules inside of a model that were asked for, from the inside out."""
    inside = [module for module in model.modules() if module is not model]
    chooses = units if callable(units) else _by_class(model, units)
    return [module for module in reversed(inside) if chooses(module)]


def initialise(model: nn.Module, device: torch.device) -> None:
    """Give memory to a sharded model that was built on the meta device, and first weights."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    model.to_empty(device=device)
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        resets = getattr(module, "reset_parameters", None)
        if not callable(resets):
            raise UsageError(
                f"{name or 'the model'} ({type(module).__name__}) was built on the meta device and "
                "has no reset_parameters() to give its parameters their first values: define it, "
                "or build the model on a device"
            )
        resets()


def _by_class(
    model: nn.Module, units: Collection[type[nn.Module] | str]
) -> Callable[[nn.Module], bool]:
    if isinstance(units, str):
        raise UsageError(f"units is a collection of classes or names of classes, got {units!r}")
    there = {cls for module in model.modules() for cls in type(module).__mro__}
    names = {cls.__name__ for cls in there}
    missing = [
        one for one in units if (one not in names if isinstance(one, str) else one not in there)
    ]
    if missing:
        own = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(
            f"units names {missing}, of which {type(model).__name__} has no module. It has {own}"
        )
    classes = tuple(one for one in units if not isinstance(one, str))
    called = {one for one in units if isinstance(one, str)}

    def chooses(module: nn.Module) -> bool:
        return isinstance(module, classes) or any(
            cls.__name__ in called for cls in type(module).__mro__
        )

    return chooses
