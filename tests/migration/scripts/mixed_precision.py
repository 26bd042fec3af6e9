"""Compute in bfloat16, reduce in float32, clip by the norm over all ranks.

torchrun --nproc-per-node 2 mixed_precision.py
"""

import torch
from tiny import (
    Results,
    Transformer,
    batches,
    launch,
    next_token_loss,
    read_gradients,
    read_state,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def main(device: torch.device) -> Results:
    model = Transformer().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    # Norm and head are gathered together, and compute in float32.
    precise = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float32)
    fully_shard([model.norm, model.head], mp_policy=precise)
    fully_shard(model, mp_policy=policy)

    seen: list[str] = []

    def look(linear: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        weight = linear.get_parameter("weight")
        seen.append(f"{weight.dtype} {args[0].dtype} {output.dtype}")

    model.get_submodule("layers.0.out").register_forward_hook(look)
    model.head.register_forward_hook(look)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms, gradients = [], [], {}
    for tokens in batches(4, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        assert isinstance(norm, DTensor)
        norms.append(norm.full_tensor().item())
        losses.append(loss.item())
        gradients = read_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {
        "losses": losses,
        "norms": norms,
        "seen": seen[:2],
        "clipped": gradients,
        "model": read_state(model),
    }


if __name__ == "__main__":
    launch(main)
