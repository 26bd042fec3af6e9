"""Train a small transformer with Lightning's Trainer, sharded by shoal.

    python examples/lightning_trainer.py --devices 2
    python examples/lightning_trainer.py --devices 3 --resume checkpoints/last.ckpt

A checkpoint loads on any number of ranks.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.integrations.lightning import ShoalStrategy, WatchdogCallback


class Model(L.LightningModule):
    """A transformer that predicts the next of sixteen tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        (tokens,) = batch
        guess = self.head(self.blocks(self.embed(tokens[:, :-1])))
        loss = F.cross_entropy(guess.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Called when the model is sharded already."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Sixty-four rows of sixteen random tokens."""
    tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=4)


def main() -> None:
    """Train, save, perhaps resume."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", default="checkpoints")
    parser.add_argument("--resume", help="a checkpoint's folder")
    options = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu" if not torch.cuda.is_available() else "auto",
        devices=options.devices,
        strategy=ShoalStrategy(units=[nn.TransformerEncoderLayer]),
        callbacks=[
            ModelCheckpoint(options.output, save_last=True, every_n_train_steps=4),
            WatchdogCallback(limit_s=300),
        ],
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,
    )
    trainer.fit(Model(), data(), ckpt_path=options.resume)
    print(f"rank {trainer.global_rank} ends at step {trainer.global_step}")


if __name__ == "__main__":
    main()
