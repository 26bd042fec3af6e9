"""Ray Train: `prepare_model` shards in a worker of `TorchTrainer`, `report` saves and tells Ray.

Ray starts the workers and their process group, and starts them again when one is lost. Shoal shards
the model, and its checkpoint is what Ray keeps: it loads on any number of workers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from shoal.checkpoint import load_training, save_training
from shoal.checkpoint.manifest import JSON
from shoal.errors import UsageError
from shoal.integrations.frameworks import require
from shoal.integrations.units import Sharding, Units, initialise
from shoal.layout import Layout
from shoal.runtime.policy import MixedPrecisionPolicy, OffloadPolicy

require("ray", (2, 40), "ray")

import ray.train  # noqa: E402  # pyright: ignore
import ray.train.torch  # noqa: E402  # pyright: ignore

__all__ = ["prepare_model", "report", "resume"]


def prepare_model(
    model: nn.Module,
    *,
    units: Units = (),
    layout: Layout | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
) -> nn.Module:
    """Shard a model over all workers; call it where `ray.train.torch.prepare_model` would stand.

    `units` are classes, or names of classes, of which each module is a unit, or a function that is
    asked for each; the rest of the model is the last. The other arguments are those of
    `fully_shard`. Build the optimizer afterwards.
    """
    if not dist.is_initialized():
        raise UsageError(
            "prepare_model runs in a worker of ray.train.torch.TorchTrainer, which starts the "
            "process group: call it inside of train_loop_per_worker"
        )
    device = ray.train.torch.get_device()
    sharding = Sharding(
        units=units,
        layout=layout,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
    )
    if not any(parameter.is_meta for parameter in model.parameters()):
        model = model.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    sharding.apply(model, mesh)
    initialise(model, device)
    return model


def report(
    metrics: dict[str, Any],
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, JSON] | None = None,
    *,
    scratch: Path | str | None = None,
) -> None:
    """Tell Ray the metrics; with a model and its optimizer, save them as Ray's checkpoint.

    Every worker calls it. The checkpoint is written into a folder below `scratch`, from which Ray
    takes it to the run's storage. Workers on several machines need one that all of them see.
    """
    if (model is None) != (optimizer is None):
        raise UsageError("report saves a model together with its optimizer: give both or neither")
    if model is None or optimizer is None:
        ray.train.report(metrics)
        return
    leads = dist.get_rank() == 0
    folder = _share(tempfile.mkdtemp(prefix="shoal-", dir=scratch) if leads else None)
    try:
        save_training(folder / "checkpoint", model, optimizer, dict(extra or {}))
        saved = ray.train.Checkpoint.from_directory(folder / "checkpoint") if leads else None
        ray.train.report(metrics, checkpoint=saved)
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)


def resume(model: nn.Module, optimizer: Optimizer) -> dict[str, JSON] | None:
    """Load the checkpoint that Ray starts the workers from; return its `extra`, or None."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return load_training(folder, model, optimizer)


def _share(name: str | None) -> Path:
    """The first worker's folder, on all."""
    names = [name]
    device = ray.train.torch.get_device() if dist.get_backend() == "nccl" else torch.device("cpu")
    dist.broadcast_object_list(names, src=0, device=device)
    assert names[0] is not None
    return Path(names[0])
