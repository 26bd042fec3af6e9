"""Lightning: `ShoalStrategy` for Trainer, `ShoalFabricStrategy` for Fabric, a watchdog callback.

A strategy shards the model as one is told to, before optimizers are built, and writes shoal's
checkpoints: whole or not there, of any number of ranks. The rest is Lightning's own strategy for
models that are parallelised by `fully_shard`.
"""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import load_model, load_training, read_manifest, save_training
from shoal.checkpoint import save as save_tensors
from shoal.errors import CheckpointError, UsageError
from shoal.integrations.frameworks import require
from shoal.integrations.units import Sharding, Units, initialise
from shoal.layout import Layout
from shoal.runtime.fsdp_module import FSDPModule, register_fsdp_forward_method
from shoal.runtime.policy import MixedPrecisionPolicy, OffloadPolicy
from shoal.watch import Watchdog

require("lightning", (2, 5), "lightning")

from lightning.fabric.strategies import (  # noqa: E402  # pyright: ignore
    ModelParallelStrategy as FabricBase,
)
from lightning.pytorch.callbacks import Callback  # noqa: E402  # pyright: ignore
from lightning.pytorch.strategies import (  # noqa: E402  # pyright: ignore
    ModelParallelStrategy as TrainerBase,
)
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402  # pyright: ignore

