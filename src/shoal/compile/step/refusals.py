"""What a captured step cannot do, refused by name before anything has changed.

Whatever is looked at here is the same on all ranks, so that all of them refuse.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal._torch import autograd, optimizers
from shoal.ddp.grad_hooks import hooks_of
from shoal.ddp.replicated import replicas_of
from shoal.errors import UsageError
from shoal.runtime.module_state import units_of

ELEMENTWISE = frozenset(
    {
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta"),
        *("RMSprop", "Rprop", "ASGD"),
    }
)
"""Optimizers that treat each element by itself, so that a part of a parameter will do."""

_WRITTEN_OUT = "Write the step out: loss.backward(), optimizer.step()."
_ON_HOST = {
    "Adafactor": "reads tensors on the host to choose its step size",
    "LBFGS": "calls the model several times in a step",
    "SparseAdam": "takes sparse gradients alone",
}


def check_kinds(model: object, loss_fn: object, optimizer: object) -> None:
    """Raise if the arguments are not what they should be, such as in another order."""
    order = "The order is compile_step(model, loss_fn, optimizer)."
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model, got a {type(model).__name__}. {order}")
    if not callable(loss_fn):
        raise UsageError(f"expected a loss_fn to call, got a {type(loss_fn).__name__}. {order}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"expected an optimizer, got a {type(optimizer).__name__}. {order}")


def check_can_capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if a captured step would not do what the written one does."""
    if not torch.is_grad_enabled():
        raise UsageError("compile_step trains: call it with gradients enabled, not in no_grad()")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise NotImplementedError(
            "shoal: compile_step cannot look into a model of TorchScript; give it the model as it "
            "was before torch.jit.script or torch.jit.trace"
        )
    kind = type(optimizer).__name__
    if kind in _ON_HOST and type(optimizer).__module__.startswith("torch."):
        raise NotImplementedError(
            f"shoal: compile_step cannot capture {kind}, which {_ON_HOST[kind]}. {_WRITTEN_OUT}"
        )
    foreign = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if foreign:
        raise NotImplementedError(
            f"shoal: compile_step cannot capture {kind}, which keeps state under {foreign[0]!r}: "
            f"that is no parameter, so a graph would lose it. {_WRITTEN_OUT}"
        )
    obstacle = optimizers.around_step(optimizer)
    if obstacle is not None:
        raise NotImplementedError(
            f"shoal: a captured step would not call {obstacle}. Call it around the step instead."
        )
    if units_of(model) and kind not in ELEMENTWISE:
        raise NotImplementedError(
            f"shoal: compile_step cannot update sharded parameters with {kind}, which looks at "
            f"whole tensors; there are {', '.join(sorted(ELEMENTWISE))}"
        )
    if any(replica.averages and not replica.in_graph.can_average for replica in replicas_of(model)):
        raise NotImplementedError(
            "shoal: compile_step does not call the communication hook of this replicated model; it "
            f"knows fp16_compress_hook and bf16_compress_hook. {_WRITTEN_OUT}"
        )
    for name, parameter in model.named_parameters():
        hooks = (autograd.tensor_hooks(parameter) or {}).values()
        for hook in (*hooks, *hooks_of(parameter).values()):
            raise NotImplementedError(
                f"shoal: compile_step does not call hooks on parameters; {name!r} has "
                f"{getattr(hook, '__qualname__', hook)!r}. Remove it (handle.remove()); max_norm= "
                f"clips gradients. {_WRITTEN_OUT}"
            )


def changes_python(change: str) -> NotImplementedError:
    """What to raise where a step leaves other attributes, lists or closures behind."""
    return NotImplementedError(
        f"shoal: compile_step cannot capture a step that changes Python's state: {change} "
        "after it ran. A captured step would not repeat that. Keep it in a buffer that is "
        "written in place, or do it outside of the step."
    )
