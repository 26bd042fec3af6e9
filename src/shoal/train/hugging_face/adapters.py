"""LoRA: small trained matrices beside frozen linear layers.

    y = W x + (alpha / rank) · B A x        W is frozen; A (rank, in) is drawn, B (out, rank) zero

Parameters have the names that PEFT gives them, `….q_proj.lora_A.weight`, so that its
`PeftModel.from_pretrained` loads what is written of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import UsageError
from shoal.train.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

A, B = "lora_A", "lora_B"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."


class Adapter(nn.Linear):
    """One of the two matrices, which `draw_adapters` fills and no file of the model holds."""


def add_adapters(model: PreTrainedModel, blocks: Sequence[nn.Module], config: ModelConfig) -> None:
    """Freeze a skeleton, and give linear layers inside of its blocks adapters, which train."""
    assert config.lora is not None
    model.requires_grad_(False)
    linears = _linear_layers(blocks)
    chosen = _chosen(linears, config.lora_targets)
    for _, linear in chosen:
        for name, num_in, num_out in (
            (A, linear.in_features, config.lora),
            (B, config.lora, linear.out_features),
        ):
            weight = linear.weight
            adapter = Adapter(num_in, num_out, bias=False, device=weight.device, dtype=weight.dtype)
            linear.add_module(name, adapter)
        linear.register_forward_hook(_Added(scale_of(config)))


def scale_of(config: ModelConfig) -> float:
    """By what the product of the adapters is multiplied."""
    assert config.lora is not None
    return config.lora_alpha / config.lora


def draw_adapters(modules: Iterable[nn.Module]) -> None:
    """Fill the adapters of some layers as LoRA starts: they change nothing yet."""
    for module in modules:
        if isinstance(getattr(module, A, None), Adapter):
            nn.init.kaiming_uniform_(module.get_submodule(A).weight, a=math.sqrt(5))  # pyright: ignore
            nn.init.zeros_(module.get_submodule(B).weight)  # pyright: ignore


def adapted_name(name: str) -> str | None:
    """The weight that an adapter's parameter is for; None for the name of any other."""
    for leaf in (A, B):
        path, found, _ = name.rpartition(f".{leaf}.weight")
        if found:
            return f"{path}.weight"
    return None


def adapter_names(weight: str) -> tuple[str, str]:
    """The two parameters that adapt a weight, if it is adapted."""
    path = weight.removesuffix(".weight")
    return f"{path}.{A}.weight", f"{path}.{B}.weight"


def peft_config(config: ModelConfig, names: Iterable[str], base: str | None) -> bytes:
    """What PEFT reads beside the adapters' weights; `names` are those of the adapted weights."""
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.lora,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.removesuffix(".weight") for name in names),
    }
    return f"{json.dumps(content, indent=2)}\n".encode()


class _Added:
    """Adds what a layer's adapters make of its input to its output."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        down, up = layer.get_submodule(A), layer.get_submodule(B)
        assert isinstance(down, Adapter)
        assert isinstance(up, Adapter)
        small = F.linear(inputs[0], down.weight)
        return output + F.linear(small, up.weight) * self._scale


def _linear_layers(blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Linear]]:
    return [
        (name, module)
        for block in blocks
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]


def _chosen(linears: list[tuple[str, nn.Linear]], targets: str) -> list[tuple[str, nn.Linear]]:
    """The layers to adapt: all of them, or those whose names end as `targets` says."""
    there = sorted({name.rpartition(".")[2] for name, _ in linears})
    if not linears:
        raise UsageError(
            "--lora: the decoder blocks of this model have no nn.Linear layers that could be "
            "adapted (those of GPT-2 are of another kind); train it without --lora"
        )
    if targets == "all":
        return linears
    wanted = [name.strip() for name in targets.split(",") if name.strip()]
    missing = [name for name in wanted if name not in there]
    if missing or not wanted:
        raise UsageError(
            f"--lora-targets: no layer of the decoder blocks is called {', '.join(missing)!r}; "
            f"expected some of {', '.join(there)}, or all"
        )
    return [(name, linear) for name, linear in linears if name.rpartition(".")[2] in wanted]
