"""Recompute activations, step inside backward, and generate through a method of the model's own.

torchrun --nproc-per-node 2 checkpointed_generate.py
"""

import torch
from tiny import Results, Transformer, batches, launch, next_token_loss, read_state
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method


class Generator(Transformer):
    """A language model with a second way in."""

    @torch.no_grad()
    def generate(self, tokens: Tensor, num_new: int) -> Tensor:
        for _ in range(num_new):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            following = self.head(self.norm(x[:, -1])).argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens


def main(device: torch.device) -> Results:
    model = Generator().to(device)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
        fully_shard(model.layers[index])
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    register_fsdp_forward_method(model, "generate")

    # One optimizer for each parameter, which steps when its gradient is there.
    optimizers: dict[Tensor, torch.optim.Optimizer] = {
        parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()
    }
    steps: list[tuple[int, ...]] = []

    def step(parameter: Tensor) -> None:
        steps.append(tuple(parameter.shape))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    losses = []
    for tokens in batches(4, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        losses.append(loss.item())

    model.eval()
    prompt = next(batches(1, device, rank=0))[:, :3]
    text = model.generate(prompt, 4)
    return {
        "losses": losses,
        "num_steps": len(steps),
        "stepped": sorted(steps),
        "gradients_left": sum(p.grad is not None for p in model.parameters()),
        "text": text.tolist(),
        "model": read_state(model),
    }


if __name__ == "__main__":
    launch(main)
