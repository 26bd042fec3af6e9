"""Guessing what someone meant to type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def did_you_mean(word: str, known: Iterable[str], *, shown: Mapping[str, str] = {}) -> str:
    """Return a question to append to a message, or nothing if no known word is near.

    `shown` says how the words are written there, if otherwise.
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {shown.get(near[0], near[0])}?" if near else ""
