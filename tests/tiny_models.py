"""Small models and tokenizers of Hugging Face, made here: tests reach for no hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install 'shoal[hf]'",
)

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "llama_tied": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
}
"""Kinds of models, and what their configs need beside what all have."""


def small_config(kind: str, *, layers: int = 3, vocabulary: int = 300, **changes: Any) -> Any:
    """Make the config of a model that has a few thousand parameters."""
    from transformers import CONFIG_MAPPING

    model_type = kind.removesuffix("_tied")
    common = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if model_type == "gpt2":
        common = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1}
        common |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if model_type == "opt":
        common |= {"dropout": 0.0}
    return CONFIG_MAPPING[model_type](**{**common, **SMALL[kind], **changes})


def small_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Save a small model with random weights as Hugging Face does; return its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(small_config(kind, **changes), dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def small_tokenizer(folder: Path, *, size: int = 280, eos: str | None = "<eos>") -> Path:
    """Train a byte-level BPE tokenizer on a few lines, and save it as Hugging Face does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the fish in the sea and the ship on the sea"] * 20, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos).save_pretrained(folder)
    return folder
