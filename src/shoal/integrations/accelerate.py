"""Accelerate, and what stands on it (Transformers' Trainer, PEFT, TRL): `use_shoal(trainer)`.

`Accelerator.prepare` leaves a model alone that is an `FSDPModule` already. So the accelerator gets
a class of its own, whose `prepare` calls shoal's `fully_shard` first, as its FSDP config says, and
then Accelerate's own `prepare`. Everything after that (clipping, accumulation, checkpoints,
`save_pretrained`) is Accelerate's code for FSDP2.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.integrations.frameworks import require
from shoal.runtime.fsdp_module import FSDPModule
from shoal.runtime.fully_shard import fully_shard

require("accelerate", (1, 6), "hf")

from accelerate import Accelerator, PartialState  # noqa: E402  # pyright: ignore
from accelerate.utils import (  # noqa: E402  # pyright: ignore
    DistributedType,
    FullyShardedDataParallelPlugin,
    fsdp2_apply_ac,
)

__all__ = ["use_shoal"]

_HOW_TO_ASK = (
    "Ask for it by one of: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
    ", "
    "TrainingArguments(fsdp=True, fsdp_config={...}), or `accelerate launch --use_fsdp "
    "--fsdp_version 2`"
)


def use_shoal(target: Any, *, plugin: Any = None) -> None:
    """Let an `Accelerator`, or a `Trainer` that holds one, shard by shoal's `fully_shard`.

    Call it after the `Accelerator` or `Trainer` (also TRL's) is built, before `prepare` or `train`.
    What is sharded how stays in the FSDP config that Accelerate has: units, precision, offload,
    activation checkpointing, kind of state dict. A config of version 1 is read as that of version
    2. On CPU Accelerate ignores FSDP and falls back to DDP; there this call selects sharding, and
    `plugin` says how, unless the launcher or `TrainingArguments` do.
    """
    accelerator = getattr(target, "accelerator", target)
    if not isinstance(accelerator, Accelerator):
        raise UsageError(
            f"use_shoal expects an Accelerator or a Trainer, got a {type(target).__name__}"
        )
    if isinstance(accelerator, _ShardsByShoal):
        return
    if accelerator._models:
        raise UsageError(
            "use_shoal came after accelerator.prepare(model, ...): call it before, right after "
            "the Accelerator or Trainer is built"
        )
    _check_distributed(accelerator)
    asked = _asked_plugin(target, accelerator, plugin)
    _select(accelerator, _as_version_2(asked))
    if hasattr(target, "is_fsdp_enabled"):
        target.is_fsdp_enabled = True
    accelerator.__class__ = _sharding_class(type(accelerator))


class _ShardsByShoal:
    """The part of an accelerator that shards, before the class it had."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Shard the model among the arguments, then prepare all as Accelerate does."""
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, Optimizer)]
        if len(models) == 1 and optimizers and not isinstance(_inner(models[0]), FSDPModule):
            _shard(self, models[0], optimizers)
        with _nothing_left_to_wrap(self):
            return super().prepare(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _sharding_class(base: type) -> type:
    return type(base.__name__, (_ShardsByShoal, base), {"__module__": base.__module__})


@contextmanager
def _nothing_left_to_wrap(accelerator: Any) -> Iterator[None]:
    """Units are made and checkpointed; by their new class names Accelerate would not find them."""
    plugin = accelerator.state.fsdp_plugin
    policy, checkpoints = plugin.auto_wrap_policy, plugin.activation_checkpointing
    plugin.auto_wrap_policy, plugin.activation_checkpointing = None, False
    try:
        yield
    finally:
        plugin.auto_wrap_policy, plugin.activation_checkpointing = policy, checkpoints


def _inner(model: nn.Module) -> nn.Module:
    """The module inside of a compiled one."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


# What was asked for.


def _check_distributed(accelerator: Any) -> None:
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        raise UsageError(
            "Accelerate runs in one process, so there is nothing to shard over: start the script "
            "by `accelerate launch --num_processes N` or `torchrun --nproc-per-node N`"
        )
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise UsageError(
            f"Accelerate selected {kind.value}, which shards by itself: turn it off. {_HOW_TO_ASK}"
        )


def _asked_plugin(target: Any, accelerator: Any, plugin: Any) -> Any:
    """The FSDP config that was given, wherever that was."""
    found = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        if not isinstance(plugin, FullyShardedDataParallelPlugin):
            raise UsageError(
                f"plugin is a FullyShardedDataParallelPlugin, got a {type(plugin).__name__}"
            )
        return plugin
    if found is not None:
        return found
    arguments = getattr(getattr(target, "args", None), "fsdp_plugin_args", None)
    if arguments is not None:
        return FullyShardedDataParallelPlugin(**arguments)
    if "FSDP_VERSION" in os.environ:  # which the launcher sets, for `--use_fsdp` alone
        return FullyShardedDataParallelPlugin()
    raise UsageError(
        f"Accelerate did not select sharding: it runs {accelerator.distributed_type.value}, and "
        f"every rank would hold the whole model. {_HOW_TO_ASK}. On CPU give it to use_shoal too: "
        "use_shoal(accelerator, plugin=plugin)"
    )


def _select(accelerator: Any, plugin: Any) -> None:
    """Do what Accelerate does for FSDP on accelerators, also where it chose DDP."""
    state = accelerator.state
    if state.mixed_precision != "no" and plugin.mixed_precision_policy is None:
        plugin.set_mixed_precision(state.mixed_precision)
    for shared in (PartialState(), state):  # the second is often made anew from the first
        shared.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    if not accelerator.is_fsdp2:
        raise UsageError(
            f"Accelerate did not take the FSDP config: it runs {accelerator.distributed_type}. "
            "Build the Accelerator in this process, and call use_shoal once for it"
        )


def _as_version_2(plugin: Any) -> Any:
    """The same config for `fully_shard`."""
    if plugin.fsdp_version == 2:
        return plugin
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    reshards = {ShardingStrategy.FULL_SHARD: True, ShardingStrategy.SHARD_GRAD_OP: False}
    if strategy not in reshards:
        raise NotImplementedError(
            f"shoal: the sharding strategy {strategy.name} of fsdp_version=1 is not supported "
            "inside of Accelerate. Expected FULL_SHARD or SHARD_GRAD_OP. For replicas of shards "
            "use fsdp_version=2 with ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
        )
    if plugin.state_dict_type == StateDictType.LOCAL_STATE_DICT:
        raise UsageError("LOCAL_STATE_DICT is not supported: use SHARDED_STATE_DICT")
    policy = plugin.mixed_precision_policy
    if isinstance(policy, MixedPrecision):
        policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, policy.param_dtype)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshards[strategy],
        cpu_offload=bool(plugin.cpu_offload.offload_params),
        mixed_precision_policy=policy,
        auto_wrap_policy=_bare_policy(plugin.auto_wrap_policy),
        transformer_cls_names_to_wrap=plugin.transformer_cls_names_to_wrap,
        min_num_params=plugin.min_num_params,
        state_dict_type=plugin.state_dict_type.name,
        activation_checkpointing=plugin.activation_checkpointing,
        ignored_modules=plugin.ignored_modules,
        # Both mean that rank 0's weights count.
        cpu_ram_efficient_loading=bool(
            plugin.cpu_ram_efficient_loading or plugin.sync_module_states
        ),
    )


# Sharding.


def _shard(accelerator: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Shard a model as the config says, and give its optimizers the sharded parameters."""
    plugin = accelerator.state.fsdp_plugin
    units = _units(model, plugin)
    if plugin.activation_checkpointing:
        fsdp2_apply_ac(accelerator, model)
    names = _names_of(model, optimizers)
    if accelerator.mixed_precision != "no":
        _keep_in_full_precision(model)
    whole = model.state_dict() if plugin.cpu_ram_efficient_loading else None
    config = _arguments(accelerator, plugin, model)
    for unit in units:
        fully_shard(unit, **config)
    # The root stays gathered between forward and backward, which begins with it.
    fully_shard(model, **{**config, "reshard_after_forward": None})
    if whole is not None:
        _load_from_first_rank(accelerator, model, whole)
    sharded = dict(model.named_parameters())
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [sharded[name] for name in members]


def _names_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[list[str]]]:
    """The parameters that each group of each optimizer holds."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = []
    for optimizer in optimizers:
        if any(optimizer.state.values()):
            raise UsageError(
                f"{type(optimizer).__name__} has taken a step before accelerator.prepare, and its "
                "state is that of whole parameters: prepare first, then load_state or step"
            )
        groups = [group["params"] for group in optimizer.param_groups]
        strangers = sum(one not in names for group in groups for one in group)
        if strangers:
            raise UsageError(
                f"{type(optimizer).__name__} holds {strangers} parameters that the model "
                f"{type(model).__name__} does not have: build it from model.parameters()"
            )
        found.append([[names[one] for one in group] for group in groups])
    return found


def _keep_in_full_precision(model: nn.Module) -> None:
    """Store what is trained in fp32; the policy casts it for compute."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32)


