"""Tokenizers: bytes as they are, or one of `transformers` from a local folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.errors import UsageError
from shoal.train.data import VOCABULARY
from shoal.train.frameworks import import_framework, in_one_line

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What a tokenizer of `transformers` may consist of."""

_SUFFICIENT = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    size: int
    """Every token is below it."""
    digest: str
    """Equal for tokenizers that make the same tokens."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        ...

    def end(self) -> np.ndarray:
        """Return what stands between documents."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token; documents end with a new line."""

    size = VOCABULARY
    digest = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def end(self) -> np.ndarray:
        """Return a new line."""
        return np.frombuffer(b"\n", dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text; bytes that are no UTF-8 are replaced."""
        return bytes(tokens).decode("utf-8", errors="replace")


class FolderTokenizer:
    """A tokenizer of `transformers`; documents end with its end-of-sequence token."""

    def __init__(self, folder: Path) -> None:
        if not is_tokenizer(folder):
            raise UsageError(
                f"--tokenizer: {folder} holds no tokenizer: expected one of "
                f"{', '.join(_SUFFICIENT)} in it"
            )
        transformers = import_framework("transformers", what="--tokenizer")
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            vocabulary = self._tokenizer.get_vocab()
        except Exception as error:  # each tokenizer reads its files in its own way
            raise UsageError(
                f"--tokenizer: transformers cannot read the tokenizer in {folder}: "
                f"{in_one_line(error)}"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise UsageError(
                f"--tokenizer: {folder} names no eos_token, by which a model could tell documents "
                "apart; add it to tokenizer_config.json"
            )
        self.size: int = 1 + max(vocabulary.values())
        self.digest = _digest(folder)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, without special ones."""
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [np.asarray(tokens, dtype=np.int64) for tokens in encoded["input_ids"]]

    def end(self) -> np.ndarray:
        """Return the end-of-sequence token."""
        return np.array([self._tokenizer.eos_token_id], dtype=np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text."""
        return self._tokenizer.decode(list(tokens))


def is_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in _SUFFICIENT)


def tokenizer_files(folder: Path | None) -> list[Path]:
    """List the files that a tokenizer consists of; none for bytes."""
    if folder is None:
        return []
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


@lru_cache(maxsize=2)
def load_tokenizer(folder: Path | None) -> Tokenizer:
    """Return the tokenizer of a folder; without one, bytes."""
    return ByteTokenizer() if folder is None else FolderTokenizer(folder)


def _digest(folder: Path) -> str:
    sha = hashlib.sha256()
    for file in tokenizer_files(folder):
        sha.update(file.name.encode() + b"\0" + file.read_bytes())
    return sha.hexdigest()
