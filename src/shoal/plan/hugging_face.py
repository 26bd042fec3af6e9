"""Models of Hugging Face's transformers, from their `config.json` alone: no weights are read."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.errors import UsageError
from shoal.plan.training import Workload

LONGEST = 4096
"""The sequence where nobody names one, if the model can have one so long."""


def hugging_face_workload(path: Path, sizes: Mapping[str, int]) -> Workload:
    """A causal language model on tokens, which are its labels too; its layers are the units.

    `path` is a folder with a `config.json`, or such a file. `sizes` may have `batch` and
    `sequence`.
    """
    transformers = _transformers()
    if not path.exists():
        raise UsageError(f"hf:{path}: there is no such file or folder; models are not downloaded")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"hf:{path}: no config of a known model: {_line(error)}") from error
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or LONGEST
    batch, sequence = sizes.get("batch", 1), sizes.get("sequence", min(LONGEST, longest))
    if sequence > longest:
        raise UsageError(f"hf:{path}: the model has {longest} positions, not {sequence}")

    def model() -> Any:
        try:
            made = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            raise UsageError(f"hf:{path}: no causal language model: {_line(error)}") from error
        made.train()
        made.config.use_cache = False
        return made

    def inputs() -> dict[str, Any]:
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return Workload(model=model, inputs=inputs)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"--model hf: needs the package transformers (pip install transformers): {_line(error)}"
        ) from error


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
