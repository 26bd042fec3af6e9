"""Compute and buffers in bfloat16, sums in float32; clipping by the norm over all ranks.

torchrun --nproc-per-node 2 mixed_precision.py
"""

import torch
from tiny import Block, Results, Transformer, batches, launch, next_token_loss, read_state
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

HALF = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
)
SUMMED_IN_HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Scaled(nn.Module):
    """A model with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer()
        self.register_buffer("scale", torch.tensor([0.7]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens) * self.scale


def run(device: torch.device, precision: MixedPrecision, use_orig_params: bool) -> Results:
    torch.manual_seed(0)
    model = FSDP(
        Scaled(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=device,
        use_orig_params=use_orig_params,
    )
    seen: list[str] = []

    def look(norm: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        weight = norm.weight
        assert isinstance(weight, torch.Tensor)
        seen.append(f"{weight.dtype} {args[0].dtype} {output.dtype}")

    model.module.inner.norm.register_forward_hook(look)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses, norms, dtypes = [], [], set()
    for tokens in batches(3, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        norm = model.clip_grad_norm_(0.5)
        norms.append(norm.item())
        losses.append(loss.item())
        dtypes |= {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        evaluated = model(next(batches(1, device)))
    return {
        "losses": losses,
        "norms": norms,
        "gradients": sorted(dtypes),
        "seen": seen,
        "evaluated": str(evaluated.dtype),
        "buffer": str(next(model.buffers()).dtype),
        "state": read_state(model),
    }


def main(device: torch.device) -> Results:
    return {
        "half": run(device, HALF, use_orig_params=True),
        "half_flat": run(device, HALF, use_orig_params=False),
        "summed_in_half": run(device, SUMMED_IN_HALF, use_orig_params=True),
    }


if __name__ == "__main__":
    launch(main)
