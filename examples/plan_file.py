"""A file for `shoal plan`: a small Llama-like transformer.

shoal plan examples/plan_file.py --world 8 --device h200
shoal plan examples/plan_file.py --world 64 --batch 4 --sequence 8192 --checkpointing --json
"""

import torch

from shoal.bench.model import BenchTransformer, ModelShape

precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def model() -> torch.nn.Module:
    """0.93 B parameters; the forward returns the loss."""
    return BenchTransformer(ModelShape(dim=2048, num_layers=16, num_heads=16, vocab_size=32000))


def inputs(batch: int = 2, sequence: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the targets."""
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return tokens, tokens


def units(model: BenchTransformer) -> list[torch.nn.Module]:
    """A unit for each block; the model is the last one."""
    return list(model.blocks)
