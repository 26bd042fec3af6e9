"""Build on the meta device, shard, and give memory to the shards only.

torchrun --nproc-per-node 2 meta_init.py
"""

import torch
from tiny import Results, Transformer, batches, launch, next_token_loss, read_state
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class InitTransformer(Transformer):
    """A model that can write its own initial weights."""

    @torch.no_grad()
    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.2)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def main(device: torch.device) -> Results:
    with torch.device("meta"):
        model = InitTransformer(num_layers=2)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    on_meta = sum(parameter.device.type == "meta" for parameter in model.parameters())

    model.to_empty(device=device)
    torch.manual_seed(7)
    model.init_weights()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().device.type == device.type
    initial = read_state(model)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches(3, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "on_meta": on_meta,
        "initial": initial,
        "losses": losses,
        "model": read_state(model),
    }


if __name__ == "__main__":
    launch(main)
