"""From DeepSpeed: a ZeRO-3 config, and what stands for each of its lines.

    torchrun --nproc-per-node 2 examples/from_deepspeed.py

DeepSpeed's engine reads a config and owns the loop. Here the loop is yours, and each line of the
config is a line of it. Weights come from the file that DeepSpeed's `zero_to_fp32.py` writes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from start import Model, batch, join_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn import functional as F

from shoal.fsdp import MixedPrecisionPolicy, fully_shard

CONFIG = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
}


def main(weights: Path | None = None) -> tuple[list[float], Model]:
    """Train as an engine with this config would; return this rank's losses, and the model."""
    with torch.device("meta"):  # zero.Init(): no rank holds the whole model
        model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # stage 3; stages 1 and 2: reshard_after_forward=False
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    load(model, weights)
    optimizer = torch.optim.AdamW(model.parameters(), **CONFIG["optimizer"]["params"])

    accumulate = CONFIG["gradient_accumulation_steps"]
    losses = []
    for step in range(6):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)  # engine.backward(loss)
            x, y = batch(step * accumulate + micro)
            loss = F.cross_entropy(model(x).float(), y)
            (loss / accumulate).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG["gradient_clipping"])
        optimizer.step()  # engine.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses, model


def load(model: Model, weights: Path | None) -> None:
    """Spread whole weights, which rank 0 alone reads, over the ranks."""
    state = {}
    if dist.get_rank() == 0:
        state = stand_in() if weights is None else torch.load(weights, mmap=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def stand_in() -> dict[str, torch.Tensor]:
    """What `zero_to_fp32.py` writes: whole fp32 weights by name."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(Model().state_dict(), Path(folder) / "pytorch_model.bin")
        return torch.load(Path(folder) / "pytorch_model.bin")


if __name__ == "__main__":
    join_ranks()
    main()
    dist.destroy_process_group()
