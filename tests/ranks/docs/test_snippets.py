"""Every Python snippet of the README and the docs runs.

A snippet shows what matters and leaves out the rest. Its *scene* is the rest: the names that it
uses, as a reader would have them at that point. A snippet without a scene fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness import on_ranks
from oracle import build
from pure.report.runs import make_run
from shoal.fsdp import FullyShardedDataParallel, fully_shard

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Names = dict[str, Any]


def snippets() -> dict[str, str]:
    """Every snippet, by its page and its number there."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {
        f"{page.name} {number}": code
        for page in pages
        for number, code in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
    }


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def training(model: nn.Module) -> Names:
    """A model that has taken a step, with its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"torch": torch, "model": model, "optimizer": optimizer}


def beginning() -> Names:
    return {"torch": torch, "model": build()}


def nothing() -> Names:
    return {}


def forecasting() -> Names:
    """It imagines the ranks."""
    return {}


def script() -> Names:
    """The ranks of this test have a process group already."""
    dist.init_process_group = lambda: None  # pyright: ignore
    return {}


def after_script() -> Names:
    return {"torch": torch, "nn": nn, "dist": dist, "fully_shard": fully_shard}


def saving() -> Names:
    return {**training(fully_shard(mlp())), "folder": "checkpoints", "step": 3}


def options() -> Names:
    from shoal.train.options import check_options, option

    return {
        "dataclass": dataclass,
        "ClassVar": ClassVar,
        "option": option,
        "check_options": check_options,
        "__name__": __name__,
    }


def transporting() -> Names:
    from shoal.comm.transport import Transport

    assert dist.group.WORLD is not None
    return {
        "Transport": Transport,
        "transport": Transport(dist.group.WORLD),
        "group": dist.group.WORLD,
        "output": torch.zeros(8),
        "shard": torch.ones(4),
        "steps": range(2),
    }


def local_ranks() -> Names:
    from shoal.comm.local import run_local

    return {"run_local": run_local, "train": lambda config: dist.get_rank(), "config": None}


def modelled() -> Names:
    from shoal.comm.collectives import Kind
    from shoal.comm.modelled import NVLINK, init_modelled

    return {
        "init_modelled": init_modelled,
        "NVLINK": NVLINK,
        "Kind": Kind,
        "dist": dist,
        "gradient": torch.ones(2),
    }


class Loss(nn.Linear):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


def replicating() -> Names:
    halves = {"first_half": torch.ones(2, 8), "second_half": torch.ones(2, 8)}
    return {"torch": torch, "model": Loss(), **halves}


def watching() -> Names:
    from shoal import replicate

    def exchange(digest: Any) -> list[Any]:
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest)
        return digests

    model = replicate(mlp())
    return {"shared_folder": "watch", "steps": range(2), "exchange": exchange, "model": model}


def old_checkpoints() -> Names:
    """Files of an unsharded training, for a wrapped model."""
    names = training(mlp())
    states = FullyShardedDataParallel.rekey_optim_state_dict
    if dist.get_rank() == 0:
        torch.save(names["model"].state_dict(), "full.pt")
        key_type = import_key_type()
        saved = states(names["optimizer"].state_dict(), key_type.PARAM_NAME, names["model"])
        torch.save(saved, "optim.pt")
    dist.barrier()
    model = FullyShardedDataParallel(mlp(), use_orig_params=True)
    return {"torch": torch, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def import_key_type() -> Any:
    from shoal.fsdp import OptimStateKeyType

    return OptimStateKeyType


def ddp_checkpoints() -> Names:
    names = training(nn.parallel.DistributedDataParallel(mlp()))
    if dist.get_rank() == 0:
        torch.save(names["model"].state_dict(), "ddp.pt")
        torch.save(names["optimizer"].state_dict(), "ddp-optim.pt")
    dist.barrier()
    return {
        "torch": torch,
        "FSDP": FullyShardedDataParallel,
        "OptimStateKeyType": import_key_type(),
        "plain_model": mlp(),
    }


def taking_over() -> Names:
    from torch.distributed.checkpoint import state_dict as dcp

    plain = training(mlp())
    states = FullyShardedDataParallel.rekey_optim_state_dict(
        plain["optimizer"].state_dict(), import_key_type().PARAM_NAME, plain["model"]
    )
    return {
        **training(fully_shard(mlp())),
        "weights": plain["model"].state_dict(),
        "states": states,
        "StateDictOptions": dcp.StateDictOptions,
        "set_model_state_dict": dcp.set_model_state_dict,
        "set_optimizer_state_dict": dcp.set_optimizer_state_dict,
    }


def whole_steps() -> Names:
    model = mlp()
    return {
        "torch": torch,
        "model": model,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "inputs": torch.ones(2, 8),
        "targets": torch.zeros(2, 3),
    }


def reporting() -> Names:
    if dist.get_rank() == 0:
        make_run(Path("runs/demo"))
    dist.barrier()
    return {"Path": Path}


def exporting() -> Names:
    from shoal.fsdp import full_parameters

    return {
        "torch": torch,
        "full_parameters": full_parameters,
        "model": fully_shard(mlp()),
        "rank": dist.get_rank(),
        "whole": mlp().state_dict(),
    }


def criticising() -> Names:
    critic = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)))
    return {"torch": torch, "critic": critic, "x": torch.ones(2, 8, requires_grad=True)}


def tying() -> Names:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

    return {"fully_shard": fully_shard, "model": Tied()}


def transforming() -> Names:
    return {**exporting(), "samples": torch.ones(3, 8)}


def flowing() -> Names:
    from shoal.fsdp import fully_shard

    return {
        "torch": torch,
        "model": fully_shard(nn.Linear(8, 8)),
        "z": torch.ones(2, 8),
        "velocity": torch.ones(2, 8),
    }


def planning() -> Names:
    from shoal.fsdp import MixedPrecisionPolicy, plan_of

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {"torch": torch, "Net": Net, "plan_of": plan_of, "half": half}


def placing() -> Names:
    from shoal.layout import Flat, ParamSpec
    from shoal.tensor.packed import Packed
    from shoal.tensor.sharded import ShardedTensor, like

    assert dist.group.WORLD is not None
    specs = [ParamSpec(name=str(i), shape=(8, 4), dtype=torch.float32) for i in range(4)]
    packing = Flat().pack(specs, dist.get_world_size())
    placement = Packed(packing=packing, index=3, group=dist.group.WORLD, rank=dist.get_rank())
    local = torch.ones(placement.piece.shape)
    return {
        "Packed": Packed,
        "packing": packing,
        "group": dist.group.WORLD,
        "nn": nn,
        "ShardedTensor": ShardedTensor,
        "local": local,
        "local_gradient": local,
        "like": like,
    }


def places() -> list[str]:
    return [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]


def sharded_layers() -> Names:
    from shoal.sharded_tensor import shard_parameter
    from shoal.sharding_spec import ChunkShardingSpec

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embed(x)

    return {
        "shard_parameter": shard_parameter,
        "ChunkShardingSpec": ChunkShardingSpec,
        "places": places(),
        "model": Embedded(),
        "batch": torch.tensor([1, 5]),
    }


def resharding() -> Names:
    from shoal import sharded_tensor
    from shoal.sharding_spec import ChunkShardingSpec
    from shoal.tensor.reshard import reshard

    spec = ChunkShardingSpec(0, places())
    return {
        "ChunkShardingSpec": ChunkShardingSpec,
        "places": places(),
        "tensor": sharded_tensor.rand(spec, 8, 16),
        "reshard": reshard,
        "placement": sharded_tensor.rand(spec, 8, 16).placement,
    }


def converting() -> Names:
    import torch.distributed.checkpoint as dcp

    from shoal.tensor.sharded import ShardedTensor

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    rows = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "ShardedTensor": ShardedTensor,
        "dtensor": distribute_tensor(torch.ones(8, 4), rows, [Shard(0)]),
        "mesh": mesh,
        "Replicate": Replicate,
        "Shard": Shard,
        "dcp": dcp,
        "folder": "saved",
    }


SCENES: dict[str, Callable[[], Names]] = {
    "README.md 0": beginning,
    "README.md 1": script,
    "README.md 2": after_script,
    "checkpoint.md 0": saving,
    "cli.md 0": options,
    "comm.md 0": transporting,
    "comm.md 1": transporting,
    "comm.md 2": local_ranks,
    "comm.md 3": modelled,
    "compile.md 0": beginning,
    "ddp.md 0": replicating,
    "distant.md 0": nothing,
    "experts.md 0": nothing,
    "faults.md 0": watching,
    "index.md 0": beginning,
    "join.md 0": nothing,
    "migration.md 0": old_checkpoints,
    "migration.md 1": ddp_checkpoints,
    "migration.md 2": taking_over,
    "offload.md 0": nothing,
    "passes.md 0": whole_steps,
    "passes.md 1": beginning,
    "plan.md 0": forecasting,
    "report.md 0": reporting,
    "runtime.md 0": planning,
    "runtime.md 1": criticising,
    "runtime.md 2": tying,
    "runtime.md 3": exporting,
    "runtime.md 4": transforming,
    "runtime.md 5": flowing,
    "sharded_tensor.md 0": sharded_layers,
    "tensor.md 0": placing,
    "tensor.md 1": resharding,
    "tensor.md 2": converting,
    "testing.md 0": nothing,
    "train.md 0": nothing,
}


ALONE = (forecasting, local_ranks, modelled)
"""Those that make ranks of their own."""


def run(name: str) -> None:
    """Run a snippet here, in the working folder."""
    exec(compile(snippets()[name], name, "exec"), SCENES[name]())


def run_in(folder: str, name: str) -> None:
    """Run a snippet on this rank."""
    os.chdir(folder)
    run(name)


def test_every_snippet_has_a_scene() -> None:
    assert snippets().keys() == SCENES.keys()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name, scene in SCENES.items() if scene not in ALONE])
def test_it_runs(name: str, tmp_path: Path) -> None:
    on_ranks(2, run_in, str(tmp_path), name, fresh=True)


@pytest.mark.parametrize("name", [name for name, scene in SCENES.items() if scene in ALONE])
def test_it_runs_in_one_process(name: str) -> None:
    run(name)
    if dist.is_initialized():
        dist.destroy_process_group()
