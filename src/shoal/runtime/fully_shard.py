"""The entry point: `fully_shard(module)` turns a module's parameters into shards, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Shard

from shoal.errors import InvariantError, UsageError
from shoal.layout import ParamSpec
from shoal.mesh import FSDPMeshInfo, HSDPMeshInfo, default_mesh, mesh_info_of
from shoal.runtime.events import Recorder
from shoal.runtime.hooks import ModuleState, context_of, register_hooks, state_of
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.runtime.unit import Home, Source, Unit
from shoal.runtime.updates import replaced_name


class FSDPModule(TorchFSDPModule):
    """What `fully_shard` makes of a module's class; libraries that look for torch's find it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build an instance of the original class: a copy of the module is not sharded."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        instance = original.__new__(original, *args, **kwargs)
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gather this module's parameters and hold them until `reshard` or the next backward."""
        if async_op:
            raise NotImplementedError("shoal: unshard(async_op=True) is not supported yet")
        unit = _own_state(self).unit
        if unit is not None:
            unit.hold()
            unit.is_kept = True

    def reshard(self) -> None:
        """Free this module's gathered parameters."""
        unit = _own_state(self).unit
        if unit is not None:
            unit.reshard()

    def _get_fsdp_state(self) -> NoReturn:
        # Every method inherited from torch's class reaches for its state first.
        raise NotImplementedError(
            "shoal does not support this FSDPModule method yet; supported are unshard() and "
            "reshard()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        # An AssertionError, because torch's class answers with one.
        raise AssertionError(
            "a sharded module cannot be deep-copied: copy it before fully_shard, or build another "
            "one and load_state_dict() this one's state_dict()"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.reshard()
        # Past torch's class, which would look for its own state.
        return super(TorchFSDPModule, self)._apply(fn, recurse)  # pyright: ignore


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard the parameters of `module` that no call on a submodule has sharded before.

    They form one unit: gathered together before the module's forward and backward, freed after,
    their gradients reduced together. Call it bottom-up, on the blocks and then on the whole
    model, and build the optimizer afterwards. The module is changed in place and returned.
    """
    _refuse_unsupported(
        module, reshard_after_forward, shard_placement_fn, offload_policy, ignored_params
    )
    if state_of(module) is not None:
        raise UsageError(
            f"fully_shard was called twice on the same {type(module).__name__}; call it once on "
            "each block and once on the whole model"
        )
    mesh_info = mesh_info_of(mesh if mesh is not None else default_mesh())
    if not isinstance(mesh_info, FSDPMeshInfo) or isinstance(mesh_info, HSDPMeshInfo):
        raise NotImplementedError(
            f"shoal: fully_shard supports a mesh of one axis so far, got {mesh_info.mesh}"
        )
    policy = mp_policy or MixedPrecisionPolicy()
    sources = _collect(module)
    _validate(sources, mesh_info)
    unit = Unit(type(module).__name__, sources, mesh_info, policy) if sources else None
    assert not isinstance(reshard_after_forward, int) or isinstance(reshard_after_forward, bool)
    state = ModuleState(module, unit, policy, reshard_after_forward)
    register_hooks(module, state)
    _swap_class(module)
    return module


@contextmanager
def watch(module: nn.Module) -> Iterator[Recorder]:
    """Record the events of what the model does inside the `with` block."""
    context = context_of(module, _own_state(module))
    if not context.units:
        raise UsageError(f"this {type(module).__name__} has no parameters, so nothing to watch")
    if context.recorder is not None:
        raise InvariantError("this model is being watched already; leave the other watch first")
    context.recorder = recorder = Recorder(context.units[0].device)
    try:
        yield recorder
    finally:
        context.recorder = None


def _own_state(module: object) -> ModuleState:
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise UsageError(
            f"this {type(module).__name__} was not given to fully_shard; call fully_shard on it"
        )
    return state


def _refuse_unsupported(
    module: object,
    reshard_after_forward: object,
    shard_placement_fn: object,
    offload_policy: object,
    ignored_params: object,
) -> None:
    if not isinstance(module, nn.Module):
        raise NotImplementedError(
            f"shoal: fully_shard takes one module so far, got {type(module).__name__}"
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise UsageError(
            f"fully_shard needs a module with a forward, got {type(module).__name__}: call it on "
            "each of its children"
        )
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"shoal: reshard_after_forward takes a bool or None so far, got {reshard_after_forward}"
        )
    given = {
        "shard_placement_fn": shard_placement_fn,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
    }
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"shoal: fully_shard({name}=…) is not supported yet")


def _collect(module: nn.Module) -> list[Source]:
    """The parameters below `module` that no other unit owns, each once, with all its homes."""
    names: dict[nn.Parameter, str] = {}
    homes: dict[nn.Parameter, list[Home]] = {}
    queue = [("", module)]
    while queue:
        prefix, current = queue.pop(0)
        if current is not module and state_of(current) is not None:
            continue
        for name, parameter in current._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, prefix + name)
                homes.setdefault(parameter, []).append(Home(module=current, name=name))
        queue.extend((f"{prefix}{n}.", child) for n, child in current.named_children())
    return [
        Source(
            spec=ParamSpec(name=name, shape=tuple(parameter.shape), dtype=parameter.dtype),
            parameter=parameter,
            homes=tuple(homes[parameter]),
        )
        for parameter, name in names.items()
    ]


def _validate(sources: list[Source], mesh_info: FSDPMeshInfo) -> None:
    """Refuse what cannot be sharded, by name; every rank sees the same and raises alike."""
    device_type = mesh_info.mesh.device_type
    for source in sources:
        name, parameter = source.spec.name, source.parameter
        elsewhere = replaced_name(parameter)
        if elsewhere is not None:
            raise UsageError(
                f"parameter {name!r} is also {elsewhere!r} of another unit, which has sharded it. "
                "Shared parameters must be in one unit: call fully_shard on a module that contains "
                "all uses, and not on the ones inside"
            )
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"shoal: parameter {name!r} is a DTensor already (tensor parallelism, or shared "
                "with a unit that is sharded), which is not supported yet"
            )
        if parameter.dim() == 0:
            raise UsageError(
                f"parameter {name!r} is a scalar, which cannot be sharded; make it 1-D"
            )
        if parameter.device.type == "meta":
            raise NotImplementedError(
                f"shoal: parameter {name!r} is on the meta device, which is not supported yet; "
                "materialise the module before fully_shard"
            )
        if parameter.device.type != device_type:
            raise UsageError(
                f"parameter {name!r} is on {parameter.device} but the mesh is of {device_type!r} "
                f"devices; move the module with .to({device_type!r}), or pass another mesh"
            )
        if not parameter.is_contiguous():
            raise UsageError(
                f"parameter {name!r} is not contiguous (strides {parameter.stride()}); replace it "
                "by a contiguous copy before fully_shard"
            )
        if not parameter.is_floating_point():
            raise NotImplementedError(
                f"shoal: parameter {name!r} has dtype {parameter.dtype}; only floating-point "
                "parameters are supported so far"
            )
    dtypes = {source.spec.dtype: source.spec.name for source in sources}
    if len(dtypes) > 1:
        listed = ", ".join(f"{name!r} is {dtype}" for dtype, name in dtypes.items())
        raise NotImplementedError(
            f"shoal: the parameters of one unit must have one dtype so far, but {listed}"
        )


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _swap_class(module: nn.Module) -> None:
    """Make the module an `FSDPModule` of its own class, as torch does."""
    cls = type(module)
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    module.__class__ = _CLASSES[cls]
