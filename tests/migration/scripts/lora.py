"""Fine-tune adapters on a frozen model; what is ignored stays whole on every rank.

torchrun --nproc-per-node 2 lora.py
"""

import torch
import torch.distributed as dist
from tiny import Results, Transformer, batches, launch, next_token_loss, read_gradients, read_state
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.constant_(self.up.weight, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class TunedTransformer(Transformer):
    """Frozen but for the adapters and one temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers:
            for name in ("mix", "out"):
                base = layer.get_submodule(name)
                assert isinstance(base, nn.Linear)
                setattr(layer, name, LoRALinear(base))
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) / self.temperature


def main(device: torch.device) -> Results:
    model = TunedTransformer().to(device)
    ignored = {model.temperature}
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params=ignored)
    kinds = {name: isinstance(p, DTensor) for name, p in model.named_parameters()}

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-2)
    losses, gradients = [], {}
    for tokens in batches(4, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        # Nobody reduces what the engine ignores.
        assert model.temperature.grad is not None
        dist.all_reduce(model.temperature.grad)
        model.temperature.grad.div_(dist.get_world_size())
        gradients = read_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "losses": losses,
        "is_sharded": kinds,
        "num_trained": len(trained),
        "gradients": gradients,
        "model": read_state(model),
    }


if __name__ == "__main__":
    launch(main)