__all__ = ["ShoalFabricStrategy", "ShoalStrategy", "WatchdogCallback"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_REST = "lightning"


class ShoalStrategy(TrainerBase):
    """Shards a LightningModule over all ranks: `Trainer(strategy=ShoalStrategy(units=[Block]))`.

    `units` are classes, or names of classes, of which each module is a unit; or a function that is
    asked for each. The LightningModule itself is the last unit, and its steps run with full
    parameters. The other arguments are those of `fully_shard`. A module that shards itself in
    `configure_model` is left as it is.
    """

    def __init__(
        self,
        *,
        units: Units = (),
        layout: Layout | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tensor_parallel_size=1, **options)
        self._sharding = Sharding(
            units=units,
            layout=layout,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            reshard_after_forward=reshard_after_forward,
        )

    def setup_environment(self) -> None:
        """Start the process group; all ranks share the data-parallel axis."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Shard the model, then build its optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._shard(self.model)
        initialise(self.model, self.root_device)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: Any) -> None:
        if any(isinstance(one, FSDPModule) for one in module.modules()):
            return
        mesh = self.device_mesh["data_parallel"]
        if module.automatic_optimization:
            self._sharding.apply(module, mesh)
            for name in _STEPS:
                register_fsdp_forward_method(module, name)
            return
        # Here backward runs inside of training_step, so that cannot be a unit's forward.
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise UsageError(
                f"{type(module).__name__} optimises by hand and has parameters of its own, {own}: "
                "put them into a child module, which can be sharded"
            )
        self._sharding.apply_to_children(module, mesh)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The sharded weights themselves; `save_checkpoint` writes them."""
        assert self.model is not None
        return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes it from the optimizer."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write weights, optimizer, random generators and Lightning's state as one checkpoint."""
        _refuse_storage_options(storage_options)
        assert self.model is not None
        rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
        optimizer = _only(self.optimizers) if "optimizer_states" in checkpoint else None
        path = Path(self.broadcast(filepath))
        _save(path, self.model, optimizer, rest, self.is_global_zero, self.barrier)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Fill the sharded model, and its optimizer when fitting; return Lightning's state."""
        assert self.model is not None
        optimizer = _only(self.optimizers) if self.optimizers else None
        return _load(Path(self.broadcast(checkpoint_path)), self.model, optimizer)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint's folder."""
        if self.is_global_zero:
            shutil.rmtree(filepath, ignore_errors=True)


class ShoalFabricStrategy(FabricBase):
    """The same for Fabric: `Fabric(strategy=ShoalFabricStrategy(units=[Block]))`.

    Call `fabric.setup_module(model)`, then build the optimizer and call `fabric.setup_optimizers`.
    `fabric.save` and `fabric.load` take one model, at most one optimizer, and any other values.
    """

    def __init__(
        self,
        *,
        units: Units = (),
        layout: Layout | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        **options: Any,
    ) -> None:
        sharding = Sharding(
            units=units,
            layout=layout,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            reshard_after_forward=reshard_after_forward,
        )
        super().__init__(
            parallelize_fn=lambda model, mesh: sharding.apply(model, mesh["data_parallel"]),
            tensor_parallel_size=1,
            **options,
        )

    def setup_environment(self) -> None:
        """Start the process group; all ranks share the data-parallel axis."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write the model, the optimizer and the other values as one checkpoint."""
        _refuse_storage_options(storage_options)
        if filter is not None:
            raise NotImplementedError("shoal: fabric.save(filter=...) is not supported")
        model, optimizer, rest = _parts(state)
        where = Path(self.broadcast(path))
        _save(where, model, optimizer, rest, self.is_global_zero, self.barrier)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the model and the optimizer, replace the other values; return what is left over."""
        where = Path(self.broadcast(path))
        if isinstance(state, nn.Module):
            return _load(where, state, None)
        model, optimizer, wanted = _parts(state or {})
        found = _load(where, model, optimizer)
        missing = sorted(wanted.keys() - found.keys())
        if missing and strict:
            raise CheckpointError(f"{where} has no {missing}: it has {sorted(found)}")
        for name in wanted.keys() & found.keys():
            state[name] = found.pop(name)
        return found


class WatchdogCallback(Callback):
    """Ends all ranks when one stays away for `limit_s`, and names it: `shoal.watch.Watchdog`."""

    def __init__(self, *, limit_s: float = 300, folder: Path | str | None = None) -> None:
        self._limit_s, self._folder = limit_s, folder
        self._held = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to watch."""
        self._held.enter_context(Watchdog(limit_s=self._limit_s, folder=self._folder))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop."""
        self._held.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tell the other ranks that this one failed."""
        self._held.__exit__(type(exception), exception, exception.__traceback__)


# Checkpoints of both.


def _save(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    rest: dict[str, Any],
    is_first: bool,
    barrier: Callable[[], None],
) -> None:
    """Write beside the checkpoint that may be there, and take its place when complete."""
    new = path.with_name(f"{path.name}.new")
    if is_first:
        shutil.rmtree(new, ignore_errors=True)
    barrier()
    extra = {_REST: _packed(rest)}
    if optimizer is None:
        weights = {f"model/{name}": value for name, value in model.state_dict().items()}
        save_tensors(new, weights, {"training": extra})
    else:
        save_training(new, model, optimizer, extra)
    if is_first:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        new.rename(path)
    barrier()


def _load(path: Path, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    if not (path / "manifest.json").exists():
        raise CheckpointError(
            f"{path} is no checkpoint of shoal. Expected a folder that ShoalStrategy wrote; for "
            "other weights use load_state_dict in configure_model, or shoal.checkpoint.import_dcp"
        )
    extra = read_manifest(path).extra
    if optimizer is None:
        load_model(path, model)
    elif "optimizer" not in extra:
        raise CheckpointError(f"{path} holds weights alone: it was saved without an optimizer")
    else:
        load_training(path, model, optimizer)
    training = extra.get("training")
    if not isinstance(training, dict) or _REST not in training:
        raise CheckpointError(f"{path} was not written by Lightning: load it by load_training")
    return _unpacked(str(training[_REST]))


def _packed(rest: dict[str, Any]) -> str:
    """Lightning's own state as text: loops, callbacks, schedulers, which JSON cannot hold."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpacked(text: str) -> dict[str, Any]:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True, map_location="cpu")


def _parts(state: dict[str, Any]) -> tuple[nn.Module, Optimizer | None, dict[str, Any]]:
    """The model, the optimizer and the rest of what Fabric saves."""
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    rest = {k: v for k, v in state.items() if not isinstance(v, nn.Module | Optimizer)}
    if len(models) != 1:
        raise UsageError(
            f"expected one model in the state, got {len(models)} in {sorted(state)}: save each "
            "model to a checkpoint of its own"
        )
    return models[0], _only(optimizers) if optimizers else None, rest


def _only(optimizers: list[Any]) -> Optimizer:
    if len(optimizers) != 1:
        raise NotImplementedError(
            f"shoal: checkpoints of {len(optimizers)} optimizers are not supported inside of "
            "Lightning: use one with several parameter groups"
        )
    return getattr(optimizers[0], "optimizer", optimizers[0])


def _refuse_storage_options(options: Any) -> None:
    if options is not None:
        raise NotImplementedError(
            "shoal: storage_options is not supported; checkpoints are folders"
        )
