"""torchtitan's trainer on shoal: a config registry of one's own.

    torchrun --nproc-per-node 8 -m torchtitan.train --module titan --config llama3_8b
    torchrun --nproc-per-node 2 examples/titan.py                    a small model, on CPU too

The first line is for GPUs, from this folder. torchtitan knows no CPUs: started as a script, this
file tells it of them.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shoal.integrations.torchtitan import use_shoal


def llama3_8b() -> Any:
    """The config of torchtitan, sharded by shoal."""
    from torchtitan.models.llama3 import config_registry

    return use_shoal(config_registry.llama3_8b())


def small(folder: Path, *, steps: int = 4, **changes: Any) -> Any:
    """Llama 3 with six small layers, on text that is made here."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry

    config = config_registry.llama3_debugmodel()
    for layer in config.model_spec.model.layers:  # flex attention has no backward on CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch than 2.13
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.steps = steps
    config.training.disable_cuda_graphs = True
    config.hf_assets_path = str(make_tokenizer(folder / "tokenizer"))
    config.dataloader.dataset_path = str(make_text(folder / "text"))
    config.dump_folder = str(folder)
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part), field, value)
    return config


def make_text(folder: Path) -> Path:
    """The text that torchtitan's `c4_test` reads, as rows of JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [
        "the",
        "fish",
        "in",
        "the",
        "sea",
        "and",
        "the",
        "ship",
        "on",
        "the",
        "sea",
        "went",
        "far",
        "from",
        "the",
        "shore",
    ]
    lines = (" ".join(words[(n * i) % len(words)] for i in range(60)) for n in range(1, 200))
    if int(os.environ.get("RANK", "0")) == 0:
        part = folder / "part"
        part.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
        part.rename(folder / "data.json")
    return folder


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes and a few pairs of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the fish in the sea and the ship on the sea"] * 20, trainer)
    if int(os.environ.get("RANK", "0")) == 0:
        tokenizer.save(str(folder / "part"))
        (folder / "part").rename(folder / "tokenizer.json")
    return folder


def prepare_torchtitan() -> None:
    """Give torchtitan what it misses in torch 2.13, and a CPU as its device without a GPU."""
    from torch.distributed import distributed_c10d
    from torchtitan.tools import utils

    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = distributed_c10d._set_pg_timeout
    if torch.cuda.is_available():
        return
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def stats(device: object = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=pages),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
        memory_stats=stats,
    )


def main(folder: Path) -> None:
    """Train the small model."""
    prepare_torchtitan()
    from torchtitan.tools.logging import init_logger

    init_logger()
    trainer = use_shoal(small(folder)).build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/titan"))
