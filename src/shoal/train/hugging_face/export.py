"""A checkpoint of `shoal train` as a Hugging Face folder: config, tokenizer and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.data_files import Progress, RegionReader
from shoal.checkpoint.disk import checkpoint_at
from shoal.checkpoint.hugging_face import MAX_FILE_BYTES, Adjust, export_weights
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.offline import read_region
from shoal.checkpoint.storage import Checkpoint
from shoal.checkpoint.training import MODEL
from shoal.errors import UsageError
from shoal.layout.region import Region
from shoal.train.checkpoints import read_saved_config
from shoal.train.config import ModelConfig
from shoal.train.hugging_face.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    adapted_name,
    adapter_names,
    peft_config,
    scale_of,
)
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

    Of tied parameters one is written, as `save_pretrained` does. Adapters are added to the weights
    that they adapt.
    """
    source = checkpoint_at(checkpoint)
    files = {file.name: file.read_bytes() for file in sorted(model_folder.iterdir())}
    skeleton = build_skeleton(read_model_config(model_folder / CONFIG))
    adapters = _read_adapters(source)
    files[CONFIG] = _config(files[CONFIG], type(skeleton).__name__, dtype or _widest(source))
    export_weights(
        source,
        folder,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        progress=progress,
        omit=tied_names(skeleton).keys() | adapters.keys(),
        files=files,
        adjust=_merging(adapters, _adapted_model(checkpoint)) if adapters else None,
    )


def export_adapters(checkpoint: Path, folder: Path) -> None:
    """Write the adapters alone, as PEFT's `save_pretrained` does; all at once or not at all."""
    from safetensors.torch import save

    adapters = _read_adapters(checkpoint_at(checkpoint))
    if not adapters:
        raise UsageError(f"{checkpoint} holds no adapters: it is not of a run with --lora")
    model = _adapted_model(checkpoint)
    named = {f"{PEFT_PREFIX}{name}": value.contiguous() for name, value in adapters.items()}
    weights = {name for name in map(adapted_name, adapters) if name is not None}
    base = (model.source or "").removeprefix("hf:") or None
    target = checkpoint_at(folder)
    with target.create().discarded_on_error() as unfinished:
        for name, data in (
            (ADAPTER_WEIGHTS, save(named, {"format": "pt"})),
            (ADAPTER_CONFIG, peft_config(model, weights, base)),
        ):
            unfinished.write(name, [data], len(data))
        unfinished.publish(target)


def _read_adapters(source: Checkpoint) -> dict[str, torch.Tensor]:
    """All adapters of a checkpoint by their names in the model; they are small."""
    manifest = read_manifest(source)
    names = [name for name in manifest.tensors if adapted_name(name.removeprefix(MODEL))]
    with RegionReader(source, manifest) as reader:
        return {
            name.removeprefix(MODEL): read_region(
                reader, name, manifest.tensors[name], Region.whole(manifest.tensors[name].shape)
            )
            for name in names
            if name.startswith(MODEL)
        }


def _adapted_model(checkpoint: Path) -> ModelConfig:
    model = read_saved_config(checkpoint).model
    if model.lora is None:
        raise UsageError(f"{checkpoint} holds adapters, but was saved by a run without --lora")
    return model


def _merging(adapters: dict[str, torch.Tensor], model: ModelConfig) -> Adjust:
    """Add to a region of an adapted weight its part of the adapters' product."""
    scale = scale_of(model)

    def merged(name: str, region: Region, values: torch.Tensor) -> torch.Tensor:
        down, up = (adapters.get(one) for one in adapter_names(name))
        if down is None or up is None:
            return values
        rows, columns = region.slices
        product = up[rows].float() @ down[:, columns].float()
        return (values.float() + scale * product).to(values.dtype)

    return merged


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
