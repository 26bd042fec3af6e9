"""What autograd keeps for itself: hooks, the running backward, its graph."""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

_AUTOGRAD: Any = vars(torch._C)["_autograd"]
_functorch: Any = vars(torch._C)["_functorch"]


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Call `hook` with the gradient of a tensor that is no leaf, before any later hook.

    `register_hook`, without a handle to remove it by, which costs more than all the rest.
    """
    own = cast(Any, tensor)
    if own._backward_hooks is not None or type(tensor) is not Tensor:
        tensor.register_hook(hook)
        return
    own._backward_hooks = hooks = OrderedDict()
    own.grad_fn._register_hook_dict(tensor)
    hooks[_NO_HANDLE] = hook


_NO_HANDLE = -1
"""Where handles count from 0."""


def base_node(tensor: Tensor) -> Any | None:
    """Where the gradient of a view's base comes through; None for what is no view."""
    base = tensor._base
    return None if base is None else base.grad_fn


grad_hooks: Callable[[Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""The hooks that autograd calls when it has accumulated a parameter's gradient; may be None."""


tensor_hooks: Callable[[Tensor], Any] = operator.attrgetter("_backward_hooks")
"""The hooks that `register_hook` was given for a tensor's gradient; may be None."""


def set_grad_hooks(parameter: Tensor, hooks: OrderedDict[int, Callable[[Tensor], None]]) -> None:
    """Put another dict where torch keeps `grad_hooks`; autograd reads it as its base class."""
    parameter._post_accumulate_grad_hooks = hooks  # pyright: ignore


def run_grad_hooks(parameter: Tensor) -> None:
    """Do for a gradient that was put there by hand what autograd does for its own."""
    hooks = grad_hooks(parameter)
    for hook in tuple(hooks.values()) if hooks else ():
        hook(parameter)


def backward_task() -> int:
    """Which backward autograd is executing in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def inside_backward() -> bool:
    """Whether autograd is executing a backward in this thread."""
    return backward_task() != -1


def inside_compiled_autograd() -> bool:
    """Whether this backward is one that `torch._dynamo.compiled_autograd` has captured."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and getattr(module, "in_compiled_autograd_region", False)


def without_compiled_autograd() -> AbstractContextManager[None]:
    """A context in which gradients are computed as usual, though a backward around is captured."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return nullcontext() if module is None else module._disable()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Queue a call for the end of the backward that is being executed."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def inside_function_transform() -> bool:
    """Whether a transform of `torch.func` is running in this thread."""
    return torch._C._are_functorch_transforms_active()


def inside_gradient_transform() -> bool:
    """Whether a transform that takes gradients is among them: `grad`, `vjp`, `jacrev`."""
    forward = (_functorch.TransformType.Vmap, _functorch.TransformType.Jvp)
    return any(one.key() not in forward for one in _functorch.get_interpreter_stack() or ())


@contextmanager
def outside_function_transforms() -> Iterator[None]:
    """Operations are not transformed here, whatever transforms are running."""
    before = _functorch.get_inplace_requires_grad_allowed()
    _functorch.set_inplace_requires_grad_allowed(True)
    try:
        with cast(Any, torch._C)._DisableFuncTorch():
            yield
    finally:
        _functorch.set_inplace_requires_grad_allowed(before)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform, and has no memory of its own."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


class _CallInBackward(torch.autograd.Function):
    """What `hook_gradient` does, where the tensor is that of a transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hook: Callable[[None], None], tensor: Tensor) -> Tensor:  # pyright: ignore
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hook = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore
        ctx.hook(None)
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor | None) -> Tensor | None:  # pyright: ignore
        return None if tangent is None else call_in_backward(ctx.hook, tangent)


def call_in_backward(hook: Callable[[None], None], tensor: Tensor) -> Tensor:
    """The same tensor, or tangent: calls a hook when a backward comes to it."""
    return cast(Tensor, _CallInBackward.apply(hook, tensor))


def applied(function: type[torch.autograd.Function], *, all_tensors: bool) -> Callable[..., Any]:
    """`function.apply`, without the questions that torch asks in Python on the way.

    They are about functions with a `setup_context`, and about transforms, which still get theirs.
    `all_tensors` says that there are no other arguments.
    """
    if not all_tensors:
        return function.apply
    apply = cast(Any, super(torch.autograd.Function, function)).apply
    with_questions = function.apply
    is_transformed = torch._C._are_functorch_transforms_active
    unwrap = _functorch.unwrap_if_dead

    def call(*tensors: Tensor) -> Any:
        if is_transformed():
            return with_questions(*tensors)
        return apply(*map(unwrap, tensors))

    return call


