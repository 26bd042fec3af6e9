"""Runs of Lightning on torch's FSDP2 and on shoal: torchrun ... lightning_runs.py CASE FOLDER.

Rank 0 writes what came out as JSON into FOLDER.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import lightning_trainer as example

from shoal import FSDPModule, ShardedTensor
from shoal.integrations.lightning import ShoalFabricStrategy, ShoalStrategy, WatchdogCallback
from shoal.layout import Flat

UNITS = ["TransformerEncoderLayer"]


class Model(example.Model):
    """The example's, which keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.losses.append(loss.item())
        return loss


class ByTorch(Model):
    """Sharded by torch, as Lightning's documentation does it."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.blocks.layers:
            torch_fully_shard(layer, mesh=mesh)
        for part in (self.blocks, self.embed, self.head):
            torch_fully_shard(part, mesh=mesh)


class ByHand(Model):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()


class OnMeta(Model):
    """Gets memory and first weights when it is sharded already."""

    def configure_model(self) -> None:
        self.to("meta")
        MultiheadAttention = nn.MultiheadAttention
        for module in self.modules():
            if isinstance(module, MultiheadAttention):
                module.reset_parameters = module._reset_parameters


def fit(
    model: Model, strategy: Any, steps: int = 4, resume: Any = None, folder: Any = None, **more: Any
) -> Model:
    saving = [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)] if folder else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else "auto",
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(folder),
        callbacks=[*saving, WatchdogCallback(limit_s=60)],
        **{"gradient_clip_val": 1.0, **more},
    )
    trainer.fit(model, example.data(), ckpt_path=resume)
    return model


def fresh(kind: type[Model] = Model) -> Model:
    L.seed_everything(0, verbose=False)
    return kind()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, one in model.named_parameters():
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        found[name] = whole.detach().clone()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trainer(folder: Path) -> dict[str, Any]:
    theirs = fit(fresh(ByTorch), ModelParallelStrategy(2, 1), folder=folder / "torch")
    ours = fit(fresh(), ShoalStrategy(units=UNITS), folder=folder / "saved")
    again = fit(
        fresh(), ShoalStrategy(units=UNITS), resume=folder / "saved" / "epoch=0-step=2.ckpt"
    )
    # Lightning takes this loader's rows from their beginning again, on every engine.
    their_again = fit(
        fresh(ByTorch),
        ModelParallelStrategy(2, 1),
        resume=folder / "torch" / "epoch=0-step=2.ckpt",
    )
    weights = full(ours)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
    return {
        "torch": theirs.losses,
        "shoal": ours.losses,
        "same_weights": same(full(theirs), full(ours)),
        "units": sum(isinstance(one, FSDPModule) for one in ours.modules()),
        "resumed": again.losses,
        "torch resumed": their_again.losses,
        "same_resumed": same(full(their_again), full(again)),
    }


def other_ranks(folder: Path) -> dict[str, Any]:
    """Load, on another number of ranks, what `trainer` saved; then go on."""
    saved = folder.parent / "trainer" / "saved" / "epoch=0-step=4.ckpt"
    loaded = fit(fresh(), ShoalStrategy(units=UNITS), resume=saved, steps=4)
    expected = torch.load(folder.parent / "trainer" / "weights.pt")
    is_same = same(full(loaded), expected)
    further = fit(fresh(), ShoalStrategy(units=UNITS), resume=saved, steps=6)
    return {
        "ranks": dist.get_world_size(),
        "same_weights": is_same,
        "steps": len(further.losses),
        "moved": not same(full(further), expected),
    }


def variants(folder: Path) -> dict[str, Any]:
    plain = fit(fresh(), ShoalStrategy(units=UNITS))
    flat = fit(fresh(), ShoalStrategy(units=UNITS, layout=Flat()), folder=folder / "flat")
    again = fit(
        fresh(),
        ShoalStrategy(units=lambda one: isinstance(one, nn.TransformerEncoderLayer), layout=Flat()),
        resume=folder / "flat" / "epoch=0-step=2.ckpt",
    )
    by_hand = fit(fresh(ByHand), ShoalStrategy(units=UNITS), gradient_clip_val=None)
    meta = fit(fresh(OnMeta), ShoalStrategy(units=UNITS))
    return {
        "plain": plain.losses,
        "flat": flat.losses,
        "is_flat": isinstance(next(flat.parameters()), ShardedTensor),
        "flat_resumed": again.losses,
        "by_hand": by_hand.losses,
        "meta": meta.losses,
        "meta_moves": meta.losses[0] != meta.losses[-1],
    }


def fabric(folder: Path) -> dict[str, Any]:
    def by_torch(model: Any, mesh: Any) -> Any:
        for layer in model.blocks.layers:
            torch_fully_shard(layer, mesh=mesh["data_parallel"])
        return torch_fully_shard(model, mesh=mesh["data_parallel"])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = fresh()
            self.embed, self.blocks, self.head = inner.embed, inner.blocks, inner.head

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            guess = self.head(self.blocks(self.embed(tokens[:, :-1])))
            return nn.functional.cross_entropy(guess.flatten(0, 1), tokens[:, 1:].flatten())

    found: dict[str, Any] = {}
    for name, strategy in (
        ("torch", FabricStrategy(by_torch, 2, 1)),
        ("shoal", ShoalFabricStrategy(units=UNITS)),
    ):
        run = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        run.launch()
        model = run.setup_module(Net())
        optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        loader = run.setup_dataloaders(example.data())
        found[name] = fabric_steps(run, model, optimizer, loader)
        state = {"model": model, "optimizer": optimizer, "step": 3, "note": {"lr": 0.1}}
        run.save(folder / name, state)
        after = fabric_steps(run, model, optimizer, loader)
        state["step"] = 0
        rest = run.load(folder / name, state)
        found[f"{name} state"] = [state["step"], state["note"], sorted(rest)]
        found[f"{name} after"] = after
        found[f"{name} reloaded"] = fabric_steps(run, model, optimizer, loader)
    return found


def fabric_steps(run: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    kept = []
    for number, (tokens,) in enumerate(loader):
        loss = model(tokens)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.item())
        if number == 2:
            break
    return kept


def mistakes(folder: Path) -> dict[str, Any]:
    (folder / "empty").mkdir(parents=True, exist_ok=True)
    tries = {
        "units": lambda: fit(fresh(), ShoalStrategy(units=["Blok"])),
        "one name": lambda: fit(fresh(), ShoalStrategy(units="Block")),
        "no checkpoint": lambda: fit(fresh(), ShoalStrategy(), resume=folder / "empty"),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


CASES = {one.__name__: one for one in (trainer, other_ranks, variants, fabric, mistakes)}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    case, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    (folder / case).mkdir(exist_ok=True)
    found = CASES[case](folder / case)
    if dist.get_rank() == 0:
        (folder / f"{case}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
