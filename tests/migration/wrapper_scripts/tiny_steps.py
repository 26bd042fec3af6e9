"""What the scripts share, and no engine sees: steps of training, readings of optimizer states."""

from typing import Any

import torch
from tiny import Results, batches, next_token_loss, reading
from torch import nn
from torch.optim import Optimizer


def offloads(device: torch.device) -> bool:
    """Whether there is a host to offload to; torch gives freed memory away where there is none."""
    return device.type != "cpu"


def train(model: Any, optimizer: Optimizer, device: torch.device, num: int = 2) -> list[float]:
    """Steps without anything special; the losses of this rank."""
    losses = []
    for tokens in batches(num, device):
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def read_named_states(state_dict: dict[str, Any]) -> Results:
    """Readings of an optimizer state dict that has names for keys and whole tensors."""
    return {
        f"{name}.{kind}": reading(value) if isinstance(value, torch.Tensor) else value
        for name, state in sorted(state_dict["state"].items())
        for kind, value in sorted(state.items())
    }


def read_groups(state_dict: dict[str, Any]) -> list[Results]:
    """Who is in which group, and what is set there."""
    return [
        {"params": sorted(group["params"]), "lr": group["lr"]}
        for group in state_dict["param_groups"]
    ]


def wrapped_names(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Where the wrappers are."""
    return [name for name, module in model.named_modules() if isinstance(module, kind)]