def set_backward(function: type[torch.autograd.Function], backward: Callable[..., Any]) -> None:
    """Let it be a function's backward from now on, also of what was called before.

    Autograd calls it at once, without looking for it by name each time.
    """
    cast(Any, function).backward = staticmethod(backward)
    cast(Any, function)._backward_cls.apply = backward


def leave_undifferentiated(ctx: Any, *outputs: Tensor) -> None:
    """Say that outputs have no derivative, and that nobody needs zeros for it."""
    ctx.mark_non_differentiable(*outputs)
    ctx._materialize_non_diff_grads = False


def step_of(tensor: Tensor) -> Any:
    """The step of autograd that made a tensor; None of a leaf, and where autograd will not say.

    That is of a view which was made without it, of something written to since.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_custom_view(tensor: Tensor, root: Tensor) -> bool:
    """Whether a custom autograd function took one of the views that lead from a tensor to this."""
    if not tensor.requires_grad:
        return False
    step, end = step_of(tensor), step_of(root)
    while step is not None and step is not end:
        if isinstance(step, torch.autograd.function.BackwardCFunction):
            return True
        step = step.next_functions[0][0] if step.next_functions else None
    return False


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """How often some tensors were written to."""
    try:
        return tuple(map(_VERSION, tensors))
    except RuntimeError:  # inference tensors have none; too rare to ask each tensor first
        return tuple(map(version_of, tensors))


_VERSION = operator.attrgetter("_version")


def set_versions(
    tensors: tuple[Tensor, ...], versions: tuple[int, ...], more: tuple[int, ...]
) -> None:
    """Let tensors look as if they were written to so many times since they had these versions."""
    new = tuple(map(operator.add, versions, more))
    try:
        _SET_VERSIONS(tensors, new)
    except RuntimeError:
        for tensor, version in zip(tensors, new, strict=True):
            if not tensor.is_inference():
                _SET_VERSIONS((tensor,), (version,))


def raise_versions(
    tensors: tuple[Tensor, ...], versions: tuple[int, ...], more: tuple[int, ...]
) -> None:
    """Let tensors look as if they were written to at least so many times since these versions."""
    for tensor, version, least in zip(tensors, versions, more, strict=True):
        if not tensor.is_inference() and tensor._version < version + least:
            _SET_VERSIONS((tensor,), (version + least,))


_SET_VERSIONS: Callable[..., None] = _AUTOGRAD._unsafe_set_version_counter


def keeps_graph() -> bool:
    """Whether the running backward may be followed by another one over the same graph."""
    return _AUTOGRAD._get_current_graph_task_keep_graph()


def has_hooks_on_saved() -> bool:
    """Whether hooks see what is saved for backward."""
    return _AUTOGRAD._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def without_hooks_on_saved() -> Iterator[None]:
    """Save for backward past all hooks."""
    before = _AUTOGRAD._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        _AUTOGRAD._saved_tensors_hooks_set_tracing(before)


def without_outer_hooks() -> AbstractContextManager[None]:
    """Trace past the hooks that are there by now: they are for what runs."""
    return without_hooks_on_saved() if has_hooks_on_saved() else nullcontext()


def delayed_error(message: str, tensor: Tensor, through: Sequence[Tensor]) -> Tensor:
    """The same tensor; to differentiate it raises, on the way to those that it goes `through` too.

    Autograd does not look at what is on no way to what it is asked for.
    """
    functions: Any = vars(torch._C)["_functions"]
    # Only what requires a gradient is asked for one.
    made = functions.DelayedError(message, 1 + len(through))(
        tensor.detach().requires_grad_(), *through
    )
    return made[0] if through else made


def leaves_after(step: Any) -> list[Tensor]:
    """The leaves that a step of backward gives gradients to at once."""
    found = (getattr(one, "variable", None) for one, _ in step.next_functions)
    return [one for one in found if one is not None]


def view_text(tensor: Tensor) -> str:
    """How a view came to be, as far as autograd allows or forbids writes to it by that."""
    return str(torch._C._autograd._get_creation_meta(tensor))  # type: ignore[attr-defined]
