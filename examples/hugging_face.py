"""Hugging Face, in and out: build a model sharded, load local weights, train, write them back.

    torchrun --nproc-per-node 2 examples/hugging_face.py
    torchrun --nproc-per-node 2 examples/hugging_face.py --weights FOLDER --out FOLDER

No rank ever holds the whole model: it is built on the meta device, and each rank reads its share
of the safetensors files. The files that come out load in plain `transformers`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from start import DEVICE, join_ranks
from torch import nn
from torch.nn import functional as F

from shoal import fully_shard
from shoal.checkpoint import export_weights, import_weights, load_model, save_training

try:
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
except ModuleNotFoundError:
    raise SystemExit("hugging_face.py needs transformers: pip install transformers") from None


def sharded(weights: Path, scratch: Path) -> nn.Module:
    """A causal language model of a local folder, of which each rank has its share."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights))
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=DEVICE)
    for module in model.modules():
        for name in module._non_persistent_buffers_set:  # computed from the config, in no file
            fresh = type(module)(module.config).get_buffer(name)
            module.get_buffer(name).copy_(fresh)
    if dist.get_rank() == 0:
        import_weights(weights, scratch / "imported")
    dist.barrier()
    load_model(scratch / "imported", model)
    return model


def write(model: nn.Module, optimizer: torch.optim.Optimizer, like: Path, out: Path) -> None:
    """Write a folder that `from_pretrained` reads."""
    saved = out.with_name(f"{out.name}-checkpoint")
    save_training(saved, model, optimizer, {})
    if dist.get_rank() == 0:
        export_weights(saved, out)
        for file in like.glob("*.json"):
            if "index" not in file.name:
                shutil.copy(file, out)
    dist.barrier()


def main(weights: Path | None, out: Path, scratch: Path) -> tuple[nn.Module, list[float]]:
    """Load, train for some steps, write."""
    if weights is None:
        weights = scratch / "pretrained"
        if dist.get_rank() == 0:
            stand_in(weights)
        dist.barrier()
    model = sharded(weights, scratch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        tokens = torch.arange(64, device=DEVICE).reshape(2, 32) % model.config.vocab_size
        logits = model(tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write(model, optimizer, weights, out)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {out} loads by from_pretrained")
    return model, losses


def stand_in(folder: Path) -> None:
    """Write a small pretrained model, as a hub would have given it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, help="a folder with config.json and safetensors")
    parser.add_argument("--out", type=Path, help="a folder to make")
    given = parser.parse_args()
    join_ranks()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    main(given.weights, given.out or Path(folders[0]) / "out", Path(folders[0]))
    dist.destroy_process_group()