def _arguments(accelerator: Any, plugin: Any, model: nn.Module) -> dict[str, Any]:
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    return {
        "mesh": mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy,
        "ignored_params": _ignored(plugin.ignored_modules, model, accelerator.device),
    }


def _ignored(
    modules: str | Iterable[nn.Module] | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Parameters of the modules that the config leaves out, and quantised ones."""
    if modules is None:
        found: list[nn.Module] = []
    elif isinstance(modules, str):
        pattern = re.compile(modules)
        found = [one for name, one in model.named_modules() if pattern.fullmatch(name)]
    else:
        found = list(modules)
    for module in found:
        module.to(device)
    quantised = {one for one in model.parameters() if not _is_number(one)}
    return {parameter for module in found for parameter in module.parameters()} | quantised


def _is_number(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _units(model: nn.Module, plugin: Any) -> list[nn.Module]:
    """Modules to call `fully_shard` on before the model, from the inside out."""
    chooses = _choice(plugin, model)
    inner = [one for one in model.modules() if one is not model]
    units = [one for one in reversed(inner) if chooses(one)]
    embedding, head = _embeddings(model)
    if embedding is not None and embedding not in units and _is_alone(embedding, head):
        units.append(embedding)
    return units


def _choice(plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool]:
    policy = _bare_policy(plugin.auto_wrap_policy)
    if policy is None:
        return lambda module: False
    if policy is transformer_auto_wrap_policy:
        blocks = _block_classes(plugin, model)
        return lambda module: isinstance(module, blocks)
    if policy is size_based_auto_wrap_policy:
        least = plugin.min_num_params or 0
        return lambda module: (
            type(module).forward is not nn.Module.forward
            and sum(one.numel() for one in module.parameters()) > least > 0
        )
    raise NotImplementedError(
        f"shoal: the auto_wrap_policy {policy} is not supported inside of Accelerate. Expected "
        "'transformer_based_wrap', 'size_based_wrap' or 'no_wrap'"
    )


def _bare_policy(policy: Any) -> Any:
    return policy.func if isinstance(policy, functools.partial) else policy


def _block_classes(plugin: Any, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of a transformer's blocks, by the names in the config or those the model has."""
    names = plugin.transformer_cls_names_to_wrap
    if names is None:
        names = getattr(model, "_no_split_modules", None) or ()
    classes = {type(module).__name__: type(module) for module in model.modules()}
    missing = sorted(set(names) - classes.keys()) if plugin.transformer_cls_names_to_wrap else []
    if missing:
        raise UsageError(
            f"the FSDP config wraps layers of class {missing}, which {type(model).__name__} does "
            f"not have. It has {sorted(classes)}: set transformer_layer_cls_to_wrap "
            "(transformer_cls_names_to_wrap) to its block's class"
        )
    return tuple(classes[name] for name in names if name in classes)


def _embeddings(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The first and the last matrix of a language model of Transformers."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, name, lambda: None)()
        found.append(module if isinstance(module, nn.Module) else None)
    return found[0], found[1]


def _is_alone(embedding: nn.Module, head: nn.Module | None) -> bool:
    """Whether no other module has its parameters: tied ones have to be of one unit."""
    if head is None:
        return True
    return not set(embedding.parameters()) & set(head.parameters())


def _load_from_first_rank(accelerator: Any, model: nn.Module, whole: dict[str, Any]) -> None:
    """Give every rank its shards of the weights that rank 0 loaded."""
    options = StateDictOptions(
        full_state_dict=True,
        broadcast_from_rank0=True,
        cpu_offload=isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy),
    )
    weights = whole if accelerator.is_main_process else {}
    set_model_state_dict(model, weights, options=options)
