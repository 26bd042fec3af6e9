"""Causal language models of Hugging Face's `transformers`: config, skeleton, units.

A skeleton has no memory: it is built on the meta device, whatever the size of the model.
`materialise.py` gives it values, one unit after the other.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import UsageError
from shoal.files import read_regular
from shoal.train.frameworks import import_framework, in_one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CONFIG = "config.json"
_WHAT = "--model hf:"
_MOST_CONFIG_BYTES = 1 << 24


def _model_path(reference: str) -> Path:
    """Return the file or folder that `--model hf:PATH` names."""
    path = Path(reference.removeprefix("hf:"))
    if not os.path.exists(path):
        raise UsageError(
            f"--model: there is no file or folder {path}. Models are not downloaded: "
            f"`hf download {path} --local-dir FOLDER` does that, then give hf:FOLDER"
        )
    return path


def config_file(reference: str) -> Path:
    """Return the config.json that `--model hf:PATH` names, or that lies in the folder it names."""
    path = _model_path(reference)
    file = path / CONFIG if path.is_dir() else path
    if not os.path.exists(file):
        raise UsageError(f"--model: there is no {CONFIG} in {path}")
    return file


def weights_folder(reference: str) -> Path | None:
    """Return the folder whose weights a run starts from; None where a config is all there is."""
    path = _model_path(reference)
    if not path.is_dir():
        return None
    if any(path.glob("*.safetensors*")):
        return path
    pickles = sorted(file.name for end in ("bin", "pt", "pth") for file in path.glob(f"*.{end}"))
    if pickles:
        raise UsageError(
            f"--model: {path} has no safetensors, and {pickles[0]} is a pickle, which is not read. "
            "Write the weights anew with save_pretrained of transformers, or give "
            f"hf:{path / CONFIG} to start from random ones."
        )
    return None


def read_model_config(file: Path) -> PretrainedConfig:
    """Read the config of a causal language model."""
    try:
        content = json.loads(read_regular(file.resolve(), _MOST_CONFIG_BYTES))
    except OSError as error:
        raise UsageError(f"--model: cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--model: {file} is not JSON: {error}") from None
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise UsageError(f"--model: {file} names no model_type, so it is no config of transformers")
    transformers = import_framework("transformers", what=_WHAT)
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in known:
        types = transformers.CONFIG_MAPPING.keys()
        release = transformers.__version__
        raise UsageError(_unknown_type(file, kind, content, known, types, release))
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(content)
    except Exception as error:  # each model checks its config in its own way
        raise UsageError(f"--model: transformers refuses {file}: {in_one_line(error)}") from error
    _check_sizes(config.get_text_config(), file)
    return config


def _check_sizes(config: PretrainedConfig, file: Path) -> None:
    """Raise a `UsageError` for a size of none: a model without blocks would train all right."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise UsageError(f"--model: {file} has {name} {size}; expected at least 1")


def _unknown_type(
    file: Path, kind: str, content: dict, known: dict, all_types: Collection[str], release: str
) -> str:
    near = difflib.get_close_matches(kind, list(known), n=1) if kind not in all_types else []
    hint = f" Did you mean {near[0]}?" if near else ""
    if "auto_map" in content:
        hint = " It brings code of its own, which is never run."
    return (
        f"--model: {file} has the model_type {kind!r}, which is no causal language model of "
        f"transformers {release}.{hint}"
    )


def build_skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device: names, shapes, tied weights, and no memory."""
    transformers = import_framework("transformers", what=_WHAT)
    config.use_cache = False  # of generated text; training has none
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise UsageError(
            f"--model: transformers cannot build a {config.model_type} from this config: "
            f"{in_one_line(error)}"
        ) from error


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """List the blocks that become units: the classes that the model itself says not to split.

    Blocks that share parameters with the rest of the model are left to the root's unit.
    """
    names = set(model._no_split_modules or ())
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in names and module not in inside and module is not model:
            blocks.append(module)
            inside.update(module.modules())
    return [block for block in blocks if not _shares(block, model)]


def units_of(model: PreTrainedModel) -> list[nn.Module]:
    """List all units but the root's: the blocks, then the embedding and the head.

    Those two are the largest matrices of many models. Tied ones stay together, in the root's unit.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    alone = [end for end in ends if isinstance(end, nn.Module) and not _shares(end, model)]
    return [*decoder_blocks(model), *alone]


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Recompute each block in backward instead of keeping its activations."""
    for block in blocks:
        # Inside of the call, so that a sharded block is one module that runs once.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _shares(block: nn.Module, model: nn.Module) -> bool:
    inside = {id(module) for module in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    return any(
        id(parameter) in own
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    )


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Map each tied parameter's name to the one that it is the same tensor as."""
    return dict(model.all_tied_weights_keys)
