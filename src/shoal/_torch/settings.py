"""The state of torch that a compiled graph depends on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch.fx import GraphModule

from shoal._torch.autograd import has_hooks_on_saved


def dispatch_text(tensor: Tensor) -> str:
    """What the dispatcher makes of a tensor: device, lazy conjugation, inference and so on."""
    return str(torch._C._dispatch_keys(tensor))


def what_intercepts() -> str | None:
    """Something that sees or changes every operator, which no key could describe; None if none."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
            return f"the mode {type(mode).__name__} is active"
    functorch: Any = vars(torch._C)["_functorch"]
    if functorch.peek_interpreter_stack() is not None:
        return "a functorch transform is active"
    if has_hooks_on_saved():
        return "hooks on saved tensors are active"
    return None


def autocast_state(device_types: Iterable[str]) -> list[Any]:
    """Where autocast is on, and for which dtypes."""
    state: list[Any] = [torch.is_autocast_cache_enabled()]
    for kind in sorted(device_types):
        with contextlib.suppress(RuntimeError):  # a device that has no autocast
            state.append(
                [kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))]
            )
    return state


is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on, for any device."""


def backend_flags() -> dict[str, Any]:
    """The global flags that decide which operators a function is made of."""
    backends: Any = torch.backends
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),
        "cpu": backends.cpu.get_cpu_capability(),
        "cudnn": [
            *(backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
            backends.cudnn.allow_tf32,
        ],
        "attention": [
            *(backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()),
            *(backends.cuda.math_sdp_enabled(), backends.cuda.cudnn_sdp_enabled()),
        ],
        "attention_fast_path": backends.mha.get_fastpath_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
    }


class GlobalSettings:
    """The settings of the process that a trace reads, as they were at one moment."""

    def __init__(self) -> None:
        # Grad mode, autocast (where, for which dtype, cached or not), default dtype, determinism,
        # precision, threads.
        self._guard = GlobalStateGuard()
        self._flags = _kernel_flags()

    def change(self) -> str | None:
        """The name of a setting that is not as it was; None if all are. Costs a microsecond."""
        if not self._guard.check():
            return self._guard.reason().strip()
        return None if _kernel_flags() == self._flags else "a flag of torch.backends"


def _kernel_flags() -> tuple[Any, ...]:
    """The flags that decide which kernel an operator becomes, as quickly as they can be read."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_float32_matmul_precision(),
        torch._C._get_mkldnn_enabled(),
    )


def hooks_of_all_modules() -> list[dict[int, Any]]:
    """The dicts of hooks that torch calls around every module, and of how it calls them."""
    module: Any = sys.modules["torch.nn.modules.module"]
    return [
        *(module._global_forward_pre_hooks, module._global_forward_hooks),
        *(module._global_backward_pre_hooks, module._global_backward_hooks),
        *(module._global_forward_hooks_with_kwargs, module._global_forward_hooks_always_called),
    ]


def device_text(device: torch.device) -> str:
    """The kind of a device, by which kernels are chosen."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{device} {properties.name} {properties.major}.{properties.minor}"


def inductor_settings() -> str:
    """Inductor's settings, in short."""
    from torch._inductor import config as inductor_config

    return inductor_config.get_hash().hex()


def compiler_versions() -> list[str]:
    """The versions of what a graph was traced with."""
    return [torch.__version__, str(torch.version.git_version), str(torch.version.cuda)]


# What users set for torch's own ahead-of-time runtime.


def joint_pass() -> Callable[[GraphModule, Any], GraphModule] | None:
    """The pass over joint graphs, before they are cut, that a user has set for torch's runtime."""
    from torch._functorch import config

    found: Any = getattr(config, "joint_custom_pass", None)
    return cast(Any, found) if callable(found) else None


def memory_budget() -> float:
    """The share of what would be saved that may stay, which a user has set for torch's runtime."""
    from torch._functorch import config

    chosen: Any = config.activation_memory_budget
    return 1.0 if chosen is None else float(chosen)


def functionalises_rng() -> bool:
    """Whether a user has set random states to be inputs and outputs of graphs."""
    from torch._functorch import config

    return bool(config.functionalize_rng_ops)


def backward_autocast() -> Any:
    """What a user has set backwards to be traced under; "off" if nothing.

    "same_as_forward", or the arguments of several `torch.amp.autocast`. The first is torch's own
    default, though not what eager does: it counts if somebody asked for it.
    """
    from torch._functorch import config

    name = "backward_pass_autocast"
    settings = cast(Any, config)
    if not hasattr(config, name) or settings._is_default(name):
        return "off"
    return getattr(config, name)


@contextlib.contextmanager
def autocast_of_backward() -> Iterator[None]:
    """Backward is traced outside of its forward's autocast, unless a user asked for another."""
    chosen = backward_autocast()
    with contextlib.ExitStack() as regions:
        if chosen != "same_as_forward":
            regions.enter_context(torch._C._DisableAutocast())
        for kwargs in () if isinstance(chosen, str) else chosen:
            regions.enter_context(torch.amp.autocast(**kwargs))
        yield
