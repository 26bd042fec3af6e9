"""torchtitan's trainer, on torch's FSDP2 or on shoal.

    torchrun --nproc-per-node 2 titan_runs.py CASE FOLDER

Rank 0 writes what came out as JSON into FOLDER.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import titan as example

from shoal.integrations.torchtitan import use_shoal

example.prepare_torchtitan()


EQUAL = {"debug__seed": 1, "debug__deterministic": True}


def summing(config: Any) -> Any:
    """FSDP2 asks for a kind of reduction that gloo does not have, unless it is told to sum."""
    parallelize = config.model_spec.parallelize_fn

    def then_sum(*args: Any, **options: Any) -> Any:
        model = parallelize(*args, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec.parallelize_fn = then_sum
    return config


def train(config: Any, start: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Run a trainer to its end: exact losses and norms, whole weights, and what sharded them.

    It begins with the weights `start`, if they are given.
    """
    trainer = config.build()
    (model,) = trainer.model_parts
    if start is not None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(distribute_tensor(start[name], p.device_mesh, p.placements))
    first = {name: whole(p) for name, p in model.named_parameters()}
    logged: list[list[float]] = []
    log = trainer.metrics_processor.log

    def keep(step: int, loss: float, largest: float, norm: float, **more: Any) -> None:
        logged.append([step, loss, norm])
        log(step, loss, largest, norm, **more)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.checkpointer.close()
    return {
        "logged": logged,
        "first": first,
        "weights": {name: whole(p) for name, p in model.named_parameters()},
        "classes": {type(m).__mro__[1].__module__.partition(".")[0] for m in units(model)},
        "units": len(units(model)),
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
    }


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def whole(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor().detach().clone()


def compare(folder: Path, **changes: Any) -> dict[str, Any]:
    """Both engines, then a resumed run on shoal."""
    changes = {**EQUAL, **changes}
    loss = changes.pop("loss", None)

    def config(name: str) -> Any:
        made = example.small(folder / name, **changes)
        if loss == "chunked":
            made.loss = example_loss()
        return made

    theirs = train(summing(config("torch")))
    # Drawn on CPU, they differ: torch draws each shard by itself.
    ours = train(use_shoal(config("shoal")), theirs["first"])
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "shoal" / "checkpoint" / "step-4")
    dist.barrier()
    again = train(use_shoal(config("shoal")))
    return {
        "torch": theirs["logged"],
        "shoal": ours["logged"],
        "resumed": again["logged"],
        "torch classes": sorted(theirs["classes"]),
        "shoal classes": sorted(ours["classes"]),
        "units": [theirs["units"], ours["units"]],
        "sharded": ours["sharded"],
        "same_weights": same(theirs["weights"], ours["weights"]),
        "same_resumed": same(ours["weights"], again["weights"]),
    }


def example_loss() -> Any:
    """The loss of torchtitan's own config: the head is called in parts, outside of the model."""
    from torchtitan.models.llama3 import config_registry

    return config_registry.llama3_debugmodel().loss


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


CASES = {
    "plain": lambda folder: compare(folder, training__mixed_precision_param="float32"),
    "bf16": compare,
    "chunked": lambda folder: compare(folder, loss="chunked"),
    "accumulated": lambda folder: compare(folder, training__global_batch_size=8),
}


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    found = CASES[case](folder / case)
    if dist.get_rank() == 0:
        (folder / f"{case}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
