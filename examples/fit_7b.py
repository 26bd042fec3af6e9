"""A 7B on 8 GPUs: does it fit, and how long does a step take?

shoal plan examples/fit_7b.py --world 8 --device h200
shoal plan examples/fit_7b.py --world 8 --device h200 --checkpointing --batch 4
shoal plan examples/fit_7b.py --world 8 --device h200 --budget 80GB
"""

import torch

from shoal.bench.model import BenchTransformer, ModelShape

precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def model() -> torch.nn.Module:
    """A decoder of 6.7 B parameters; the forward returns the loss."""
    return BenchTransformer(ModelShape(dim=4096, num_layers=32, num_heads=32, vocab_size=32000))


def inputs(batch: int = 1, sequence: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the targets."""
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return tokens, tokens


def units(model: BenchTransformer) -> list[torch.nn.Module]:
    """One unit for each block; the model is the last one."""
    return list(model.blocks)
