"""A checkpoint of `shoal train` as a Hugging Face folder: config, tokenizer and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.data_files import Progress
from shoal.checkpoint.disk import checkpoint_at
from shoal.checkpoint.hugging_face import MAX_FILE_BYTES, export_weights
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.storage import Checkpoint
from shoal.checkpoint.training import MODEL
from shoal.train.hugging_face.models import CONFIG, build_skeleton, read_model_config, tied_names


def model_folder_of(checkpoint: Path) -> Path | None:
    """Return where the run of a checkpoint keeps what its model is beside the weights."""
    folder = checkpoint.resolve().parent.parent / "model"
    return folder if (folder / CONFIG).is_file() else None


def export_model(
    checkpoint: Path,
    model_folder: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a folder that `from_pretrained` of `transformers` loads; all at once or not at all.

    Of tied parameters one is written, as `save_pretrained` does.
    """
    source = checkpoint_at(checkpoint)
    files = {file.name: file.read_bytes() for file in sorted(model_folder.iterdir())}
    skeleton = build_skeleton(read_model_config(model_folder / CONFIG))
    files[CONFIG] = _config(files[CONFIG], type(skeleton).__name__, dtype or _widest(source))
    export_weights(
        source,
        folder,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        progress=progress,
        omit=tied_names(skeleton).keys(),
        files=files,
    )


def _config(data: bytes, architecture: str, dtype: torch.dtype) -> bytes:
    """Say which class the model has, and the dtype of its weights: loading converts to that."""
    content: dict[str, Any] = json.loads(data)
    content.pop("torch_dtype", None)  # as older releases called it
    content["architectures"] = [architecture]
    content["dtype"] = str(dtype).removeprefix("torch.")
    return f"{json.dumps(content, indent=2)}\n".encode()


def _widest(source: Checkpoint) -> torch.dtype:
    entries = read_manifest(source).tensors
    floats = [
        entry.dtype
        for name, entry in entries.items()
        if name.startswith(MODEL) and entry.dtype.is_floating_point
    ]
    return max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
