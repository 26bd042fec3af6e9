"""What the scripts share, and no engine sees: a model, its data, a launcher, readings."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

VOCAB = 19
Results = dict[str, Any]


class Block(nn.Module):
    """A decoder block; its odd width divides no number of ranks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim + 3), nn.GELU(), nn.Linear(2 * dim + 3, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.squeeze(1))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, dim: int = 8, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batches(num: int, device: torch.device, rank: int | None = None) -> Iterator[Tensor]:
    """Token sequences, others on every rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(num):
        yield torch.randint(VOCAB, (2, 6), generator=generator).to(device)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of each token given those before it."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def reading(tensor: Tensor) -> Results:
    """What identifies a tensor, sharded or not: all ranks must call it."""
    result: Results = {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    if isinstance(tensor, DTensor):
        result["placements"] = [str(placement) for placement in tensor.placements]
        result["local_shape"] = list(tensor.to_local().shape)
        tensor = tensor.full_tensor()
    values = tensor.detach().double().flatten()
    weights = torch.arange(1, values.numel() + 1, device=values.device, dtype=values.dtype)
    result["norm"] = values.norm().item()
    result["checksum"] = (values * weights.sin()).sum().item()
    return result


def read_state(model: nn.Module) -> Results:
    """Readings of everything in the model's state dict."""
    return {name: reading(tensor) for name, tensor in model.state_dict().items()}


def read_gradients(model: nn.Module) -> Results:
    """Readings of the gradients that are there."""
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: reading(gradient) for name, gradient in gradients if gradient is not None}


def read_optimizer(optimizer: torch.optim.Optimizer) -> Results:
    """Readings of the optimizer's state, by parameter index."""
    return {
        f"{index}.{name}": reading(value)
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def launch(main: Callable[[torch.device], Results]) -> None:
    """Run under torchrun on the accelerator if there is one, and print rank 0's results."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local_rank = dist.get_node_local_rank() % torch.cuda.device_count()
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        torch.manual_seed(0)
        results = main(device)
        if dist.get_rank() == 0:
            print(json.dumps(results, indent=1))
        dist.barrier()  # a rank that leaves while others still talk can bring them down
    finally:
        dist.destroy_process_group()
        time.sleep(0.2)  # threads of gloo abort a process that ends before they let go of tensors
