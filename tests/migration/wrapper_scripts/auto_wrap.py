"""Every way to say which modules are wrapped, and one step with each.

torchrun --nproc-per-node 2 auto_wrap.py
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from tiny import Block, Results, Transformer, launch, read_state
from tiny_steps import train, wrapped_names
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)


def by_class(module: nn.Module) -> bool | dict[str, Any]:
    """Blocks as all, the head with a strategy of its own."""
    if isinstance(module, nn.Linear) and module.bias is None and module.in_features == 8:
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    return isinstance(module, Block)


POLICIES: dict[str, Callable[..., Any]] = {
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=300),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)
    ),
    "always": always_wrap_policy,
    "classes": ModuleWrapPolicy({Block, nn.Embedding}),
    "custom": CustomPolicy(by_class),
}


def results(model: FSDP, device: torch.device) -> Results:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "wrapped": wrapped_names(model, FSDP),
        "strategies": [each.sharding_strategy.name for each in FSDP.fsdp_modules(model)],
        "roots": len(FSDP.fsdp_modules(model, root_only=True)),
        "parameters": len(list(model.parameters())),
        "losses": train(model, optimizer, device),
        "state": read_state(model),
    }


class Chosen(nn.Module):
    """Its author has chosen what is wrapped, if anybody wraps."""

    def __init__(self) -> None:
        super().__init__()
        inner = Transformer(num_layers=2)
        inner.layers = nn.ModuleList(wrap(layer) for layer in inner.layers)
        self.inner = wrap(inner, use_orig_params=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


def main(device: torch.device) -> Results:
    found: Results = {}
    for name, policy in POLICIES.items():
        torch.manual_seed(0)
        model = FSDP(Transformer(), auto_wrap_policy=policy, device_id=device)
        found[name] = results(model, device)
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FSDP, device_id=device, use_orig_params=True):
        model = wrap(Chosen())
    found["by_hand"] = results(model, device)
    return found


if __name__ == "__main__":
    launch(main)
