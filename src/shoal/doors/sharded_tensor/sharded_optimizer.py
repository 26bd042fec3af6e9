"""An optimizer over the local shards of sharded tensors, which autograd gives gradients to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.tensor.sharded import ShardedTensor


class ShardedOptimizer(Optimizer):
    """An optimizer of any class that steps plain tensors, and each shard for itself.

    A layer with a sharded weight, `local_tensor()` and `local_shards()` leave gradients on the
    shards, where an optimizer over the sharded tensors would not look.
    """

    def __init__(
        self,
        named_params: Mapping[str, Tensor],
        optimizer_class: Callable[..., Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        tensors: list[Tensor] = []
        for tensor in named_params.values():
            if isinstance(tensor, ShardedTensor):
                tensors += [shard.tensor for shard in tensor.local_shards()]
            else:
                tensors.append(tensor)
        self.named_params = named_params
        # Not `super().__init__`: groups and state are those of the optimizer inside.
        self._optim = optimizer_class(tensors, *optimizer_args, **optimizer_kwargs)
        self.param_groups = self._optim.param_groups
        self.state = self._optim.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of plain tensors and of shards."""
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Step once, each rank on what it holds."""
        return self._optim.step(closure)

    def state_dict(self) -> NoReturn:
        """Raise: the state of shards has no names."""
        raise NotImplementedError(_refusal("state_dict"))

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise: the state of shards has no names."""
        raise NotImplementedError(_refusal("load_state_dict"))

    def add_param_group(self, param_group: Any) -> NoReturn:
        """Raise: the optimizer is made of all its parameters."""
        raise NotImplementedError(_refusal("add_param_group"))


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Give the module's parameters, and before them sharded tensors that are plain attributes."""
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    seen: set[int] = set()
    for path, inner in modules:
        for name, value in vars(inner).items():
            if isinstance(value, ShardedTensor) and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value
    yield from module.named_parameters()


def _refusal(name: str) -> str:
    return (
        f"ShardedOptimizer {name} not implemented yet! An optimizer over the sharded tensors "
        "themselves has it: make one of module.parameters(), and give them gradients"
    )
