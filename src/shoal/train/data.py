"""The text of a run: reading it as bytes, the order of its samples, and each rank's share.

Here a token is a byte; text/ makes others. A sample is a stretch of `context` tokens; stretches do
not overlap and cover the text. An epoch is all of them in an order that seed and epoch decide. A
run goes through the epochs one after the other, so that a single number, how many samples all
ranks together have seen, says where it is:

    samples seen   0 ............ n-1 | n ........... 2n-1 | 2n ...
                        epoch 0       |      epoch 1       |

The number belongs to the run and not to a rank: a resume goes on with the next sample whatever the
number of ranks, or the size of the batch, is then. The ranks cut the batch of a step up among
them, so that a run sees the same data on any number of ranks.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from shoal.errors import UsageError
from shoal.files import kind_of, open_regular
from shoal.report.number_format import size
from shoal.train.config import DataConfig

_MOST_BYTES = 16_000_000
"""Of text that is read into memory, unless another limit is given."""

VOCABULARY = 256
"""Number of tokens: every byte is one."""

# Of the standard library: packages of others, and tests, which hold little prose and odd bytes.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The text of a run: one part to learn, one held out."""

    training: np.ndarray  # 1D, unsigned
    validation: np.ndarray  # 1D, unsigned
    content: str
    """What was read, in words."""
    skipped: tuple[str, ...]
    """Files that could not be read, or held no UTF-8 text."""
    digest: str


def load_corpus(config: DataConfig, context: int) -> Corpus:
    """Read the text that `config` names; both parts hold at least one sequence of `context`."""
    if config.folder is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = walk(root, suffix=".py", skip=_NOT_LIBRARY)
    else:
        root, paths = config.folder, _text_files(config.folder)
    limit = config.max_bytes or _MOST_BYTES
    pieces, skipped, num_bytes, num_seen = [], [], 0, 0
    for path in paths:
        num_seen += 1
        text = _read_text(path, limit - num_bytes)
        if text is None:
            skipped.append(str(path.relative_to(root)))
        elif text:
            pieces.append(text)
            num_bytes += len(text)
        if num_bytes >= limit:
            break
    if not num_seen:
        raise UsageError(f"--data: no files in {root}; it needs files of text")
    if not pieces:
        raise UsageError(
            f"--data: none of the {num_seen} files in {root} is readable, non-empty UTF-8 text"
        )
    data = b"".join(pieces)
    return split_corpus(
        np.frombuffer(data, dtype=np.uint8),
        where=f"--max-bytes {limit} leaves" if len(data) == limit else f"--data: {root} has",
        held_out=config.held_out,
        context=context,
        content=f"{size(len(data))} of text from {len(pieces)} files",
        skipped=tuple(skipped),
        digest=hashlib.sha256(data).hexdigest(),
    )


def num_samples(*, num_bytes: int, context: int) -> int:
    """Count the samples of a text; each also needs the byte after it, which it predicts."""
    return (num_bytes - 1) // context


def sample_offsets(*, seed: int, seen: int, num: int, num_bytes: int, context: int) -> np.ndarray:
    """Return where the next `num` samples begin in the text, after `seen` ones of the run."""
    per_epoch = num_samples(num_bytes=num_bytes, context=context)
    epochs, places = np.divmod(np.arange(seen, seen + num, dtype=np.int64), per_epoch)
    indices = np.empty(num, dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        indices[in_epoch] = _order(seed, int(epoch), per_epoch)[places[in_epoch]]
    return indices * context


# Two, because a batch may reach into the next epoch.
@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num)


def spread_offsets(*, num: int, num_bytes: int, context: int) -> np.ndarray:
    """Return `num` offsets spread evenly over a text: the same ones at every validation."""
    return np.linspace(0, num_bytes - context - 1, num).astype(np.int64)


def share_of(offsets: np.ndarray, *, rank: int, world_size: int) -> np.ndarray:
    """Cut a rank's share out of a global batch: contiguous, equally long for every rank."""
    num = len(offsets) // world_size
    return offsets[rank * num : (rank + 1) * num]


def windows(text: np.ndarray, offsets: np.ndarray, context: int) -> torch.Tensor:
    """Return the sequences at `offsets`, one byte longer than `context`: (offset, byte), int64."""
    views = np.lib.stride_tricks.sliding_window_view(text, context + 1)
    return torch.from_numpy(views[offsets].astype(np.int64))


def _text_files(folder: Path) -> Iterator[Path]:
    # os.path, because these answer False where permission to look is lacking.
    if not os.path.exists(folder):
        raise UsageError(f"--data: there is no folder {folder}")
    if not os.path.isdir(folder):
        raise UsageError(
            f"--data: expected a folder of text files, but {folder} is {kind_of(folder)}"
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"--data: no permission to read {folder}")
    return walk(folder)


def walk(root: Path, *, suffix: str = "", skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files under `root` in an order that every machine agrees on; none hidden."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in skip and not name.startswith(".")
        )
        for name in sorted(names):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(folder, name)


def _read_text(path: Path, max_bytes: int) -> bytes | None:
    """Return the beginning of a file, or None if it is unreadable or no UTF-8 text."""
    try:
        with open_regular(path, follow=True) as file:
            data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size))
        # Incremental, because `max_bytes` may cut a character in two.
        text = codecs.getincrementaldecoder("utf-8")().decode(data)
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else data


def split_corpus(
    tokens: np.ndarray,
    *,
    where: str,
    held_out: float,
    context: int,
    content: str,
    skipped: tuple[str, ...],
    digest: str,
) -> Corpus:
    """Divide tokens into a part to learn and one held out, each of a sequence at least.

    `where` begins the message if there are too few.
    """
    num_held_out = max(int(len(tokens) * held_out), context + 1) if held_out else 0
    num_training = len(tokens) - num_held_out
    if num_training < context + 1:
        needed = (context + 1) * (2 if held_out else 1)
        raise UsageError(
            f"{where} {len(tokens)} tokens, but --context {context} needs at least {needed}: one "
            "sequence and its next token" + (", to learn and again held out" if held_out else "")
        )
    return Corpus(
        training=tokens[:num_training],
        validation=tokens[num_training:],
        content=content,
        skipped=skipped,
        digest=digest,
    )
